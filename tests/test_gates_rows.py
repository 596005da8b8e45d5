"""Every kernel for grouped rows that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest
from helpers import compiled_kernels

from deep_gemm.choose.config import GemmConfig
from deep_gemm.choose.rows import reachable_grouped
from deep_gemm.jit.compiler import CompiledKernel
from deep_gemm.jit.report import report
from deep_gemm.kernels import fp8_gemm
from deep_gemm.tools.gates import violations


@pytest.fixture(scope="module")
def compiled() -> dict[GemmConfig, CompiledKernel]:
    return compiled_kernels(reachable_grouped())


def test_all_have_names_of_their_own() -> None:
    configs = reachable_grouped()
    assert len({config.name for config in configs}) == len(configs)


@pytest.mark.parametrize("config", reachable_grouped(), ids=lambda config: config.name)
def test_a_kernel_for_grouped_rows_is_what_was_planned(
    config: GemmConfig, compiled: dict[GemmConfig, CompiledKernel]
) -> None:
    kernel = compiled[config]
    assert violations(report(kernel.cubin, kernel.log), fp8_gemm.code_plan(config)) == []
