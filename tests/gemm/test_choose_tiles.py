"""Tiles: every one has a name of its own, that of its configurations, by which it is found again."""

from __future__ import annotations

import pytest

from deep_gemm.gemm.choose.tiles import OUTPUTS_BY_NAME, TILES, TILES_PER_ROW, Tile, tiles_for
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output


@pytest.mark.parametrize("output", OUTPUTS_BY_NAME.values(), ids=lambda output: output.name)
def test_tiles_and_outputs_have_names_of_their_own(output: Output) -> None:
    assert len({tile.name for tile in tiles_for(output)}) == len(tiles_for(output))
    assert OUTPUTS_BY_NAME[output.name] == output


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_names_are_those_of_configurations(tile: Tile) -> None:
    for name in ("fp32", "bf16", "bf16+c"):
        assert tile.config(OUTPUTS_BY_NAME[name], 512).name.startswith(f"{tile.name} {name}")


def test_names_of_tiles_with_scales_by_row_are_those_of_configurations() -> None:
    for name in ("1d1d bf16", "1d1d fp32", "1d1d fp32+c"):
        for tile in TILES_PER_ROW:
            assert tile.config(OUTPUTS_BY_NAME[name], 512).name.startswith(f"{tile.name} {name}")


def test_names_of_outputs_tell_their_groups() -> None:
    assert Output(is_fp32=True, with_c=True, work=works.DEPTHS).name == "fp32+c by depths"
