"""Everything besides the tile that decides a kernel's code: work, operands and their scales, D, and the epilogue."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.check.layout import SCALE_BLOCK
from ...core.check.recipes import (
    BFLOAT16,
    E2M1,
    E4M3,
    MX,
    NO_RECIPES,
    PER_64,
    PER_BLOCK,
    PER_ROW,
    VALUES,
    WHOLE,
    Recipes,
    Scales,
    Values,
)
from ...core.check.ue8m0 import Words
from .epilogues import TO_D, Epilogue
from .works import COUNTS, DENSE, DEPTHS, ENDS, HEADS, IDS, Work

Operands = tuple[Values, Scales | None, Scales | None]
"""Values of B, and the scales of A and of B."""
ScaledOperands = tuple[Values, Scales, Scales]
"""`Operands` other than BF16, which always have scales."""
USUAL_OPERANDS: ScaledOperands = E4M3, PER_ROW, PER_BLOCK
OPERANDS_BY_ROW: Operands = E4M3, PER_ROW, PER_ROW
FP4_OPERANDS: ScaledOperands = E2M1, PER_ROW, MX
BF16_OPERANDS: Operands = BFLOAT16, None, None
WHOLE_OPERANDS: ScaledOperands = E4M3, WHOLE, WHOLE
"""No scale changes along k."""
SUMMED_OPERANDS = USUAL_OPERANDS, WHOLE_OPERANDS
"""Operands of FP8 whose blocks of columns a kernel adds up."""
FINE_OPERANDS: tuple[Operands, ...] = tuple(
    (E4M3, of_a, of_b)
    for of_a in (PER_ROW, PER_64, MX)
    for of_b in (PER_BLOCK, PER_ROW, Scales(64, 64), Scales(32, 32), MX)
    if min(of_a.columns, of_b.columns) < SCALE_BLOCK
)
"""Operands of which A or B, or both, have scales of fewer than 128 columns."""
_ANY = USUAL_OPERANDS, OPERANDS_BY_ROW, FP4_OPERANDS, *FINE_OPERANDS, WHOLE_OPERANDS
OPERANDS_OF: dict[Work, tuple[Operands, ...]] = {
    **dict.fromkeys((DENSE, IDS, ENDS, COUNTS), _ANY),
    DEPTHS: (OPERANDS_BY_ROW,),
    HEADS: (USUAL_OPERANDS, OPERANDS_BY_ROW),
}
"""For each kind of work, the operands besides BF16 that its calls may have; all of these have tiles."""
_VALUES = {values.dtype: values for values in VALUES}
_NAMES: dict[Operands, str] = {
    BF16_OPERANDS: "",
    USUAL_OPERANDS: "",
    OPERANDS_BY_ROW: "1d1d ",
    (E4M3, PER_64, PER_BLOCK): "by 64 ",
    FP4_OPERANDS: "fp4 ",
    WHOLE_OPERANDS: "by rows ",
}
"""Names of operands; empty for the usual ones."""


def recipes_for(operands: Operands) -> Recipes:
    """Return the recipes that a call must state for these operands: none if the product assumes them anyway."""
    return NO_RECIPES if operands in (USUAL_OPERANDS, FP4_OPERANDS) else (None, *operands[1:])


def has_chunks(operands: Operands) -> bool:
    """Tell whether blocks of B that share a scale are smaller than 128 x 128."""
    _, _, of_b = operands
    return of_b is not None and 1 < of_b.rows < SCALE_BLOCK


@dataclass(frozen=True, kw_only=True)
class Output:
    """Everything besides the tile that decides a kernel's code. A configuration of `fp8_gemm` adds a tile to this."""

    is_fp32: bool = False
    """True if D is FP32, false if it is BF16."""
    with_c: bool = False
    """True if C is read and added: another tensor, or D itself in BF16."""
    c_is_fp32: bool = False
    """True if C is FP32 and D is BF16: C is a bias."""
    adds_to_d: bool = False
    """True if C is D itself, in FP32: TMA adds to D in memory, which is faster than reading D."""
    b: Values = E4M3
    """Values of B. A has E4M3 values, or BF16 if B has BF16."""
    sfa: Scales | None = PER_ROW
    """The rows and columns of A under one scale. None: neither operand has scales, as in BF16."""
    sfb: Scales | None = PER_BLOCK
    """The rows and columns of B under one scale."""
    work: Work = DENSE
    """The kind of work: the rows that each B multiplies, and the part of k."""
    epilogue: Epilogue = TO_D
    """The way in which sums become D."""

    @property
    def operands(self) -> Operands:
        """Values of B, and scales."""
        return self.b, self.sfa, self.sfb

    @property
    def columns_of_a(self) -> int:
        """Columns of A that share a scale; all columns of a k-block if A has no scales along k."""
        return SCALE_BLOCK if self.sfa is None else self.sfa.columns or SCALE_BLOCK

    @cached_property
    def scale_parts(self) -> int:
        """The number of parts of a k-block that have their own scales in A."""
        return SCALE_BLOCK // self.columns_of_a

    @property
    def scale_parts_of_b(self) -> int:
        """The number of parts of a k-block that have their own scales in B; 1 if the scales fold into B's values."""
        return 1 if self.sfb in (None, WHOLE) or self.converts_b else SCALE_BLOCK // self.sfb.columns

    @property
    def parts(self) -> int:
        """The number of parts of a k-block that are promoted one by one."""
        return max(self.scale_parts, self.scale_parts_of_b)

    @property
    def has_chunks(self) -> bool:
        """Tell whether a scale of B covers less than 128 x 128; a producer's warp writes these scales to slots."""
        return has_chunks(self.operands)

    @property
    def loads_sfb(self) -> bool:
        """Tell whether TMA loads scales of B like A's, because each row has its own; if not, math threads read them."""
        return self.sfb is not None and self.sfb.rows == 1 and not (self.converts_b or self.sfb == WHOLE)

    @property
    def reads_words(self) -> Words:
        """Operands whose scales may be words of UE8M0: B, if warps read its scales; TMA cannot convert words."""
        return Words.B if self.has_chunks or self.converts_b else Words.NONE

    @property
    def folds_parts(self) -> bool:
        """Tell whether a k-block is promoted at once if its blocks of B have the same scale in all parts."""
        return self.has_chunks and self.scale_parts == 1

    @property
    def converts_b(self) -> bool:
        """Tell whether B is E2M1, which warps convert to E4M3 in shared memory."""
        return self.b == E2M1

    @property
    def multiplied_b(self) -> Values:
        """Values of B that WGMMA multiplies."""
        return E4M3 if self.converts_b else self.b

    @property
    def name(self) -> str:
        """Short name for people and tables: scales, type, C, groups; such as "bf16" or "1d1d fp32+d"."""
        return self.name_of_d + self.name_of_work

    @property
    def name_of_d(self) -> str:
        """Name scales, type and C."""
        sides = (f"{side.rows}x{side.columns} " for side in (self.sfa, self.sfb) if side is not None)
        scales = _NAMES.get(self.operands, "".join(sides))
        of = self.epilogue.name or ("fp32" if self.is_fp32 else "bf16")
        return scales + of + ("+d" if self.adds_to_d else "+c32" if self.c_is_fp32 else "+c" if self.with_c else "")

    @property
    def name_of_work(self) -> str:
        """Name the groups of rows, and the destination of rows."""
        return self.work.suffix + self.epilogue.suffix


def other_fields(one: Any, other: Output) -> list[str]:
    """Name the fields that differ between an output and a configuration, or another output.

    Reading C and adding to D count as the same: if k is split, C is always read.
    """
    adds = getattr(one, "adds_to_d", False)
    same = ("with_c", "adds_to_d") if (one.with_c or adds) == (other.with_c or other.adds_to_d) else ()
    names = (each.name for each in fields(Output) if each.name not in same)
    return [name for name in names if getattr(one, name, False) != getattr(other, name)]


def output_into(
    d: Tensor, c: Tensor | None, operands: Operands = USUAL_OPERANDS, work: Work = DENSE, epilogue: Epilogue = TO_D
) -> Output:
    """Make the output of a product: the tensors tell the type of D, and whether and how C is added."""
    is_fp32 = d.dtype == torch.float32
    adds_to_d = is_fp32 and c is not None and c.data_ptr() == d.data_ptr()
    of_c = c is not None and not adds_to_d, not is_fp32 and c is not None and c.dtype == torch.float32, adds_to_d
    return _output(is_fp32, *of_c, *operands, work, epilogue)


@cache
def _output(*given: Any) -> Output:
    return Output(**dict(zip((each.name for each in fields(Output)), given, strict=True)))


def values_of(b: Tensor) -> Values:
    """Return the kind of values of a checked B from its dtype; bytes are packed values."""
    return _VALUES[b.dtype]


@cache
def types_of_b(work: Work, *scales: Scales) -> tuple[torch.dtype, ...]:
    """Return the types that B may have for a kind of work and these scales of A and B, if B is not packed."""
    return tuple(b.dtype for b, *its in OPERANDS_OF[work] if b.bits == 8 and (*its,) == scales)


OUTPUTS = (
    Output(),
    Output(with_c=True),
    Output(is_fp32=True),
    Output(is_fp32=True, with_c=True),
    Output(is_fp32=True, adds_to_d=True),
    Output(with_c=True, c_is_fp32=True),
)
"""Every type of D, with every way to add C."""
BF16, BF16_C, FP32, FP32_C, FP32_D, BF16_C32 = OUTPUTS
OUTPUTS_OF_ROWS = BF16, FP32, FP32_C, BF16_C32
"""Outputs of grouped rows. Their C, if any, is a bias in FP32."""
OUTPUTS_OF = {
    (b, sfa, sfb): tuple(replace(output, b=b, sfa=sfa, sfb=sfb) for output in OUTPUTS)
    for b, sfa, sfb in (*OPERANDS_OF[DENSE], BF16_OPERANDS)
}
"""`OUTPUTS` for each kind of operands."""


class Sizes(NamedTuple):
    """The sizes of a product, or of each of several products."""

    m: float
    """Rows of A, or of each head; about how many rows a group has."""
    n: int
    k: int
    """The depth; for groups along k, the average depth of a group."""
    groups: int = 1
    """The number of groups or heads."""
