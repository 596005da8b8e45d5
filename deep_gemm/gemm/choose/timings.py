"""Constants of the cost model: times of the parts of a product, read from timings.json.

`python -m lab tune --fit` makes that file from measured times, and reports how good the resulting choices are. All
Hopper GPUs have the same SMs, so most constants are fitted to all GPUs together; the GPUs differ in memory. One
constant, `across_lines_ps`, was measured by itself: a fit of all constants to times with rows across lines chose no
better. GPUs that were not measured use `GUESSES`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ...core.gpu import Gpu

FORMAT = 1
FILE = Path(__file__).with_name("timings.json")


@dataclass(frozen=True, eq=False)
class Timings:
    """The constants for one GPU. A name ends in its unit, unless it is a ratio.

    Instances are compared by identity, so that results computed from them can be cached.
    """

    launch_us: float
    """Time of the smallest product: launch, first bytes, end."""
    sm_tflops: float
    """FP8 operations of one SM's tensor cores, in a burst."""
    block_ns: float
    """Time of a tile for a k-block besides these operations; equal for every size of tile."""
    tile_us: float
    """Time of a tile besides its k-blocks: filling the ring, starting to store."""
    store_us: float
    """Time to store a tile of 256x128 in BF16, without the part that overlaps with the next tile."""
    load_gb_per_s: float
    """Rate at which one SM loads A and B in the decode kernel, which spends its time loading."""
    fp4_ns: float
    """Time of an SM in the decode kernel to convert 64 columns of a k-block of an FP4 weight to E4M3."""
    fp4_token_ns: float
    """Extra time for each row of A that is multiplied by these 64 columns."""
    fp4_alone_ns: float
    """Extra time for a k-block if a CTA is alone on its SM: a second CTA would hide it."""
    convert_ns: float
    """Extra time of a tile of `fp8_gemm` for converting a k-block of an FP4 weight."""
    split_us: float
    """Time to add up the sums of a tile if CTAs split k, in `fp8_gemm`."""
    decode_split_ns: float
    """`split_us` for each element of a tile, in the decode kernel."""
    split_c_ns: float
    """Extra time for an element of a tile if k is split and C is added: C is read after the sums are complete."""
    add_us: float
    """Time to add C, or the old D, to a tile of 256x128 along k. A next tile with enough k-blocks hides this time."""
    across_lines_ps: float
    """Time of the L2 for 128 bytes of a row that straddle two of its lines, if k is no multiple of 128."""
    across_sectors_ps: float
    """`across_lines_ps` if k is no multiple of 32: then 128 bytes are in five sectors of 32 bytes instead of four."""
    part_ps: float
    """Extra time for an element of a tile of `fp8_gemm`, for each part of a k-block after the first."""
    part_ns: float
    """Extra time of a tile of `fp8_gemm`, for each part of a k-block after the first."""
    by_row: float
    """Factor on the time of a k-block if B has a scale for each row."""
    find_us: float
    """Delay before the first product of grouped rows: the kernel must find their tiles first."""
    find_group_us: float
    """Time of a CTA to find a group of rows in ids, besides `find_row_ns`, if tiles have more than 64 rows."""
    find_row_ns: float
    """Time to find each row of a group, if tiles have at most 64 rows; taller tiles take a third of it."""
    part_power: float
    """A tile of which only a fraction `part` is filled takes `part ** part_power` of a whole tile's time."""
    dram_tb_per_s: float
    """Rate at which products read and write DRAM, once the L2 holds nothing older."""
    evict_us: float
    """Extra time until `dram_tb_per_s` is reached, because older data must leave the L2 first."""


@cache
def measured() -> dict[str, Timings]:
    """Read the timings of each GPU that was measured."""
    content = json.loads(FILE.read_text())
    if content.get("format") != FORMAT:
        raise ValueError(f"{FILE}: format: expected {FORMAT}, got {content.get('format')!r}")
    return {name: Timings(**content["all"], **entry) for name, entry in content["gpus"].items()}


@cache
def timings_of(gpu: Gpu) -> Timings:
    """Return the timings of a GPU: measured, or an H200's with the rates of `GUESSES`."""
    found = measured()
    if gpu.name in found:
        return found[gpu.name]
    h200, (dram, tensor_cores) = found["H200"], GUESSES[gpu.name]
    return replace(h200, dram_tb_per_s=h200.dram_tb_per_s * dram, sm_tflops=h200.sm_tflops * tensor_cores)


GUESSES = {"H20": (0.83, 0.25)}
"""Rates of DRAM and of an SM's tensor cores, as fractions of an H200's, from the data sheets."""
