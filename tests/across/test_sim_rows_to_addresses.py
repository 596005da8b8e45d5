"""Grouped products whose rows go to addresses, in the simulator: beside the reference, and all that lies around."""

from __future__ import annotations

from functools import cache

import pytest
from test_sim_rows import SIZES, ids_of_sizes

from deep_gemm.across.rows_to_addresses import OUTPUT, OUTPUT_BY_64
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_of_tile import tile_config
from deep_gemm.gemm.rows.check import ContiguousProblem
from deep_gemm.gemm.rows.choose import TILES
from deep_gemm.gemm.tiles import Tile
from lab.sim import HostKernel
from lab.sim import rows as sim_rows
from lab.sim import rows_to_addresses as sim
from lab.sim.dense import compile_config

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


@cache
def compiled(config: GemmConfig) -> HostKernel:
    return compile_config(config)


def check(config: GemmConfig, ids: list[int], n: int, k: int, seed: int = 1, schedule: str | None = None) -> None:
    problem = sim_rows.random_problem(config, ids, n, k, seed, zero_padding=False)
    assert isinstance(problem, ContiguousProblem)
    outcome = sim.run(compiled(config), config, problem, seed=seed, schedule=schedule)
    assert outcome.mistakes is None, outcome.mistakes


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def test_every_tile(tile: Tile) -> None:
    config = tile_config(tile.block_m, tile.block_n, OUTPUT, k=272)
    check(config, [*ids_of_sizes(SIZES), *[-1] * 200], tile.block_n + 8, 272)


@pytest.mark.parametrize("schedule", ["slow_warps", "slow_warpgroup", "slow_lanes", "late_stores"])
def test_buffers_that_are_used_again(schedule: str) -> None:
    config = tile_config(128, 32, OUTPUT, k=128)
    for seed in (1, 2):
        check(config, ids_of_sizes([3, 0, 70, 129, 1]), 136, 128, seed, schedule)


@pytest.mark.parametrize("block_n", [64, 256])
def test_scales_of_64_columns(block_n: int) -> None:
    config = tile_config(128, block_n, OUTPUT_BY_64, k=384)
    check(config, [*ids_of_sizes([70, 0, 3, 129, 1]), *[-1] * 9], block_n + 8, 384)
