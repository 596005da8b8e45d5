"""What a product takes with a tile: a time in microseconds on a named GPU.

It is the larger of two times, and a little more where they are alike:

    computing   launch + waves * (k_blocks of a CTA * block_us + tile_us + what adding up a split k takes); or,
                where rows lie across lines of the L2, launch + what it takes to load all tiles' rows, if that is more
    memory      launch + bytes / bandwidth, and that `fp8_gemm` begins later; for the decode kernel also what rings that
                hold less of B, reading B again, and crowded SMs take

`block_us` is what a tile takes for one k-block with all SMs at work, and `tile_us` what it takes besides: filling the
ring, and the part of its stores that the next tile does not hide. They were fitted to the times of some hundred
products on an H200, cold, each with up to 40 configurations. In an audit of 136 (`python -m deep_gemm tune --audit`)
what is chosen took 0.8% longer than the best on average, 13.2% at most. Other GPUs are scaled from these.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from ..gpus import H200, Gpu
from ..problem.layout import ceil_div
from .config import BLOCK_K, Output
from .tiles import BLOCKS_OF_RUNS, Tile

CLUSTERS_THAT_FIT = {
    1: (132, 264), 2: (66, 132), 3: (39, 79), 4: (30, 62), 5: (22, 47), 6: (17, 39), 7: (15, 32), 8: (15, 30),
}  # fmt: skip
"""By their size: how many run at a time on 132 SMs, with one and with two CTAs on an SM (an H200's driver says so)."""
SPLIT_US = {False: (2.4, 0.2), True: (0.4, 0.05)}
"""Adding up a split k: what it takes always and for each CTA, with `fp8_gemm` and with the decode kernel."""
WHOLE_RING_KB, SHALLOW_BY_KB, SHALLOW = 192, 64, 0.03
"""How much of B the decode kernel's rings on an SM hold where they hold most; with so much less it takes that part
longer to read B, and more by the square of what is missing."""
LATE_US = 0.35
"""How much later than with the decode kernel memory is busy with `fp8_gemm`."""
DECODE_REREAD = 0.2
"""What each row of the decode kernel's tiles after the first adds to the time of reading B, as a part of it."""
DECODE_CROWDED_US = 0.3
"""What its memory time grows by where some SMs have two of its CTAs and others one."""
DECODE_WAVE_US = 1.0
"""And where its CTAs do not all run at once."""
STRADDLING_ROW_US = 2.1e-5
"""What the L2 takes for 128 bytes of a row across two of its lines, as they lie where k is no multiple of 128."""
SHARPNESS = 8
"""Of the larger of two times: the exponent of the norm that is taken for it."""
NARROW = 1536
MOST_TOKENS = {False: 32, True: 128}
"""Up to how many the decode kernel multiplies: more by a narrow weight, whose k it splits."""


class Fit(NamedTuple):
    """A tile put to one weight: all of its cost that does not depend on m, so that a new m is looked at quickly."""

    tile: Tile
    rows: int
    """Rows of D that a cluster computes."""
    clusters_n: int
    clusters_at_once: int
    clusters_uncrowded: int
    """How many run with a CTA on each SM."""
    wave_us: float
    launch_us: float
    row_us: float
    """What memory takes for one row of A and of D."""
    weight_us: float
    """What memory takes for B."""
    straddling_us: float
    """What the L2 takes for a cluster's rows of A and B where they lie across its lines, else 0."""
    least_m: int
    most_m: int

    @classmethod
    def of(cls, tile: Tile, n: int, k: int, output: Output, gpu: Gpu) -> Fit:
        """Put a tile to a weight."""
        k_blocks = ceil_div(ceil_div(k, BLOCK_K), tile.cluster_k)
        split_us = 0.0
        if tile.cluster_k > 1:
            once, each = SPLIT_US[tile.is_decode]
            split_us = once + each * tile.cluster_k
            if not tile.is_decode:  # shares are whole runs
                k_blocks = ceil_div(k_blocks, BLOCKS_OF_RUNS) * BLOCKS_OF_RUNS
        # An FP32 output is twice the bytes to store, a C as many to read.
        output_factor = (2 if output.is_fp32 else 1) + (1 if output.with_c else 0)
        macs = tile.block_m * tile.block_n * BLOCK_K * tile.ctas_per_sm
        tensor_us = 2 * macs / (gpu.fp8_tflops / gpu.num_sms) / 1e6
        block_us = max(tile.block_ns / 1e3, tensor_us)
        bytes_per_us = gpu.dram_tb_per_s * 1e6
        weight_us = n * k / bytes_per_us
        if tile.is_decode:
            ring_kb = tile.config(output, k).num_stages * tile.block_n * BLOCK_K * tile.ctas_per_sm / 1024
            weight_us *= 1 + SHALLOW * ((WHOLE_RING_KB - ring_kb) / SHALLOW_BY_KB) ** 2
        rows_loaded = (tile.block_m * tile.cluster_m + tile.block_n * tile.cluster_n) * ceil_div(k, BLOCK_K)
        row_bytes = k + n * (4 if output.is_fp32 else 2) * (2 if output.with_c or output.adds_to_d else 1)
        ctas = tile.cluster_m * tile.cluster_n * tile.cluster_k
        # Nothing to share, nothing to split, nowhere to run: never.
        never = (
            (tile.cluster_n > 1 and n <= tile.block_n)
            or (tile.cluster_k > 1 and k <= BLOCK_K * tile.cluster_k)
            or ctas > gpu.num_sms
        )
        fit = [max(clusters * gpu.num_sms // H200.num_sms, 1) for clusters in CLUSTERS_THAT_FIT[ctas]]
        most_m = MOST_TOKENS[n <= NARROW] if tile.is_decode else sys.maxsize
        return cls(
            tile,
            rows=tile.block_m * tile.cluster_m,
            clusters_n=ceil_div(n, tile.block_n * tile.cluster_n),
            clusters_at_once=fit[tile.ctas_per_sm - 1],
            clusters_uncrowded=fit[0],
            wave_us=k_blocks * block_us + tile.tile_us * output_factor + split_us,
            launch_us=gpu.launch_us,
            row_us=row_bytes / bytes_per_us,
            weight_us=weight_us,
            straddling_us=rows_loaded * STRADDLING_ROW_US if k % BLOCK_K else 0.0,
            least_m=tile.block_m + 1 if tile.cluster_m > 1 else 1,
            most_m=0 if never else most_m,
        )

    def clusters(self, m: int) -> int:
        """How many compute all of D."""
        return ceil_div(m, self.rows) * self.clusters_n

    def waves(self, m: int) -> int:
        """How often all SMs take a tile."""
        return ceil_div(self.clusters(m), self.clusters_at_once)

    def compute_us(self, m: int) -> float:
        """What computing takes."""
        return self.launch_us + max(self.waves(m) * self.wave_us, self.clusters(m) * self.straddling_us)

    def memory_us(self, m: int) -> float:
        """What memory takes."""
        us = self.launch_us + self.weight_us + m * self.row_us
        if not self.tile.is_decode:
            return us + LATE_US
        us += DECODE_REREAD * (ceil_div(m, self.rows) - 1) * self.weight_us + DECODE_WAVE_US * (self.waves(m) - 1)
        return us + (DECODE_CROWDED_US if self.clusters(m) > self.clusters_uncrowded else 0.0)

    def cost_us(self, m: int) -> float:
        """The larger of the two, about; infinite for what cannot or shall not run."""
        if not self.least_m <= m <= self.most_m:
            return float("inf")
        compute, memory = self.compute_us(m), self.memory_us(m)
        return float((compute**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS))

    def why_not(self, m: int) -> str | None:
        """Say why it cannot or shall not run; None if it can."""
        if self.least_m <= m <= self.most_m:
            return None
        if m < self.least_m:
            return "one row of tiles, nothing to share B with"
        if self.most_m:
            return "many tokens" if m > MOST_TOKENS[True] else "many tokens and a wide weight"
        if self.tile.cluster_n > 1:
            return "one column of tiles, nothing to share A with"
        return "fewer blocks of k, or SMs, than CTAs that would split k"
