"""The fp8_gemm kernel's own source in the simulator: every feature, ragged edges, several seeds and schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import run_simulated, small_integers, some, sum_of_parts
from thorough import one_in

from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW
from deep_gemm.gemm.choose.tiles import TILES, TILES_PER_ROW, Tile
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds.output import Output
from lab.sim import dense as sim
from lab.sim.dense import DenseTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

BF16, FP32, BY_ROW = Output(), Output(is_fp32=True), Output(sfb=PER_ROW)


def check(config: GemmConfig, m: int, n: int, k: int, seed: int, schedule: str | None = None, **how: Any) -> None:
    DenseTrial(config, m, n, k, seed, schedule, **how).run()


def ragged(config: GemmConfig) -> tuple[int, int, int]:
    """Return slightly more than two tiles in m and n, for two clusters: the ring wraps, and every edge is ragged."""
    m, n = config.block_m * 2 * config.cluster_m + 8, config.block_n * 2 * config.cluster_n + 8
    return m, n, 128 * 2 + 16


CHOSEN = [(tile, BF16) for tile in TILES if not tile.is_decode] + [(tile, BY_ROW) for tile in TILES_PER_ROW]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("choice", CHOSEN, ids=lambda choice: f"{choice[0].config(choice[1], 128).name}")
def test_every_tile_on_a_ragged_problem(choice: tuple[Tile, Output], seed: int) -> None:
    tile, output = choice
    config = tile.config(output, 128 * 3)
    assert isinstance(config, GemmConfig)
    check(config, *ragged(config), seed)


@pytest.mark.parametrize("num_k_blocks", one_in(2, [1, 3, 4, 5, 8, 32, 33, 35]))
@pytest.mark.parametrize("num_partials", [1, 2])
@pytest.mark.parametrize("run_k_blocks", [2, 4])
def test_runs_and_tails_of_any_depth(run_k_blocks: int, num_partials: int, num_k_blocks: int) -> None:
    tall, has_tail = GemmConfig(128, 64, 3), num_k_blocks % run_k_blocks != 0
    for units in (tall, replace(tall, unit_n=32, panel_columns=32)):
        config = replace(units, num_partials=num_partials, run_k_blocks=run_k_blocks, has_tail=has_tail)
        check(config, 264, 72, 128 * num_k_blocks - 16, seed=num_k_blocks)


@pytest.mark.parametrize("num_partials", [1, 2])
@pytest.mark.parametrize("run_k_blocks", [1, 8, 16, 32])
def test_runs_of_any_length(run_k_blocks: int, num_partials: int) -> None:
    """Test less than a run, a run, a k-block more, past the 32 k-blocks whose scales a warp holds; tails or none."""
    whole = GemmConfig(64, 16, 3, 1, num_partials=num_partials, run_k_blocks=run_k_blocks, panel_columns=16)
    for num_k_blocks in one_in(2, sorted({1, run_k_blocks - 1, run_k_blocks, run_k_blocks + 1, 64, 67} - {0})):
        config = replace(whole, has_tail=num_k_blocks % run_k_blocks != 0)
        check(config, 72, 40, 128 * num_k_blocks - 16, seed=num_k_blocks)


UNITS = {
    "two along n": GemmConfig(64, 64, 3, 1, unit_n=32, panel_columns=32),
    "two along m": GemmConfig(256, 32, 3, panel_columns=32),
    "two each way": GemmConfig(256, 64, 3, unit_n=32, panel_columns=32),
    "four along n": GemmConfig(128, 128, 2, unit_n=32, panel_columns=32),
    "one for each of three warpgroups": GemmConfig(192, 32, 3, 3, panel_columns=32),
}


@pytest.mark.parametrize("schedule", ["late_loads", "slow_warps"])
@pytest.mark.parametrize("num_partials", [1, 2])
@pytest.mark.parametrize("by_row", [False, True], ids=["1d2d", "1d1d"])
@pytest.mark.parametrize("units", UNITS)
def test_units_in_any_order_of_rows_and_columns(units: str, by_row: bool, num_partials: int, schedule: str) -> None:
    """In each order, several pieces read a slot, and the last of these pieces must give the slot back."""
    sfb = PER_ROW if by_row else PER_BLOCK
    config = replace(UNITS[units], num_partials=num_partials, run_k_blocks=2, has_tail=True, sfb=sfb)
    check(config, config.block_m + 24, config.block_n * 2 + 8, 128 * 5 - 16, seed=num_partials, schedule=schedule)


@pytest.mark.parametrize("schedule", [None, "slow_cta", "slow_warps"])
@pytest.mark.parametrize("cluster_k", one_in(3, range(2, 9)))
def test_splits_of_k_over_several_tiles(cluster_k: int, schedule: str | None) -> None:
    """Test more tiles than clusters, so the next tile reuses the memory of partial sums; and fewer runs than CTAs."""
    config = tile_config(64, 32, Output(with_c=True), cluster_k=cluster_k, k=128 * 9)
    check(config, 264, 72, 128 * 9, seed=cluster_k, schedule=schedule)
    check(config, 136, 40, 128 * 3 - 16, seed=cluster_k, schedule=schedule)


@pytest.mark.parametrize("cluster_k", one_in(3, range(2, 9)))
def test_shares_of_k_that_are_not_alike(cluster_k: int) -> None:
    """Every CTA has work, some CTAs have one more run, the last run is cut short; shares are longer than the ring."""
    config = GemmConfig(64, 32, 2, 1, num_partials=2, run_k_blocks=2, has_tail=True, panel_columns=32)
    config = replace(config, cluster_k=cluster_k)
    check(config, 136, 72, 128 * (4 * cluster_k + 3) - 16, seed=cluster_k)


@pytest.mark.parametrize("cluster_k", one_in(2, [5, 7]))
def test_ctas_to_which_no_part_of_a_tile_falls(cluster_k: int) -> None:
    """Each CTA adds up two of 8 chunks. The last CTAs receive no chunk, but must still send theirs, and wait too."""
    config = GemmConfig(64, 16, 2, 1, cluster_k=cluster_k, panel_columns=16)
    for seed, schedule in enumerate(("slow_cta", "late_stores", "slow_warps")):
        check(config, 264, 40, 128 * (cluster_k + 1), seed=seed, schedule=schedule)


SPLITS = {
    "units along n": GemmConfig(64, 64, 3, 1, unit_n=32, cluster_k=3, panel_columns=32),
    "units along m": GemmConfig(256, 32, 3, cluster_k=2, panel_columns=32, is_fp32=True),
    "three warpgroups": GemmConfig(192, 32, 3, 3, cluster_k=3, panel_columns=32, with_c=True),
    "scales by row": GemmConfig(128, 64, 3, cluster_k=3, sfb=PER_ROW),
    "pairs, by row": GemmConfig(
        64, 64, 3, 1, num_partials=2, cluster_k=4, panel_columns=32, is_fp32=True, with_c=True, sfb=PER_ROW
    ),
}


@pytest.mark.parametrize("schedule", [None, "slow_warps"])
@pytest.mark.parametrize("kind", SPLITS)
def test_splits_of_every_kind_of_tile(kind: str, schedule: str | None) -> None:
    config = replace(SPLITS[kind], run_k_blocks=2, has_tail=True)
    check(config, config.block_m + 24, config.block_n * 2 + 8, 128 * (2 * config.cluster_k + 1), 3, schedule)


@pytest.mark.parametrize("kind", SPLITS)
def test_a_split_gives_the_sums_of_its_parts_in_order_whoever_is_slow(kind: str) -> None:
    config = replace(SPLITS[kind], run_k_blocks=2, has_tail=True)
    m, n, k = config.block_m + 8, config.block_n + 8, 128 * (2 * config.cluster_k + 1) - 16
    p = small_integers(config, m, n, k, seed=m)
    right = sum_of_parts(p, config.cluster_k, config.run_k_blocks)
    for seed, schedule in enumerate(one_in(2, ("slow_cta", "slow_warps", "late_stores"))):
        outcome = run_simulated(config, p, num_sms=config.cluster_k, seed=seed, schedule=schedule)
        assert torch.equal(outcome.d, right)


IN_PLACE = {
    "whole": tile_config(128, 64, Output(with_c=True), k=128),
    "FP32, read": tile_config(128, 64, Output(is_fp32=True, with_c=True), k=128),
    "split": GemmConfig(64, 32, 3, 1, cluster_k=3, panel_columns=32, with_c=True),
    "FP32, split": tile_config(64, 32, Output(is_fp32=True, adds_to_d=True), cluster_k=2, k=128),
}


@pytest.mark.parametrize("schedule", [None, "late_stores"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_c_may_be_d(kind: str, schedule: str | None) -> None:
    config = IN_PLACE[kind]
    assert config.with_c
    assert not config.adds_to_d
    check(config, config.block_m * 2 + 8, config.block_n * 2 + 8, 400, 1, schedule, in_place=True)


def test_c_may_be_one_row_for_all() -> None:
    """C is a bias: one row that is added to every row."""
    for config in (tile_config(64, 64, Output(with_c=True)), tile_config(64, 64, Output(with_c=True), cluster_k=3)):
        p = sim.random_problem(config, 70, 200, 912, seed=4)
        p = p._replace(c=some(p.c)[0].clone().expand_as(p.d))
        run_simulated(config, p, seed=4).checked()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "output", [Output(with_c=True), FP32, Output(is_fp32=True, with_c=True), Output(is_fp32=True, adds_to_d=True)]
)
@pytest.mark.parametrize("tile", [(128, 128), (256, 128), (192, 64), (64, 48), (128, 256)])
def test_every_kind_of_output(tile: tuple[int, int], output: Output, seed: int) -> None:
    config = tile_config(*tile, output, k=128 * 3)
    check(config, *ragged(config), seed)


@pytest.mark.parametrize("output", [FP32, Output(is_fp32=True, adds_to_d=True)], ids=lambda output: output.name)
@pytest.mark.parametrize("n", [4, 60, 72, 80, 96, 128, 132])
def test_every_span_of_wide_panels(n: int, output: Output) -> None:
    """n is a multiple of 4, 8, 16 or 32 and of no larger power of two; D ends inside of a panel or at its end."""
    config = tile_config(64, 64, output, k=144)
    assert config.has_wide_panels
    check(config, 72, n, 144, seed=n)


@pytest.mark.parametrize("k", one_in(2, [16, 112, 128, 144, 1024, 4224, 8208]))
def test_any_depth(k: int) -> None:
    """Test less than a k-block, a k-block's edges, more than the 32 k-blocks whose scales a warp holds, and over 64."""
    check(tile_config(128, 112, BF16, k=k), 136, 120, k, seed=k)


@pytest.mark.parametrize("m", [1, 3, 64, 65, 127, 129])
@pytest.mark.parametrize("n", [8, 120, 136])
def test_any_rows_and_columns(m: int, n: int) -> None:
    check(tile_config(128, 128, BF16, k=272), m, n, 272, seed=m * n)


@pytest.mark.parametrize("m", [1, 33, 63])
@pytest.mark.parametrize(
    "config",
    [
        tile_config(64, 32, BF16, k=400),
        tile_config(192, 64, Output(with_c=True), k=400),
        tile_config(128, 64, Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW), k=400),
        tile_config(128, 64, BF16, cluster_k=3, k=400),
        tile_config(128, 64, BF16, cluster_m=2, k=400),
        tile_config(128, 64, BF16, cluster_n=2, k=400),
    ],
    ids=lambda config: config.name,
)
def test_fewer_rows_than_a_tile(config: GemmConfig, m: int) -> None:
    """If A has few rows, TMA boxes of A and of A's scales must have fewer rows, in each kind of product."""
    check(config, m, config.block_n + 8, 400, seed=m)


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
    run_simulated(config, column_major, seed=3).checked()


@pytest.mark.parametrize("output", [BF16, FP32, Output(is_fp32=True, with_c=True)])
def test_the_tensor_cores_sums_stay_within_what_is_allowed_them(output: Output) -> None:
    config = tile_config(128, 64, output)
    check(config, 136, 72, 400, 4, truncate=True)
