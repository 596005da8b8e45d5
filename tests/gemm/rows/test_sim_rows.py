"""The fp8_gemm kernel's own source in the simulator where rows are grouped.

In every problem here D is full of canaries, and rows of A without a group are NaN, values and scales. After a
run all of D is compared: products, zeros in padding that must be zero, canaries everywhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import run_simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import one_in, up_to

from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW
from deep_gemm.gemm.choose.tiles import ROWS_PER_ROW as TILES_PER_ROW
from deep_gemm.gemm.choose.tiles import tiles_for
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.problem import Problem
from lab.sim import rows as sim
from lab.sim.library import SCHEDULES
from lab.sim.product import Outcome
from lab.sim.rows import RowsTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

KINDS = [works.IDS, works.ENDS, works.COUNTS]
SIZES = [3, 0, 70, 128, 0, 129, 1, 64, 200, 5]
N, K = 72, 272


def config_for(kind: works.Work, block_m: int = 128, block_n: int = 64, k: int = K, **output: Any) -> GemmConfig:
    return tile_config(block_m, block_n, Output(work=kind, **output), k=k)


def ids_of_sizes(sizes: list[int], padding: int = 0) -> list[int]:
    """Return the ids of groups of these sizes, each padded to a multiple of `padding` rows."""
    ids: list[int] = []
    for group, size in enumerate(sizes):
        ids += [group] * size + [-1] * (-size % padding if padding else 0)
    return ids


def ends_of_sizes(sizes: list[int], alignment: int) -> list[int]:
    ends, end = [], 0
    for size in sizes:
        if size:
            end = -(-end // alignment) * alignment + size
        ends.append(end)
    return ends


def layout_of(kind: works.Work, sizes: list[int]) -> list[int]:
    if kind == works.ENDS:
        return ends_of_sizes(sizes, 128)
    return ids_of_sizes(sizes) if kind == works.IDS else sizes


def check(config: GemmConfig, problem: Problem, seed: int = 1, schedule: str | None = None, **how: Any) -> Outcome:
    return run_simulated(config, problem, seed=seed, schedule=schedule, **how).checked()


def check_layout(config: GemmConfig, layout: list[int], **how: Any) -> Outcome:
    return RowsTrial(config, tuple(layout), n=N, k=K, **{"seed": 1, **how}).passed()


# ---- every tile, output and schedule


@pytest.mark.parametrize(
    ("kind", "tile"),
    [(of, (tile.block_m, tile.block_n)) for of in KINDS for tile in tiles_for(Output(work=of)) if not tile.is_decode],
    ids=str,
)
def test_every_tile(kind: works.Work, tile: tuple[int, int]) -> None:
    config = config_for(kind, *tile)
    problem = sim.random_problem(config, layout_of(kind, [*SIZES, 2 * tile[0] + 1]), tile[1] + 8, K)
    check(config, problem)


@pytest.mark.parametrize("schedule", [None, "slow_warps", "slow_warpgroup", "late_loads", "late_stores"])
@pytest.mark.parametrize("fp32", [False, True])
def test_tall_tiles_that_end_at_any_height(fp32: bool, schedule: str | None) -> None:
    counts = [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 321, 449, 513]
    config = config_for(works.COUNTS, 256, 64, is_fp32=fp32)
    check(config, sim.random_problem(config, counts, 72, 272, rows=516), 1, schedule)


@pytest.mark.parametrize(
    ("block_n", "num_sms", "fp32", "schedule"),
    [
        (256, (4,), False, None),
        (64, (2, 3, 4, 5, 7), False, None),
        (64, (2, 3, 4, 5, 7), False, "slow_warpgroup"),
        (64, (2, 3, 4, 5, 7), True, "late_stores"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_tiles_are_cut_in_halves_where_they_are_few(
    kind: works.Work, block_n: int, num_sms: tuple[int, ...], fp32: bool, schedule: str | None
) -> None:
    """Test the usual 128x256 tiles once, else narrow tiles of two units, which take a fourth of the time."""
    config = config_for(kind, 128, block_n, is_fp32=fp32)
    if block_n == 64:
        config = replace(config, unit_n=32, panel_columns=32)
    assert config.cuts_last_tiles
    one_tile, six, forty = ([3], block_n), ([200, 0, 70], block_n + 8), ([1] * 40, block_n // 2 + 8)
    # A kernel that reads ids finds out too late that its only tile is the last tile, so it does not cut this tile.
    cut_by = ((one_tile, () if kind == works.IDS else (2, 3, 4, 5, 7)), (six, (4, 5)), (forty, (3,)))
    for (sizes, n), cut_by_sms in cut_by:
        problem = sim.random_problem(config, layout_of(kind, sizes), n, K)
        whole = run_simulated(config, problem, num_sms=1).checked()
        for sms in one_in(3, num_sms):
            outcome = check(config, problem, sms, schedule, num_sms=sms)
            assert torch.equal(outcome.d, whole.d)
            assert outcome.result.stores == whole.result.stores
            has_loaded_twice = outcome.result.loads > whole.result.loads  # both halves load A's rows
            assert has_loaded_twice == (sms in cut_by_sms)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("tile", TILES_PER_ROW, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def test_b_with_a_scale_for_each_row(tile: object, fp32: bool, kind: works.Work) -> None:
    block_m, block_n = tile.block_m, tile.block_n  # type: ignore[attr-defined]
    config = config_for(kind, block_m, block_n, is_fp32=fp32, sfb=PER_ROW)
    check(config, sim.random_problem(config, layout_of(kind, SIZES), block_n + 8, K))


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp32_output(kind: works.Work) -> None:
    check_layout(config_for(kind, is_fp32=True), layout_of(kind, SIZES))


@pytest.mark.parametrize("k", [16, 128, 144, 4224])
def test_any_depth(k: int) -> None:
    config = config_for(works.IDS, k=k)
    check(config, sim.random_problem(config, ids_of_sizes([5, 130, 64]), 136, k))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", [each for each in SCHEDULES if each not in ("even", "prompt_loads")])
def test_biased_schedules(kind: works.Work, schedule: str) -> None:
    config = config_for(kind)
    for seed in one_in(2, (1, 2)):
        problem = sim.random_problem(config, layout_of(kind, [3, 0, 70, 129, 1]), 136, 400, seed)
        check(config, problem, seed, schedule)


# ---- problems that users met


@pytest.mark.parametrize("max_m", [8, 16, 32, 96])
def test_masked_with_fewer_rows_than_a_tile(max_m: int) -> None:
    for block_m, block_n in one_in(2, ((64, 64), (128, 64), (256, 64), (256, 160), (128, 192))):
        check_layout(config_for(works.COUNTS, block_m, block_n), [max_m, 0, 1, max_m - 1, max_m], rows=max_m)


def test_masked_with_skewed_counts_and_an_expectation_that_is_wrong() -> None:
    counts = [4001, 1425, 0, 0, 0, 0, 0, 571, 503, 0, 26, 12, 1232, 0, 0, 224]
    scaled = [-(-count // 16) for count in counts]
    check_layout(config_for(works.COUNTS), scaled, rows=256)


@pytest.mark.parametrize("place", ["end", "start", "between"])
def test_thousands_of_rows_without_a_group_cost_no_loads_and_the_stores_of_padding(place: str) -> None:
    config, sizes, skipped = config_for(works.IDS), [70, 129, 3], [-1] * 3000
    plain = check_layout(config, ids_of_sizes(sizes))
    ids = ids_of_sizes(sizes)
    at = {"end": len(ids), "start": 0, "between": 70}[place]
    layout = [*ids[:at], *skipped, *ids[at:]]
    with_skipped = check_layout(config, layout)
    blocks = [layout[row : row + 128] for row in range(0, len(layout), 128)]
    padding = sum(block.count(-1) for block in blocks if max(block) >= 0)
    assert with_skipped.result.loads == plain.result.loads
    assert with_skipped.result.stores == plain.result.stores + padding


@pytest.mark.parametrize("sizes", [[1, 1, 384, 24], [0, 0, 7], [5, 0, 0], [127, 129, 255, 1]])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_are_no_multiples_of_anything(kind: works.Work, sizes: list[int]) -> None:
    for block_m in (64, 128):
        check_layout(config_for(kind, block_m), layout_of(kind, sizes))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_at_all(kind: works.Work) -> None:
    config = config_for(kind)
    layout = [-1] * 300 if kind == works.IDS else [0, 0, 0]
    outcome = check_layout(config, layout, **({"num_groups": 2} if kind == works.IDS else {"rows": 300}))
    assert (outcome.d == sim.CANARY).all()
    assert outcome.result.loads == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_gives_the_same_bits(kind: works.Work) -> None:
    config = config_for(kind)
    problem = sim.random_problem(config, layout_of(kind, SIZES), N, K)
    first = check(config, problem, seed=1)
    for seed, schedule in ((2, "slow_cta"), (3, "slow_warps")):
        assert torch.equal(check(config, problem, seed, schedule).d, first.d)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_share_one_weight_by_a_stride_of_0(kind: works.Work, by_row: bool) -> None:
    config = config_for(kind, is_fp32=by_row, sfb=PER_ROW if by_row else PER_BLOCK)
    problem = sim.random_problem(config, layout_of(kind, [70, 0, 130, 3]), N, K)
    shared = {name: getattr(problem, name)[:1].expand(getattr(problem, name).shape) for name in ("b", "sfb")}
    outcome = check(config, problem._replace(**shared))
    copied = {name: x.contiguous() for name, x in shared.items()}
    assert torch.equal(outcome.d, check(config, problem._replace(**copied)).d)


# ---- layouts


def test_padding_that_callers_add_becomes_zeros_unless_told_otherwise() -> None:
    config = config_for(works.IDS)
    layout = [*ids_of_sizes([70, 0, 128, 5], 128), *[-1] * 300]
    padded = check_layout(config, layout).d
    assert (padded[70:128] == 0).all()
    assert (padded[384:] == sim.CANARY).all()
    untouched = check_layout(config, layout, zero_padding=False).d
    assert (untouched[70:128] == sim.CANARY).all()


@pytest.mark.parametrize("alignment", [1, 16, 96, 128])
def test_ends_with_any_alignment(alignment: int) -> None:
    config = config_for(works.ENDS)
    ends = ends_of_sizes([3, 0, 70, 128, 1, 200], alignment)
    for zero_padding in (True, False):
        check_layout(config, ends, rows=ends[-1] + 150, alignment=alignment, zero_padding=zero_padding)


def test_runs_in_any_order_and_several_of_one_group() -> None:
    ids = [*[2] * 70, *[0] * 3, *[-1] * 5, *[2] * 65, *[1] * 130, 0, 2, 0, 1, -1, 1]
    for block_m in (64, 128):
        check_layout(config_for(works.IDS, block_m), ids)


def test_a_group_for_each_row() -> None:
    check_layout(config_for(works.IDS, 64), [row % 3 for row in range(40)])


def test_operands_with_pitches_of_their_own() -> None:
    for kind in KINDS:
        config = config_for(kind)
        p = sim.random_problem(config, layout_of(kind, [5, 70, 0, 129]), N, K)
        wide_a = torch.zeros(*p.a.shape[:-1], K + 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
        wide_b = torch.zeros(len(p.b) * 2, N, K + 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
        a, b = wide_a[..., :K], wide_b[::2, :, :K]
        a.view(torch.uint8).copy_(p.a.view(torch.uint8))
        b.view(torch.uint8).copy_(p.b.view(torch.uint8))
        sfb = torch.empty(len(p.b), p.sfb.shape[2], p.sfb.shape[1]).mT.copy_(p.sfb)
        check(config, p._replace(a=a, b=b, sfb=sfb))


def test_numbers_that_no_layout_may_hold_lead_nowhere() -> None:
    """The host cannot check a layout on a GPU: wrong rows are skipped or cut off, and no other memory is touched."""
    for kind, good, bad in (
        (works.IDS, [*[0] * 70, *[-1] * 70, *[1] * 70], [*[0] * 70, *[7, -9, 1 << 30, 3, -2] * 14, *[1] * 70]),
        (works.ENDS, [70, 200, 300], [70, 200, 1 << 30]),
        (works.COUNTS, [70, 0, 300], [70, -5, 1 << 30]),
    ):
        config = config_for(kind)
        p = sim.random_problem(config, good, N, K, rows=300, num_groups=2 if kind == works.IDS else None)
        wrong = torch.tensor(bad, dtype=torch.int32)
        right = check(config, p).d
        assert torch.equal(run_simulated(config, p, layout=wrong).d, right)


@settings(max_examples=up_to(40, 10))
@given(data=st.data())
def test_any_layout(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    block_m = data.draw(st.sampled_from([64, 128]))
    config = config_for(kind, block_m)
    size = st.one_of(st.integers(0, 5), st.integers(60, 70), st.integers(120, 135), st.integers(0, 260))
    zero_padding = data.draw(st.booleans())
    if kind == works.COUNTS:
        counts = data.draw(st.lists(size, min_size=1, max_size=6))
        check_layout(config, counts, rows=max(1, *counts) + data.draw(st.integers(0, 70)))
    elif kind == works.ENDS:
        alignment = data.draw(st.sampled_from([1, 8, 100, 128]))
        ends = ends_of_sizes(data.draw(st.lists(size, min_size=1, max_size=6)), alignment)
        rows = max(ends[-1], 1) + data.draw(st.integers(0, 200))
        check_layout(config, ends, rows=rows, alignment=alignment, zero_padding=zero_padding)
    else:
        runs = data.draw(st.lists(st.tuples(st.integers(-1, 3), size), min_size=1, max_size=8))
        ids = [group for group, rows in runs for _ in range(rows)] or [-1]
        check_layout(config, ids, num_groups=4, zero_padding=zero_padding)
