"""Every kernel that casts what it multiplies is compiled for each tile that can be chosen, and is what was planned."""

from __future__ import annotations

import pytest
from thorough import configurations

from deep_gemm.choose.config_decode import DecodeConfig
from deep_gemm.choose.config_linear_decode import linear_decode_config
from deep_gemm.choose.dense import reachable_decode
from deep_gemm.jit.compiler import compile_cubin
from deep_gemm.jit.report import report
from deep_gemm.kernels import linear_decode
from deep_gemm.tools.gates import violations

TILES = [tile for tile in reachable_decode() if not tile.output_is_fp32 and linear_decode_config(tile) is not None]


@pytest.mark.parametrize("tile", configurations(TILES), ids=lambda tile: tile.name)
def test_a_reachable_kernel_is_what_was_planned(tile: DecodeConfig) -> None:
    config = linear_decode_config(tile)
    assert config is not None
    kernel = compile_cubin(linear_decode.SOURCE, linear_decode.headers(config), name=linear_decode.NAME)
    assert violations(report(kernel.cubin, kernel.log), linear_decode.code_plan(config)) == []
