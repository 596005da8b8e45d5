"""Gates find out a kernel of paged logits that is broken."""

from __future__ import annotations

import pytest

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.indexer.paged_kernel import KERNEL, PagedConfig, paged_config
from lab.gates import violations


def problems(config: PagedConfig, headers: dict[str, str]) -> list[str]:
    kernel = compile_cubin(KERNEL.source, headers, name=KERNEL.name)
    return violations(report(kernel.cubin, kernel.log), KERNEL.code_plan(config))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("ptx::wgmma_wait_group<kInFlight < kLag ? kInFlight : kLag>();", "ptx::wgmma_wait_group<1>();", "C75"),
        ("ptx::setmaxnreg_inc<kMathRegisters>();", "", "setmaxnreg"),
    ],
    ids=["no wait", "no setmaxnreg"],
)
def test_a_broken_kernel_does_not_pass(old: str, new: str, expected: str) -> None:
    config = paged_config(2, 64, 128, 64, 4)
    headers = KERNEL.headers(config)
    assert headers["fp8_paged_mqa_logits.cuh"].count(old) == 1
    headers["fp8_paged_mqa_logits.cuh"] = headers["fp8_paged_mqa_logits.cuh"].replace(old, new)
    assert any(expected in problem for problem in problems(config, headers))
