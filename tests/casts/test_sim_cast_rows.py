"""The cast_rows kernel's own source in the simulator gives the reference's bits, and keeps poison around outputs.

Activated rows may differ by one step of FP8: a GPU approximates exp and the reciprocal, which the simulator rounds
correctly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from thorough import sample, up_to

from deep_gemm.casts.cast_rows import PIECES, CastConfig, Groups, cast_config, reachable_cast
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import FP4, FP8, MXFP4, Target
from deep_gemm.core.check.layout import rows_of_groups
from lab.sim.cast_rows import GATINGS, RowTrial, hard, is_cast

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


def config(dtype: Any = torch.bfloat16, *, is_aligned: bool = True, is_few: bool = False, **kind: Any) -> CastConfig:
    return cast_config(dtype, is_aligned, is_few, **kind)


CONFIGS = reachable_cast()
every_configuration = pytest.mark.parametrize("which", sample(CONFIGS), ids=lambda which: which.name)
every_activation = pytest.mark.parametrize("which", [of for of in CONFIGS if of.activates], ids=lambda of: of.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def ragged(which: CastConfig) -> list[RowTrial]:
    """Return sizes of columns, rows and groups that no number of the configuration divides, and the smallest sizes."""
    step = max(which.vector, which.to.format.per_byte)
    padding, wide, at_once = 16 if which.vector > 1 else 3, 264 + which.vector, which.lanes * max(which.vector, 4)
    sizes: dict[Groups, list[tuple[int, int, dict[str, Any]]]] = {
        Groups.NONE: [
            (2 * which.rows + 3, 5 * 128 + 3 * step, {}),
            (1, step, {"padding": 0, "topk": 1}),
            (2, 128, {}),
            (5, 129 * step, {}),
            *([(3, PIECES * at_once + 3 * step, {}), (2, 2 * at_once, {})] if which.lanes else ()),
        ],
        Groups.COUNTS: [(60, wide, {"sizes": (0, 12, 5, 1, 11)}), (3, step, {"sizes": (1, 0, 1)})],
        Groups.UNTIL: [(60, wide, {"sizes": (0, 5, 5, 17, 50)}), (3, step, {"sizes": (3,)})],
        Groups.ENDS: [
            (60, wide, {"sizes": (0, 5, 5, 17, 33, 50), "alignment": 8}),
            (11, 128, {"sizes": (3, 3, 9)}),
            (1, step, {"sizes": (1,), "alignment": 128}),
        ],
    }
    return [
        RowTrial(which, m, k, seed, rounds_up=which.to.packs, **{"padding": padding, **more})
        for seed, (m, k, more) in enumerate(sizes[which.groups], start=1)
    ]


@every_configuration
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("is_m_major", [False, True])
@pytest.mark.parametrize("data", ["wild", "mixed", "ordinary"])
def test_every_configuration_on_ragged_matrices(which: CastConfig, data: str, is_m_major: bool, up: bool) -> None:
    """In `mixed` data some blocks of a warp are ordinary and others are not, so the warp casts both kinds."""
    for case in ragged(which):
        replace(case, data=data, is_m_major=is_m_major, rounds_up=up or case.rounds_up).run()


@every_activation
@pytest.mark.parametrize("gating", GATINGS, ids=str)
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("data", ["wild", "mixed", "ordinary"])
def test_weights_and_activations(which: CastConfig, data: str, has_weights: bool, gating: Gating) -> None:
    case = ragged(which)[0]
    replace(case, data=data, has_weights=has_weights, gating=gating).run()


# Numbers


@pytest.mark.parametrize("min_amax", [0.0, 1e-4, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("activates", [False, True])
def test_the_largest_magnitude_has_a_floor(min_amax: float, activates: bool) -> None:
    which = config(is_few=True, activates=activates)
    for data in ("wild", "ordinary"):
        RowTrial(which, 7, 512, 2, data=data, min_amax=min_amax).run()


@pytest.mark.parametrize("is_aligned", [False, True])
def test_quotients_beside_where_a_format_rounds_the_other_way(is_aligned: bool) -> None:
    for to in [Target(columns=block, format=format) for format in (FP8, FP4, MXFP4) for block in format.blocks]:
        which = config(torch.float32, is_aligned=is_aligned, to=to)
        m, k = hard(which).shape
        RowTrial(which, m, k, data="hard").run()


@every_dtype
@pytest.mark.parametrize("to_routes", [False, True])
def test_what_is_no_ordinary_number(dtype: torch.dtype, to_routes: bool) -> None:
    """Put each special number in a block of ordinary numbers, once in each lane's place, beside blocks without it."""
    which = config(dtype, to_routes=to_routes)
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for seed, strange in enumerate([torch.nan, -torch.nan, torch.inf, -torch.inf, largest, -largest, least, least / 4]):
        for others in (1.0, 0.0):
            x = torch.full((128, 256), others, dtype=dtype)
            x[torch.arange(128), torch.arange(128)] = strange
            RowTrial(which, 128, 256, seed, matrix=x).run()


# Groups


@pytest.mark.parametrize("activates", [False, True])
@pytest.mark.parametrize("is_few", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(0, 0, 0, 0), (16, 16, 16, 16), (-5, 17, 2**31 - 1, -(2**31)), (1, 0, 0, 16)],
    ids=["none", "full", "out of range", "some"],
)
def test_counts_without_room_in_a_group_reach_nothing_outside(sizes: Any, is_few: bool, activates: bool) -> None:
    which = config(groups=Groups.COUNTS, is_few=is_few, activates=activates)
    for is_m_major in (False, True):
        RowTrial(which, 64, 136, 1, sizes=sizes, is_m_major=is_m_major, data="mixed").run()


@pytest.mark.parametrize("is_few", [False, True])
@pytest.mark.parametrize("alignment", [1, 8, 128])
@pytest.mark.parametrize(
    "sizes",
    [(0, 0, 0), (48,), (3, 3, 48), (10, 30, 200), (-3, 20, 40), (2**31 - 1, 2**31 - 1), (-(2**31), 40), (100, 130)],
    ids=str,
)
def test_ends_reach_nothing_outside(sizes: tuple[int, ...], alignment: int, is_few: bool) -> None:
    which = config(groups=Groups.ENDS, is_few=is_few, activates=True)
    RowTrial(which, 48, 136, 1, sizes=sizes, alignment=alignment, data="ordinary").run()


@pytest.mark.parametrize("sizes", [(30, 5, 40), (48, 0, 48), (9, 8, 7, 6)], ids=str)
@pytest.mark.parametrize("alignment", [1, 8])
def test_ends_out_of_order_reach_nothing_outside(sizes: tuple[int, ...], alignment: int) -> None:
    RowTrial(config(groups=Groups.ENDS, activates=True), 48, 136, 1, sizes=sizes, alignment=alignment).run()


@pytest.mark.parametrize("groups", [Groups.COUNTS, Groups.ENDS])
@pytest.mark.parametrize("number", [7, 8, 9, 255, 256, 1000, 1023, 1024])
def test_many_groups(groups: Groups, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    counts = torch.randint(0, 4, (number,), generator=generator)
    sizes = counts if groups == Groups.COUNTS else counts.cumsum(0)
    m = 3 * number if groups == Groups.COUNTS else max(int(sizes[-1]), 1)
    RowTrial(config(groups=groups, activates=True), m, 8, number, sizes=tuple(sizes.tolist()), data="ordinary").run()


@pytest.mark.parametrize("groups", [Groups.COUNTS, Groups.ENDS])
@pytest.mark.parametrize("num_sms", [1, 2])
@pytest.mark.parametrize("activates", [False, True])
def test_ctas_take_unit_after_unit(groups: Groups, num_sms: int, activates: bool) -> None:
    if groups == Groups.ENDS and not activates:
        return
    sizes = (70, 0, 75, 3) if groups == Groups.COUNTS else (70, 70, 200, 290)
    which = config(torch.float32, groups=groups, is_few=True, activates=activates)
    case = RowTrial(which, 300, 520, 3, sizes=sizes, num_sms=num_sms, data="mixed")
    units = int(is_cast(case).sum()) * 5
    assert units > 2 * num_sms * which.ctas_per_sm * which.teams
    case.run()


def test_the_rows_of_groups_are_the_packages() -> None:
    """Check that trials cast the rows that the package's CPU code casts, for all sizes that a caller may pass."""
    counts = RowTrial(config(groups=Groups.COUNTS), 64, 8, sizes=(0, 16, 3, -7))
    assert is_cast(counts).tolist() == [row in range(16, 32) or row in range(32, 35) for row in range(64)]
    for alignment in (1, 8):
        ends = RowTrial(config(groups=Groups.ENDS, activates=True), 50, 8, sizes=(3, 3, 17, 40), alignment=alignment)
        right = rows_of_groups(torch.tensor(ends.sizes, dtype=torch.int32), 50, alignment)
        assert torch.equal(is_cast(ends), right)


# Routes


@pytest.mark.parametrize("topk", [1, 2, 8, 15, 16, 17, 20, 32, 33, 40, 70])
@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("is_few", [False, True])
def test_any_number_of_routes(topk: int, is_aligned: bool, is_few: bool) -> None:
    """Test also more routes than the 16 or 32 lanes of a team. The first token has no route."""
    which = config(is_aligned=is_aligned, is_few=is_few, to_routes=True)
    RowTrial(which, 11, 136, topk, topk=topk, data="mixed", padding=16 if is_aligned else 3).run()


# Schedules


@pytest.mark.parametrize("seed", range(up_to(4, 2)))
@pytest.mark.parametrize("schedule", [None, "slow_warps", "slow_lanes"])
@pytest.mark.parametrize(
    "which",
    [
        config(torch.float32),
        config(groups=Groups.COUNTS, activates=True),
        config(groups=Groups.ENDS, activates=True, is_aligned=False),
        config(to_routes=True),
    ],
    ids=lambda which: which.name,
)
def test_many_schedules(which: CastConfig, schedule: str | None, seed: int) -> None:
    sizes = {Groups.NONE: (), Groups.COUNTS: (4, 20, 7), Groups.ENDS: (4, 24, 60)}[which.groups]
    RowTrial(which, 60, 264, seed, schedule, data="mixed", sizes=sizes, padding=16).run()
