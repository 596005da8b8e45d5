"""Every kernel for groups along k that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest
from helpers import gemm_report
from thorough import configurations

from deep_gemm.config import GemmConfig
from deep_gemm.gates import CodePlan, violations
from deep_gemm.heuristics_k_grouped import reachable_k_grouped
from deep_gemm.jit.compiler import compile_cubin
from deep_gemm.jit.report import report
from deep_gemm.kernels import fp8_gemm, fp8_gemm_k_grouped


def test_all_have_names_of_their_own() -> None:
    configs = reachable_k_grouped()
    assert len({config.name for config in configs}) == len(configs)
    assert [config.why_illegal() for config in configs] == [None] * len(configs)


@pytest.mark.parametrize("config", configurations(reachable_k_grouped()), ids=lambda config: config.name)
def test_a_kernel_for_groups_along_k_is_what_was_planned(config: GemmConfig) -> None:
    assert violations(gemm_report(config), fp8_gemm.code_plan(config)) == []


def test_the_kernel_that_makes_maps_is_what_was_planned() -> None:
    name = fp8_gemm_k_grouped.MAPS_NAME
    kernel = compile_cubin(fp8_gemm_k_grouped.MAPS_SOURCE, fp8_gemm_k_grouped.maps_headers(), name=name)
    threads = fp8_gemm_k_grouped.MAPS_THREADS
    plan = CodePlan(roles=((threads, None),), shared_bytes=0, qgmma=0, tma_loads=0, multicast_loads=0)
    assert violations(report(kernel.cubin, kernel.log), plan) == []
