"""Encodes a kernel's arguments as bytes: numbers, pointers, tensor maps, and structs of these."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from deep_gemm.core.check.layout import ADDRESS_ALIGNMENT
from deep_gemm.core.jit.tensor_map import MAP_ALIGNMENT, ElementType, TensorMap

_TENSOR_MAP_MAGIC = 0x544D4150


@dataclass(frozen=True)
class Pointer:
    """The address of a buffer, or of a byte in it; a null pointer if `buffer` is None."""

    buffer: str | None
    byte_offset: int = 0


@dataclass(frozen=True)
class Map:
    """A tensor map over a buffer."""

    buffer: str
    spec: TensorMap
    byte_offset: int = 0


@dataclass(frozen=True)
class U64:
    """A 64-bit integer; a plain int has 32 bits."""

    value: int


class Struct:
    """A struct parameter: its fields in order, with C++'s layout."""

    def __init__(self, *fields: Argument) -> None:
        self.fields = fields


Argument = int | float | bytes | U64 | Pointer | Map | Struct


def encode(argument: Argument, addresses: Mapping[str, int]) -> bytes:
    """Return the bytes of one argument; `addresses` has the start of each buffer."""
    return _encode(argument, addresses)[0]


def _encode(argument: Argument, addresses: Mapping[str, int]) -> tuple[bytes, int]:
    """Return the bytes and the alignment."""
    if isinstance(argument, bytes):
        return argument, MAP_ALIGNMENT
    if isinstance(argument, Struct):
        data, widest = b"", 1
        for part in argument.fields:
            encoded, alignment = _encode(part, addresses)
            data += b"\0" * (-len(data) % alignment) + encoded
            widest = max(widest, alignment)
        return data + b"\0" * (-len(data) % widest), widest
    if isinstance(argument, Map):
        tensor = addresses[argument.buffer]
        return encode_tensor_map(argument.spec, tensor + argument.byte_offset, tensor), 64
    if isinstance(argument, Pointer):
        base = 0 if argument.buffer is None else addresses[argument.buffer]
        return struct.pack("<Q", base + argument.byte_offset), 8
    if isinstance(argument, U64):
        return struct.pack("<Q", argument.value), 8
    if isinstance(argument, float):
        return struct.pack("<f", argument), 4
    return struct.pack("<i" if argument < 0 else "<I", argument), 4


def encode_tensor_map(spec: TensorMap, address: int, tensor: int) -> bytes:
    """Return the bytes of `ptx::TensorMap` (host/ptx/tma.cuh). TMA may only access the buffer at `tensor`."""
    if reason := spec.why_illegal():
        raise ValueError(f"tensor_map: {reason}")
    if address % ADDRESS_ALIGNMENT:
        raise ValueError(f"tensor_map: expected an address that is a multiple of 16, got {address:#x}")
    rank = len(spec.sizes)
    dims = (*spec.sizes, *(1,) * (5 - rank))
    strides = (*spec.strides, *(0,) * (5 - rank))
    box = (*spec.box, *(1,) * (5 - rank))
    packed = struct.pack(
        "<Q5Q4Q5H4BxxI4xQ",
        address,
        *dims,
        *strides,
        *box,
        rank,
        spec.element.value,
        spec.swizzle,
        int(spec.element is ElementType.FLOAT32),
        _TENSOR_MAP_MAGIC,
        tensor,
    )
    return packed + b"\0" * (128 - len(packed))
