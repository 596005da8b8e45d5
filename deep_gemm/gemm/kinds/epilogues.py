"""Epilogues: how a tile's sums become D, and where they go. Each is a value; gemm/epilogue has their files."""

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
    """Write the left and the right part of each head. The columns between them stay as they are."""
    of_heads = sums.view(p.m, p.n // p.heads.columns, p.heads.columns)
    left, right = p.heads.of(p.d)
    left.copy_(of_heads[..., : p.heads.left])
    right.copy_(of_heads[..., p.heads.left :])


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Epilogue(Named):
    """A way to store a tile. There is one object of each."""

    source: str = "stored"
    """Its file in gemm/epilogue, unless a cluster splits k."""
    destination: str = "to_matrix"
    """The file that says where in D a panel lies."""
    gates: str | None = None
    """The file that says how gate and up lie in a tile, if D is their activation (gemm/epilogue/<gates>.cuh)."""
    second_map: str = "map_whole_d"
    """The second map of D that a product without row scales of B has, if its work or its epilogue has two."""
    name: str = ""
    """For people, in place of D's type."""
    suffix: str = ""
    """For people, behind the kind of work."""
    kernel: str = ""
    """Its part of a kernel's name."""
    by_tma: bool = True
    """Tiles go through panels in shared memory, and by a tensor map to D."""
    output_bytes: int = 0
    """Bytes of an element of D; 0 if D's type says it."""
    skips_mid: bool = False
    """D has heads, with columns between their parts that are not written."""
    has_row_addresses: bool = False
    """Each row goes to an address of its own, perhaps in another GPU's memory."""
    write: Callable[[Any, Tensor], None] = add
    """Writes the D of a problem of one product, from its FP32 sums: the definition."""
    work: Work | None = None
    """The only kind of work that it is made for, with a BF16 D, no C and whole k; None: it goes with several."""
    operands: tuple[tuple[Values, Any, Any], ...] = ((E4M3, PER_ROW, PER_BLOCK),)
    """Values of B and scales of A and B that it is made for, if it is made for one kind of work."""

    @cached_property
    def activates(self) -> bool:
        """D is silu(gate) * up, in FP8 or in BF16."""
        return self.gates is not None

    @cached_property
    def gates_apart(self) -> bool:
        """B has gate's rows first, gate and up are rounded to BF16, and a scale of FP8 is for 128 columns."""
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
TO_ADDRESSES = Epilogue(
    source="store_rows",
    suffix=" to addresses",
    by_tma=False,
    has_row_addresses=True,
    work=ENDS,
    operands=((E4M3, PER_ROW, PER_BLOCK), (E4M3, PER_64, PER_BLOCK), (E2M1, PER_ROW, MX)),
)
"""Each row goes to an address of its own."""
TO_ADDRESSES_IN_BF16 = replace(TO_ADDRESSES, operands=((BFLOAT16, None, None),))
"""The same of BF16 operands."""
SILU = Epilogue(
    source="silu", gates="gates_in_turn", name="silu", kernel="_silu", by_tma=False, output_bytes=1, work=ENDS
)
"""B is gate and up in turn, 8 rows each, and D is silu(gate) * up, cast to FP8 with a scale for 64 columns."""
SILU_OF_HALVES = replace(SILU, gates="gates_apart", name="silu of halves")
"""The same of a B that has gate's rows first: a scale is for 128 columns, and gate and up are rounded to BF16."""
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
"""Of two products by one kernel: SILU_OF_HALVES makes A of the second, whose rows go TO_ADDRESSES."""
SILU_IN_BF16 = Epilogue(
    source="activated", gates="activated", name="silu", kernel="_silu", work=ENDS, operands=((BFLOAT16, None, None),)
)
"""BF16 operands, a B that has gate's rows first, and D is silu(gate) * up in BF16: tiles go through panels to D."""


def combinations() -> list[tuple[Epilogue, Work, tuple[Values, Scales, Scales]]]:
    """List epilogues of FP8 that are made for one kind of work, with it and each of their operands."""
    all_of_them = TO_D, TO_HEADS, TO_ADDRESSES, SILU, SILU_OF_HALVES, SILU_THEN_ROWS
    return [(each, each.work, operands) for each in all_of_them if each.work is not None for operands in each.operands]
