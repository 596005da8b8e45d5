"""The configuration of `fp8_gemm` for a tile: the fastest that fits in registers and shared memory."""

from __future__ import annotations

from dataclasses import fields, replace
from math import gcd
from typing import Any, TypeVar

from ...core.check.layout import ceil_div
from ...core.check.recipes import E2M1, PER_64, PER_BLOCK, PER_ROW
from ...core.gpu import SHARED_BYTES_LIMIT, WGMMA_ROWS
from ..kinds.output import Output
from .tall import BLOCK_K, RASTER_GROUP, GemmConfig

C = TypeVar("C", bound=GemmConfig)
MAX_ACCUMULATORS = {1: 192, 2: 192, 3: 128}
"""Registers of a math thread for sums, totals and partial sums, by the number of math warpgroups."""
MAX_ACCUMULATORS_BESIDE_CONVERTING = {64: 192, 128: 128, 256: 192}
"""`MAX_ACCUMULATORS` if other threads convert B, by the rows of a tile."""
MATH_WARPGROUPS = {64: 1, 128: 2, 192: 3, 256: 2}
"""Warpgroups that multiply, by the rows of a tile."""
MAX_STAGES = 16


def tile_config(
    block_m: int, block_n: int, output: Output, cluster_m: int = 1, cluster_n: int = 1, cluster_k: int = 1, k: int = 0
) -> GemmConfig:
    """Configure the kernel for a tile: store buffers for the whole tile if they fit, and all stages that fit then.

    If the whole tile is buffered, its stores overlap the next tile's products: on an H200 that saved 3-10% at k = 2048
    and cost nothing at k = 16384, even if only 3 stages were left instead of 4.
    """
    of_tile = fields_of(block_m, block_n, output, cluster_m, cluster_n, cluster_k)
    num_math_warpgroups = of_tile["num_math_warpgroups"]
    rows_per_warpgroup = block_m // num_math_warpgroups
    # A thread's registers must hold all units' totals, and the partial sums of one unit, or of two if they fit.
    units_along_m = rows_per_warpgroup // WGMMA_ROWS
    room = MAX_ACCUMULATORS[num_math_warpgroups]
    if output.b == E2M1:
        room = MAX_ACCUMULATORS_BESIDE_CONVERTING.get(block_m, 0)
    unit_n = block_n if (units_along_m + 1) * block_n // 2 <= room else gcd(block_n, 128)
    keeps_row_scales = output.sfb == PER_ROW and units_along_m > 1 and unit_n == block_n
    kept = unit_n // 4 if keeps_row_scales else 0
    num_partials = 2 if (units_along_m * block_n + 2 * unit_n) // 2 + kept <= room else 1
    if keeps_row_scales:
        run_k_blocks, has_tail = 1, False  # longer runs gain nothing here, and take registers
    else:
        run_k_blocks, has_tail = _runs(ceil_div(k, BLOCK_K), block_m * block_n, num_partials, output)
    panel_columns = gcd(unit_n, 64)
    panels = units_along_m * block_n // panel_columns
    # A kernel that converts B gains 4% from a fourth stage at 256 x 128, if a buffered tile of D leaves memory for it.
    min_stages = 3 if (block_m + block_n) * BLOCK_K >= 44 * 1024 and output.b != E2M1 else 4
    config = GemmConfig(
        num_stages=min_stages,
        unit_n=unit_n,
        num_partials=num_partials,
        run_k_blocks=run_k_blocks,
        has_tail=has_tail,
        panel_columns=panel_columns,
        **of_tile,
    )
    return deepest(with_buffers(config, panels))


def fields_of(
    block_m: int, block_n: int, output: Output, cluster_m: int, cluster_n: int, cluster_k: int
) -> dict[str, Any]:
    """Check the sizes of a tile, and return the fields of a configuration that follow from them and from an output.

    The tiles in flight on 132 SMs read least from DRAM if together they are about as high as wide: the raster moves on
    along n after 8 tiles if a tile is higher than wide, after 16 if it is twice as wide as high. On an H200 that saved
    2% with 128x256 at k = 512 and 1536, 0.5% at 16384, and 1% with 64x128.
    """
    if block_m not in MATH_WARPGROUPS:
        raise ValueError(f"block_m: expected one of {list(MATH_WARPGROUPS)}, got {block_m}")
    if block_n not in range(16, 257, 16):
        raise ValueError(f"block_n: expected a multiple of 16 from 16 to 256, got {block_n}")
    adds_to_d = output.adds_to_d and cluster_k == 1
    return {
        **{each.name: getattr(output, each.name) for each in fields(Output)},  # vars() would slow later attribute reads
        **{"block_m": block_m, "block_n": block_n, "num_math_warpgroups": MATH_WARPGROUPS[block_m]},
        **{"cluster_m": cluster_m, "cluster_n": cluster_n, "cluster_k": cluster_k},
        "raster_group": output.work.band or RASTER_GROUP * (2 if block_n >= 2 * block_m * cluster_m else 1),
        "with_c": output.with_c or (output.adds_to_d and not adds_to_d),  # if k is split, C is read, also if it is D
        "adds_to_d": adds_to_d,
    }


def with_buffers(config: C, panels: int) -> C:
    """Add store buffers to a configuration: for all panels of a warpgroup, or for the most panels that fit."""
    for buffered in range(panels, 0, -1):
        if panels % buffered and buffered > 3:
            continue  # if the whole tile does not fit, rotate through few panels
        at_once, buffers = (panels, 1) if buffered == panels else (1, buffered)
        config = replace(config, panels_per_store=at_once, num_store_buffers=buffers)
        if config.shared_bytes <= SHARED_BYTES_LIMIT:
            break
    return config


def deepest(config: C) -> C:
    """Add stages to a configuration while they fit, with panels that D's tensor map can describe."""
    if config.work.groups_rows and config.has_wide_panels:  # halve panels: D's map has no dimension left
        panels = config.panels_per_store * 2
        config = replace(config, panel_columns=config.panel_columns // 2, panels_per_store=panels)
    while config.num_stages < MAX_STAGES:
        deeper = replace(config, num_stages=config.num_stages + 1)
        if deeper.shared_bytes > SHARED_BYTES_LIMIT:
            break
        config = deeper
    return config


def _runs(k_blocks: int, area: int, num_partials: int, output: Output) -> tuple[int, bool]:
    """Return the number of k-blocks of a run (a straight line of code), and whether a tail needs code of its own.

    A longer run takes longer to compile, and so does a tail. With one set of partial sums, runs of 2 are 0.4% faster
    than a plain loop, with scales by row 2%; scales of A for 64 columns, and FP4 tiles of 256x128, leave no registers.
    With two sets, runs of 4 are 2% faster than runs of 2 in small tiles and with scales by row, else equal (an H200).
    """
    if output.work.is_along_k:
        return (4 if num_partials == 2 else 2), True  # for any depths of the groups
    if output.parts > 1 and (output.sfa, output.sfb) != (PER_64, PER_BLOCK):
        return 1, False
    is_odd = k_blocks % 2 != 0
    if num_partials == 1:
        return (1 if is_odd or output.sfa == PER_64 or (output.b == E2M1 and area == 256 * 128) else 2), False
    gains_by_four = area <= 64 * 128 or output.sfb == PER_ROW
    if gains_by_four and k_blocks % 4 == 0:
        return 4, False
    return 2, is_odd or gains_by_four
