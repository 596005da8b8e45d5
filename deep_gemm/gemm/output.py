"""All that decides a kernel's code besides its tile: the output, how operands are scaled, how rows or k are grouped."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import IntEnum

from ..core.check.recipes import PER_64, PER_BLOCK, PER_ROW, Scales


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

_NAMES = {(PER_ROW, PER_BLOCK): "", (PER_ROW, PER_ROW): "1d1d", (PER_64, PER_BLOCK): "by 64"}


def name_of_scales(sfa: Scales, sfb: Scales) -> str:
    """Name the scales of A and B, for people; the usual ones have none.

    >>> name_of_scales(Scales(1, 32), Scales(32, 32))
    '1x32 32x32'
    """
    return _NAMES.get((sfa, sfb), f"{sfa.rows}x{sfa.columns} {sfb.rows}x{sfb.columns}")


@dataclass(frozen=True)
class Output:
    """The output of a product: the type of D, and how C takes part."""

    is_fp32: bool = False
    with_c: bool = False
    """C is another tensor, or D itself in BF16: read and added."""
    adds_to_d: bool = False
    """C is D itself, in FP32: TMA adds where D lies."""
    _: KW_ONLY
    sfa: Scales = PER_ROW
    """The caller's as well: how A is scaled. BF16 has no scales, whatever is said here."""
    sfb: Scales = PER_BLOCK
    """How B is scaled."""
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

    @property
    def name(self) -> str:
        """Short, for people and tables: scales, type, C, groups; such as "bf16" or "1d1d fp32+d"."""
        scales = name_of_scales(self.sfa, self.sfb)
        scales += " " * bool(scales)
        addition = "+d" if self.adds_to_d else "+c" if self.with_c else ""
        groups = f" by {self.groups.name.lower()}" if self.groups else ""
        places = " to addresses" if self.to_addresses else " fetched" if self.fetches else ""
        silu = "silu of halves" if self.gates_apart else "silu"
        of = silu if self.activates else "fp32" if self.is_fp32 else "bf16"
        return f"{scales}{of}{addition}{groups}{places}"
