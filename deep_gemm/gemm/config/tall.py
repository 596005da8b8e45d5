"""The configuration of the `fp8_gemm` kernel, stated once: its fields become the constants of `config.cuh`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, NamedTuple

from ...core.check.layout import align, ceil_div
from ...core.check.recipes import PER_64, PER_BLOCK, PER_ROW, WHOLE
from ...core.gpu import SHARED_BYTES_LIMIT, WARPGROUP_THREADS, WGMMA_ROWS
from ...core.kernel import Config, constants_of
from ..kinds.output import OPERANDS_BY_ROW, Output
from ..kinds.works import TILE_SLOTS
from ..softmax_piece import BLOCK

BLOCK_K = 128
"""FP8 values of a k-block."""
LINE_BYTES = 128
"""Bytes of a row of an operand in a slot of the ring: one k-block, in any type."""
MAX_CLUSTER = 8
CHUNK_ELEMENTS = 16 * 8
"""Elements that a warp sends to another CTA at a time; see core/exchange.cuh."""
CONVERT_ROWS = 32
"""Rows of B that one warp converts."""
PASS_SLOTS = 4
"""Slots of the queue in which scaling warps tell all other roles a tile's passes; see gemm/convert/e2m1.cuh."""
EMPTY_BYTES = 1
"""Size of a struct without members, in C++."""
RASTER_GROUP = 8
"""Tiles along m that the raster covers before it moves on along n, unless another number is better."""


class Majors(NamedTuple):
    """Majors of A and B: true for an operand that is contiguous along m or n, false if along k."""

    a_is_mn: bool = False
    b_is_mn: bool = False

    @property
    def name(self) -> str:
        """Name both majors in BLAS's letters for transposition: "nt" if A and B are contiguous along k."""
        return {(False, False): "nt", (False, True): "nn", (True, True): "tn", (True, False): "tt"}[self]


K_MAJOR = Majors()
"""A and B are contiguous along k."""


@dataclass(frozen=True)
class GemmConfig(Config, Output):
    """One configuration of the `fp8_gemm` kernel. A tile is `block_m` x `block_n`; k is divided into k-blocks of 128.

    `Output` declares its D, scales and groups. If k is split, the kernel reads C and adds it, even if C is D itself.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_math_warpgroups: int = 2
    unit_n: int | None = None
    """Columns of one WGMMA; None means the whole tile's."""
    num_partials: int = 1
    """Sets of partial sums: with two sets, one is promoted while the tensor cores fill the other."""
    run_k_blocks: int = 1
    """k-blocks that are multiplied in a straight line of code; the tensor cores run dry at the end of each line."""
    has_tail: bool = False
    """True if there is code for a tail: k-blocks that are left when no whole run remains."""
    cluster_m: int = 1
    """2: two CTAs with neighbouring rows of tiles share B by multicast."""
    cluster_n: int = 1
    """2: two CTAs with neighbouring columns of tiles share A by multicast."""
    cluster_k: int = 1
    """CTAs that split a tile's k-blocks and add up their totals."""
    panel_columns: int = 64
    """Columns of D that one TMA store writes, in rows of up to 128 bytes, or of 256 bytes (wide panels)."""
    panels_per_store: int = 1
    num_store_buffers: int = 2
    raster_group: int = RASTER_GROUP
    """Tiles along m that are computed before the raster moves on along n."""
    block_k: ClassVar[int] = BLOCK_K
    """Values of a k-block."""
    majors = K_MAJOR
    """A and B are contiguous along k."""

    @property
    def name(self) -> str:
        """Short name for people: tile, cluster, scales, output; such as "256x128/n2 bf16+c"."""
        sides = {"m": self.cluster_m, "n": self.cluster_n, "k": self.cluster_k}
        cluster = "".join(f"/{side}{ctas}" for side, ctas in sides.items() if ctas > 1)
        tail = " tail" if self.has_tail else " run 1" if self.run_k_blocks == 1 else ""
        panels = f" by {self.panel_columns}" if self.epilogue.skips_mid else ""
        return f"{self.block_m}x{self.block_n}{cluster} {self.name_of_d}{tail}{self.name_of_work}{panels}"

    @property
    def starts_alone(self) -> bool:
        """Tell whether each cluster computes one tile only, instead of several in turn."""
        return False

    @property
    def has_second_map(self) -> bool:
        """Tell whether D has a second map: for whole tiles of rows, or for the right parts of heads."""
        return (self.work.groups_rows and not self.loads_sfb) or self.epilogue.skips_mid

    @property
    def units_along_n(self) -> int:
        """Units of `unit_n` columns in a tile."""
        return self.block_n // (self.unit_n or self.block_n)

    @property
    def units_per_warpgroup(self) -> int:
        """Units of 64 x `unit_n` that one warpgroup multiplies for each k-block."""
        return self.block_m // self.num_math_warpgroups // WGMMA_ROWS * self.units_along_n

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def num_threads(self) -> int:
        """Threads of a block: the math warpgroups, the producer's warpgroup and the converting warpgroups."""
        return (self.num_math_warpgroups + 1 + self.convert_groups) * WARPGROUP_THREADS

    @property
    def convert_groups(self) -> int:
        """The number of warpgroups that convert B."""
        return 0 if not self.converts_b else 1 if self.block_m == 256 else 2

    @property
    def convert_warps(self) -> int:
        """The number of warps that convert one slot."""
        return ceil_div(self.block_n, CONVERT_ROWS) if self.converts_b else 0

    @property
    def scaling_warps(self) -> int:
        """The number of the producer's last warps that read B's scales: one per 64 converted rows, or one in all."""
        return self.block_n // 64 if self.converts_b else int(self.has_chunks)

    @property
    def storing_warps(self) -> int:
        """The number of the producer's last warps that store D: one per math warpgroup, but none if they scale B."""
        return self.num_math_warpgroups if self.epilogue.has_row_addresses and not self.converts_b else 0

    @property
    def scales_written(self) -> int:
        """The number of values that scaling warps write into a slot: factors, or chunks' scales and if these fold."""
        if not self.has_chunks:
            return self.scaling_warps
        return self.scale_parts_of_b * (self.block_n // self.scale_rows_of_b) + 1

    @property
    def loaded_line_bytes_of_b(self) -> int:
        """Bytes that TMA loads for a k-block of a row of B."""
        return LINE_BYTES // 2 if self.converts_b else LINE_BYTES

    @property
    def convert_registers(self) -> int:
        """Registers of a converting thread after `setmaxnreg`."""
        return {64: 72, 128: 48, 256: 40}.get(self.block_m, 0) if self.converts_b else 0

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer thread and of a math thread after `setmaxnreg`; in sum no more than the launch gave.

        If rows are grouped, one of the producer's warps searches the layout. It needs more registers if it also looks
        for the last tiles, if it fetches rows, or if it searches ids while the loading thread loads B's scales by row.
        The loading thread needs 24. Tiles of 256x128 that keep B's scales by row (their rows are never grouped) spill
        with 232 registers, which cost up to 12% on an H200.
        """
        if self.converts_b:
            return {64: (64, 232), 128: (64, 160), 256: (56, 208)}.get(self.block_m, (0, 0))
        if self.has_chunks:
            return {1: (56, 248), 2: (56, 224)}.get(self.num_math_warpgroups, (0, 0))
        if self.keeps_row_scales:
            return 24, 240
        searches_ids_with_row_scales = self.work.reads_ids and self.loads_sfb
        searches_more = self.cuts_last_tiles or self.work.is_twice
        if searches_more or (searches_ids_with_row_scales and self.num_math_warpgroups == 2):
            return 56, 224
        return {1: (40, 248), 2: (40, 232), 3: (32, 160)}[self.num_math_warpgroups]

    @property
    def has_scales(self) -> bool:
        """Tell whether slots hold scales, by which promotion multiplies partial sums."""
        return self.sfa not in (None, WHOLE)

    @property
    def scale_rows_of_b(self) -> int:
        """Rows of B that share a scale; a block's rows if each row has its own scale, or B has no scales."""
        return PER_BLOCK.rows if self.sfb is None or self.loads_sfb else self.sfb.rows

    @property
    def store_buffer_bytes(self) -> int:
        """Size of one store buffer of one warpgroup."""
        return self.panels_per_store * WGMMA_ROWS * self.panel_columns * self.output_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of one element of D."""
        return self.epilogue.output_bytes or (4 if self.is_fp32 else 2)

    @property
    def stores_by_tma(self) -> bool:
        """Tell whether TMA stores tiles of D from panels in shared memory, through a tensor map."""
        return self.cluster_k == 1 and self.epilogue.by_tma

    @property
    def has_wide_panels(self) -> bool:
        """Tell whether a row of a panel has two or more spans of a swizzle: see gemm/epilogue/panels.cuh."""
        return self.panel_columns * self.output_bytes == 256

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in gemm/fp8_gemm.cuh, which asserts that it is the same."""
        operands = self.num_stages * (self.block_m + self.block_n) * LINE_BYTES
        outputs = self.num_math_warpgroups * self.num_store_buffers * self.store_buffer_bytes
        if self.epilogue.has_row_addresses:  # 64 rows of a tile, with padding after each: gemm/epilogue/store_rows.cuh
            outputs = self.num_math_warpgroups * WGMMA_ROWS * (self.block_n * self.output_bytes + 16)
        if self.cluster_k > 1:
            outputs = self.exchange_bytes
        elif not (self.epilogue.by_tma or self.epilogue.has_row_addresses):
            outputs = EMPTY_BYTES
        barriers = self.num_stages * 2 * 8 + self.output_barriers_bytes
        before_work = align(outputs, 1024) + operands + self.scales_bytes + barriers
        alignment = self.work.alignment
        before_convert = align(before_work, 16 if self.converts_b else alignment)
        return align(align(before_convert + self.convert_bytes, alignment) + self.work_bytes, 1024)

    @property
    def convert_bytes(self) -> int:
        """Size of `ConvertStorage` in gemm/convert."""
        if not self.converts_b:
            return 0
        return align(self.num_stages * (self.block_n * 4 + 8) + PASS_SLOTS * (8 + 2 * 8), 16)

    @property
    def exchange_bytes(self) -> int:
        """Bytes that each CTA receives from the CTAs that split k with it."""
        chunks = self.block_m * self.block_n // CHUNK_ELEMENTS
        return self.cluster_k * ceil_div(chunks, self.cluster_k) * CHUNK_ELEMENTS * 4

    @property
    def output_barriers_bytes(self) -> int:
        """Size of `OutputBarriers` in the epilogue."""
        if self.epilogue.has_row_addresses:
            return self.num_math_warpgroups * 2 * 8
        return 2 * 8 if self.cluster_k > 1 else EMPTY_BYTES

    @property
    def scales_bytes(self) -> int:
        """Size of the scales of all slots. Without scales a slot has one float, because C++ has no empty arrays."""
        if self.sfa in (None, WHOLE):
            return align(self.num_stages * 4, 8)
        of_b = self.scale_parts_of_b * self.block_n if self.loads_sfb else self.scales_written
        return self.num_stages * align(self.scale_parts * self.scale_rows + of_b, 32) * 4

    @property
    def work_bytes(self) -> int:
        """Size of `WorkStorage` in the file of work that the configuration includes."""
        return self.work.queue_bytes(self.block_m) + self.work.more_bytes or EMPTY_BYTES

    @property
    def scale_rows(self) -> int:
        """Rows of A whose scales a slot of the ring holds, rounded to lines of 128 bytes.

        Stacked groups begin at any row, but TMA's loads begin at multiples of 16 bytes, so up to 3 rows earlier.
        """
        if self.sfa in (None, WHOLE):
            return 0
        rows = self.block_m + (32 if self.work.is_stacked else 0)
        return rows if rows <= 256 else align(rows, 64)

    @property
    def box_scale_rows(self) -> int:
        """Rows whose scales one TMA instruction loads: all, or half of them, in whole lines of 128 bytes."""
        return self.scale_rows if self.scale_rows <= 256 else self.scale_rows // 2

    @property
    def has_short_tiles(self) -> bool:
        """Tell whether a group's last tile may be lower, in steps of 64 rows: warpgroups must have two units.

        A group of 129 to 256 rows is then one tile, which reads B once and multiplies few rows in vain: on an H200
        128x256 tiles took 6% longer for 32 groups of about 192 rows. Tiles of 128 or 192 rows gained nothing by this:
        CTAs that share B get out of step, and read it from DRAM twice.
        """
        return self.work.groups_rows and self.block_m == 2 * WGMMA_ROWS * self.num_math_warpgroups

    @property
    def branches_on_parts(self) -> bool:
        """Tell whether the code for whole tiles skips units of a short tile: separate code would lack registers."""
        return self.converts_b and self.has_short_tiles

    @property
    def cuts_last_tiles(self) -> bool:
        """Tell whether the last tiles are cut in halves if they are at most half as many as the CTAs.

        A wave of few tiles takes as long as a full one; the same tiles in halves take two thirds of that: 144 tiles for
        the 132 SMs of an H200 take 70 us instead of 85. Warpgroups of two units have code for halves. Quarters gained
        2% more, halves of rows nothing. Tiles are not cut if a cut would part gate from up, or if each row has its own
        address: then the warp that looks for tiles to cut would take registers that the math warps need.
        """
        has_halves = self.units_along_n == self.units_per_warpgroup == 2
        can_be_cut = not (self.epilogue.gates_apart or self.epilogue.has_row_addresses)
        return self.work.groups_rows and has_halves and can_be_cut

    @property
    def units_of_part(self) -> int:
        """How many of its first units a warpgroup computes in a short or narrow tile; 0 if all tiles are whole."""
        return self.units_along_n if self.has_short_tiles else 1 if self.cuts_last_tiles else 0

    @property
    def mixes_parts(self) -> bool:
        """Tell whether one product promotes parts of k-blocks, and another product of the kernel whole k-blocks."""
        return self.work.is_twice and self.parts > 1

    @property
    def keeps_row_scales(self) -> bool:
        """Tell whether registers keep B's scales by row, because a warpgroup's units, one below another, share them."""
        return self.loads_sfb and self.units_along_n == 1 and self.units_per_warpgroup > 1 and self.parts == 1

    @property
    def box_rows_of_a(self) -> int:
        """The most rows of A that one TMA instruction loads: a tile's rows, or this CTA's part of them.

        If rows are grouped, TMA takes longer to fill rows after a group's end with zeros than to load rows. So boxes
        have 64 rows, and boxes after the group's end are left out. On an H200 that saves 6% with 128x256 tiles if
        groups are small, and 25% with 128x128 tiles, and costs nothing if groups are large.
        """
        return WGMMA_ROWS if self.work.groups_rows else self.block_m // self.cluster_n

    @property
    def box_rows_of_b(self) -> int:
        """Rows of B per TMA load: a tile's rows, half of them if halves may be apart, or a converting warp's rows."""
        if self.converts_b:
            return CONVERT_ROWS
        return self.block_n // 2 if self.cuts_last_tiles or self.epilogue.gates_apart else self.block_n

    def box_rows_of_sfa(self, m: int) -> int:
        """Rows of A whose scales one TMA instruction loads: a tile's, but no more than A has, rounded up to 16 bytes.

        With several parts: all rows of a tile, the distance of two parts in a slot. Groups begin at any row.
        """
        if self.work.groups_rows:
            return self.box_scale_rows
        if self.work.is_along_k:
            return self.box_rows_of_a
        return self.block_m if self.scale_parts > 1 else min(self.block_m, align(m, 4))

    def ctas(self, m: int, n: int, num_sms: int, groups: int = 1) -> int:
        """Count the CTAs for `groups` products: one for each SM, but no more clusters than there are tiles.

        Grouped rows get no more CTAs than tiles (or halves of tiles) can exist; a tile has at least one row.
        """
        if self.work.groups_rows:
            return min(num_sms, groups * m * ceil_div(n, self.block_n) * (2 if self.cuts_last_tiles else 1))
        tiles_m, tiles_n = ceil_div(m, self.block_m), ceil_div(n, self.block_n)
        clusters = groups * ceil_div(tiles_m, self.cluster_m) * ceil_div(tiles_n, self.cluster_n)
        at_once = clusters if self.starts_alone else max(num_sms // self.cluster_size, 1)
        return min(at_once, clusters) * self.cluster_size

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; a rule may rely on the ones before it."""
        yield from self._rules_of_tiles()
        yield from self._rules_of_stores()
        yield from self._rules_of_work()
        yield from self._rules_of_fine_scales()
        yield self.num_partials in (1, 2), "1 or 2 sets of partial sums"
        yield self.run_k_blocks in (1, 2, 4, 8, 16, 32), "runs whose length divides 32 k-blocks"
        one_by_one = self.run_k_blocks == self.num_partials == 1 or not self.branches_on_parts
        yield one_by_one, "runs of one k-block, and one set of sums, if units may be skipped"
        yield self.run_k_blocks > 1 or not self.has_tail, "runs of several k-blocks if there is a tail"
        registers = self.registers[1]
        others = 16 if self.converts_b else 32
        yield self.accumulators <= registers - others, f"{self.accumulators} accumulators in {registers} registers"
        yield self.shared_bytes <= SHARED_BYTES_LIMIT, f"{self.shared_bytes} of {SHARED_BYTES_LIMIT} bytes shared"

    def _rules_of_tiles(self) -> Iterator[tuple[bool, str]]:
        unit_n = self.unit_n or self.block_n
        yield self.num_math_warpgroups in (1, 2, 3), "1, 2 or 3 math warpgroups"
        whole_units = self.block_m > 0 and self.block_m % (WGMMA_ROWS * self.num_math_warpgroups) == 0
        yield whole_units, "64 rows for each math warpgroup"
        yield self.block_m <= 256, "a TMA box of at most 256 rows of A"
        yield self.block_n <= 256, "a TMA box of at most 256 rows of B"
        yield unit_n % 16 == 0 and 16 <= unit_n <= 256, "units of 16 to 256 columns, a multiple of 16"
        yield self.block_n % unit_n == 0, "whole units along n"
        scale_chunk = gcd(self.block_n, self.scale_rows_of_b)
        yield unit_n % scale_chunk == 0 or scale_chunk % unit_n == 0, "whole scale chunks"
        yield self.num_stages >= 2, "at least 2 stages"
        # Half of an operand that a cluster shares is whole swizzle atoms, 8 rows each, by the rules on tiles above.
        yield (self.cluster_m, self.cluster_n) in ((1, 1), (1, 2), (2, 1)), "1 or 2 CTAs that share an operand"
        yield 1 <= self.cluster_k <= MAX_CLUSTER, f"1 to {MAX_CLUSTER} CTAs that split k"
        yield self.cluster_k == 1 or self.cluster_m * self.cluster_n == 1, "a split of k or a shared operand, not both"
        yield self.cluster_k == 1 or not self.adds_to_d, "no addition to D by TMA if k is split"

    def _rules_of_stores(self) -> Iterator[tuple[bool, str]]:
        unit_n = self.unit_n or self.block_n
        yield self.panel_columns * self.output_bytes in (32, 64, 128, 256), "panel rows of 32, 64, 128 or 256 bytes"
        may_be_wide = self.is_fp32 and not self.work.groups_rows
        yield (
            may_be_wide or not self.has_wide_panels,
            "panel rows of 256 bytes only for an FP32 D whose rows are not grouped",
        )
        panels = self.units_per_warpgroup * unit_n // self.panel_columns
        whole_panels = unit_n % self.panel_columns == 0
        yield (
            whole_panels and self.panels_per_store > 0 and panels % self.panels_per_store == 0,
            "panels that fill a tile",
        )
        half = panels // 2
        yield not self.units_of_part or half % min(half, self.panels_per_store) == 0, "panels that fill half a tile"
        yield self.num_store_buffers >= 1, "at least 1 store buffer"
        yield self.raster_group >= 1, "a raster of at least 1 tile"
        yield not self.adds_to_d or self.is_fp32, "an FP32 D if the product is added to D"
        yield not (self.adds_to_d and self.with_c), "only one way to add C"

    def _rules_of_work(self) -> Iterator[tuple[bool, str]]:
        unit_n, work, epilogue = self.unit_n or self.block_n, self.work, self.epilogue
        grouped, along_k = work.groups_rows, work.is_along_k
        yield not grouped or self.cluster_size == 1, "no clusters if rows are grouped"
        only_a = self.cluster_size == self.cluster_n or not self.has_scales
        yield not along_k or only_a, "only A shared if groups are along k"
        yield not (grouped and self.adds_to_d), "no addition to D if rows are grouped"
        yield work.may_split_k or self.cluster_k == 1, "no split of k for heads"
        yield (
            not along_k or self.sfb == PER_ROW or not self.has_scales,
            "scales of B for each row if groups are along k",
        )
        yield not along_k or self.has_tail or self.run_k_blocks == 1, "code for a tail, because each group may have one"
        plain = (
            work.takes_fine_scales
            and not (grouped or self.loads_sfb or self.is_fp32 or self.with_c)
            and self.cluster_k == 1
        )
        yield (
            plain or not epilogue.skips_mid,
            "a plain BF16 product without a split of k if columns of D are skipped",
        )
        is_plain = not (self.is_fp32 or self.with_c or self.adds_to_d) and self.cluster_k == 1
        yield (
            epilogue.work is None or (is_plain and epilogue.work == work and self.operands in epilogue.operands),
            "a BF16 D without C or a split of k, and the work and operands that its epilogue supports",
        )
        of_halves = (unit_n == 128 or epilogue.by_tma) and self.block_n in (128, 256)
        yield of_halves or not epilogue.activates, "one or two units of 128 columns if rows are activated"
        sums = work.takes_fine_scales and not (grouped or self.with_c or self.adds_to_d) and unit_n % BLOCK == 0
        yield (
            (sums and self.is_fp32 and self.cluster_k == 1) or not epilogue.sums_blocks,
            "an FP32 D without C or a split of k, and units of whole blocks, if blocks of columns are added up",
        )
        apart = epilogue.gates_apart and not epilogue.by_tma
        yield self.block_n == 256 or not apart, "tiles of 256 columns if gate is apart from up"

    def _rules_of_fine_scales(self) -> Iterator[tuple[bool, str]]:
        unit_n, work, epilogue = self.unit_n or self.block_n, self.work, self.epilogue
        yield (
            self.sfa is None or (self.sfa.rows == 1 and self.sfa.columns in (0, 32, 64, 128)),
            "a scale of A for each 128, 64 or 32 columns, or for all",
        )
        yield (self.sfa == WHOLE) == (self.sfb == WHOLE), "scales of all columns on both sides or on none"
        plain_tiles = work.takes_fine_scales and (work.is_twice or not epilogue.activates) and not epilogue.skips_mid
        yield (self.parts == 1 or plain_tiles, "no heads, depths or lone activation if scales are below 128 columns")
        yield self.scale_parts == 1 or self.box_scale_rows == self.scale_rows, "one TMA box of A's finer scales"
        yield self.block_n == unit_n == 128 or not self.has_chunks, "128 columns if scales of B cover smaller blocks"
        yield self.run_k_blocks == 1 or not self.folds_parts, "one k-block at a time if its parts may fold"
        by_warps = self.num_math_warpgroups < 3 and self.cluster_m * self.cluster_n == 1
        yield (
            by_warps or not self.has_chunks,
            "1 or 2 math warpgroups, and no shared operand, if scales of B cover smaller blocks",
        )
        yield self.num_math_warpgroups < 3 or not self.converts_b, "1 or 2 math warpgroups if B is converted"
        yield not (self.converts_b and self.cuts_last_tiles), "whole tiles if B is converted"
        alone = self.cluster_m * self.cluster_n == 1
        yield alone or not self.converts_b, "no shared operand if B is converted: tiles may differ in passes"
        is_plain = not (self.is_fp32 or self.with_c)
        yield is_plain or not self.converts_b or self.block_m < 256, "at most 128 rows for FP4 unless D is BF16"
        yield self.block_n in (64, 128) or not self.converts_b, "64 or 128 columns if B is converted"

    @property
    def accumulators(self) -> int:
        """Registers of a math thread for totals and partial sums."""
        return (self.units_per_warpgroup + self.num_partials) * (self.unit_n or self.block_n) // 2

    def choices(self) -> dict[str, str]:
        """Return the files that gemm/kinds.cuh includes, one of each kind, and the kernel's name."""
        work, epilogue = self.work, self.epilogue
        stores = "split" if self.cluster_k > 1 else epilogue.source
        scales = "by_row_kept" if self.keeps_row_scales else "by_row" if self.loads_sfb else "by_block"
        scales = "whole" if self.sfa == WHOLE else scales
        scales = "by_chunk" if self.has_chunks else scales
        scales = "by_slot" if self.converts_b else "by_halves" if epilogue.activates else scales
        convert = "e2m1" if self.converts_b else "scales_of_blocks" if self.has_chunks else "none"
        has_params = work.groups_rows and not work.is_twice
        params = "_silu" if epilogue.activates else ""
        of_rows = {"ROWS_PARAMS": f"work/rows{params}_params.cuh"} if has_params else {}
        gates = {} if epilogue.gates in (None, stores) else {"GATES": f"epilogue/{epilogue.gates}.cuh"}
        return {
            "DESTINATION": f"epilogue/{epilogue.destination}.cuh",
            "WORK": f"work/{work.source}.cuh",
            "CONVERT": f"convert/{convert}.cuh",
            "MAINLOOP": "mainloop.cuh",
            "SCALES": f"scales/{scales}.cuh",
            "EPILOGUE": f"epilogue/{stores}.cuh",
            **of_rows,
            **gates,
            "KERNEL_NAME": self.kernel_name,
        }

    @property
    def kernel_name(self) -> str:
        """Name the kernel so that profilers find it and know the kind of product.

        Profilers look for `fp8_gemm`, for `fp8_wgrad_gemm` if both operands have scales by row, and for `gemm_`. They
        count one match a call, so a kernel that only helps a product must not have any of these in its name.
        """
        work, epilogue = self.work, self.epilogue
        of_work = epilogue.kernel if epilogue.skips_mid else work.kernel
        scales = "" if self.parts == 1 else "_by_64" if (self.sfa, self.sfb) == (PER_64, PER_BLOCK) else "_fine"
        of_rows = epilogue.kernel if epilogue.activates else scales
        return f"{'fp8_wgrad_gemm' if self.operands == OPERANDS_BY_ROW else 'fp8_gemm'}_{of_work}{of_rows}"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source needs."""
        producer_registers, math_registers = self.registers
        work, epilogue = self.work, self.epilogue
        return {
            **constants_of(self, *CONSTANTS),
            "kLineBytes": LINE_BYTES,
            "kUnitN": self.unit_n or self.block_n,
            "kUnitStride": self.num_math_warpgroups * WGMMA_ROWS,
            "kNumMathWarps": self.num_math_warpgroups * 4,
            "kProducerRegisters": producer_registers,
            "kMathRegisters": math_registers,
            "kConvertRows": CONVERT_ROWS,
            "kFinishingWarps": self.convert_warps or self.scaling_warps,
            "kMulticastCtas": self.cluster_m * self.cluster_n,
            "kAllCtas": (1 << self.cluster_m * self.cluster_n) - 1,
            "kGroups": work.number,
            "kGateColumns": self.block_n // 2 if epilogue.gates_apart else 8,
            "kColumnsOfValue": 1 + epilogue.activates,  # gate and up, or one
            "kTileSlots": TILE_SLOTS,
            "kWindowRows": work.window_rows(),
            "kRunWords": work.run_words(self.block_m),
            "kAIsMnMajor": self.majors.a_is_mn,
            "kBIsMnMajor": self.majors.b_is_mn,
            "kExponentBitsOfB": self.multiplied_b.exponent_bits,
            "kOutputIsFp32": self.is_fp32,
            "kCIsFp32": self.is_fp32 or self.c_is_fp32,
            "kCBytes": 4 if self.is_fp32 or self.c_is_fp32 else 2,
            "kSfbIsPerRow": self.loads_sfb,
            "kSkipsMid": epilogue.skips_mid,
            "kToAddresses": epilogue.has_row_addresses,
            "kLoopsInBatches": not work.is_along_k,
            "kLoadsScalesByAddress": work.is_along_k,
        }


CONSTANTS = (
    *("block_m", "block_n", "block_k", "num_stages", "num_math_warpgroups", "num_threads", "shared_bytes"),
    *("units_along_n", "units_per_warpgroup", "units_of_part", "num_partials", "run_k_blocks", "has_tail"),
    *("cluster_m", "cluster_n", "cluster_k", "cluster_size", "starts_alone", "raster_group"),
    *("panel_columns", "panels_per_store", "num_store_buffers", "output_bytes", "stores_by_tma", "storing_warps"),
    *("box_rows_of_a", "box_rows_of_b", "loaded_line_bytes_of_b", "has_scales", "scale_rows", "box_scale_rows"),
    *("scale_parts", "scale_parts_of_b", "parts", "folds_parts", "scales_written", "scale_rows_of_b", "scaling_warps"),
    *("convert_warps", "convert_groups", "convert_registers", "with_c", "adds_to_d"),
    *("has_short_tiles", "branches_on_parts", "cuts_last_tiles", "mixes_parts"),
)
"""Attributes of a configuration that the source uses by their names."""
