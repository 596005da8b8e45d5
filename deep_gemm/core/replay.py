"""Replay records: the definition of what a record means, and the way where replay.c was not built.

A replay looks at nothing but sizes, strides, types, devices and addresses, keeps no tensor, and never reads elements.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .jit import driver
from .jit.tensor_map import MAP_BYTES, ElementType, TensorMap
from .record import Address, From, Launch, Op, Record, Relation

MAY_BE_NEGATED = torch.float16, torch.float32, torch.float64
"""Types of tensors that may be views of other numbers: imaginary parts of conjugates."""
ELEMENTS = {ElementType.UINT8: 0, ElementType.FLOAT32: 7, ElementType.BFLOAT16: 9}
"""CUtensorMapDataType of cuda.h."""
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle of cuda.h, by bytes."""
_WORDS = {4: struct.Struct("<I"), 8: struct.Struct("<Q")}


KNOWN = {Tensor, torch.nn.Parameter}
"""Types of tensors that records know."""
Key = Any
"""All of a call's tensors that is not free: bytes, or a tuple. None for tensors that no record knows."""
Free = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Dimensions of each tensor whose sizes, and whose strides, may be others."""
MOST_RECORDS, MOST_ALIKE = 4096, 16


FUNCTIONS = "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuCtxGetDevice"
"""The driver's functions that replay.c calls."""


@cache
def native() -> Any:
    """Give replay.c's module, ready for this torch and the driver; None if one of them is not there."""
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is None or not torch.cuda.is_available():
        return None
    try:
        from . import _replay
    except ImportError:
        return None
    library = ctypes.CDLL("libcuda.so.1")
    pointers = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS]
    _replay.setup(table, *pointers, Tensor, torch.nn.Parameter, torch.empty_strided, torch.is_grad_enabled)
    return _replay


class Records:
    """Records of a function's calls that say the same besides their tensors. The oldest go if there are too many."""

    def __init__(self, free: Free, native: Any = None) -> None:
        """`native` is replay.c's module, or None to replay in Python."""
        self._free, self._native = free, native
        self._bits = bytes(sum(1 << i for i in each) for of_tensor in free for each in of_tensor)
        self._kept: dict[Key, list[Any]] = {}

    def recall(self, tensors: tuple[Any, ...]) -> tuple[Key, Any]:
        """Replay the first record that serves these tensors: its results, or NotImplemented. Give the key too."""
        if self._native is not None:
            found: tuple[Key, Any] = self._native.recall(self._kept, self._bits, tensors)
            return found
        key = key_of(tensors, self._free)
        for record in self._kept.get(key, ()):
            values = numbers_of(record, tensors)
            if values is not None:
                return key, replay(record, tensors, values, tensors[0].device)
        return key, NotImplemented

    def keep(self, key: Key, record: Record, place: torch.device) -> None:
        """Keep a record for calls with this key."""
        packed_one = record if self._native is None else packed(self._native, record, place)
        if key not in self._kept and len(self._kept) >= MOST_RECORDS:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = [packed_one, *self._kept.get(key, [])[: MOST_ALIKE - 1]]  # others may be reading the old list


def key_of(tensors: Sequence[Any], free: Free) -> Key:
    """Give all that is not free of tensors that records may know; None for others."""
    found: list[Any] = []
    for x, (sizes, strides) in zip(tensors, free, strict=False):
        if type(x) not in KNOWN or x.is_meta or x.layout is not torch.strided:
            return None
        if (torch.is_grad_enabled() and x.requires_grad) or x.is_neg():
            return None
        fixed = (
            (-1 if i in sizes else n, -1 if i in strides else s)
            for i, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
        )
        found.append((x.dtype, x.get_device(), *fixed))
    return tuple(found)


def numbers_of(record: Record, tensors: Sequence[Tensor]) -> list[int] | None:
    """Give the record's numbers for tensors that it serves; None if it does not serve them."""
    if len(tensors) != len(record.given):
        return None
    for x, given in zip(tensors, record.given, strict=True):
        if x.dtype != given.dtype or x.get_device() != record.device or x.data_ptr() % given.alignment:
            return None
        for mine, its in ((given.sizes, x.shape), (given.strides, x.stride())):
            if len(mine) != len(its) or any(a not in (-1, b) for a, b in zip(mine, its, strict=True)):
                return None
    values: list[int] = []
    for op, a, b in record.steps:
        if op is Op.CONSTANT:
            value = a
        elif op is Op.SIZE:
            value = tensors[a].shape[b]
        elif op is Op.STRIDE:
            value = tensors[a].stride(b)
        else:
            value = _computed(op, values[a], values[b])
        values.append(value)
    for relation, a, b, holds in record.conditions:
        outcome = values[a] < values[b] if relation is Relation.BELOW else values[a] == values[b]
        if outcome != holds:
            return None
    for output, other, span, span_of_other, or_same in record.apart:
        first, second = tensors[output].data_ptr(), tensors[other].data_ptr()
        if first == second and or_same:
            continue
        if first < second + values[span_of_other] and second < first + values[span]:
            return None
    return values


def _computed(op: Op, a: int, b: int) -> int:
    if op is Op.ADD:
        return a + b
    if op is Op.SUBTRACT:
        return a - b
    if op is Op.MULTIPLY:
        return a * b
    if op is Op.DIVIDE:
        return a // b
    if op is Op.REMAINDER:
        return a % b
    return min(a, b) if op is Op.LEAST else max(a, b)


def replay(record: Record, tensors: Sequence[Tensor], values: Sequence[int], place: torch.device) -> list[Tensor]:
    """Launch what a record says for tensors that it serves, and give the tensors that it makes for the caller."""
    made = [
        torch.empty_strided([values[i] for i in sizes], [values[i] for i in strides], dtype=dtype, device=place)
        for sizes, strides, dtype in record.made
    ]
    scratch = torch.empty(values[record.scratch], dtype=torch.uint8, device=place) if values[record.scratch] else None
    beginnings = {
        From.TENSOR: [x.data_ptr() for x in tensors],
        From.RESULT: [x.data_ptr() for x in made],
        From.SCRATCH: [0 if scratch is None else scratch.data_ptr()],
    }

    def at(address: Address) -> int:
        return beginnings[address.base][address.index] + values[address.behind]

    for launch in record.launches:
        _start(launch, values, at, record.device)
    return made


def _start(launch: Launch, values: Sequence[int], at: Any, device: int) -> None:
    params, launcher = bytearray(launch.params), launch.kernel
    for place, size, number, address in launch.words:
        _WORDS[size].pack_into(params, place, values[number] if address is None else at(address))
    for place, address, element, swizzle, *numbers in launch.maps:
        sizes, strides, box = (tuple(values[i] for i in each) for each in numbers)
        begins = at(address)
        encoded = launcher.encode(TensorMap(ElementType(element), sizes, strides, box, swizzle), begins, begins)
        params[place : place + MAP_BYTES] = encoded
    start(launcher, bytes(params), values[launch.grid], device)


def start(launcher: driver.Launcher, params: bytes, grid: int, device: int) -> None:
    """Launch with these parameters on the current stream of the current device, which is `device`."""
    with launcher.lock:
        launcher.hold(None, params, grid)
        stream = launcher.current_stream(device)
        if stream != launcher.stream:
            launcher.set_stream(stream)
        (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
        if status != launcher.success:
            launcher.start_again(status, device)


def packed(native: Any, record: Record, place: torch.device) -> Any:
    """Pack a record for replay.c, whose module is `native`."""

    @cache
    def facts(dtype: torch.dtype) -> tuple[int, ...]:
        found: tuple[int, ...] = native.facts(torch.empty(0, dtype=dtype, device=place))
        return found

    given = tuple(
        (*facts(each.dtype)[2:], int(each.dtype in MAY_BE_NEGATED), each.sizes, each.strides, each.alignment)
        for each in record.given
    )
    made = tuple((sizes, strides, {"dtype": dtype, "device": place}) for sizes, strides, dtype in record.made)
    scratch = record.scratch, {"dtype": torch.uint8, "device": place}
    launches = tuple(map(_packed, record.launches))
    kept = [launch.kernel for launch in record.launches]
    device = facts(torch.uint8)[:2]
    steps, conditions = (tuple(map(tuple, each)) for each in (record.steps, record.conditions))
    return native.Record(device, given, steps, conditions, record.apart, made, scratch, launches, kept)


def _packed(launch: Launch) -> tuple[Any, ...]:
    of = launch.kernel
    maps = tuple(
        (each.at, tuple(each.address), ELEMENTS[ElementType(each.element)], SWIZZLES[each.swizzle], *each[4:])
        for each in launch.maps
    )
    how = int(of.function), of.threads, of.kernel.shared_bytes, of.cluster, int(of.is_dependent)
    return *how, launch.grid, launch.params, launch.words, maps
