"""FP4 weights in the fp8_gemm kernel, in the simulator: every tile, ragged edges, scales that fold and do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fp4_cases import plain
from fp4_passes import bytes_of, passes_of
from helpers import assert_same_bits_by, run_simulated, with_other_strides
from thorough import one_in
from torch import Tensor

from deep_gemm.core.check.recipes import E2M1, MX
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.choose.tiles import TILES_FP4
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import CONVERT_ROWS, GemmConfig
from deep_gemm.gemm.kinds.output import Output
from lab.sim.dense import DenseTrial, random_problem
from lab.sim.library import SCHEDULES

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

TILES = [(tile.block_m, tile.block_n, tile.cluster_k) for tile in TILES_FP4 if not tile.is_decode]
SIZES = sorted({tile[:2] for tile in TILES})


def config(block_m: int, block_n: int, cluster_k: int = 1, k: int = 128, **output: Any) -> GemmConfig:
    return tile_config(block_m, block_n, Output(b=E2M1, sfb=MX, **output), cluster_k=cluster_k, k=k)


@pytest.mark.parametrize("any_scales", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_on_ragged_problems(tile: tuple[int, int, int], any_scales: bool) -> None:
    of = config(*tile)
    for m, n, k in one_in(2, ((of.block_m + 13, of.block_n + 8, 672), (of.block_m - 3, 576, 288))):
        DenseTrial(of, m, n, k, m, any_scales=any_scales, num_sms=2 * of.cluster_size).run()


@pytest.mark.parametrize("k", one_in(3, [32, 64, 96, 128, 160, 288, 1312]))
def test_any_depth(k: int) -> None:
    """Test k below a k-block, an incomplete last k-block, and a split whose last CTAs have no k-block."""
    for of in (config(64, 128), config(64, 64, 4), config(128, 128, 2), config(256, 128)):
        DenseTrial(of, 72, 136, k, k, any_scales=True).run()


@pytest.mark.parametrize("n", [8, 72, 136, 576])
@pytest.mark.parametrize("m", [1, 65, 300])
def test_any_rows_and_columns(m: int, n: int) -> None:
    for of in (config(64, 128), config(128, 128)):
        DenseTrial(of, m, n, 416, m + n, any_scales=m > 1).run()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tile", [(64, 64, 2), (64, 128, 1), (128, 128, 1), (256, 128, 1)], ids=str)
def test_biased_schedules(tile: tuple[int, int, int], schedule: str) -> None:
    of = config(*tile)
    for seed in one_in(2, (1, 2)):
        trial = DenseTrial(of, of.block_m + 9, 296, 928, seed, schedule, any_scales=seed == 2)
        replace(trial, num_sms=of.cluster_size).run()


@pytest.mark.parametrize("schedule", [None, "late_loads", "slow_math"])
@pytest.mark.parametrize("stages", one_in(2, [2, 3, 4, 5]))
def test_rings_of_any_length(stages: int, schedule: str | None) -> None:
    """The ring wraps within a tile, at a tile's end, and within a pass; with two warpgroups, in the turn of either."""
    for of in (config(64, 64), replace(config(64, 64), num_partials=1), config(256, 128)):
        shallow = replace(of, num_stages=stages)
        if shallow.why_illegal() is None:
            for num_k_blocks in one_in(2, (1, stages - 1, stages, stages + 1, 3 * stages + 1)):
                trial = DenseTrial(shallow, 72, 200, 128 * num_k_blocks, num_k_blocks, schedule, num_sms=1)
                for any_scales in one_in(2, (True, False)):
                    replace(trial, any_scales=any_scales).run()


OUTPUTS: dict[str, dict[str, bool]] = {
    "BF16": {},
    "with C": {"with_c": True},
    "FP32": {"is_fp32": True},
    "FP32, with C": {"is_fp32": True, "with_c": True},
    "FP32, added to D": {"is_fp32": True, "adds_to_d": True},
}


@pytest.mark.parametrize("cluster_k", [1, 2])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_kind_of_output(kind: str, cluster_k: int) -> None:
    of = config(64, 128, cluster_k, **OUTPUTS[kind])
    for in_place in {False, of.with_c and not of.adds_to_d}:
        DenseTrial(of, 72, 136, 544, 1, is_dependent=True, in_place=in_place, any_scales=True).run()


def spread(pattern: list[int], scales: Tensor) -> Tensor:
    """Repeat a pattern over scales, row by row."""
    return torch.tensor(pattern, dtype=torch.uint8).repeat(scales.numel() // len(pattern)).view(scales.shape)


def counted(scales: Tensor, number: int) -> Tensor:
    return torch.arange(scales.numel()).view(scales.shape) % number


SCALES: dict[str, Callable[[Tensor], object]] = {
    "the smallest": lambda s: s.fill_(0),
    "the largest": lambda s: s.fill_(254),
    "NaN": lambda s: s.fill_(255),
    "2^30 apart": lambda s: s.copy_(spread([100, 130], s)),
    "2^30 apart in other rows": lambda s: (s[::2].fill_(100), s[1::2].fill_(130)),
    "2^11 apart": lambda s: s.copy_(spread([120, 131], s)),
    "2^12 apart": lambda s: s.copy_(spread([120, 132], s)),
    "steps of 2^12": lambda s: s.copy_(spread([0, 12, 24, 36, 48, 60, 72, 84], s)),
    "from the smallest on": lambda s: s.copy_(counted(s, 188)),
    "up to the largest": lambda s: s.copy_(67 + counted(s, 188)),
    "one row of the smallest": lambda s: s[3].fill_(0),
    "small": lambda s: s.copy_(counted(s, 9)),
    "small, a few too many": lambda s: s.copy_(counted(s, 13)),
    "large": lambda s: s.copy_(245 + counted(s, 10)),
    "larger with k": lambda s: s.copy_(40 + torch.arange(s.shape[1]) // 4 * 20),
    "far below in the first 64 rows": lambda s: s[47, 5].fill_(90),
    "far below in the second 64 rows": lambda s: s[100, 5].fill_(90),
    "far below in the last k-block": lambda s: s[127, 13].fill_(90),
    "single NaNs": lambda s: (s[5, 6].fill_(255), s[130, 0].fill_(255)),
    "NaN beside the smallest": lambda s: (s[:32].fill_(2), s[5, 6].fill_(255)),
    "NaN beside the largest": lambda s: (s[:32].fill_(250), s[5, 6].fill_(255)),
    "NaN where scales do not fold": lambda s: (s[6, 4:8].fill_(60), s[5, 6].fill_(255)),
}


@pytest.mark.parametrize("tile", SIZES, ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_any_scales_give_the_product_to_the_bit(name: str, tile: tuple[int, int]) -> None:
    """Each row of A has one number that is not zero, so no sum is rounded; the scales decide the number of passes."""
    of, n, k = config(*tile, k=512), 136, 480
    generator = torch.Generator().manual_seed(1)
    a = torch.zeros(77, k)
    a.scatter_(1, torch.randint(0, k, (77, 1), generator=generator), 1.5)
    values = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (n, k // 32), generator=generator, dtype=torch.uint8)
    SCALES[name](scales)
    sfa = torch.full((77, 4), 2.0**-60 if int(scales.clamp_max(254).amax()) > 200 else 2.0**20)
    p = dense_problem((a.to(torch.float8_e4m3fn), sfa), (values, scales), None, None)
    result = run_simulated(of, p, num_sms=1)
    right = (a.double() @ plain(values, scales).t() * sfa[0, 0].double()).bfloat16()
    right[:, (scales == 255).any(1)] = torch.nan
    assert torch.equal(result.d.isnan(), right.isnan())
    assert torch.equal(result.d.nan_to_num(7.25), right.nan_to_num(7.25))
    passes = -(-77 // of.block_m) * sum(passes_of(scales, of.block_n))
    assert result.result.loads == passes * 4 * (2 + of.block_n // CONVERT_ROWS)


@pytest.mark.parametrize("schedule", [None, "slow_warps", "slow_producer", "slow_math"])
@pytest.mark.parametrize("tile", [(64, 128), (128, 64), (256, 128)], ids=str)
def test_tiles_of_one_launch_have_passes_of_their_own(tile: tuple[int, int], schedule: str | None) -> None:
    """More tiles than the queue of passes holds, with 1 to 4 passes each; either scaling warp may need more passes."""
    of = config(*tile, k=256)
    p = random_problem(of, of.block_m, of.block_n * 7, 256, 3)
    scales = bytes_of(p.sfb, 256).clone()
    for row, few in ((1, [90]), (40, [90, 60]), (63, [60]), (250, [30, 60, 90]), (300, [150]), (-1, [90])):
        scales[row * of.block_n // 128, : len(few)] = torch.tensor(few, dtype=torch.uint8)
    p = p._replace(sfb=words_of(scales))
    passes = passes_of(scales, of.block_n)
    assert {1, 2, 4} <= set(passes)
    result = run_simulated(of, p, num_sms=1, schedule=schedule).checked().result
    assert result.loads == sum(passes) * 2 * (2 + of.block_n // CONVERT_ROWS)


def test_a_split_has_passes_for_each_part_of_k() -> None:
    of = config(64, 64, 2, k=1024)
    part = 128 * of.run_k_blocks
    p = random_problem(of, 64, 64, 2 * part, 3)
    scales = bytes_of(p.sfb, p.k).clone()
    scales[9, -3], scales[41, -2] = 90, 60
    result = run_simulated(of, p._replace(sfb=words_of(scales)), num_sms=2).checked().result
    assert [passes_of(each, 64) for each in torch.split(scales, part // 32, 1)] == [[1], [3]]
    assert result.loads == (1 + 3) * of.run_k_blocks * (2 + 64 // CONVERT_ROWS)


def test_scales_may_have_any_strides() -> None:
    of = config(64, 128)
    for problem in with_other_strides(random_problem(of, 70, 264, 736, 3, any_scales=True)):
        run_simulated(of, problem).checked()


@pytest.mark.parametrize("any_scales", one_in(2, [False, True]))
def test_bits_do_not_depend_on_the_tile(any_scales: bool) -> None:
    """If all scales fold, the bits must equal the decode kernel's too."""
    decode = [] if any_scales else [DecodeConfig(48, 2, 2, 1, b=E2M1, sfb=MX)]
    p = random_problem(config(64, 64), 40, 264, 1312, 5, any_scales=any_scales)
    assert_same_bits_by([*(config(*tile, k=128) for tile in SIZES), *decode], p)
