"""The parameters of each kernel: a struct whose members are stated only in the kernel's source.

`Params.of_source` reads the members from the source. `pack` makes the bytes that a launch passes to the kernel.
`offset` says where a record writes a new value. `layout_header` makes a header of assertions: the compiler must lay
the struct out as `pack` does. The simulator passes its kernels the bytes of `pack`, too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from .jit.tensor_map import MAP_ALIGNMENT, MAP_BYTES
from .sources import cuda_sources


class Kind(Enum):
    """The kind of a field: its size in bytes, its alignment, and its letter in Python's `struct`."""

    MAP = (MAP_BYTES, MAP_ALIGNMENT, "")
    POINTER = (8, 8, "Q")
    UINT64 = (8, 8, "Q")
    UINT32 = (4, 4, "I")
    FLOAT32 = (4, 4, "f")

    def __init__(self, size: int, alignment: int, letter: str) -> None:
        self.size, self.alignment, self.format = size, alignment, letter


class Field(NamedTuple):
    """A member of a struct: one number or map, or an array of `length`."""

    name: str
    kind: Kind
    length: int = 1
    of_base: int = 1
    """Alignment of a nested struct, for its first member and for the member behind it (the nested struct is padded)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the member."""
        return self.kind.size * self.length

    @property
    def is_bytes(self) -> bool:
        """Tell whether the member's value is bytes (a map or an array), not a number."""
        return self.kind is Kind.MAP or self.length > 1


_KINDS = {
    "ptx::TensorMap": Kind.MAP,
    "*": Kind.POINTER,
    "uint64_t": Kind.UINT64,
    "int64_t": Kind.UINT64,
    "uint32_t": Kind.UINT32,
    "int32_t": Kind.UINT32,
    "float": Kind.FLOAT32,
}
_MEMBER = re.compile(r" ?(\*?)(\w*)(?:\[(\w+)\])?")
Names = Mapping[str, str | int]
"""Values of names from `config.cuh`: a file for each macro that a source includes, a number for an array's length."""


def _found(struct_name: str, source: str, names: Names) -> tuple[str, str, str]:
    """Find a struct in a source or its included files. Return the file's text, the struct's bases and its body."""
    texts = [source]
    for text in texts:
        _, begin, rest = text.partition(f"\nstruct {struct_name} ")
        if begin:
            bases, _, rest = rest.partition("{")
            return text, bases.strip(" :"), rest.partition("};" if rest.startswith("}") else "\n};")[0]
        words = (line.split(maxsplit=1)[0] for line in text.split("#include ")[1:])
        included = (cuda_sources().get(str(names.get(word, word.strip('"')))) for word in words)
        texts += [each for each in included if each is not None and each not in texts]
    raise ValueError(f"{struct_name}: expected a struct of this name in the kernel's source")


def _members(struct_name: str, source: str, names: Names, of_union: str, prefix: str = "") -> Iterator[Field]:
    """Read the members of a struct in order, including the members of its bases and of structs inside it.

    In a struct, all members are ahead of its functions. `of_union` lists the members to read from unions.
    """
    source, bases, body = _found(struct_name, source, names)
    body, _, _ = " ".join(line.partition("//")[0] for line in body.split("\n")).partition("DEVICE ")
    statements, of_base = bases.split(","), 1
    for i, part in enumerate(re.split(r"union {(.*?)};", body)):
        each_of = part.split(";")
        named = [each for each in each_of if {*re.findall(r"\w+", each)} & {*of_union.split()}] if i % 2 else each_of
        statements += named or [part]
    for words in map(str.split, statements):
        statement = " ".join(words)
        type_name, _, declared = statement.removeprefix("const ").replace("* ", " *").partition(" ")
        for each in map(_MEMBER.fullmatch, declared.split(",") if statement else []):
            kind = None if each is None else _KINDS.get("*" if each[1] else type_name)
            if each is None or (kind is None and each[3] is not None):
                raise ValueError(f"{struct_name}: expected members, got {statement!r}")
            if kind is not None:
                yield Field(prefix + each[2], kind, int(names.get(each[3], each[3] or 1)), of_base)
                of_base = 1
                continue
            first, *others = _members(type_name, source, names, of_union, f"{prefix}{each[2]}." if each[2] else prefix)
            alignment = max(field.kind.alignment for field in (first, *others))
            yield first._replace(of_base=max(of_base, alignment))
            yield from others
            of_base = alignment


class Params:
    """A kernel's one parameter: a struct whose members are these fields, in order."""

    def __init__(self, struct_name: str, *fields: Field) -> None:
        self.struct_name, self.fields = struct_name, fields
        self._offsets: dict[str, int] = {}
        at, alignment, whole = 0, 1, "<"
        for field in fields:
            if not field.name.replace(".", "").isidentifier():
                raise ValueError(f"{struct_name}: expected names of members, got {field.name!r}")
            before = -at % max(field.of_base, field.kind.alignment)
            alignment = max(alignment, field.kind.alignment)
            self._offsets[field.name] = at + before
            at += before + field.num_bytes
            whole += f"{before}x" + (f"{field.num_bytes}s" if field.is_bytes else field.kind.format)
        self.size = at + -at % alignment
        """The value of `sizeof`."""
        # Each launch packs all its parameters, so one call packs them, which saves host time.
        self._whole = struct.Struct(f"{whole}{self.size - at}x")
        self._members = [field.name for field in fields]
        self.pointers = [field.name for field in fields if field.kind is Kind.POINTER]
        self._bytes_of = {field.name: field.num_bytes for field in fields if field.is_bytes}
        self._formats = {field.name: field.kind.format or Kind.POINTER.format for field in fields}

    @classmethod
    def of_source(cls, source: str, struct_name: str, names: Names | None = None, of_union: str = "") -> Params:
        """Read a struct from a source or its included files. `of_union` lists the members to read from unions."""
        return cls(struct_name, *_members(struct_name, source, names or {}, of_union))

    @property
    def header_name(self) -> str:
        """Name by which a source includes `layout_header`: "cast_params_layout.cuh" for `CastParams`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.struct_name).lower() + "_layout.cuh"

    def offset(self, name: str) -> int:
        """Return the byte at which a member begins."""
        return self._offsets[name]

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Return the struct's bytes. A map's value is bytes, an array's is bytes or a tuple, any other is a number.

        The value of an array may be shorter than the array.
        """
        if values.keys() != self._offsets.keys():
            raise ValueError(f"{self.struct_name}: expected values of {sorted(self._offsets)}, got {sorted(values)}")
        for name, most in self._bytes_of.items():
            given = values[name]
            if isinstance(given, tuple):
                given = struct.pack(f"<{len(given)}{self._formats[name]}", *given)
                values = {**values, name: given}
            if isinstance(given, bytes) and len(given) > most:
                raise ValueError(f"{name}: expected at most {most} bytes, got {len(given)}")
        return self._whole.pack(*[values[name] for name in self._members])

    def layout_header(self) -> str:
        """Make a header of assertions that the compiler lays the struct out as `pack` does."""
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
