"""FP4 weights in the fp8_gemm kernel where rows are grouped, in the simulator: ids, ends and counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fp4_passes import bytes_of, passes_of
from helpers import run_simulated
from thorough import one_in

from deep_gemm.core.check.recipes import E2M1, MX
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.gemm.choose.tiles import Tile, tiles_for
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import CONVERT_ROWS, GemmConfig
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output
from lab.sim import dense as sim_dense
from lab.sim import rows as sim
from lab.sim.library import SCHEDULES
from lab.sim.rows import RowsTrial
from lab.sim.rows_to_addresses import AddressesTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

SIZES = [3, 0, 70, 128, 0, 129, 1, 64]
LAYOUTS = {
    works.IDS: tuple(group for group, size in enumerate(SIZES) for _ in range(size)) + (-1,) * 5 + (2,) * 66,
    works.ENDS: (3, 3, 198, 384, 384, 513, 641, 832),
    works.COUNTS: tuple(SIZES),
}
OF = [(kind, tile) for kind in LAYOUTS for tile in tiles_for(Output(work=kind, b=E2M1, sfb=MX)) if not tile.is_decode]
TILES = [(kind, (tile.block_m, tile.block_n)) for kind, tile in OF]
BLOCKS = sorted({block for _, block in TILES})
TO_ADDRESSES = Output(work=works.ENDS, b=E2M1, sfb=MX, epilogue=epilogues.TO_ADDRESSES)


def config(kind: works.Work, block_m: int, block_n: int, **output: Any) -> GemmConfig:
    return tile_config(block_m, block_n, Output(work=kind, b=E2M1, sfb=MX, **output), k=128)


@pytest.mark.parametrize("any_scales", [False, True])
@pytest.mark.parametrize(("kind", "block"), TILES, ids=str)
def test_every_tile(kind: works.Work, block: tuple[int, int], any_scales: bool) -> None:
    of = config(kind, *block)
    for n, k in one_in(2, ((block[1] + 8, 416), (72, 160))):
        RowsTrial(of, LAYOUTS[kind], 1, n=n, k=k, any_scales=any_scales, num_sms=3).run()


@pytest.mark.parametrize("k", one_in(2, [32, 64, 96, 128, 160, 288]))
@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_depth(kind: works.Work, k: int) -> None:
    RowsTrial(config(kind, 64, 128), LAYOUTS[kind], k, n=136, k=k, any_scales=True).run()


@pytest.mark.parametrize("n", one_in(2, [8, 72, 136, 576]))
@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_columns(kind: works.Work, n: int) -> None:
    RowsTrial(config(kind, 128, 128), LAYOUTS[kind], n, n=n, k=288, any_scales=True, num_sms=2).run()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_biased_schedules(kind: works.Work, block: tuple[int, int], schedule: str) -> None:
    trial = RowsTrial(config(kind, *block), LAYOUTS[kind], 2, schedule, n=136, k=544, any_scales=True, num_sms=2)
    for each in one_in(2, (trial, replace(trial, seed=3, any_scales=False))):
        each.run()


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_kind_of_output(kind: works.Work, is_fp32: bool, zero_padding: bool) -> None:
    of = config(kind, 128, 64, is_fp32=is_fp32)
    RowsTrial(of, LAYOUTS[kind], 5, n=72, k=288, any_scales=True, zero_padding=zero_padding).run()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_without_any_rows(kind: works.Work) -> None:
    layout = (-1,) * 70 if kind == works.IDS else (0, 0, 0)
    RowsTrial(config(kind, 64, 128), layout, 1, rows=70, n=136, k=288, num_groups=3, any_scales=True).run()


@pytest.mark.parametrize("any_scales", [False, True])
@pytest.mark.parametrize("tile", tiles_for(TO_ADDRESSES), ids=str)
def test_rows_that_go_to_addresses(tile: Tile, any_scales: bool) -> None:
    of = tile_config(tile.block_m, tile.block_n, TO_ADDRESSES, k=128)
    AddressesTrial(of, 136, 288, 1, any_scales=any_scales).run()


def test_groups_of_one_launch_have_passes_of_their_own() -> None:
    """Test more tiles than the queue of passes holds. Each group's weight needs other passes, some in one tile only."""
    of, counts, n, k = config(works.COUNTS, 64, 128), [70, 3, 0, 64, 129, 1], 264, 256
    p = sim.random_problem(of, counts, n, k, 3)
    scales = bytes_of(p.sfb, k).clone()
    for group, row, few in ((0, 1, [90]), (1, 40, [90, 60]), (2, 63, [60]), (3, 250, [30, 60, 90]), (5, 130, [150])):
        scales[group, row, : len(few)] = torch.tensor(few, dtype=torch.uint8)
    p = p._replace(sfb=words_of(scales))
    passes = [passes_of(each, of.block_n) for each in scales]
    assert {len(set(each)) for each in passes} == {1, 2}
    for schedule in (None, "slow_warps", "slow_producer"):
        result = run_simulated(of, p, num_sms=2, schedule=schedule).checked().result
        tiles = sum(-(-count // of.block_m) * sum(each) for count, each in zip(counts, passes, strict=True))
        assert result.loads == tiles * 2 * (2 + of.block_n // CONVERT_ROWS)


@pytest.mark.parametrize("any_scales", one_in(2, [False, True]))
def test_bits_are_those_of_dense_products(any_scales: bool) -> None:
    """Test each kind of layout and each tile."""
    k, n, sizes = 544, 136, [70, 0, 129]
    of_counts = config(works.COUNTS, 64, 128)
    p = sim.random_problem(of_counts, sizes, n, k, 1, rows=129, any_scales=any_scales)
    for of in (config(works.COUNTS, *block) for block in BLOCKS):
        d = run_simulated(of, p._replace(d=torch.zeros_like(p.d)), truncate=True).d
        for group, size in enumerate(sizes):
            if size:
                dense = tile_config(64, 64, Output(b=E2M1, sfb=MX), k=k)
                like = sim_dense.random_problem(dense, size, n, k)
                one = like._replace(a=p.a[group, :size], sfa=p.sfa[group, :size], b=p.b[group], sfb=p.sfb[group])
                right = run_simulated(dense, one, truncate=True).d
                assert torch.equal(d[group, :size].view(torch.int16), right.view(torch.int16))
