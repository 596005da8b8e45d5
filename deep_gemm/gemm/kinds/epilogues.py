"""Epilogues: how a tile's sums become D, and where D is stored. Each is a value; gemm/epilogue has their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ...core.check.recipes import BFLOAT16, E2M1, E4M3, MX, PER_64, PER_BLOCK, PER_ROW, Scales, Values
from .works import ENDS, TWICE, Named, Work


def store(d: Tensor, c: Tensor | None, sums: Tensor) -> None:
    """Write D = C + sums, or the sums alone."""
    d.copy_(sums if c is None else sums + c.float())


def add(p: Any, sums: Tensor) -> None:
    """Write the D of a problem from its sums."""
    store(p.d, p.c, sums)


def write_heads(p: Any, sums: Tensor) -> None:
    """Write the left and the right part of each head. The columns between the two stay unchanged."""
    of_heads = sums.view(p.m, p.n // p.heads.columns, p.heads.columns)
    left, right = p.heads.of(p.d)
    left.copy_(of_heads[..., : p.heads.left])
    right.copy_(of_heads[..., p.heads.left :])


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Epilogue(Named):
    """A way to store a tile. Each way is one object."""

    source: str = "stored"
    """The epilogue's file in gemm/epilogue, unless a cluster splits k."""
    destination: str = "to_matrix"
    """The file (gemm/epilogue/<destination>.cuh) that computes the position of a panel in D."""
    gates: str | None = None
    """The file (gemm/epilogue/<gates>.cuh) that finds the columns of gate and up in a tile, if D is activated."""
    second_map: str = "map_whole_d"
    """The member for D's second map, if the work or the epilogue needs this map and B has no scales by row."""
    name: str = ""
    """A name for people, in place of D's type."""
    suffix: str = ""
    """A name for people, after the kind of work."""
    kernel: str = ""
    """The epilogue's part of a kernel's name."""
    by_tma: bool = True
    """True if tiles are copied to panels in shared memory, and TMA stores the panels to D."""
    output_bytes: int = 0
    """Bytes of an element of D; 0: the size of D's type."""
    skips_mid: bool = False
    """True if D has heads, with columns between their parts that are not written."""
    sums_blocks: bool = False
    """True if D has a number for each block of 128 columns, whichever tile has the block."""
    has_row_addresses: bool = False
    """True if each row is stored at its own address, perhaps in another GPU's memory."""
    write: Callable[[Any, Tensor], None] = add
    """Writes a problem's D from its FP32 sums, for one product: the definition of the epilogue."""
    work: Work | None = None
    """The only supported kind of work, with a BF16 D, no C and no split of k; None if several kinds are supported."""
    operands: tuple[tuple[Values, Any, Any], ...] = ((E4M3, PER_ROW, PER_BLOCK),)
    """The supported values of B and scales of A and B, if one kind of work is supported."""

    @cached_property
    def activates(self) -> bool:
        """Tell whether D is silu(gate) * up, in FP8 or in BF16."""
        return self.gates is not None

    @cached_property
    def gates_apart(self) -> bool:
        """Tell whether B has gate's rows first, gate and up are rounded to BF16, and FP8 scales cover 128 columns."""
        return self.gates in ("gates_apart", "activated")


TO_D = Epilogue()
"""D is a matrix, or one for each head or group."""
TO_HEADS = Epilogue(
    destination="to_heads",
    second_map="map_right_d",
    suffix=" skip mid",
    kernel="skip_head_mid",
    skips_mid=True,
    write=write_heads,
)
"""D has heads, each with columns between a left and a right part that are not written."""
BLOCK_SUMS = Epilogue(
    source="block_sums",
    destination="block_sums",
    name="block sums",
    by_tma=False,
    sums_blocks=True,
)
"""D has log(sum(exp)) of each 128 columns of a row; see gemm/softmax_piece.py."""
TO_ADDRESSES = Epilogue(
    source="store_rows",
    suffix=" to addresses",
    by_tma=False,
    has_row_addresses=True,
    work=ENDS,
    operands=((E4M3, PER_ROW, PER_BLOCK), (E4M3, PER_64, PER_BLOCK), (E2M1, PER_ROW, MX)),
)
"""Each row is stored at its own address."""
TO_ADDRESSES_IN_BF16 = replace(TO_ADDRESSES, operands=((BFLOAT16, None, None),))
"""`TO_ADDRESSES` for BF16 operands."""
SILU = Epilogue(
    source="silu", gates="gates_in_turn", name="silu", kernel="_silu", by_tma=False, output_bytes=1, work=ENDS
)
"""B has gate and up in turn, 8 rows each, and D is silu(gate) * up, cast to FP8 with a scale for 64 columns."""
SILU_OF_HALVES = replace(SILU, gates="gates_apart", name="silu of halves")
"""`SILU` for a B that has gate's rows first: scales for 128 columns, gate and up rounded to BF16."""
SILU_THEN_ROWS = Epilogue(
    source="silu_or_rows",
    gates="gates_apart",
    name="silu, then rows",
    suffix=" to addresses",
    by_tma=False,
    has_row_addresses=True,
    output_bytes=2,
    work=TWICE,
)
"""Two products in one kernel: SILU_OF_HALVES makes A of the second product, whose rows go TO_ADDRESSES."""
SILU_IN_TURN_THEN_ROWS = replace(
    SILU_THEN_ROWS, gates="gates_in_turn", name="silu in turn, then rows", operands=((E4M3, PER_64, PER_BLOCK),)
)
"""`SILU_THEN_ROWS` with SILU in the first product: A of the second product has scales for 64 columns."""
SILU_IN_BF16 = Epilogue(
    source="activated", gates="activated", name="silu", kernel="_silu", work=ENDS, operands=((BFLOAT16, None, None),)
)
"""Operands are BF16, B has gate's rows first, and D is silu(gate) * up in BF16, stored through panels."""


def combinations() -> list[tuple[Epilogue, Work, tuple[Values, Scales, Scales]]]:
    """List FP8 epilogues that are made for one kind of work: each with this kind, once for each of its operands."""
    all_of_them = TO_D, TO_HEADS, TO_ADDRESSES, SILU, SILU_OF_HALVES, SILU_THEN_ROWS, SILU_IN_TURN_THEN_ROWS
    return [(each, each.work, operands) for each in all_of_them if each.work is not None for operands in each.operands]
