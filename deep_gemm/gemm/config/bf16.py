"""A configuration of the BF16 kernel: the differences from the FP8 kernel's, and the configuration of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import ClassVar

from ...core.check.layout import ceil_div
from ...core.check.recipes import BFLOAT16, Scales, Values
from ...core.gpu import WARPGROUP_THREADS, WGMMA_ROWS
from ..kinds.output import Output
from .of_tile import MAX_ACCUMULATORS, deepest, fields_of, with_buffers
from .tall import CHUNK_ELEMENTS, K_MAJOR, GemmConfig, Majors

BLOCK_K = 64
"""BF16 values of a k-block."""


@dataclass(frozen=True)
class Bf16Config(GemmConfig):
    """One configuration of the BF16 kernel: sums stay in the tensor cores' accumulators over a slice of k."""

    majors: Majors = K_MAJOR
    slices: int = 1
    """Slices of k, each summed from zero: one CTA of a cluster for each (`cluster_k`), or one CTA for all in turn."""
    b: Values = field(default=BFLOAT16, kw_only=True)
    sfa: Scales | None = field(default=None, kw_only=True)
    sfb: Scales | None = field(default=None, kw_only=True)
    block_k: ClassVar[int] = BLOCK_K
    """Values of a k-block."""

    @property
    def name(self) -> str:
        """Short name for people, such as "bf16 nt 128x256/m2 bf16+c"."""
        slices = f" of {self.slices} slices" if self.walks_slices else ""
        return f"bf16 {self.majors.name} {super().name.removesuffix(' run 1')}{slices}".replace(" run 1 ", " ")

    @property
    def starts_alone(self) -> bool:
        """Tell whether each cluster has one tile only, because k is split."""
        return self.cluster_k > 1

    @property
    def walks_slices(self) -> bool:
        """Tell whether a CTA computes all slices in turn: it then needs totals besides the sums of one slice."""
        return self.slices > 1 and self.cluster_k == 1

    @property
    def sums(self) -> int:
        """Sums of a tile in each math thread."""
        return self.units_per_warpgroup * (self.unit_n or self.block_n) // 2

    @property
    def shared_sums(self) -> int:
        """Sums of a thread that are kept in store buffers while the next slice is summed, for lack of registers."""
        return max(self.sums * 2 - MAX_ACCUMULATORS[self.num_math_warpgroups], 0) if self.walks_slices else 0

    @property
    def accumulators(self) -> int:
        """Registers of a math thread for sums: of this slice, and of earlier slices."""
        return self.sums * 2 - self.shared_sums if self.walks_slices else self.sums

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer thread and of a math thread; with 40, warps that store rows of low tiles spill."""
        return (56, 248) if self.storing_warps == 1 else super().registers

    @property
    def exchange_bytes(self) -> int:
        """Bytes that a CTA gets from the CTAs that split k with it: whole columns of chunks, from all math warps."""
        return self.cluster_k * ceil_div(self.block_n // 8, self.cluster_k) * self.block_m // 16 * CHUNK_ELEMENTS * 4

    @property
    def output_barriers_bytes(self) -> int:
        """Size of `OutputBarriers` in the epilogue."""
        return 8 if self.cluster_k > 1 else super().output_barriers_bytes

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield from super().rules()
        for name, is_mn, rows in (
            ("A", self.majors.a_is_mn, self.box_rows_of_a),
            ("B", self.majors.b_is_mn, self.box_rows_of_b // self.cluster_m),
        ):
            yield not is_mn or rows % WGMMA_ROWS == 0, f"boxes of 64 rows of {name} if its rows are contiguous"
        yield (not (self.majors.a_is_mn and self.work.groups_rows), "an A with contiguous k if rows are grouped")
        yield self.cluster_k == 1 or self.units_per_warpgroup == 1, "one unit for each warpgroup if k is split"
        yield self.cluster_k in (1, self.slices), "a slice for each CTA that splits k"
        yield self.run_k_blocks == self.num_partials == 1, "one k-block at a time, and one set of sums"
        yield self.units_along_n == 1 or not self.epilogue.activates, "gate and up in one unit if rows are activated"
        room = self.num_store_buffers * self.store_buffer_bytes // (4 * WARPGROUP_THREADS)
        yield self.shared_sums <= room, f"store buffers for {self.shared_sums} sums of a thread, not {room}"
        yield not (self.shared_sums and self.is_fp32), "a BF16 D if store buffers hold sums"

    def choices(self) -> dict[str, str]:
        """Return the file that the kernel includes for each kind, and the kernel's name."""
        kinds = {**super().choices(), "MAINLOOP": f"mainloop_of_slice{'s' if self.walks_slices else ''}.cuh"}
        del kinds["SCALES"]
        if self.cluster_k > 1:
            kinds["EPILOGUE"] = "epilogue/split_once.cuh"
        return kinds

    @property
    def kernel_name(self) -> str:
        """Name the kernel so that profilers find it: they search for `bf16_gemm` and `gemm_`."""
        return super().kernel_name.replace("fp8_", "bf16_")

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source needs."""
        more = {"kSharedSums": self.shared_sums, "kMayBeEmpty": self.work.may_be_empty}
        return {**super().constants(), "kSlices": self.slices, **more}


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
    """Configure the kernel for a tile: store buffers for the whole tile if they fit, and all stages that fit then."""
    of_tile = fields_of(block_m, block_n, output, cluster_m, cluster_n, cluster_k)
    num_math_warpgroups = of_tile["num_math_warpgroups"]
    units_along_m = block_m // num_math_warpgroups // WGMMA_ROWS
    columns = block_n // (1 + output.epilogue.activates)  # columns of D: a column of gate and one of up make one
    panel_columns = gcd(columns, 64)
    shares_sums = slices > cluster_k == 1 and units_along_m * block_n > MAX_ACCUMULATORS[num_math_warpgroups]
    config = Bf16Config(
        num_stages=min_stages
        or (3 if block_m + block_n > 384 or shares_sums or output.epilogue.has_row_addresses else 4),
        unit_n=block_n,
        panel_columns=panel_columns,
        majors=majors,
        slices=slices,
        **{**of_tile, "b": BFLOAT16, "sfa": None, "sfb": None},
    )
    return deepest(with_buffers(config, units_along_m * columns // panel_columns))
