"""A configuration of the kernel for BF16: what differs from that for FP8, and the configuration of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from ...core.check.layout import align, ceil_div
from ...core.check.recipes import Scales
from ...core.sm90 import WARPGROUP_THREADS, WGMMA_ROWS
from ..config import CHUNK_ELEMENTS, EMPTY_BYTES, GemmConfig
from ..config_of_tile import deepest, of_output, raster_group, warpgroups_of, with_buffers
from ..output import Groups, Output

BLOCK_K = 64
"""BF16 values of a k-block."""
MOST_COUNTED, PART_BYTES = 128, 16
"""Groups of a launch that counts depths on the GPU (`kMostCounted` of gemm/work/k_counted.cuh), and bytes of each."""
MAX_ACCUMULATORS = {1: 192, 2: 192, 3: 128}
"""Registers of a math thread for sums, by math warpgroups."""


class Majors(NamedTuple):
    """The operands that have m or n contiguous, not k."""

    a_is_mn: bool = False
    b_is_mn: bool = False

    @property
    def name(self) -> str:
        """Name of both majors, as BLAS names what is transposed: "nt" if k is contiguous in both."""
        return {(False, False): "nt", (False, True): "nn", (True, True): "tn", (True, False): "tt"}[self]


K_MAJOR = Majors()
"""k is contiguous in both."""


@dataclass(frozen=True)
class Bf16Config(GemmConfig):
    """One configuration of the kernel for BF16: sums stay in the tensor cores' accumulators over a slice of k."""

    majors: Majors = K_MAJOR
    slices: int = 1
    """Slices of k, each summed from zero; CTAs of a cluster take one each (`cluster_k`), or a CTA all in turn."""
    sfa: Scales | None = field(default=None, kw_only=True)
    sfb: Scales | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """Short, for people: such as "bf16 nt 128x256/m2 bf16+c"."""
        slices = f" of {self.slices} slices" if self.walks_slices else ""
        return f"bf16 {self.majors.name} {super().name.removesuffix(' run 1')}{slices}".replace(" run 1 ", " ")

    @property
    def walks_slices(self) -> bool:
        """A CTA takes all slices in turn, and needs totals beside the sums of one."""
        return self.slices > 1 and self.cluster_k == 1

    @property
    def sums(self) -> int:
        """A tile's sums that a math thread has."""
        return self.units_per_warpgroup * (self.unit_n or self.block_n) // 2

    @property
    def shared_sums(self) -> int:
        """Sums that lie in store buffers while the next slice is summed, as no registers are left for them."""
        return max(self.sums * 2 - MAX_ACCUMULATORS[self.num_math_warpgroups], 0) if self.walks_slices else 0

    @property
    def accumulators(self) -> int:
        """Registers of a math thread for sums: of a slice, and of those before."""
        return self.sums * 2 - self.shared_sums if self.walks_slices else self.sums

    @property
    def exchange_bytes(self) -> int:
        """Bytes that CTAs that split k send to each: whole columns of chunks, from all math warps."""
        return self.cluster_k * ceil_div(self.block_n // 8, self.cluster_k) * self.block_m // 16 * CHUNK_ELEMENTS * 4

    @property
    def output_barriers_bytes(self) -> int:
        """Size of `OutputBarriers` in the epilogue."""
        return 8 if self.cluster_k > 1 else EMPTY_BYTES

    @property
    def scale_rows(self) -> int:
        """There are no scales."""
        return 0

    @property
    def scales_bytes(self) -> int:
        """A float in each slot, as C++ has no array of nothing; behind them barriers are aligned."""
        return align(self.num_stages * 4, 8)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield from super().rules()
        for name, is_mn, rows in (
            ("A", self.majors.a_is_mn, self.box_rows_of_a),
            ("B", self.majors.b_is_mn, self.box_rows_of_b // self.cluster_m),
        ):
            yield not is_mn or rows % WGMMA_ROWS == 0, f"boxes of 64 rows of an {name} whose rows are contiguous"
        yield not (self.majors.a_is_mn and self.rows_are_grouped), "an A with contiguous k where rows are grouped"
        yield self.cluster_k == 1 or self.units_per_warpgroup == 1, "one unit for each warpgroup where k is split"
        yield self.cluster_k in (1, self.slices), "a slice for each CTA that splits k"
        yield self.run_k_blocks == self.num_partials == 1, "one k-block at a time, and one set of sums"
        room = self.num_store_buffers * self.store_buffer_bytes // (4 * WARPGROUP_THREADS)
        yield self.shared_sums <= room, f"store buffers for {self.shared_sums} sums of a thread, not {room}"
        yield not (self.shared_sums and self.is_fp32), "BF16 for D where sums lie in store buffers"

    def choices(self) -> dict[str, str]:
        """Give the files that the kernel includes, one of each kind, and its name."""
        kinds = {**super().choices(), "MAINLOOP": f"mainloop_of_slice{'s' if self.walks_slices else ''}.cuh"}
        del kinds["SCALES"]
        if self.cluster_k > 1:
            kinds["EPILOGUE"] = "epilogue/split_once.cuh"
        if self.groups == Groups.DEPTHS:
            kinds["WORK"] = "work/k_parts.cuh"
        return kinds

    @property
    def finds_tiles_alone(self) -> bool:
        """Each role of a CTA finds its tiles by itself: along k too, as one map serves all groups, unless it counts."""
        return not self.rows_are_grouped and self.groups != Groups.COUNTED_DEPTHS

    @property
    def work_bytes(self) -> int:
        """Size of `WorkStorage` in the file of work: of depths that are counted, where each group begins."""
        return MOST_COUNTED * PART_BYTES if self.groups == Groups.COUNTED_DEPTHS else super().work_bytes

    @property
    def kernel_name(self) -> str:
        """The kernel's name, by which profilers find it: they look for `bf16_gemm` and `gemm_`."""
        return super().kernel_name.replace("fp8_", "bf16_")

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes."""
        return {
            **super().constants(),
            "kBlockK": BLOCK_K,
            "kSlices": self.slices,
            "kSharedSums": self.shared_sums,
            "kAIsMnMajor": self.majors.a_is_mn,
            "kBIsMnMajor": self.majors.b_is_mn,
            "kMayBeEmpty": self.groups in (Groups.DEPTHS, Groups.COUNTED_DEPTHS),
            "kStartsAlone": self.cluster_k > 1,
        }


def bf16_config(
    block_m: int,
    block_n: int,
    output: Output,
    majors: Majors = K_MAJOR,
    cluster_m: int = 1,
    cluster_n: int = 1,
    cluster_k: int = 1,
    slices: int = 1,
    min_stages: int = 0,
) -> Bf16Config:
    """Configure the kernel for a tile: as many stages as fit beside store buffers for, if possible, the whole tile."""
    num_math_warpgroups = warpgroups_of(block_m, block_n)
    units_along_m = block_m // num_math_warpgroups // WGMMA_ROWS
    panel_columns = gcd(block_n, 64)
    shares_sums = slices > cluster_k == 1 and units_along_m * block_n > MAX_ACCUMULATORS[num_math_warpgroups]
    config = Bf16Config(
        block_m,
        block_n,
        num_stages=min_stages or (3 if block_m + block_n > 384 or shares_sums else 4),
        num_math_warpgroups=num_math_warpgroups,
        unit_n=block_n,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        cluster_k=cluster_k,
        panel_columns=panel_columns,
        raster_group=raster_group(block_m, block_n, cluster_m),
        majors=majors,
        slices=slices,
        **{**of_output(output, cluster_k), "sfa": None, "sfb": None},
    )
    return deepest(with_buffers(config, units_along_m * block_n // panel_columns))
