"""Every kernel for heads that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest
from helpers import gemm_report
from thorough import configurations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.heads.choose import reachable, reachable_heads, reachable_heads_decode
from deep_gemm.gemm.kernel import KERNEL as FP8_GEMM
from deep_gemm.gemm.kernel_decode import KERNEL as FP8_GEMM_DECODE
from lab.gates import violations

MAX_CONFIGURATIONS = 200


def test_few_configurations_are_reachable_and_all_have_names_of_their_own() -> None:
    configs = reachable()
    assert len(configs) <= MAX_CONFIGURATIONS
    assert len({config.name for config in configs}) == len(configs)
    assert [config for config in configs if config.why_illegal()] == []


@pytest.mark.parametrize("config", configurations(reachable_heads()), ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: GemmConfig) -> None:
    assert violations(gemm_report(config), FP8_GEMM.code_plan(config)) == []


@pytest.mark.parametrize("config", configurations(reachable_heads_decode()), ids=lambda config: config.name)
def test_a_reachable_decode_kernel_is_what_was_planned(config: DecodeConfig) -> None:
    kernel = compile_cubin(FP8_GEMM_DECODE.source, FP8_GEMM_DECODE.headers(config), name=FP8_GEMM_DECODE.name)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, FP8_GEMM_DECODE.code_plan(config)) == []
    assert found.counts["MEMBAR"] == 0
