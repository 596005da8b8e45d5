"""BF16 kernels that can be chosen compile, and their machine code is what was planned."""

from __future__ import annotations

import pytest
from thorough import THOROUGH, covering, one_in, values

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.gemm.bf16 import sum_slices
from deep_gemm.gemm.bf16.choose import reachable_bf16, reachable_bf16_depths, reachable_bf16_rows, reachable_bf16_sum
from deep_gemm.gemm.bf16.config import Bf16Config
from deep_gemm.gemm.bf16.kernel import KERNEL as BF16_GEMM
from lab.gates import violations

REACHABLE = [*reachable_bf16(), *reachable_bf16_rows(), *reachable_bf16_depths(), *reachable_bf16_sum()]
COMPILED = one_in(3, covering(REACHABLE, values)) if not THOROUGH else covering(REACHABLE, values)
"""Hundreds are alike: every value of every field."""


def test_all_can_be_built_and_have_names_of_their_own() -> None:
    assert [config.name for config in REACHABLE if config.why_illegal()] == []
    assert len({config.name for config in REACHABLE}) == len(REACHABLE)


@pytest.mark.parametrize("config", COMPILED, ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: Bf16Config) -> None:
    kernel = compile_cubin(BF16_GEMM.source, BF16_GEMM.headers(config), name=config.kernel_name)
    assert violations(report(kernel.cubin, kernel.log), BF16_GEMM.code_plan(config)) == []


@pytest.mark.parametrize("config", sum_slices.reachable_slices(), ids=lambda config: config.name)
def test_the_sum_of_slices_is_what_was_planned(config: sum_slices.SlicesConfig) -> None:
    kernel = compile_cubin(sum_slices.KERNEL.source, sum_slices.KERNEL.headers(config), name=sum_slices.KERNEL.name)
    assert violations(report(kernel.cubin, kernel.log), sum_slices.KERNEL.code_plan(config)) == []


def test_the_pipeline_of_products_is_checked() -> None:
    """Sums that C was added to, and that are not let go, make products wait for each other."""
    config = next(config for config in REACHABLE if config.with_c and config.cluster_k == config.slices == 1)
    headers = BF16_GEMM.headers(config)
    name = "mainloop_of_slice.cuh"
    headers[name] = headers[name].replace("kWithC || kMayBeEmpty", "kMayBeEmpty")
    kernel = compile_cubin(BF16_GEMM.source, headers, name=config.kernel_name)
    assert any("C7515" in text for text in violations(report(kernel.cubin, kernel.log), BF16_GEMM.code_plan(config)))
