"""Every decode kernel that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest

from deep_gemm.choose.config_decode import DecodeConfig
from deep_gemm.choose.dense import reachable_decode
from deep_gemm.jit.compiler import CompiledKernel, Job, compile_many
from deep_gemm.jit.report import report
from deep_gemm.kernels import fp8_gemm_decode
from deep_gemm.tools.gates import violations

MAX_CONFIGURATIONS = 200


@pytest.fixture(scope="module")
def compiled() -> dict[DecodeConfig, CompiledKernel]:
    configs = reachable_decode()
    jobs = [
        Job(f"fp8_gemm_decode {config.name}", fp8_gemm_decode.SOURCE, fp8_gemm_decode.headers(config))
        for config in configs
    ]
    return dict(zip(configs, compile_many(jobs, threads=2), strict=True))


def test_few_configurations_are_reachable_and_all_have_names_of_their_own() -> None:
    configs = reachable_decode()
    assert len(configs) <= MAX_CONFIGURATIONS
    assert len({config.name for config in configs}) == len(configs)
    assert [config for config in configs if config.why_illegal()] == []


@pytest.mark.parametrize("config", reachable_decode(), ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(
    config: DecodeConfig, compiled: dict[DecodeConfig, CompiledKernel]
) -> None:
    kernel = compiled[config]
    assert violations(report(kernel.cubin, kernel.log), fp8_gemm_decode.code_plan(config)) == []


def test_sums_cross_the_cluster_without_a_memory_barrier(compiled: dict[DecodeConfig, CompiledKernel]) -> None:
    """A release at the scope of a cluster compiles to a barrier for the whole GPU: half a microsecond or more."""
    for kernel in compiled.values():
        assert report(kernel.cubin, kernel.log).counts["MEMBAR"] == 0
