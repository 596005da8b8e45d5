"""Products with scales of fewer than 128 columns, in the simulator: whole results, bits, and the chosen path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import assert_same_bits_by, run_simulated
from thorough import one_in

from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW, Scales
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.choose.tiles import tiles_for
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import FINE_OPERANDS, OUTPUTS_OF, Operands, Output
from deep_gemm.gemm.problem import Problem
from lab.sim import dense as sim
from lab.sim.dense import DenseTrial
from lab.sim.rows import RowsTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

BLOCKS = Scales(32, 32), Scales(64, 64)
TILES_OF = {each: tiles_for(OUTPUTS_OF[each][0]) for each in FINE_OPERANDS}
TILES_THERE = {each: {(t.block_m, t.block_n) for t in tiles if not t.is_decode} for each, tiles in TILES_OF.items()}
TILES = sorted(set.union(*TILES_THERE.values()))


def config(operands: Operands, tile: tuple[int, int], groups: works.Work = works.DENSE, **more: int) -> GemmConfig:
    b, sfa, sfb = operands
    return tile_config(*tile, Output(b=b, sfa=sfa, sfb=sfb, work=groups), **{"k": 128, **more})


@pytest.mark.parametrize("k", [16, 288, 576, 1312])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("operands", FINE_OPERANDS, ids=str)
def test_every_kind_tile_and_depth(operands: Operands, tile: tuple[int, int], k: int) -> None:
    if tile in TILES_THERE[operands]:
        DenseTrial(config(operands, tile, k=k), 150, 200, k, 1).run()


@pytest.mark.parametrize("words", [Words.A, Words.B, Words.A | Words.B])
@pytest.mark.parametrize("operands", FINE_OPERANDS, ids=str)
def test_any_sides_scales_in_words(operands: Operands, words: Words) -> None:
    """Kernels read B's block scales as words; other scales become FP32. A split may begin anywhere in a word."""
    of = config(operands, (64, 128), cluster_k=2)
    DenseTrial(of, 72, 200, 1312, 7, any_scales=True, words=words, num_sms=2).run()


@pytest.mark.parametrize("words", [Words.NONE, Words.A | Words.B])
@pytest.mark.parametrize("groups", [works.IDS, works.ENDS, works.COUNTS])
@pytest.mark.parametrize("operands", FINE_OPERANDS, ids=str)
def test_rows_of_groups(operands: Operands, groups: works.Work, words: Words) -> None:
    ids = (*[0] * 70, *[-1] * 3, *[2] * 66, *[1] * 130)
    layout = {works.IDS: ids, works.ENDS: (70, 70, 258), works.COUNTS: (70, 0, 130)}[groups]
    of = config(operands, (128, 128), groups=groups, k=416)
    RowsTrial(of, layout, 2, n=200, k=416, any_scales=True, words=words, num_sms=2).run()


@pytest.mark.parametrize("schedule", ["slow_producer", "slow_warps", "slow_math", "slow_warpgroup", "late_loads"])
@pytest.mark.parametrize("operands", FINE_OPERANDS[::3], ids=str)
def test_biased_schedules(operands: Operands, schedule: str) -> None:
    DenseTrial(config(operands, (128, 128), k=928), 137, 296, 928, 3, schedule, num_sms=1).run()


def problem(sfb: Scales, *, of_a: Scales = PER_ROW) -> tuple[GemmConfig, Problem]:
    of = tile_config(128, 128, Output(sfa=of_a, sfb=sfb), k=128)
    return of, sim.random_problem(of, 150, 264, 1312, 5)


@pytest.mark.parametrize("sfb", one_in(2, BLOCKS), ids=str)
def test_blocks_that_share_a_scale_along_k_are_promoted_at_once(sfb: Scales) -> None:
    """Scales that are equal along k give the bits of 128x128 scales, even if other columns of the tile have others."""
    of, p = problem(sfb)
    plain = tile_config(128, 128, Output(), k=128)
    blocks = torch.rand(3, 11, generator=torch.Generator().manual_seed(1)) + 0.5
    fine = blocks.repeat_interleave(128 // sfb.rows, 0).repeat_interleave(128 // sfb.columns, 1)
    fine = fine[: p.sfb.shape[0], : p.sfb.shape[1]].contiguous()
    by_128 = run_simulated(plain, p._replace(sfb=blocks, of_b=PER_BLOCK), truncate=True).d
    at_once = run_simulated(of, p._replace(sfb=fine, d=torch.empty_like(p.d)), truncate=True).checked().d
    assert torch.equal(at_once, by_128)
    fine[0, 1] *= 3
    d = run_simulated(of, p._replace(sfb=fine, d=torch.empty_like(p.d)), truncate=True).checked().d
    assert torch.equal(d[:, 128:], by_128[:, 128:])
    assert not torch.equal(d[:, sfb.rows : 128], by_128[:, sfb.rows : 128])


@pytest.mark.parametrize("sfb", one_in(2, BLOCKS), ids=str)
def test_bits_do_not_depend_on_the_tile(sfb: Scales) -> None:
    tiles = one_in(2, ((64, 128), (128, 128), (256, 128)))
    assert_same_bits_by((tile_config(*tile, Output(sfb=sfb), k=128) for tile in tiles), problem(sfb)[1])


@pytest.mark.parametrize("sfb", [*BLOCKS, Scales(1, 32)], ids=str)
@pytest.mark.parametrize("of_a", [PER_ROW, Scales(1, 32)], ids=str)
def test_scales_of_any_size_and_strides(sfb: Scales, of_a: Scales) -> None:
    """Test scales of 0, NaN, huge beside tiny scales, and scales in the columns of another tensor."""
    of, p = problem(sfb, of_a=of_a)
    p.sfb[1, 3], p.sfb[2, 6], p.sfb[3, 9], p.sfb[0, 5] = 0, torch.nan, 2.0**-100, 2.0**90
    wide = torch.full((p.sfb.shape[0], 50), torch.nan)
    wide[:, : p.sfb.shape[1]] = p.sfb
    for scales in one_in(2, (p.sfb, p.sfb.t().contiguous().t(), wide[:, : p.sfb.shape[1]])):
        result = run_simulated(of, p._replace(sfb=scales, d=torch.empty_like(p.d)))
        assert bool(result.d.isnan().any())
        result.checked()


@pytest.mark.parametrize("split", [2, 4])
def test_a_split_of_k_adds_up_parts_of_any_scales(split: int) -> None:
    for sfb in BLOCKS:
        of = config((Output().b, PER_ROW, sfb), (64, 128), cluster_k=split)
        DenseTrial(of, 72, 200, 1312, 7, num_sms=split).run()


def test_c_is_added() -> None:
    of = tile_config(128, 128, Output(is_fp32=True, adds_to_d=True, sfa=Scales(1, 32), sfb=Scales(1, 32)), k=128)
    DenseTrial(of, 137, 264, 416, 8).run()
    DenseTrial(replace(of, adds_to_d=False, with_c=True), 137, 264, 416, 8).run()
