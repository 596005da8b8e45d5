"""Every decode kernel that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest
from thorough import configurations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.choose import reachable_decode
from deep_gemm.gemm.kernel_decode import KERNEL as FP8_GEMM_DECODE
from lab.gates import violations

MAX_CONFIGURATIONS = 200


def test_few_configurations_are_reachable_and_all_have_names_of_their_own() -> None:
    configs = reachable_decode()
    assert len(configs) <= MAX_CONFIGURATIONS
    assert len({config.name for config in configs}) == len(configs)
    assert [config for config in configs if config.why_illegal()] == []


@pytest.mark.parametrize("config", configurations(reachable_decode()), ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: DecodeConfig) -> None:
    """And a cluster's sums cross without a release at its scope, a barrier for the whole GPU of half a microsecond."""
    kernel = compile_cubin(FP8_GEMM_DECODE.source, FP8_GEMM_DECODE.headers(config), name=FP8_GEMM_DECODE.name)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, FP8_GEMM_DECODE.code_plan(config)) == []
    assert found.counts["MEMBAR"] == 0
