"""Every kernel of products into heads that can be chosen is compiled, and its machine code is what was planned."""

from __future__ import annotations

import pytest
from helpers import gemm_report
from thorough import configurations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.kernel import KERNEL as FP8_GEMM
from deep_gemm.gemm.kernel_decode import KERNEL as FP8_GEMM_DECODE
from deep_gemm.gemm.skip.choose import reachable_skipping
from lab.gates import violations

CONFIGS = reachable_skipping()
TILES = [config for config in CONFIGS if isinstance(config, GemmConfig)]
DECODE = [config for config in CONFIGS if isinstance(config, DecodeConfig)]


def test_few_configurations_are_reachable_and_all_have_names_of_their_own() -> None:
    assert len(CONFIGS) <= 200
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)
    assert [config for config in CONFIGS if config.why_illegal()] == []


@pytest.mark.parametrize("config", configurations(TILES), ids=lambda config: config.name)
def test_a_tiled_kernel_is_what_was_planned(config: GemmConfig) -> None:
    assert violations(gemm_report(config), FP8_GEMM.code_plan(config)) == []


@pytest.mark.parametrize("config", configurations(DECODE), ids=lambda config: config.name)
def test_a_decode_kernel_is_what_was_planned(config: DecodeConfig) -> None:
    kernel = compile_cubin(FP8_GEMM_DECODE.source, FP8_GEMM_DECODE.headers(config), name=FP8_GEMM_DECODE.name)
    assert violations(report(kernel.cubin, kernel.log), FP8_GEMM_DECODE.code_plan(config)) == []
