"""The parameters of each kernel, stated once.

A list is the struct of the same name in a source: it gives the bytes that a launch hands over (`pack`), the places
that a plan writes anew (`word`, `offset`), and the header by which the kernel's source asserts that the compiler lays
its struct out the same way (`layout_header`). The simulator runs the very bytes that are packed here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from .jit.tensor_map import MAP_ALIGNMENT, MAP_BYTES


class Kind(Enum):
    """The kind of a field: how many bytes, to what its place is aligned, and how `struct` packs it."""

    MAP = (MAP_BYTES, MAP_ALIGNMENT, "")
    POINTER = (8, 8, "Q")
    UINT64 = (8, 8, "Q")
    UINT32 = (4, 4, "I")
    FLOAT32 = (4, 4, "f")

    @property
    def size(self) -> int:
        """Bytes of a field."""
        return int(self.value[0])

    @property
    def alignment(self) -> int:
        """The number that a member's place is a multiple of."""
        return int(self.value[1])

    @property
    def format(self) -> str:
        """`struct`'s letter."""
        return str(self.value[2])


class Field(NamedTuple):
    """A member of a struct; `length` of them in a row."""

    name: str
    kind: Kind
    length: int = 1
    of_base: int = 1
    """Alignment of the first member that a struct adds to its base: the base's own, of which its size is a multiple."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.kind.size * self.length

    @property
    def is_bytes(self) -> bool:
        """Tell whether its value is bytes, a map or an array, instead of a number."""
        return self.kind is Kind.MAP or self.length > 1


class Run(NamedTuple):
    """Members beside each other, written by one call of `struct`."""

    pack_into: Callable[..., None]
    at: int
    """Byte of the first."""
    which: slice
    """The place of its values among those of all members that a patch writes."""


Patch = tuple[Run, ...]


def fields(kind: Kind, *names: str) -> tuple[Field, ...]:
    """Give members of one kind, which follow each other."""
    return tuple(Field(name, kind) for name in names)


def head_parts(of_base: int) -> tuple[Field, ...]:
    """`HeadParts` of gemm/head_parts.cuh, behind a base of this alignment."""
    more = (Field(f"heads.{name}", Kind.UINT32) for name in ("mid", "columns", "multiplier", "shift"))
    return Field("heads.left", Kind.UINT32, of_base=of_base), *more


class Params:
    """A kernel's one parameter: a struct whose members are these fields, in order."""

    def __init__(self, struct_name: str, *fields: Field) -> None:
        self.struct_name, self.fields = struct_name, fields
        self._offsets: dict[str, int] = {}
        self._patches: dict[tuple[str, ...], Patch] = {}
        at, alignment, whole = 0, 1, "<"
        for field in fields:
            if not field.name.replace(".", "").isidentifier():
                raise ValueError(f"{struct_name}: expected names of members, got {field.name!r}")
            before = -at % max(field.of_base, field.kind.alignment)
            alignment = max(alignment, field.kind.alignment)
            self._offsets[field.name] = at + before
            at += before + field.num_bytes
            whole += f"{before}x" + (f"{field.num_bytes}s" if field.is_bytes else field.kind.format)
        self.end = at
        """The byte at which the last member ends."""
        self.size = at + -at % alignment
        """The size that `sizeof` gives."""
        # A launch packs its parameters, so all of them are packed by one call.
        self._whole = struct.Struct(f"{whole}{self.size - at}x")
        self._members = [field.name for field in fields]
        self._bytes_of = {field.name: field.num_bytes for field in fields if field.is_bytes}
        self._formats = {field.name: field.kind.format or Kind.POINTER.format for field in fields}

    @property
    def header_name(self) -> str:
        """Name by which a source includes `layout_header`: "cast_params_layout.cuh" for `CastParams`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.struct_name).lower() + "_layout.cuh"

    def offset(self, name: str) -> int:
        """Byte of a member."""
        return self._offsets[name]

    def word(self, name: str) -> int:
        """Place of a member among 64-bit words: a pointer, or a map's first word, which is its address."""
        index, rest = divmod(self._offsets[name], 8)
        if rest:
            raise ValueError(f"{name}: expected a member at a multiple of 8 bytes, got byte {self._offsets[name]}")
        return index

    def pack(self, values: Mapping[str, float | bytes]) -> bytes:
        """Give the struct's bytes. Every member has a value: a number, or bytes for a map or an array."""
        if values.keys() != self._offsets.keys():
            raise ValueError(f"{self.struct_name}: expected values of {sorted(self._offsets)}, got {sorted(values)}")
        for name, most in self._bytes_of.items():
            given = values[name]
            if isinstance(given, bytes) and len(given) > most:
                raise ValueError(f"{name}: expected at most {most} bytes, got {len(given)}")
        return self._whole.pack(*[values[name] for name in self._members])

    def patch(self, names: Sequence[str]) -> Patch:
        """Prepare to write these members anew: numbers, of an array its first, in the struct's order.

        Neighbours go by one call. Of a map the address is written, where launchers say that it is the first word.
        """
        if (made := self._patches.get(tuple(names))) is not None:
            return made
        unknown = [name for name in names if not self._formats.get(name)]
        if unknown or [*names] != [name for name in self._members if name in names]:
            raise ValueError(f"{self.struct_name}: expected numbers among its members, in their order, got {[*names]}")
        runs: list[Run] = []
        first, form = 0, "<"
        for index, name in enumerate(names, start=1):
            form += self._formats[name]
            at = self._offsets[names[first]]
            if index == len(names) or self._offsets[names[index]] != at + struct.calcsize(form):
                runs.append(Run(struct.Struct(form).pack_into, at, slice(first, index)))
                first, form = index, "<"
        return self._patches.setdefault(tuple(names), tuple(runs))

    def layout_header(self) -> str:
        """Text by which a source asserts that the compiler lays the struct out as `pack` does."""
        asserts = [
            f'static_assert(OFFSET_OF({self.struct_name}, {name}) == {at}, "{self.struct_name}.{name}: '
            f'core/params.py has it at byte {at}");'
            for name, at in self._offsets.items()
        ]
        size = (
            f'static_assert(sizeof({self.struct_name}) == {self.size}, "{self.struct_name}: core/params.py has '
            f'{self.size} bytes");'
        )
        return "\n".join(["#pragma once", *asserts, size, ""])
