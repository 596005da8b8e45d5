"""The kernel of hyper-connections is compiled for what may be chosen, and is what was planned."""

from __future__ import annotations

from itertools import combinations

import pytest
from thorough import covering, values

from deep_gemm.choose.config_hc_prenorm import HcConfig
from deep_gemm.jit.compiler import compile_cubin
from deep_gemm.jit.report import report
from deep_gemm.kernels import hc_prenorm
from deep_gemm.tools.gates import violations


def problems(config: HcConfig, headers: dict[str, str]) -> list[str]:
    kernel = compile_cubin(hc_prenorm.SOURCE, headers, name=hc_prenorm.NAME)
    return violations(report(kernel.cubin, kernel.log), hc_prenorm.code_plan(config))


CONFIGS = covering(hc_prenorm.reachable_hc(), lambda config: combinations(values(config), 2))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: HcConfig) -> None:
    assert config.why_illegal() is None
    assert problems(config, hc_prenorm.headers(config)) == []


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
    headers = hc_prenorm.headers(config)
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
    ):
        assert config.why_illegal() == reason
        with pytest.raises(ValueError, match="config: needs"):
            hc_prenorm.build(config)
