"""Every kernel that casts is compiled for each configuration that can be chosen, and is what was planned."""

from __future__ import annotations

import pytest
from thorough import configurations

from deep_gemm.choose.config_cast import CastConfig, TileCastConfig, reachable_cast, reachable_tile_casts
from deep_gemm.jit.compiler import compile_cubin
from deep_gemm.jit.report import report
from deep_gemm.kernels import cast_rows, cast_tiles
from deep_gemm.tools.gates import violations

MOST_DIVISIONS = 8
"""Reciprocals in a kernel: two for a scale, of which a thread computes one for its row and one for its column. None is
of an element, of which a thread has up to 64."""


@pytest.mark.parametrize("configs", [reachable_cast(), reachable_tile_casts()], ids=["cast_rows", "cast_tiles"])
def test_all_configurations_are_legal_and_have_names_of_their_own(configs: list[CastConfig | TileCastConfig]) -> None:
    assert len({config.name for config in configs}) == len(configs)
    assert [config for config in configs if config.why_illegal()] == []


@pytest.mark.parametrize("config", configurations(reachable_cast()), ids=lambda config: config.name)
def test_a_reachable_cast_of_rows_is_what_was_planned(config: CastConfig) -> None:
    kernel = compile_cubin(cast_rows.SOURCE, cast_rows.headers(config), name=cast_rows.NAME)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, cast_rows.code_plan(config)) == []
    assert found.counts["LDG"] >= config.rows * (4 if config.vector == 1 else 1) * (2 if config.activates else 1)
    assert found.counts["MUFU"] <= MOST_DIVISIONS


@pytest.mark.parametrize("config", configurations(reachable_tile_casts()), ids=lambda config: config.name)
def test_a_reachable_cast_of_tiles_is_what_was_planned(config: TileCastConfig) -> None:
    kernel = compile_cubin(cast_tiles.SOURCE, cast_tiles.headers(config), name=cast_tiles.NAME)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, cast_tiles.code_plan(config)) == []
    assert found.counts["LDG"] == {8: 8, 4: 16, 1: 64}[config.vector], "each element is loaded once"
    assert found.counts["MUFU"] <= MOST_DIVISIONS
