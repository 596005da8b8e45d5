"""Products of heads in the simulator: every tile, output and cluster, ragged edges, operands inside of wider rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from thorough import one_in

from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.choose.tiles import HEADS_PER_ROW as TILES_PER_ROW
from deep_gemm.gemm.choose.tiles import TILES_OF_HEADS as TILES
from deep_gemm.gemm.choose.tiles import Tile
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import OPERANDS_BY_ROW, OUTPUTS_OF, USUAL_OPERANDS, Output
from lab.sim.heads import of_tile

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

BF16 = Output(work=works.HEADS)
OUTPUTS = [replace(of, work=works.HEADS) for kind in (USUAL_OPERANDS, OPERANDS_BY_ROW) for of in OUTPUTS_OF[kind][:5]]
FEW_ROWS = Tile(16, 64, cluster_k=2, is_decode=True)


def check(tile: Tile, output: Output, heads: int, m: int, n: int, k: int, **how: Any) -> None:
    of_tile(tile, output, heads, m, n, k, **how).run()


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_every_tile(tile: Tile) -> None:
    height = tile.block_m * tile.cluster_m
    for heads, m in ((3, max(height - 3, 1)), (2, height + 5)):
        check(tile, BF16, heads, m, tile.block_n + 8, 272)


@pytest.mark.parametrize("tile", TILES_PER_ROW, ids=lambda tile: tile.name)
def test_every_tile_with_scales_by_row(tile: Tile) -> None:
    check(tile, replace(BF16, is_fp32=True, sfb=PER_ROW), 2, tile.block_m + 5, tile.block_n + 8, 272)


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_every_output(output: Output) -> None:
    check(Tile(64, 64), output, 3, 70, 136, 400)
    check(Tile(128, 128), output, 2, 21, 136, 400)
    if output.sfb != PER_ROW:
        check(FEW_ROWS, output, 3, 21, 72, 400)
        check(FEW_ROWS, output, 2, 9, 72, 400, in_place=not output.adds_to_d)


@pytest.mark.parametrize("schedule", ["slow_cta", "slow_warps", "late_loads", "late_stores", "slow_producer"])
@pytest.mark.parametrize("tile", [Tile(64, 64), Tile(128, 256, cluster_m=2), FEW_ROWS], ids=lambda tile: tile.name)
def test_unfair_schedules(tile: Tile, schedule: str) -> None:
    check(tile, BF16, 3, tile.block_m + 9, 72, 400, seed=1, schedule=schedule)


@pytest.mark.parametrize("num_sms", one_in(2, [2, 3, 5]))
def test_more_heads_than_lanes(num_sms: int) -> None:
    check(Tile(64, 64), BF16, 40, 3, 8, 128, num_sms=num_sms)
    check(Tile(8, 64, is_decode=True), BF16, 40, 3, 8, 128, num_sms=num_sms)


@pytest.mark.parametrize("tile", [Tile(64, 64), FEW_ROWS], ids=lambda tile: tile.name)
def test_nothing_is_read_before_the_kernel_ahead_has_ended(tile: Tile) -> None:
    for seed in range(3):
        check(tile, replace(BF16, with_c=True), 2, 13, 72, 272, seed=seed, is_dependent=True)
