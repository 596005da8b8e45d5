"""Rows that fp8_gemm activates and casts before it stores them, in the simulator.

Values and scales are full of canaries. Rows without a group are NaN in A, in A's scales and in the weights. The memory
after a run is compared as a whole.
"""

from __future__ import annotations

import pytest
import torch
from helpers import run_simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import one_in, up_to

from deep_gemm.core.check.recipes import PER_64, PER_ROW
from deep_gemm.gemm.choose.tiles import ROWS_APART as TILES_APART
from deep_gemm.gemm.choose.tiles import ROWS_SILU as TILES_SILU
from deep_gemm.gemm.choose.tiles import tiles_for
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.problem import Problem
from lab.silu import mistakes, right
from lab.sim import rows as sim_by_64
from lab.sim import rows_silu as sim
from lab.sim.product import compile_config
from lab.sim.rows import RowsTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

TILES = [(tile.block_m, tile.block_n) for tile in TILES_SILU]
RAGGED = [70, 0, 3, 129, 1, 64, 2]


def config_of(tile: tuple[int, int] = (128, 128), k: int = 384, apart: bool = False) -> GemmConfig:
    epilogue = epilogues.SILU_OF_HALVES if apart else epilogues.SILU
    return tile_config(*tile, Output(work=works.ENDS, epilogue=epilogue), k=k)


def check(p: Problem, config: GemmConfig, seed: int = 1, schedule: str | None = None, num_sms: int = 2) -> None:
    got, result = sim.run(compile_config(config), config, p, seed=seed, schedule=schedule, num_sms=num_sms)
    assert mistakes(p, got, right(p)) is None, mistakes(p, got, right(p))
    assert result.stores == 0, "no store by TMA"


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("k", [384, 512])
def test_every_tile(tile: tuple[int, int], k: int) -> None:
    check(sim.random_problem(RAGGED, 768, k, 1), config_of(tile, k))


@pytest.mark.parametrize("tile", [(tile.block_m, tile.block_n) for tile in TILES_APART], ids=str)
def test_gate_and_up_that_lie_apart(tile: tuple[int, int]) -> None:
    for k, limit, has_weights in one_in(2, ((272, 0.5, True), (384, None, False))):
        p = sim.random_problem(RAGGED, 768, k, 7, limit=limit, has_weights=has_weights, gates_apart=True)
        check(p, config_of(tile, k, apart=True), num_sms=5)


@pytest.mark.parametrize("schedule", ["slow_warps", "slow_math", "slow_warpgroup", "slow_lanes", "late_loads"])
def test_biased_schedules(schedule: str) -> None:
    for tile in one_in(2, TILES):
        check(sim.random_problem(RAGGED, 512, 256, 2), config_of(tile, 256), 3, schedule)


@pytest.mark.parametrize("sizes", [[1], [0, 0], [1] * 40, [131, 0, 5]], ids=str)
def test_groups_of_any_size(sizes: list[int]) -> None:
    for tile in TILES:
        check(sim.random_problem(sizes, 256, 128, 3, behind=200), config_of(tile, 128))


def test_the_last_tiles_are_cut_in_halves_where_they_are_few() -> None:
    config = config_of((128, 256), 128)
    p = sim.random_problem([3, 130, 40], 768, 128, 4)
    for num_sms in (1, 3, 5, 8):
        check(p, config, num_sms=num_sms)


@pytest.mark.parametrize("limit", [None, 0.25, 3.0])
@pytest.mark.parametrize("has_weights", [False, True])
def test_limits_and_weights(limit: float | None, has_weights: bool) -> None:
    check(sim.random_problem(RAGGED, 256, 256, 5, limit=limit, has_weights=has_weights, size=2.0), config_of(k=256))


def test_weights_of_zero_and_below() -> None:
    p = sim.random_problem(RAGGED, 256, 256, 6)
    assert p.row_weights is not None
    p.row_weights[:20] = 0
    p.row_weights[20:40] *= -1
    got, _ = sim.run(compile_config(config_of(k=256)), config_of(k=256), p)
    assert mistakes(p, got, right(p)) is None
    assert (got[0].view(torch.uint8)[:20] & 0x7F == 0).all()
    assert (got[1][:20] == 1).all(), "as in any cast of zeros"


def test_the_very_large_the_very_small_and_what_is_not_finite() -> None:
    """Scales of A make the rows' results larger than FP32's largest number, smaller than 2^-90, zero, or infinite."""
    p = sim.random_problem([64, 70], 256, 256, 7)
    for first, factor in ((0, 1e18), (8, 4e18), (16, 1e25), (24, 1e-13), (32, 1e-18), (40, 1e-30), (48, float("inf"))):
        p.sfa[first : first + 8] *= factor
    p.sfa[56:60] = float("nan")
    for tile in TILES:
        check(p, config_of(tile, 256))


def test_gates_far_from_zero() -> None:
    check(sim.random_problem(RAGGED, 256, 256, 8, size=60.0), config_of(k=256))


def test_the_same_call_gives_the_same_bits() -> None:
    p, first = sim.random_problem(RAGGED, 512, 384, 9), None
    for tile in one_in(2, TILES):
        for seed, schedule in ((1, None), (2, "slow_cta"), (3, "slow_warps")):
            config = config_of(tile)
            (values, scales), _ = sim.run(compile_config(config), config, p, seed=seed, schedule=schedule)
            bits = torch.cat([values.view(torch.uint8).flatten(), scales.flatten().view(torch.uint8)])
            assert first is None or torch.equal(bits, first)
            first = bits


def test_operands_with_pitches_of_their_own() -> None:
    p = sim.random_problem(RAGGED, 256, 256, 10)
    wide_d = torch.full((len(p.a), 128 + 48), sim.POISON, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide_b = torch.zeros(len(p.b) * 2, 256, 256 + 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    d, b = wide_d[:, :128], wide_b[::2, :, :256]
    b.view(torch.uint8).copy_(p.b.view(torch.uint8))
    sfb = torch.empty(len(p.b), p.sfb.shape[2], p.sfb.shape[1]).mT.copy_(p.sfb)
    check(p._replace(b=b, d=d, sfb=sfb), config_of(k=256))


@settings(max_examples=up_to(20, 5))
@given(data=st.data())
def test_any_layout(data: st.DataObject) -> None:
    tile = data.draw(st.sampled_from(TILES))
    size = st.one_of(st.integers(0, 5), st.integers(60, 70), st.integers(120, 135), st.integers(0, 260))
    sizes = data.draw(st.lists(size, min_size=1, max_size=6))
    p = sim.random_problem(sizes, 256, 128, data.draw(st.integers(0, 9)), behind=data.draw(size) + 1)
    check(p, config_of(tile, 128))


# Grouped rows whose A has a scale for each 64 columns, in the simulator: what tests of grouped rows compare, whole.


BY_64 = Output(work=works.IDS, sfa=PER_64)
TILES_BY_64 = [(tile.block_m, tile.block_n) for tile in tiles_for(BY_64)]
RAGGED_BY_64 = (*[2] * 70, *[-1] * 5, *[0] * 3, *[1] * 129, 3, *[-1] * 200, *[0] * 64, *[2] * 2)


def check_by_64(tile: tuple[int, int], n: int, k: int, seed: int, schedule: str | None = None) -> None:
    """Check a product whose A has two different scales in each k-block."""
    RowsTrial(tile_config(*tile, BY_64, k=k), RAGGED_BY_64, seed, schedule, n=n, k=k, zero_padding=False).run()


@pytest.mark.parametrize("tile", [*TILES_BY_64, (128, 64)], ids=str)
@pytest.mark.parametrize("k", [384, 512, 64, 192])
def test_every_tile_and_any_depth(tile: tuple[int, int], k: int) -> None:
    check_by_64(tile, tile[1] + 8, k, 1)


@pytest.mark.parametrize("schedule", ["slow_producer", "slow_warps", "slow_math", "slow_warpgroup", "late_loads"])
@pytest.mark.parametrize("tile", [(64, 128), (128, 128), (128, 256)], ids=str)
def test_biased_schedules_by_64(tile: tuple[int, int], schedule: str) -> None:
    check_by_64(tile, 136, 640, 3, schedule)


def test_scales_that_are_alike_give_the_product_by_128() -> None:
    """The order of sums differs, but the sums are small whole numbers, which FP32 holds exactly."""
    generator = torch.Generator().manual_seed(1)
    config = tile_config(128, 128, BY_64, k=256)
    p = sim_by_64.random_problem(config, RAGGED_BY_64, 136, 256, 3, zero_padding=False)
    assert isinstance(p, Problem)
    for x in (p.a, p.b):
        x.copy_(torch.randint(-4, 5, x.shape, generator=generator).float())
    p.sfb.fill_(0.5)
    p.sfa.fill_(2)
    plain = tile_config(128, 128, Output(work=works.IDS), k=256)
    by_128 = run_simulated(plain, p._replace(sfa=p.sfa[:, ::2].contiguous(), of_a=PER_ROW))
    assert torch.equal(by_128.d, run_simulated(config, p).checked().d)
