"""All that decides a kernel's code besides its tile: the output, how B is scaled, how rows or k are grouped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Groups(IntEnum):
    """Which rows of A each group's B multiplies: what `kGroups` of gemm/work/layout.cuh says."""

    NONE = 0
    """All rows, one B."""
    IDS = 1
    """Rows stacked by group, and a group's number for each row."""
    ENDS = 2
    """Rows stacked by group, and where each group's rows end."""
    COUNTS = 3
    """The first rows of each group's own A, and how many ("masked")."""
    DEPTHS = 4
    """All rows, and a part of k for each group ("k-grouped")."""
    HEADS = 5
    """All rows, and of each head its own A, B and D (`fp8_einsum`): work/heads.cuh, which does not ask `kGroups`."""
    SUM = 6
    """All rows of several products that are added up ("bmk,bnk->mn"), in slices of k: work/sums.cuh."""
    COUNTED_DEPTHS = 7
    """BF16's `DEPTHS`, of any depths, which the GPU alone may know: work/k_counted.cuh."""


OF_BF16_ALONE = (Groups.SUM, Groups.COUNTED_DEPTHS)
"""Work that no FP8 product does."""


@dataclass(frozen=True)
class Output:
    """The output of a product: the type of D, and how C takes part."""

    is_fp32: bool = False
    with_c: bool = False
    """C is another tensor, or D itself in BF16: read and added."""
    adds_to_d: bool = False
    """C is D itself, in FP32: TMA adds where D lies."""
    sfb_is_per_row: bool = False
    """B has one scale per row ("1D1D")."""
    groups: Groups = Groups.NONE
    """The caller's as well: how rows belong to groups."""
    to_addresses: bool = False
    """Each row goes to an address of its own, perhaps in another GPU's memory. Only BF16 rows with ids can."""
    activates: bool = False
    """B is gate and up in turn, 8 rows each, and D is silu(gate) * up, cast to FP8 with a scale for 64 columns."""
    gates_apart: bool = False
    """With `activates`: B has gate's rows first, a scale is for 128 columns, gate and up are rounded to BF16."""
    fetches: bool = False
    """The caller's as well, with `activates`: rows of A lie in rooms of a node's ranks, and are fetched as needed."""
    sfa_by_64: bool = False
    """The caller's as well: A has a scale for 64 columns, as `activates` makes them, not for 128."""

    @property
    def name(self) -> str:
        """Short, for people and tables: scales, type, C, groups; such as "bf16" or "1d1d fp32+d"."""
        scales = "1d1d " if self.sfb_is_per_row else "by 64 " if self.sfa_by_64 else ""
        addition = "+d" if self.adds_to_d else "+c" if self.with_c else ""
        groups = f" by {self.groups.name.lower()}" if self.groups else ""
        places = " to addresses" if self.to_addresses else " fetched" if self.fetches else ""
        silu = "silu of halves" if self.gates_apart else "silu"
        of = silu if self.activates else "fp32" if self.is_fp32 else "bf16"
        return f"{scales}{of}{addition}{groups}{places}"
