"""Gates find out a BF16 kernel that is broken."""

from __future__ import annotations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.gemm.bf16.kernel import KERNEL as BF16_GEMM
from lab.gates import violations


def test_the_pipeline_of_products_is_checked() -> None:
    """Sums that C was added to, and that are not let go, make products wait for each other."""
    config = next(config for config in BF16_GEMM.configs() if config.with_c and config.cluster_k == config.slices == 1)
    headers = BF16_GEMM.headers(config)
    name = "mainloop_of_slice.cuh"
    headers[name] = headers[name].replace("kWithC || kMayBeEmpty", "kMayBeEmpty")
    kernel = compile_cubin(BF16_GEMM.source, headers, name=config.kernel_name)
    assert any("C7515" in text for text in violations(report(kernel.cubin, kernel.log), BF16_GEMM.code_plan(config)))
