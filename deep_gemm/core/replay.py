"""Replay records. This code defines the meaning of a record, and runs where replay.c was not built.

A replay reads only sizes, strides, types, devices and addresses of tensors. It keeps no tensor and reads no element.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from operator import mul
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .jit import driver
from .jit.tensor_map import MAP_BYTES, ElementType, TensorMap
from .record import From, Launch, Op, Record
from .settings import settings

MAY_BE_NEGATED = torch.float16, torch.float32, torch.float64
"""Types whose tensors may store their values negated, as the imaginary part of a conjugate does."""
ELEMENTS = {ElementType.UINT8: 0, ElementType.FLOAT32: 7, ElementType.BFLOAT16: 9}
"""Values of CUtensorMapDataType in cuda.h."""
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Values of CUtensorMapSwizzle in cuda.h, by bytes."""
_WORDS = {4: struct.Struct("<I"), 8: struct.Struct("<Q")}
KNOWN = {Tensor, torch.nn.Parameter}
"""Tensor classes that records handle."""
Key = Any
"""The fixed sizes and strides, the types and the last four address bits of a call's tensors: bytes, or a tuple.

None for tensors that records do not handle.
"""
Free = tuple[Sequence[int], Sequence[int]]
"""For one tensor: the dimensions whose sizes may differ between calls, and the dimensions whose strides may."""
FIXED: Free = (), ()
SOME_ADDRESS = 1 << 40
"""A made-up address for maps that are encoded before their real address is known."""
MOST_RECORDS, MOST_ALIKE = 4096, 64
_PUTTING = Lock()
FUNCTIONS = "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuCtxGetDevice"
"""The driver's functions that replay.c calls."""


def native() -> Any:
    """Return replay.c's module, set up for this torch and the driver; None to replay in Python."""
    return _native()[0]


def which() -> str:
    """Return "replay.c", or "Python" with the reason why replay.c does not run."""
    return _native()[1]


@cache
def _native() -> tuple[Any, str]:
    if settings().disable_native_replay:
        return None, "Python: DG_DISABLE_NATIVE_REPLAY is set"
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        return None, f"Python: torch {torch.__version__} has no __dlpack_c_exchange_api__"
    try:
        module = import_module("._replay", __package__)
        digest = zlib.crc32(Path(__file__).with_name("replay.c").read_bytes())
        if getattr(module, "SOURCE_DIGEST", digest) != digest:
            return None, "Python: replay.c was built before it changed; install the package again"
        if not torch.cuda.is_available():
            return None, "Python: torch finds no GPU"
        library = ctypes.CDLL("libcuda.so.1")
    except ModuleNotFoundError:
        return None, "Python: replay.c was not built when the package was installed"
    except (ImportError, OSError) as error:
        return None, f"Python: {error}"
    pointers = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS]
    from_torch = Tensor, torch.nn.Parameter, torch.empty_strided, torch.is_grad_enabled
    module.setup(table, *pointers, *from_torch, driver.failed)
    return module, "replay.c"


class Records:
    """Records of a function's calls that differ only in their tensors. If they are too many, the oldest are dropped."""

    def __init__(self, free: Sequence[Free], native: Any = None) -> None:
        """`native` is replay.c's module, or None to replay in Python."""
        self._free, self._native = free, native
        self._bits = bits_of(tuple(free))
        self._kept: dict[Key, list[Any]] = {}
        self._ready: dict[Key, tuple[Record, Sequence[int], Sequence[Ready], Sequence[int]]] = {}
        self.recall: Callable[..., Any] = self._recall
        if native is not None:
            self.recall = partial(native.recall, self._kept, self._bits)

    def __len__(self) -> int:
        """Count records."""
        return sum(map(len, self._kept.values()))

    def name(self, tensors: tuple[Any, ...], stated: tuple[int, ...] = ()) -> Key:
        """Return the key of the records that may serve a call."""
        if self._native is not None:
            return self._native.name(self._bits, tensors, stated)
        exact = exact_key_of(tensors, stated)
        return None if exact is None else (key_of(exact[1:], self._free), len(stated))

    def _recall(self, tensors: tuple[Any, ...], stated: tuple[int, ...] = ()) -> Any:
        """Replay the first record that serves these tensors. Return its results, or NotImplemented if none serves.

        `stated`: integers that the caller states; they may differ between calls.
        """
        exact = exact_key_of(tensors, stated)
        ready = None if exact is None else self._ready.get(exact) or self._find(exact, tensors, stated)
        if ready is None or not are_apart(tensors, ready[0].outputs, ready[3]):
            return NotImplemented
        return replay(ready[0], tensors, ready[1], tensors[0].device, ready[2])

    def _find(self, exact: Key, tensors: Sequence[Tensor], stated: tuple[int, ...]) -> Any:
        """Find the first record that serves tensors of this layout, and prepare its launches for the layout."""
        for record in self._kept.get((key_of(exact[1:], self._free), len(stated)), ()):
            values = computed(record, tensors, stated)  # the key has checked the fixed part of the layout
            if values is not None:
                launches = [Ready.of(launch, values) for launch in record.launches]
                found = record, values, launches, spans_of(exact) if record.outputs else []
                put(self._ready, exact, found, MOST_RECORDS)
                return found
        return None

    def keep(self, key: Key, record: Record, place: torch.device) -> None:
        """Keep a record for calls with this key."""
        packed_one = record if self._native is None else packed(self._native, record, place)
        alike = [packed_one, *self._kept.get(key, [])[: MOST_ALIKE - 1]]  # other threads may be reading the old list
        put(self._kept, key, alike, MOST_RECORDS)


@cache
def bits_of(free: tuple[Free, ...]) -> bytes:
    """Pack each tensor's free sizes into the bits of one byte, and its free strides into another, for replay.c."""
    return bytes(sum(1 << i for i in each) for of_tensor in free for each in of_tensor)


def put(kept: dict[Key, Any], key: Key, value: Any, most: int) -> None:
    """Store a value, and drop the oldest value if `kept` has `most`. Several threads may call this at once."""
    with _PUTTING:
        if key not in kept and len(kept) >= most:
            del kept[next(iter(kept))]
        kept[key] = value


def exact_key_of(tensors: Sequence[Any], stated: Sequence[int] = ()) -> Key:
    """Return the layout of tensors, with all sizes and strides; None for tensors that records do not handle."""
    found: list[Any] = [tuple(stated)]
    if any(type(x) is not int for x in stated):
        return None
    may_want_gradient = torch.is_grad_enabled()
    for x in tensors:
        dtype = x.dtype
        if type(x) not in KNOWN or (may_want_gradient and x.requires_grad) or (dtype in MAY_BE_NEGATED and x.is_neg()):
            return None
        found.append((dtype, x.get_device(), x.data_ptr() % 16, x.shape, x.stride()))
    return tuple(found)


def key_of(exact: Key, free: Sequence[Free]) -> Key:
    """Return the part of a layout that is the same in all calls of a record."""
    return tuple(
        (dtype, device, behind, *_but(sizes, free_sizes), *_but(strides, free_strides))
        for (dtype, device, behind, sizes, strides), (free_sizes, free_strides) in zip(exact, free, strict=False)
    )


def _but(numbers: Sequence[int], free: Sequence[int]) -> Sequence[int]:
    return [-1 if i in free else number for i, number in enumerate(numbers)] if free else numbers


def computed(record: Record, tensors: Sequence[Tensor], stated: Sequence[int] = ()) -> list[int] | None:
    """Compute a record's numbers for tensors of its layout. Return None if a condition of the record fails."""
    values, read = [*record.constants], record.read
    for place, of, dimension in read[Op.SIZE]:
        values[place] = tensors[of].shape[dimension]
    for place, of, dimension in read[Op.STRIDE]:
        values[place] = tensors[of].stride(dimension)
    for place, which, _ in read[Op.STATED]:
        values[place] = stated[which]
    for numbers, below, i, j, holds in record.program:  # the first conditions test rows: most records fail there
        for place, compute, a, b in numbers:
            values[place] = compute(values[a], values[b])
        if ((values[i] < values[j]) if below else (values[i] == values[j])) != holds:
            return None
    return values


def spans_of(exact: Key) -> list[int]:
    """Return the bytes from each tensor's first element to the end of its last element."""
    _, *tensors = exact
    return [
        (sum(map(mul, sizes, strides)) - sum(strides) + 1) * dtype.itemsize for dtype, _, _, sizes, strides in tensors
    ]


def are_apart(tensors: Sequence[Tensor], outputs: int, spans: Sequence[int] = ()) -> bool:
    """Tell whether the last `outputs` tensors share no memory with any other tensor. `spans`: bytes of each tensor."""
    if not outputs:
        return True
    if not spans:
        exact = exact_key_of(tensors)
        if exact is None:  # no record serves such tensors
            return False
        spans = spans_of(exact)
    at = [x.data_ptr() for x in tensors]
    for i in range(len(at) - outputs, len(at)):
        first, end = at[i], at[i] + spans[i]
        if any(first < at[j] + spans[j] and at[j] < end for j in range(i)):
            return False
    return True


class Ready(NamedTuple):
    """A launch prepared for tensors of one layout. Its parameters lack only the addresses."""

    launcher: Any
    params: bytes
    grid: int
    words: Sequence[tuple[int, From, int, int]]
    """For each address: its index among 64-bit words, its base and tensor, and its bytes behind the tensor's start."""
    maps: Sequence[tuple[int, TensorMap, From, int, int]]
    """Maps to encode at each launch, if their first word is not the address: byte, map, base, tensor, bytes behind."""

    @classmethod
    def of(cls, launch: Launch, values: Sequence[int]) -> Ready:
        """Write a record's numbers into a launch's parameters, and its maps with a made-up address."""
        params, launcher = bytearray(launch.params), launch.kernel
        words, maps, keeps = [], [], launcher.keeps_addresses()
        for place, size, number, address in launch.words:
            if address is None:
                _WORDS[size].pack_into(params, place, values[number])
            else:
                words.append((place // 8, address.base, address.which, values[address.behind]))
        for place, address, element, swizzle, *numbers in launch.maps:
            sizes, strides, box = (tuple(values[i] for i in each) for each in numbers)
            tensor_map = TensorMap(ElementType(element), sizes, strides, box, swizzle)
            begins = address.base, address.which, values[address.behind]
            if keeps:
                params[place : place + MAP_BYTES] = launcher.encode(tensor_map, SOME_ADDRESS, SOME_ADDRESS)
                words.append((place // 8, *begins))
            else:
                maps.append((place, tensor_map, *begins))
        return cls(launcher, bytes(params), values[launch.grid], words, maps)


def replay(
    record: Record,
    tensors: Sequence[Tensor],
    values: Sequence[int],
    place: torch.device,
    launches: Sequence[Ready] = (),
) -> list[Tensor]:
    """Launch a record's kernels for tensors that it serves. Return the tensors that are made for the caller."""
    made = []
    for sizes, strides, dtype, view in record.made:
        x = torch.empty_strided([values[i] for i in sizes], [values[i] for i in strides], dtype=dtype, device=place)
        if view:
            shape, steps = ([values[i] for i in numbers] for numbers in view)
            x = x.as_strided(shape, steps)
        made.append(x)
    scratch = torch.empty(values[record.scratch], dtype=torch.uint8, device=place) if values[record.scratch] else None
    beginnings = (
        [x.data_ptr() for x in tensors],
        [x.data_ptr() for x in made],
        [0 if scratch is None else scratch.data_ptr()],
    )
    for ready in launches or [Ready.of(launch, values) for launch in record.launches]:
        start(ready, beginnings, record.device)
    return made


def start(ready: Ready, beginnings: Sequence[Sequence[int]], device: int) -> None:
    """Launch on the current stream of `device`, the current device. `beginnings`: addresses, by kind of memory."""
    launcher = ready.launcher
    with launcher.lock:
        launcher.hold(ready.params, ready.grid)
        words = launcher.params.words
        for word, base, index, behind in ready.words:
            words[word] = beginnings[base][index] + behind
        for place, tensor_map, base, index, behind in ready.maps:
            begins = beginnings[base][index] + behind
            launcher.params.bytes[place : place + MAP_BYTES] = launcher.encode(tensor_map, begins, begins)
        stream = launcher.current_stream(device)
        if stream != launcher.stream:
            launcher.set_stream(stream)
        (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
        if status != launcher.success:
            launcher.start_again(status, device)


def packed(native: Any, record: Record, place: torch.device) -> Any:
    """Pack a record for replay.c, whose module is `native`."""
    given = tuple(
        (*_facts(native, each.dtype, place)[2:], int(each.dtype in MAY_BE_NEGATED), each.sizes, each.strides)
        for each in record.given
    )
    made = tuple(
        (sizes, strides, {"dtype": dtype, "device": place}, *(view or (None, None)))
        for sizes, strides, dtype, view in record.made
    )
    scratch = record.scratch, {"dtype": torch.uint8, "device": place}
    launches = tuple(map(_packed, record.launches))
    kept = [launch.kernel for launch in record.launches]
    device = _facts(native, torch.uint8, place)[:2]
    steps = tuple(map(tuple, record.steps))
    conditions = tuple(sorted(map(tuple, record.conditions), key=lambda each: max(each[1:3])))
    return native.Record(device, given, record.stated, steps, conditions, record.outputs, made, scratch, launches, kept)


@cache
def _facts(native: Any, dtype: torch.dtype, place: torch.device) -> tuple[int, ...]:
    """Return DLPack's numbers for a device and a type."""
    found: tuple[int, ...] = native.facts(torch.empty(0, dtype=dtype, device=place))
    return found


def _packed(launch: Launch) -> tuple[Any, ...]:
    of = launch.kernel
    maps = tuple(
        (each.at, tuple(each.address), ELEMENTS[ElementType(each.element)], SWIZZLES[each.swizzle], *each[4:])
        for each in launch.maps
    )
    how = int(of.function), of.threads, of.kernel.shared_bytes, of.cluster, int(of.is_dependent)
    return *how, launch.grid, launch.params, launch.words, maps
