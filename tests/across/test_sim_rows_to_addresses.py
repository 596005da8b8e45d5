"""Grouped products with rows at addresses, in the simulator: D and memory around it, against the reference."""

from __future__ import annotations

import pytest
from test_sim_rows import SIZES

from deep_gemm.across.rows_to_addresses import OUTPUT, OUTPUT_BY_64
from deep_gemm.gemm.choose.tiles import ROWS as TILES
from deep_gemm.gemm.choose.tiles import Tile
from deep_gemm.gemm.config.bf16 import Bf16Config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import BF16_GEMM
from lab.sim.rows_to_addresses import AddressesTrial, Bf16AddressesTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
BF16_TILES = [config for config in BF16_GEMM.configs() if config.epilogue.has_row_addresses]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def test_every_tile(tile: Tile) -> None:
    config = tile_config(tile.block_m, tile.block_n, OUTPUT, k=272)
    AddressesTrial(config, tile.block_n + 8, 272, 1, sizes=tuple(SIZES), behind=200).run()


@pytest.mark.parametrize("schedule", ["slow_warps", "slow_warpgroup", "slow_lanes", "late_stores"])
def test_buffers_that_are_used_again(schedule: str) -> None:
    config = tile_config(128, 32, OUTPUT, k=128)
    for seed in (1, 2):
        AddressesTrial(config, 136, 128, seed, schedule, sizes=(3, 0, 70, 129, 1), behind=0).run()


@pytest.mark.parametrize("config", BF16_TILES, ids=lambda config: config.name)
def test_every_tile_of_bf16(config: Bf16Config) -> None:
    Bf16AddressesTrial(config, config.block_n + 8, 136, 1, sizes=(3, 0, 70, 129, 1), behind=9).run()


@pytest.mark.parametrize("block_n", [64, 256])
def test_scales_of_64_columns(block_n: int) -> None:
    config = tile_config(128, block_n, OUTPUT_BY_64, k=384)
    AddressesTrial(config, block_n + 8, 384, 1, behind=9).run()
