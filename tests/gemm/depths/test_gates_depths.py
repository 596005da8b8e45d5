"""Every kernel for groups along k that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest
from helpers import gemm_report
from thorough import configurations

from deep_gemm.core.code_plan import CodePlan
from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.depths import maps_kernel as k_group_maps
from deep_gemm.gemm.depths.choose import reachable_k_grouped
from deep_gemm.gemm.kernel import KERNEL as FP8_GEMM
from lab.gates import violations


def test_all_have_names_of_their_own() -> None:
    configs = reachable_k_grouped()
    assert len({config.name for config in configs}) == len(configs)
    assert [config.why_illegal() for config in configs] == [None] * len(configs)


@pytest.mark.parametrize("config", configurations(reachable_k_grouped()), ids=lambda config: config.name)
def test_a_kernel_for_groups_along_k_is_what_was_planned(config: GemmConfig) -> None:
    assert violations(gemm_report(config), FP8_GEMM.code_plan(config)) == []


def test_the_kernel_that_makes_maps_is_what_was_planned() -> None:
    name = k_group_maps.KERNEL.name
    kernel = compile_cubin(k_group_maps.KERNEL.source, k_group_maps.KERNEL.headers(k_group_maps.CONFIG), name=name)
    threads = k_group_maps.CONFIG.num_threads
    plan = CodePlan(roles=((threads, None),), shared_bytes=0, qgmma=0, tma_loads=0, multicast_loads=0)
    assert violations(report(kernel.cubin, kernel.log), plan) == []
