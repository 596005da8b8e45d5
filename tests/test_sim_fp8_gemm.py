"""The fp8_gemm kernel's own source in the simulator: every feature, ragged edges, several seeds and schedules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from deep_gemm.config import GemmConfig, Output, tile_config
from deep_gemm.heuristics import TILES, TILES_1D1D, Tile
from deep_gemm.sim import HostKernel
from deep_gemm.sim import fp8_gemm as sim

pytestmark = pytest.mark.host_compiler

BF16, FP32, BY_ROW = Output(), Output(is_fp32=True), Output(sfb_is_per_row=True)


@cache
def compiled(config: GemmConfig) -> HostKernel:
    return sim.compile_config(config)


def check(config: GemmConfig, m: int, n: int, k: int, seed: int, schedule: str | None = None) -> None:
    problem = sim.random_problem(config, m, n, k, seed)
    num_sms = 2 * config.cluster_size
    outcome = sim.run(compiled(config), config, problem, num_sms=num_sms, seed=seed, schedule=schedule)
    assert outcome.mistakes is None, outcome.mistakes


def ragged(config: GemmConfig) -> tuple[int, int, int]:
    """Two tiles and a bit each way, for two clusters: the ring wraps across tiles, and every edge is ragged."""
    m, n = config.block_m * 2 * config.cluster_m + 8, config.block_n * 2 * config.cluster_n + 8
    return m, n, 128 * 2 + 16


CHOSEN = [(tile, BF16) for tile in TILES if not tile.is_decode] + [(tile, BY_ROW) for tile in TILES_1D1D]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("choice", CHOSEN, ids=lambda choice: f"{choice[0].config(choice[1], 128).name}")
def test_every_tile_on_a_ragged_problem(choice: tuple[Tile, Output], seed: int) -> None:
    tile, output = choice
    config = tile.config(output, 128 * 3)
    assert isinstance(config, GemmConfig)
    check(config, *ragged(config), seed)


@pytest.mark.parametrize("num_k_blocks", [1, 3, 4, 5, 8, 32, 33, 35])
@pytest.mark.parametrize("num_partials", [1, 2])
@pytest.mark.parametrize("run_k_blocks", [2, 4])
def test_runs_and_rests_of_any_depth(run_k_blocks: int, num_partials: int, num_k_blocks: int) -> None:
    has_rest = num_k_blocks % run_k_blocks != 0
    narrow: dict[str, Any] = {"unit_n": 32, "panel_columns": 32}
    for units in ({}, narrow):
        config = replace(
            GemmConfig(128, 64, 3), num_partials=num_partials, run_k_blocks=run_k_blocks, has_rest=has_rest, **units
        )
        check(config, 264, 72, 128 * num_k_blocks - 16, seed=num_k_blocks)


@pytest.mark.parametrize("schedule", [None, "slow_cta", "slow_warps"])
@pytest.mark.parametrize("cluster_k", range(2, 9))
def test_splits_of_k_over_several_tiles(cluster_k: int, schedule: str | None) -> None:
    """More tiles than clusters, so that what is exchanged makes room for the next; and fewer runs than CTAs."""
    config = tile_config(64, 32, Output(with_c=True), cluster_k=cluster_k, k=128 * 9)
    check(config, 264, 72, 128 * 9, seed=cluster_k, schedule=schedule)
    check(config, 136, 40, 128 * 3 - 16, seed=cluster_k, schedule=schedule)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("output", [Output(with_c=True), FP32, Output(True, with_c=True), Output(True, adds_to_d=True)])
@pytest.mark.parametrize("tile", [(128, 128), (256, 128), (192, 64), (64, 48), (128, 256)])
def test_every_kind_of_output(tile: tuple[int, int], output: Output, seed: int) -> None:
    config = tile_config(*tile, output, k=128 * 3)
    check(config, *ragged(config), seed)


@pytest.mark.parametrize("k", [16, 112, 128, 144, 1024, 4224, 8208])
def test_any_depth(k: int) -> None:
    """Below one block, at its edges, past the 32 blocks whose scales a warp holds, and past 64."""
    check(tile_config(128, 112, BF16, k=k), 136, 120, k, seed=k)


@pytest.mark.parametrize("m", [1, 3, 64, 65, 127, 129])
@pytest.mark.parametrize("n", [8, 120, 136])
def test_any_rows_and_columns(m: int, n: int) -> None:
    check(tile_config(128, 128, BF16, k=272), m, n, 272, seed=m * n)


@pytest.mark.parametrize(
    "schedule", ["slow_cta", "slow_warps", "slow_producer", "slow_math", "late_loads", "late_stores"]
)
@pytest.mark.parametrize("tile", [(128, 128, 1, 1), (256, 128, 1, 2), (128, 128, 2, 1), (192, 128, 1, 1)])
def test_biased_schedules(tile: tuple[int, int, int, int], schedule: str) -> None:
    block_m, block_n, cluster_m, cluster_n = tile
    config = tile_config(block_m, block_n, BF16, cluster_m, cluster_n, k=128 * 3)
    check(config, *ragged(config), seed=5, schedule=schedule)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_rings_of_any_length(stages: int) -> None:
    for num_k_blocks in (1, stages - 1, stages, stages + 1, 3 * stages + 1):
        check(GemmConfig(128, 64, stages), 300, 72, 128 * num_k_blocks, seed=num_k_blocks)


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2)])
def test_a_cluster_with_one_tile_outside_d(cluster: tuple[int, int]) -> None:
    config = tile_config(128, 64, BF16, *cluster)
    for m, n in ((128 * 3, 64), (128, 64 * 3), (100, 40)):
        check(config, m, n, 400, seed=m + n)


def test_scales_may_have_any_strides() -> None:
    config = tile_config(128, 128, BF16)
    p = sim.random_problem(config, 200, 264, 400, seed=3)
    column_major = p._replace(sfb=p.sfb.t().contiguous().t())
    assert column_major.sfb.stride() != p.sfb.stride()
    assert sim.run(compiled(config), config, column_major, seed=3).mistakes is None


@pytest.mark.parametrize("output", [BF16, FP32, Output(True, with_c=True)])
def test_the_tensor_cores_sums_stay_within_what_is_allowed_them(output: Output) -> None:
    config = tile_config(128, 64, output)
    p = sim.random_problem(config, 136, 72, 400, seed=4)
    outcome = sim.run(compiled(config), config, p, seed=4, truncate=True)
    assert outcome.mistakes is None, outcome.mistakes
