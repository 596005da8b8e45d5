"""Kinds of work: which rows of A each B multiplies, and over which part of k. Each kind is a value.

A value names the file in gemm/work that finds a CTA's tiles, the members that the file adds to a kernel's parameters,
and the shared memory that the file needs. Configurations, choices and launches read the value's fields, not its kind.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property

TILE_SLOTS = 4
"""Tiles of a grouped product found before the threads that load and multiply need them; see work/tile_queue.cuh."""
TILE_BYTES = 16
MAIL_BYTES = 24
"""Size of `NumberMail` in gemm/work/k_scheduler.cuh."""
STAGING_BYTES = 8192
"""Size of `staging` in gemm/work/rows_twice.cuh."""
WINDOW_ROWS = 2048
RUN_WORDS = 36
"""Words for the first row of each sequence of rows with one id, in kernels of low tiles; see gemm/work/layout.cuh."""
LOW_TILE = 64
MOST_K_PARTS = 128
"""The most groups along k in one BF16 launch: `kMostKParts` of gemm/work/k_parts.cuh."""
MOST_INLINE_COUNTS = 768
"""The most depths that the host can pass as parameters of a launch: `kMostInlineCounts` of gemm/work/k_counted.cuh."""
MOST_COUNTED, PART_BYTES = 128, 16
"""The most groups of a launch that counts depths on the GPU (`kMostCounted`, gemm/work/k_counted.cuh); bytes of one."""


class Named:
    """A value that is stated once, in the module of its class. Pickling keeps its name in that module."""

    def __reduce__(self) -> str:
        return next(name for name, each in vars(sys.modules[self.__module__]).items() if each is self)

    def __repr__(self) -> str:
        return f"{self.__module__.rpartition('.')[2]}.{self.__reduce__()}"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Work(Named):
    """A kind of work. Each kind is one object."""

    name: str
    """A name for people: in names of configurations, and an argument of `explain`."""
    kernel: str
    """The work's part of a kernel's name."""
    source: str
    """The work's file in gemm/work."""
    number: int
    """`kGroups` of gemm/work/layout.cuh."""
    decode: str | None = None
    """The work's file in gemm/decode, if the decode kernel supports such work."""
    line: str = "{m} x {n} x {k} runs"
    """The line of DG_PRINT_CONFIGS for a problem."""
    groups_rows: bool = False
    """True if a layout says which rows of A belong to a group, and TMA cuts boxes off at a group's end."""
    is_stacked: bool = False
    """True if groups of rows follow one another in one matrix, and may begin at any row."""
    reads_ids: bool = False
    """True if the layout has a number for each row."""
    is_along_k: bool = False
    """True if each group has a part of k, of any depth."""
    may_be_empty: bool = False
    """True if a tile may have no k-block."""
    is_summed: bool = False
    """True if products are added up."""
    has_planes: bool = False
    """True if each group has its own A and D."""
    queue: bool = False
    """True if a warp finds tiles before the other warps need them, and passes them through a queue."""
    more_bytes: int = 0
    """Bytes of shared memory of the file besides the queue."""
    alignment: int = 1
    """Alignment of the file's shared memory."""
    is_twice: bool = False
    """True if tiles are of two products: a ring gets the first product's rows from the rooms of a node's ranks."""
    band: int = 0
    """Tiles along m that the raster takes before it moves on along n; 0: a number that suits the tile's shape."""
    may_split_k: bool = True
    """True if the CTAs of a cluster may split k."""
    takes_fine_scales: bool = False
    """True if scales may cover fewer than 128 columns."""
    maps: str | None = "plain"
    """Maps of A and B: "plain"; "late", with boxes that may begin with zeros; None if an earlier kernel makes them."""

    @cached_property
    def suffix(self) -> str:
        """Return the work's part of a configuration's name."""
        return f" by {self.name}" if self.name else ""

    def window_rows(self, most: int = WINDOW_ROWS) -> int:
        """Rows of the layout that `Stretches` (gemm/work/layout.cuh) reads at a time; 4 if the layout holds no rows."""
        return most if self.reads_ids else 4

    def run_words(self, rows_of_tile: int) -> int:
        """Words after the window: `Stretches` keeps there the first row of each sequence of rows with one id."""
        return RUN_WORDS if self.reads_ids and rows_of_tile <= LOW_TILE else 0

    def queue_bytes(self, rows_of_tile: int, window_rows: int = WINDOW_ROWS) -> int:
        """Size of `TileQueue` in gemm/work/tile_queue.cuh without alignment; 0 without a queue."""
        words = self.window_rows(window_rows) + self.run_words(rows_of_tile)
        return TILE_SLOTS * (TILE_BYTES + 2 * 8) + words * 4 if self.queue else 0


DENSE = Work(name="", kernel="dense", source="dense", number=0, decode="one", takes_fine_scales=True)
"""One product: all rows multiply one B."""
IDS = Work(
    name="ids",
    kernel="m_grouped_contiguous",
    source="rows",
    number=1,
    decode="rows",
    line="{groups} groups of {n} x {k} run",
    groups_rows=True,
    is_stacked=True,
    reads_ids=True,
    queue=True,
    alignment=16,
    takes_fine_scales=True,
)
"""Rows stacked by group, with the group's number for each row."""
ENDS = replace(IDS, name="ends", number=2, reads_ids=False)
"""Rows stacked by group, and where each group's rows end."""
TWICE = replace(
    ENDS,
    name="ends twice",
    kernel="m_grouped_twice",
    source="rows_twice",
    is_twice=True,
    band=8,
    more_bytes=STAGING_BYTES,
)
"""`ENDS` for two products: the kernel fetches A of the first product, whose result is A of the second."""
COUNTS = replace(ENDS, name="counts", kernel="m_grouped_masked", number=3, is_stacked=False, has_planes=True)
"""Each group has its own A, and a count of the first rows that are used ("masked")."""
DEPTHS = Work(
    name="depths",
    kernel="k_grouped",
    source="depths",
    number=4,
    line="{groups} groups of {m} x {n} run",
    is_along_k=True,
    may_be_empty=True,
    queue=True,
    more_bytes=MAIL_BYTES,
    alignment=16,
    maps=None,
)
"""All rows, and a part of k for each group ("k-grouped"); another kernel makes each group's maps of A and B."""
PARTS = replace(DEPTHS, source="k_parts", queue=False, more_bytes=0, alignment=1, maps="plain")
"""BF16 groups along k whose depths the host knows: whole k-blocks, with the groups' rows one after another."""
COUNTED = replace(
    PARTS,
    name="counted_depths",
    source="k_counted",
    number=7,
    is_along_k=False,
    more_bytes=MOST_COUNTED * PART_BYTES,
    alignment=16,
    maps="late",
)
"""BF16 groups along k of any depths, which perhaps only the GPU knows."""
HEADS = Work(
    name="heads",
    kernel="heads",
    source="heads",
    number=5,
    decode="heads",
    line="{groups} heads of {m} x {n} x {k} run",
    has_planes=True,
    may_split_k=False,
)
"""Each head has its own A, B and D (`fp8_einsum`)."""
SUM = Work(
    name="sum", kernel="sum", source="sums", number=6, line="{groups} x {m} x {n} x {k}, added up, runs", is_summed=True
)
"""All rows of several products that are added up ("bmk,bnk->mn"), in slices of k."""
WORKS = (DENSE, IDS, ENDS, TWICE, COUNTS, DEPTHS, PARTS, COUNTED, HEADS, SUM)
