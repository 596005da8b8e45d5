"""Kinds of work: which rows of A each B multiplies, and along which part of k. Each is a value.

A value names the file in gemm/work that finds a CTA's tiles, the members that the file adds to a kernel's parameters,
and the shared memory that it needs. Configurations, choices and launches ask the value; none asks which one it is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property

TILE_SLOTS = 4
"""Tiles of a grouped product that are found ahead of the threads that load and multiply; see work/tile_queue.cuh."""
TILE_BYTES = 16
MAIL_BYTES = 24
"""Size of `NumberMail` in gemm/work/k_scheduler.cuh."""
STAGING_BYTES = 8192
"""Size of `staging` in gemm/work/rows_twice.cuh."""
WINDOW_ROWS = 2048
RUN_WORDS = 36
"""Room for the first rows of runs of one id, in kernels of low tiles; see gemm/work/layout.cuh."""
LOW_TILE = 64
MOST_K_PARTS = 128
"""Groups along k that one launch of BF16 takes: `kMostKParts` of gemm/work/k_parts.cuh."""
MOST_INLINE_COUNTS = 768
"""Depths from the host that a launch takes among its parameters: `kMostInlineCounts` of gemm/work/k_counted.cuh."""
MOST_COUNTED, PART_BYTES = 128, 16
"""Groups of a launch that counts depths on the GPU (`kMostCounted` of gemm/work/k_counted.cuh), and bytes of each."""


class Named:
    """A value that is stated once, in the module of its class. Pickling keeps its name in that module."""

    def __reduce__(self) -> str:
        return next(name for name, each in vars(sys.modules[self.__module__]).items() if each is self)

    def __repr__(self) -> str:
        return f"{self.__module__.rpartition('.')[2]}.{self.__reduce__()}"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Work(Named):
    """A kind of work. There is one object of each."""

    name: str
    """For people: in the names of configurations, and what `explain` takes."""
    kernel: str
    """Its part of a kernel's name."""
    source: str
    """Its file in gemm/work."""
    number: int
    """`kGroups` of gemm/work/layout.cuh."""
    decode: str | None = None
    """Its file in gemm/decode, if the kernel of few rows does such work."""
    line: str = "{m} x {n} x {k} runs"
    """The line of DG_PRINT_CONFIGS for a problem."""
    groups_rows: bool = False
    """A layout says which rows of A belong to a group, and TMA cuts boxes off at a group's end."""
    is_stacked: bool = False
    """Groups of rows lie one behind another in one matrix, and may begin at any row."""
    reads_ids: bool = False
    """The layout has a number for each row."""
    is_along_k: bool = False
    """Each group has a part of k, of any depth."""
    may_be_empty: bool = False
    """A tile may have no k-block."""
    is_summed: bool = False
    """Products are added up."""
    has_planes: bool = False
    """Each group has an A and a D of its own."""
    queue: bool = False
    """A warp finds tiles ahead of the others, and hands them over by a queue."""
    more_bytes: int = 0
    """Shared memory of the file besides the queue."""
    alignment: int = 1
    """Alignment of the file's shared memory."""
    is_twice: bool = False
    """Tiles are of two products. Rows of the first are fetched from the rooms of a node's ranks, into a ring."""
    band: int = 0
    """Tiles along m that the raster takes before it moves on along n; 0: as many as the tile's shape wants."""
    tile_slots: int = TILE_SLOTS
    """Tiles that the queue holds."""
    may_split_k: bool = True
    """CTAs of a cluster may share out k."""
    takes_fine_scales: bool = False
    """Scales may be for fewer than 128 columns."""
    maps: str | None = "plain"
    """How boxes of A and B begin: "plain"; "late", perhaps with zeros; None if a kernel ahead makes the maps."""

    @cached_property
    def suffix(self) -> str:
        """Its part of a configuration's name."""
        return f" by {self.name}" if self.name else ""

    def window_rows(self, most: int = WINDOW_ROWS) -> int:
        """Rows of the layout that `Stretches` in gemm/work/layout.cuh sees at a time; few if it holds no rows."""
        return most if self.reads_ids else 4

    def run_words(self, rows_of_tile: int) -> int:
        """Words behind the window, where `Stretches` keeps the begins of runs of one id."""
        return RUN_WORDS if self.reads_ids and rows_of_tile <= LOW_TILE else 0

    def queue_bytes(self, rows_of_tile: int, window_rows: int = WINDOW_ROWS) -> int:
        """Size of `TileQueue` in gemm/work/tile_queue.cuh but for its alignment; 0 without a queue."""
        words = self.window_rows(window_rows) + self.run_words(rows_of_tile)
        return self.tile_slots * (TILE_BYTES + 2 * 8) + words * 4 if self.queue else 0


DENSE = Work(name="", kernel="dense", source="dense", number=0, decode="one", takes_fine_scales=True)
"""All rows, one B."""
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
"""Rows stacked by group, and a group's number for each row."""
ENDS = replace(IDS, name="ends", number=2, reads_ids=False)
"""Rows stacked by group, and where each group's rows end."""
TWICE = replace(
    ENDS,
    name="ends twice",
    kernel="m_grouped_twice",
    source="rows_twice",
    is_twice=True,
    band=8,
    tile_slots=2,
    more_bytes=STAGING_BYTES,
)
"""The same for two products: the kernel fetches A of the first one, whose result is A of the second."""
COUNTS = replace(ENDS, name="counts", kernel="m_grouped_masked", number=3, is_stacked=False, has_planes=True)
"""The first rows of each group's own A, and how many ("masked")."""
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
"""All rows, and a part of k for each group ("k-grouped"); each has maps of A and B, which a kernel ahead makes."""
PARTS = replace(DEPTHS, source="k_parts", queue=False, more_bytes=0, alignment=1, maps="plain")
"""The same of BF16, of depths that the host knows: whole k-blocks, whose rows lie one behind another."""
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
"""The same of any depths, which the GPU alone may know."""
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
"""All rows, and of each head its own A, B and D (`fp8_einsum`)."""
SUM = Work(
    name="sum", kernel="sum", source="sums", number=6, line="{groups} x {m} x {n} x {k}, added up, runs", is_summed=True
)
"""All rows of several products that are added up ("bmk,bnk->mn"), in slices of k."""
WORKS = (DENSE, IDS, ENDS, TWICE, COUNTS, DEPTHS, PARTS, COUNTED, HEADS, SUM)
