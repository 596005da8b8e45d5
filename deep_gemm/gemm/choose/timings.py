"""The times of the parts of a product: the constants of the cost model, read from timings.json.

`python -m lab tune --fit` makes that file from measured times, and says how well choices by it do. All Hopper
GPUs have the same SMs, so most constants are fitted to all GPUs together; the GPUs differ in memory. One constant,
`across_lines_ps`, was measured by itself: a fit of all constants to times that include such rows chose no better.
`GUESSES` stands in for GPUs that were not measured.
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

    Compared by identity, so that results computed from them can be cached.
    """

    launch_us: float
    """Time of the smallest product: launch, first bytes, end."""
    sm_tflops: float
    """FP8 operations of one SM's tensor cores, in a burst."""
    block_ns: float
    """Time of a tile for a block of k beside these operations; the same for every size of tile."""
    tile_us: float
    """Time of a tile besides its blocks of k: filling the ring, starting to store."""
    store_us: float
    """Time of storing a tile of 256x128 in BF16 that the next tile does not hide."""
    load_gb_per_s: float
    """Rate at which one SM loads A and B in the decode kernel, which waits for nothing else."""
    fp4_ns: float
    """Time of an SM in the decode kernel to make E4M3 of 64 columns of a k-block of an FP4 weight."""
    fp4_token_ns: float
    """Extra time for each row of A that is multiplied by these 64 columns."""
    fp4_alone_ns: float
    """Extra time for a k-block if a CTA is alone on its SM: a second CTA would hide it."""
    convert_ns: float
    """Further time of a tile of `fp8_gemm` for a block of k of an FP4 weight, which is converted first."""
    split_us: float
    """Time of adding up a tile if k is split among CTAs, in `fp8_gemm`."""
    decode_split_ns: float
    """The same in the decode kernel."""
    split_c_ns: float
    """Extra time for an element of a tile if k is split and C is added: C is read after the sums are complete."""
    add_us: float
    """Time of adding a tile of 256x128 to D along k. The next tile hides it if it has enough blocks of k."""
    across_lines_ps: float
    """Time of the L2 for 128 bytes of a row that straddle two of its lines, if k is no multiple of 128."""
    across_sectors_ps: float
    """The same if k is no multiple of 32: then 128 bytes lie in five of its sectors of 32 bytes instead of four."""
    part_ps: float
    """Extra time for an element of a tile of `fp8_gemm`, for each part of a k-block after the first."""
    part_ns: float
    """Extra time of a tile of `fp8_gemm`, for each part of a k-block after the first."""
    by_row: float
    """How much longer a block of k takes if B has a scale for each row."""
    find_us: float
    """Delay before the first product of grouped rows: the kernel must find their tiles first."""
    find_group_us: float
    """Time of a CTA to find a group of rows in ids, besides `find_row_ns`, if tiles have more than 64 rows."""
    find_row_ns: float
    """Time to find each row of a group, if tiles have at most 64 rows; taller tiles take a third of it."""
    part_power: float
    """A tile that is only partly filled takes `part ** part_power` of a whole tile's time."""
    dram_tb_per_s: float
    """Rate at which products read and write, once nothing from before is left in the L2."""
    evict_us: float
    """Further time to reach that rate, as older data have to leave the L2 first."""


@cache
def measured() -> dict[str, Timings]:
    """Read the timings of each GPU that was measured."""
    content = json.loads(FILE.read_text())
    if content.get("format") != FORMAT:
        raise ValueError(f"{FILE}: format: expected {FORMAT}, got {content.get('format')!r}")
    return {name: Timings(**content["all"], **entry) for name, entry in content["gpus"].items()}


@cache
def timings_of(gpu: Gpu) -> Timings:
    """Give the timings of a GPU: measured, or guessed as an H200's with the slower rates of `GUESSES`."""
    found = measured()
    if gpu.name in found:
        return found[gpu.name]
    h200, (dram, tensor_cores) = found["H200"], GUESSES[gpu.name]
    return replace(h200, dram_tb_per_s=h200.dram_tb_per_s * dram, sm_tflops=h200.sm_tflops * tensor_cores)


GUESSES = {"H20": (0.83, 0.25)}
"""Rates of DRAM and of an SM's tensor cores, as fractions of an H200's, from the data sheets."""
