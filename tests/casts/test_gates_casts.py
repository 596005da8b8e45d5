"""Every kernel that casts is compiled for each configuration that can be chosen, and is what was planned."""

from __future__ import annotations

import pytest
from helpers import assert_loads_nothing_early
from thorough import configurations

from deep_gemm.casts import cast_rows, cast_tiles
from deep_gemm.casts.cast_rows import MAX_GROUPS, CastConfig, Groups, reachable_cast
from deep_gemm.casts.cast_tiles import TileCastConfig, reachable_tile_casts
from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from lab.gates import violations

MOST_DIVISIONS = 8
"""Reciprocals in a cast of tiles: one for a scale, of which a thread computes one for its row and one for its column,
for ordinary tiles and for any. None is of an element, of which a thread has up to 64."""
WAYS = 2
"""In which a unit of rows is cast: as an ordinary one and as any."""


def planned_loads(config: CastConfig) -> int:
    """Loads from global memory in the code of `cast_rows`."""
    of_row = 4 if config.vector == 1 else 1
    if config.activates:
        of_row = 2 * of_row + 1  # gate, up, and the row's weight
    if config.to_routes:
        of_row += 1 + 2 * WAYS  # first routes, and further ones for values and for scales
    groups_of_thread = MAX_GROUPS // config.num_threads
    of_sizes = {Groups.NONE: 0, Groups.UNTIL: 1, Groups.COUNTS: groups_of_thread, Groups.ENDS: 2 * groups_of_thread}
    return config.rows * of_row + of_sizes[config.groups]


def planned_mufu(config: CastConfig) -> int:
    """Reciprocals and powers of two: a scale's, two for an activated element, one where groups divide an integer."""
    elements = config.rows * max(config.vector, 4) if config.activates else 0
    kinds = 2  # with a limit and weights, and without
    of_groups = 0 if config.groups in (Groups.NONE, Groups.UNTIL) else MAX_GROUPS // config.num_threads
    return WAYS + 2 * kinds * elements + of_groups


@pytest.mark.parametrize("configs", [reachable_cast(), reachable_tile_casts()], ids=["cast_rows", "cast_tiles"])
def test_all_configurations_are_legal_and_have_names_of_their_own(configs: list[CastConfig | TileCastConfig]) -> None:
    assert len({config.name for config in configs}) == len(configs)
    assert [config for config in configs if config.why_illegal()] == []


@pytest.mark.parametrize("config", configurations(reachable_cast()), ids=lambda config: config.name)
def test_a_reachable_cast_of_rows_is_what_was_planned(config: CastConfig) -> None:
    kernel = compile_cubin(cast_rows.KERNEL.source, cast_rows.KERNEL.headers(config), name=cast_rows.KERNEL.name)
    assert_loads_nothing_early(kernel)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, cast_rows.KERNEL.code_plan(config)) == []
    assert found.counts["LDG"] == planned_loads(config), "each element is loaded once"
    assert found.counts["MUFU"] == planned_mufu(config), "no element is divided"


@pytest.mark.parametrize("config", configurations(reachable_tile_casts()), ids=lambda config: config.name)
def test_a_reachable_cast_of_tiles_is_what_was_planned(config: TileCastConfig) -> None:
    kernel = compile_cubin(cast_tiles.KERNEL.source, cast_tiles.KERNEL.headers(config), name=cast_tiles.KERNEL.name)
    assert_loads_nothing_early(kernel)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, cast_tiles.KERNEL.code_plan(config)) == []
    assert found.counts["LDG"] == {8: 8, 4: 16, 1: 64}[config.vector], "each element is loaded once"
    assert found.counts["MUFU"] <= MOST_DIVISIONS
