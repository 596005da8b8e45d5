"""Tiles: each tile has a different name, which the tile's configurations share, and a search by name finds the tile."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd

import pytest

from deep_gemm.core.check.recipes import E2M1, MX, PER_64, PER_ROW, WHOLE, Scales
from deep_gemm.core.gpu import REGISTERS_PER_SM, SHARED_BYTES_LIMIT
from deep_gemm.gemm.choose.tiles import OUTPUTS_BY_NAME, TILES, TILES_PER_ROW, Tile, tiles_for
from deep_gemm.gemm.config.of_tile import MATH_WARPGROUPS, tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.kinds import epilogues, works
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


# Configurations that the kernel can be compiled for, and configurations that tiles choose.


LEGAL = GemmConfig(128, 128, num_stages=4)
PANEL = "panel_columns"
FP4: dict[str, object] = {"b": E2M1, "sfb": MX}
OF_SILU = {"work": works.ENDS, "epilogue": epilogues.SILU}
OF_IDS, OF_DEPTHS, OF_HEADS = ({"work": work} for work in (works.IDS, works.DEPTHS, works.HEADS))
OUTPUTS = [Output(), Output(with_c=True), Output(is_fp32=True), Output(is_fp32=True, adds_to_d=True)]

VIOLATIONS: dict[str, list[dict[str, object]]] = {
    "needs 1, 2 or 3 math warpgroups": [{"num_math_warpgroups": 0}, {"num_math_warpgroups": 4}],
    "needs 64 rows for each math warpgroup": [{"block_m": 64}, {"block_m": 0}, {"block_m": 200}],
    "needs a TMA box of at most 256 rows of A": [{"block_m": 384}],
    "needs a TMA box of at most 256 rows of B": [{"block_n": 512, "unit_n": 128}],
    "needs units of 16 to 256 columns, a multiple of 16": [{"block_n": 0}, {"block_n": 120}, {"unit_n": 8}],
    "needs whole units along n": [{"unit_n": 48}],
    "needs whole scale chunks": [{"block_n": 192, "unit_n": 96, "panel_columns": 32}],
    "needs at least 2 stages": [{"num_stages": 1}],
    "needs 1 or 2 CTAs that share an operand": [{"cluster_m": 4}, {"cluster_m": 2, "cluster_n": 2}, {"cluster_n": 0}],
    "needs panel rows of 32, 64, 128 or 256 bytes": [{PANEL: 0}, {PANEL: 256}, {PANEL: 128, "is_fp32": True}],
    "needs panel rows of 256 bytes only for an FP32 D whose rows are not grouped": [
        {PANEL: 128},
        {"is_fp32": True, "work": works.COUNTS},
    ],
    "needs panels that fill a tile": [{"block_n": 96}, {"panels_per_store": 3}, {"panels_per_store": 0}],
    "needs at least 1 store buffer": [{"num_store_buffers": 0}],
    "needs a raster of at least 1 tile": [{"raster_group": 0}],
    "needs an FP32 D if the product is added to D": [{"adds_to_d": True}],
    "needs only one way to add C": [{"is_fp32": True, "panel_columns": 32, "with_c": True, "adds_to_d": True}],
    "needs 1 to 8 CTAs that split k": [{"cluster_k": 9}],
    "needs a split of k or a shared operand, not both": [{"cluster_k": 2, "cluster_m": 2}],
    "needs no addition to D by TMA if k is split": [{"cluster_k": 2, "is_fp32": True, PANEL: 32, "adds_to_d": True}],
    "needs panels that fill half a tile": [
        {"work": works.COUNTS, "block_m": 256, "block_n": 96, PANEL: 32, "panels_per_store": 2, "num_stages": 3}
    ],
    "needs scales of all columns on both sides or on none": [{"sfa": WHOLE}, {"sfb": WHOLE}],
    "needs no split of k for heads": [{"work": works.HEADS, "cluster_k": 2}],
    "needs no clusters if rows are grouped": [{"work": works.IDS, "cluster_n": 2}],
    "needs only A shared if groups are along k": [{**OF_DEPTHS, "cluster_m": 2}, {**OF_DEPTHS, "cluster_k": 2}],
    "needs no addition to D if rows are grouped": [{**OF_IDS, "adds_to_d": True, "is_fp32": True, PANEL: 32}],
    "needs scales of B for each row if groups are along k": [{"work": works.DEPTHS}],
    "needs code for a tail, because each group may have one": [{**OF_DEPTHS, "sfb": PER_ROW, "run_k_blocks": 2}],
    "needs a plain BF16 product without a split of k if columns of D are skipped": [
        {"epilogue": epilogues.TO_HEADS, "with_c": True}
    ],
    "needs a BF16 D without C or a split of k, and the work and operands that its epilogue supports": [
        {"epilogue": epilogues.SILU},
        {"work": works.COUNTS, "epilogue": epilogues.TO_ADDRESSES},
    ],
    "needs one or two units of 128 columns if rows are activated": [{**OF_SILU, "unit_n": 64}],
    "needs an FP32 D without C or a split of k, and units of whole blocks, if blocks of columns are added up": [
        {"epilogue": epilogues.BLOCK_SUMS},
    ],
    "needs tiles of 256 columns if gate is apart from up": [
        {**OF_SILU, "epilogue": epilogues.SILU_OF_HALVES, "unit_n": 128}
    ],
    "needs a scale of A for each 128, 64 or 32 columns, or for all": [{"sfa": Scales(2, 128)}],
    "needs no heads, depths or lone activation if scales are below 128 columns": [{**OF_HEADS, "sfa": PER_64}],
    "needs one TMA box of A's finer scales": [{**OF_IDS, "sfa": PER_64, "block_m": 256, "num_stages": 3}],
    "needs 128 columns if scales of B cover smaller blocks": [{"sfb": Scales(32, 32), "block_n": 64}],
    "needs one k-block at a time if its parts may fold": [{"sfb": Scales(64, 64), "run_k_blocks": 2}],
    "needs 1 or 2 math warpgroups, and no shared operand, if scales of B cover smaller blocks": [
        {"sfb": Scales(32, 32), "cluster_m": 2}
    ],
    "needs 1 or 2 math warpgroups if B is converted": [{**FP4, "block_m": 192, "num_math_warpgroups": 3}],
    "needs whole tiles if B is converted": [{**FP4, "work": works.IDS, "unit_n": 64}],
    "needs no shared operand if B is converted: tiles may differ in passes": [{**FP4, "cluster_m": 2}],
    "needs at most 128 rows for FP4 unless D is BF16": [{**FP4, "block_m": 256, "with_c": True, "num_stages": 3}],
    "needs 64 or 128 columns if B is converted": [
        {**FP4, "block_n": 112, "panel_columns": 16},
        {**FP4, "block_n": 160, "unit_n": 32, "panel_columns": 32},
    ],
    "needs runs of one k-block, and one set of sums, if units may be skipped": [
        {**FP4, "work": works.COUNTS, "block_m": 256, "num_partials": 2, "num_stages": 3}
    ],
    "needs 1 or 2 sets of partial sums": [{"num_partials": 3}],
    "needs runs whose length divides 32 k-blocks": [{"run_k_blocks": 3}],
    "needs runs of several k-blocks if there is a tail": [{"has_tail": True}],
    "needs 256 accumulators in 232 registers": [{"block_n": 256, "num_stages": 3}],
    "needs 300032 of 232448 bytes shared": [{"num_stages": 8}],
}


@pytest.mark.parametrize(
    ("reason", "change"), [(reason, change) for reason, changes in VIOLATIONS.items() for change in changes], ids=str
)
def test_each_rule_says_so_where_it_alone_is_violated(reason: str, change: dict[str, object]) -> None:
    assert LEGAL.why_illegal() is None
    config = replace(LEGAL, **change)  # type: ignore[arg-type]
    assert config.why_illegal() == reason


def test_every_rule_is_violated_above() -> None:
    def without_numbers(rule: str) -> str:
        return re.sub(r"\d+", "", rule)

    told = {*map(without_numbers, VIOLATIONS)}
    assert {without_numbers(f"needs {rule}") for _, rule in LEGAL.rules()} == told


def test_an_illegal_configuration_is_never_compiled() -> None:
    with pytest.raises(ValueError, match="config: needs at least 2 stages, got GemmConfig"):
        FP8_GEMM.build(replace(LEGAL, num_stages=1))


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("block_m", MATH_WARPGROUPS)
def test_a_tile_gets_a_legal_configuration_or_one_that_says_why_not(block_m: int, output: Output) -> None:
    for block_n in range(16, 257, 16):
        for cluster_m, cluster_n in ((1, 1), (1, 2), (2, 1)):
            config = tile_config(block_m, block_n, output, cluster_m, cluster_n)
            reason = config.why_illegal()
            if block_n <= 128 or block_m <= 128:
                assert reason is None
            else:  # the accumulators or the ring of this tile may be too large
                assert reason is None or "accumulators" in reason or "bytes shared" in reason
            assert (config.block_m, config.block_n) == (block_m, block_n)
            assert (config.cluster_m, config.cluster_n) == (cluster_m, cluster_n)
            assert Output(is_fp32=config.is_fp32, with_c=config.with_c, adds_to_d=config.adds_to_d) == output


def test_a_configuration_uses_what_an_sm_has_and_no_more() -> None:
    for block_m, block_n in ((64, 16), (64, 256), (128, 112), (192, 128), (256, 128)):
        config = tile_config(block_m, block_n, Output())
        deeper = replace(config, num_stages=config.num_stages + 1)
        assert config.shared_bytes <= SHARED_BYTES_LIMIT
        assert config.num_stages == 16 or deeper.shared_bytes > SHARED_BYTES_LIMIT, "another stage would fit"
        producer, math = config.registers
        assert 128 * producer + 128 * config.num_math_warpgroups * math <= REGISTERS_PER_SM


def test_a_unit_shares_its_scales_of_b_in_whole_chunks() -> None:
    for block_n in range(16, 257, 16):
        config = tile_config(128, block_n, Output())
        unit_n, chunk = config.unit_n or block_n, gcd(block_n, 128)
        assert config.units_along_n * unit_n == block_n
        assert unit_n % chunk == 0 or chunk % unit_n == 0


@pytest.mark.parametrize("block_m", [0, 1, 63, 100, 320, -64])
def test_a_height_that_no_kernel_has_is_refused(block_m: int) -> None:
    with pytest.raises(ValueError, match=rf"block_m: expected one of \[64, 128, 192, 256\], got {block_m}"):
        tile_config(block_m, 128, Output())


@pytest.mark.parametrize("block_n", [0, 8, 100, 272, -16])
def test_a_width_that_no_kernel_has_is_refused(block_n: int) -> None:
    with pytest.raises(ValueError, match=f"block_n: expected a multiple of 16 from 16 to 256, got {block_n}"):
        tile_config(128, block_n, Output())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("256x128 bf16", tile_config(256, 128, Output())),
        ("256x128/n2 bf16+c", tile_config(256, 128, Output(with_c=True), cluster_n=2)),
        ("64x48/m2 fp32", tile_config(64, 48, Output(is_fp32=True), cluster_m=2)),
        ("128x112 fp32+d", tile_config(128, 112, Output(is_fp32=True, adds_to_d=True))),
        (
            "256x128/n2 1d1d fp32 run 1 by depths",
            tile_config(256, 128, Output(is_fp32=True, sfb=PER_ROW, work=works.DEPTHS), cluster_n=2),
        ),
    ],
)
def test_a_configuration_has_a_short_name(name: str, config: GemmConfig) -> None:
    assert config.name == name


@pytest.mark.parametrize(
    ("tile", "tiles_down_m"), [((128, 256), 16), ((64, 128), 16), ((128, 192), 8), ((256, 128), 8), ((128, 256, 2), 8)]
)
def test_tiles_twice_as_wide_as_high_have_a_higher_raster(tile: tuple[int, ...], tiles_down_m: int) -> None:
    block_m, block_n, cluster_m = (*tile, 1)[:3]
    assert tile_config(block_m, block_n, Output(), cluster_m).raster_group == tiles_down_m


def test_grouped_rows_are_loaded_64_at_a_time() -> None:
    counts, depths = Output(work=works.COUNTS), Output(is_fp32=True, sfb=PER_ROW, work=works.DEPTHS)
    assert tile_config(128, 192, counts).box_rows_of_a == 64
    assert tile_config(256, 128, counts).box_rows_of_a == 64
    assert tile_config(192, 128, depths).box_rows_of_a == 192
    assert tile_config(256, 128, depths, cluster_n=2).box_rows_of_a == 128
    assert tile_config(128, 192, Output()).box_rows_of_a == 128
    assert tile_config(256, 128, Output(), cluster_n=2).box_rows_of_a == 128


def test_tiles_whose_halves_are_units_are_cut_where_rows_are_grouped() -> None:
    for groups in (works.IDS, works.ENDS, works.COUNTS):
        assert tile_config(128, 256, Output(work=groups)).cuts_last_tiles
        assert not tile_config(128, 160, Output(work=groups)).cuts_last_tiles
    assert not tile_config(128, 256, Output()).cuts_last_tiles
    assert not tile_config(256, 128, Output(work=works.COUNTS)).cuts_last_tiles


def test_registers_move_to_those_who_need_them() -> None:
    assert tile_config(256, 128, Output()).registers == (40, 232)
    assert tile_config(256, 128, Output(sfb=PER_ROW)).registers == (24, 240)
    assert tile_config(128, 256, Output(work=works.IDS)).registers == (56, 224)
    assert tile_config(128, 96, Output(sfb=PER_ROW, work=works.IDS)).registers == (56, 224)
    assert tile_config(128, 96, Output(sfb=PER_ROW, work=works.ENDS)).registers == (40, 232)
