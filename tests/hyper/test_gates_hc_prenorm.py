"""The kernel of hyper-connections is compiled for what may be chosen, and is what was planned."""

from __future__ import annotations

from itertools import combinations

import pytest
from thorough import covering, values

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.cubin import read_kernels
from deep_gemm.core.jit.report import report
from deep_gemm.hyper.choose import Chosen, kernel_of
from deep_gemm.hyper.kernel import KERNEL, HcConfig, reachable_hc
from deep_gemm.hyper.kernel_few import KERNEL as KERNEL_FEW
from deep_gemm.hyper.kernel_few import HcFewConfig, reachable_few
from lab.gates import violations


def problems(config: Chosen, headers: dict[str, str]) -> list[str]:
    kernel = kernel_of(config).KERNEL
    compiled = compile_cubin(kernel.source, headers, name=kernel.name)
    return violations(report(compiled.cubin, compiled.log), kernel.code_plan(config))


CONFIGS = covering(reachable_hc(), lambda config: combinations(values(config), 2))
FEW = covering(reachable_few(), lambda config: combinations(values(config), 2))


@pytest.mark.parametrize("config", [*CONFIGS, *FEW], ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: Chosen) -> None:
    assert config.why_illegal() is None
    assert problems(config, kernel_of(config).KERNEL.headers(config)) == []


@pytest.mark.parametrize("config", FEW, ids=lambda config: config.name)
def test_few_rows_are_loaded_behind_the_wait_for_the_kernel_ahead_and_many_at_a_time(config: HcFewConfig) -> None:
    compiled = compile_cubin(KERNEL_FEW.source, KERNEL_FEW.headers(config), name=KERNEL_FEW.name)
    (code,) = read_kernels(compiled.cubin)
    mnemonics = [instruction.mnemonic for instruction in code.instructions]
    wait, products = mnemonics.index("ACQBULK"), mnemonics.index("HMMA")
    loads = 2 + config.block_n // 8 * 2
    assert "LDG" not in mnemonics[:wait]
    assert mnemonics[wait:products].count("LDG") == config.ahead * loads
    assert mnemonics.count("LDG") == 2 * config.ahead * loads
    assert mnemonics.count("HMMA") == config.ahead * config.block_n // 8 * 4


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
