"""Grouped rows whose A has a scale for each 64 columns, in the simulator: what tests of grouped rows compare, whole."""

from __future__ import annotations

import pytest
import torch

from deep_gemm.core.check.recipes import PER_64, PER_ROW
from deep_gemm.gemm.choose.tiles import tiles_for
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.problem import Problem
from lab.sim import product as simulated
from lab.sim import rows as sim
from lab.sim.product import compile_config
from lab.sim.rows import RowsTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

BY_64 = Output(work=works.IDS, sfa=PER_64)
TILES = [(tile.block_m, tile.block_n) for tile in tiles_for(BY_64)]
RAGGED = (*[2] * 70, *[-1] * 5, *[0] * 3, *[1] * 129, 3, *[-1] * 200, *[0] * 64, *[2] * 2)


def check(tile: tuple[int, int], n: int, k: int, seed: int, schedule: str | None = None) -> None:
    """The two scales of a k-block differ by more than chance."""
    RowsTrial(tile_config(*tile, BY_64, k=k), RAGGED, seed, schedule, n=n, k=k, zero_padding=False).run()


@pytest.mark.parametrize("tile", [*TILES, (128, 64)], ids=str)
@pytest.mark.parametrize("k", [384, 512, 64, 192])
def test_every_tile_and_any_depth(tile: tuple[int, int], k: int) -> None:
    check(tile, tile[1] + 8, k, 1)


@pytest.mark.parametrize("schedule", ["slow_producer", "slow_warps", "slow_math", "slow_warpgroup", "late_loads"])
@pytest.mark.parametrize("tile", [(64, 128), (128, 128), (128, 256)], ids=str)
def test_biased_schedules(tile: tuple[int, int], schedule: str) -> None:
    check(tile, 136, 640, 3, schedule)


def test_scales_that_are_alike_give_the_product_by_128() -> None:
    """But for the order of sums: these are of small numbers, which FP32 holds exactly."""
    generator = torch.Generator().manual_seed(1)
    config = tile_config(128, 128, BY_64, k=256)
    p = sim.random_problem(config, RAGGED, 136, 256, 3, zero_padding=False)
    assert isinstance(p, Problem)
    for x in (p.a, p.b):
        x.copy_(torch.randint(-4, 5, x.shape, generator=generator).float())
    p.sfb.fill_(0.5)
    p.sfa.fill_(2)
    plain = tile_config(128, 128, Output(work=works.IDS), k=256)
    by_128 = simulated.run(compile_config(plain), plain, p._replace(sfa=p.sfa[:, ::2].contiguous(), of_a=PER_ROW))
    assert torch.equal(by_128.d, simulated.run(compile_config(config), config, p).checked().d)
