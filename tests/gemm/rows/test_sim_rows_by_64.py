"""Grouped rows whose A has a scale for each 64 columns, in the simulator: what tests of grouped rows compare, whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deep_gemm.core.check.recipes import PER_64, PER_ROW
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_of_tile import tile_config
from deep_gemm.gemm.output import Groups, Output
from deep_gemm.gemm.rows.check import ContiguousProblem
from deep_gemm.gemm.rows.choose import tiles_for
from lab.sim import HostKernel
from lab.sim import rows as sim
from lab.sim.dense import compile_config

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

BY_64 = Output(groups=Groups.IDS, sfa=PER_64)
TILES = [(tile.block_m, tile.block_n) for tile in tiles_for(BY_64)]
RAGGED = [*[2] * 70, *[-1] * 5, *[0] * 3, *[1] * 129, 3, *[-1] * 200, *[0] * 64, *[2] * 2]


@cache
def compiled(config: GemmConfig) -> HostKernel:
    return compile_config(config)


def problem(config: GemmConfig, n: int, k: int, seed: int) -> ContiguousProblem:
    p = sim.random_problem(config, RAGGED, n, k, seed, zero_padding=False)
    assert isinstance(p, ContiguousProblem)
    # The two scales of a k-block must differ by more than chance.
    p.sfa.mul_(torch.where(torch.arange(p.sfa.shape[1]) % 2 == 0, 1.0, 3.0))
    return p


def check(config: GemmConfig, p: ContiguousProblem, seed: int = 1, schedule: str | None = None) -> torch.Tensor:
    outcome = sim.run(compiled(config), config, p, seed=seed, schedule=schedule)
    assert outcome.mistakes is None, outcome.mistakes
    return outcome.d


@pytest.mark.parametrize("tile", [*TILES, (128, 64)], ids=str)
@pytest.mark.parametrize("k", [384, 512, 64, 192])
def test_every_tile_and_any_depth(tile: tuple[int, int], k: int) -> None:
    config = tile_config(*tile, BY_64, k=k)
    check(config, problem(config, tile[1] + 8, k, 1))


@pytest.mark.parametrize("schedule", ["slow_producer", "slow_warps", "slow_math", "slow_warpgroup", "late_loads"])
@pytest.mark.parametrize("tile", [(64, 128), (128, 128), (128, 256)], ids=str)
def test_biased_schedules(tile: tuple[int, int], schedule: str) -> None:
    config = tile_config(*tile, BY_64, k=640)
    check(config, problem(config, 136, 640, 2), 3, schedule)


def test_scales_that_are_alike_give_the_product_by_128() -> None:
    """But for the order of sums: these are of small numbers, which FP32 holds exactly."""
    generator = torch.Generator().manual_seed(1)
    config = tile_config(128, 128, BY_64, k=256)
    p = problem(config, 136, 256, 3)
    for x in (p.a, p.b):
        x.copy_(torch.randint(-4, 5, x.shape, generator=generator).float())
    p.sfb.fill_(0.5)
    p.sfa.fill_(2)
    plain = tile_config(128, 128, Output(groups=Groups.IDS), k=256)
    by_128 = sim.run(compiled(plain), plain, p._replace(sfa=p.sfa[:, ::2].contiguous(), of_a=PER_ROW))
    assert torch.equal(by_128.d, check(config, p))
