"""Gates find out kernels of hyper-connections that are broken."""

from __future__ import annotations

import pytest

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.hyper.choose import Chosen, kernel_of
from deep_gemm.hyper.kernel import KERNEL, HcConfig
from deep_gemm.hyper.kernel_few import HcFewConfig
from lab.gates import violations


def problems(config: Chosen, headers: dict[str, str]) -> list[str]:
    kernel = kernel_of(config).KERNEL
    compiled = compile_cubin(kernel.source, headers, name=kernel.name)
    return violations(report(compiled.cubin, compiled.log), kernel.code_plan(config))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("    ptx::wgmma_wait_group<0>();\n", "", "C75"),
        ("shared.b[at.stage], k_block * kBlockK, unit.row_n);", "shared.b[at.stage], 0, unit.row_n);", None),
        ("      ptx::tma_load_2d(&p.map_a", "      if (false) ptx::tma_load_2d(&p.map_a", "TMA loads"),
    ],
    ids=["no wait", "a change that gates allow", "A is not loaded"],
)
def test_a_broken_kernel_does_not_pass(old: str, new: str, expected: str | None) -> None:
    config = HcConfig(128, 24, 2)
    headers = KERNEL.headers(config)
    assert headers["hc_prenorm.cuh"].count(old) == 1
    headers["hc_prenorm.cuh"] = headers["hc_prenorm.cuh"].replace(old, new)
    found = problems(config, headers)
    assert found == [] if expected is None else any(expected in problem for problem in found)


def test_configurations_that_cannot_be() -> None:
    for config, reason in (
        (HcConfig(96, 24), "needs tiles of (64, 128) rows"),
        (HcConfig(64, 20), "needs tiles of (8, 16, 24, 32) columns"),
        (HcConfig(64, 24, 17), "needs clusters of 1 to 16 CTAs"),
        (HcConfig(64, 24, 1, 9), "needs 1 to 8 teams"),
        (HcConfig(64, 24, 1, 2, 1), "needs at least a stage for each team"),
        (HcFewConfig(20), "needs tiles of (8, 16, 24, 32) columns"),
        (HcFewConfig(24, 17), "needs clusters of 1 to 16 CTAs"),
        (HcFewConfig(24, 1, 17), "needs 1 to 16 warps"),
        (HcFewConfig(24, 1, 8, 9), "needs 1 to 8 steps ahead"),
    ):
        assert config.why_illegal() == reason
        with pytest.raises(ValueError, match="config: needs"):
            kernel_of(config).KERNEL.build(config)
