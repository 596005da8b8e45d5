"""Records are made here, with shadows in place of a call's tensors.

The code that answers calls also makes a record: it runs once with `Shadow`s in place of the call's tensors. The record
stores the memory that the code allocates and the kernels that it launches. Free sizes and strides of shadows are
`Number`s. The record stores each operation on a number, and repeats it for other sizes. Each comparison becomes a
condition of the record, so code that chooses by m makes one record for each range of m. If code uses a number as a
plain integer, the record serves only calls with this value. Code that needs more of a shadow than records know, such
as torch's own operators, gets an `UnfitError`, and its calls have no record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index, mul
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .record import (
    ARITHMETIC,
    MOST_STATED,
    Address,
    Condition,
    From,
    Given,
    Launch,
    Made,
    Map,
    Op,
    Record,
    Relation,
    Step,
    Word,
)

if TYPE_CHECKING:
    from .jit.tensor_map import TensorMap


class UnfitError(Exception):
    """A call cannot be recorded: it needs more than launches of kernels for tensors of known shapes."""


@dataclass(eq=False)
class Room:
    """Memory that a recorded call allocates."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    bytes: Any
    first: int = -1
    last: int = -1
    """`first` and `last`: the first and the last launch that use the room; -1 if none does."""


class Mapped(NamedTuple):
    """A parameter of a launch: a tensor map of memory that begins `before` bytes ahead of tensor `x`."""

    map: TensorMap
    x: Any
    before: Any = 0


class Target(Protocol):
    """An object that receives launches in place of a GPU's stream, and that provides memory."""

    def launch(
        self, kernel: Any, config: Any, values: Mapping[str, Any], grid: Any, device: int, is_dependent: bool
    ) -> None:
        """Receive a launch from `Kernel.run`."""

    def room(self, shape: Sequence[Any], dtype: torch.dtype, strides: Sequence[Any] | None = None) -> Any:
        """Provide memory for a tensor."""


class _Now(threading.local):
    target: Target | None = None


_NOW = _Now()
ROOM_ALIGNMENT = 256
SOMEWHERE = 1 << 52
"""Made-up addresses of rooms are multiples of this while a call is recorded: no room overlaps a tensor or a room."""


def target() -> Target | None:
    """Return the target of this thread's launches, such as a recording; None for the GPU."""
    return _NOW.target


@contextmanager
def launching_into(target: Target) -> Iterator[None]:
    """Send this thread's launches to a target while the block runs."""
    before, _NOW.target = _NOW.target, target
    try:
        yield
    finally:
        _NOW.target = before


@dataclass(eq=False)
class Recording:
    """A record in the making. It is a target of launches."""

    place: torch.device
    steps: list[Step] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    conditions: dict[Condition, None] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)
    num_stated: int = 0
    outputs: int = 0
    rooms: list[Room] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    _numbers: dict[tuple[Op, int, int], Number] = field(default_factory=dict)
    _constants: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index(1)  # the stride of the buffer between launches

    def number(self, op: Op, a: int, b: int, value: int) -> Number:
        """Return the number of a step. Add the step if the record has no equal step."""
        found = self._numbers.get((op, a, b))
        if found is None:
            found = self._numbers[op, a, b] = Number(self, len(self.steps), value)
            self.steps.append(Step(op, a, b))
            self.values.append(value)
        return found

    def stated_numbers(self, numbers: Sequence[int]) -> list[Any]:
        """Return the integers that the caller states, as numbers."""
        if any(type(x) is not int for x in numbers) or len(numbers) > MOST_STATED:
            raise UnfitError("too many numbers, or a number that is not an integer")
        self.num_stated = len(numbers)
        return [self.number(Op.STATED, i, 0, x) for i, x in enumerate(numbers)]

    def places(self, numbers: Sequence[Any]) -> tuple[int, ...]:
        """Return the places of numbers and integers among the steps."""
        known = self._constants
        found: list[Any] = [
            known.get(x) if type(x) is int else x.place if type(x) is Number and x.of is self else None for x in numbers
        ]
        return tuple(map(self.index, numbers)) if None in found else tuple(found)

    def index(self, x: Any) -> int:
        """Return the place of a number, or of an integer, among the steps."""
        if type(x) is Number:
            if x.of is not self:
                raise ValueError("a number of another record")
            return x.place
        place = self._constants.get(x)
        if place is None:
            place = self._constants[x] = len(self.steps)
            self.steps.append(Step(Op.CONSTANT, index(x)))
            self.values.append(index(x))
        return place

    def holds(self, relation: Relation, a: Any, b: Any) -> bool:
        """Compare two numbers, and store the outcome as a condition."""
        if type(a) is float or type(b) is float:  # a record holds no floats: the other number is fixed
            x, y = (each if type(each) is float else int(each) for each in (a, b))
            return x < y if relation is Relation.BELOW else x == y
        return self.holds_of(relation, *self.places((a, b)))

    def holds_of(self, relation: Relation, i: int, j: int) -> bool:
        """Compare two numbers by their places."""
        outcome = self.values[i] < self.values[j] if relation is Relation.BELOW else self.values[i] == self.values[j]
        if i != j and not self.steps[i].op is self.steps[j].op is Op.CONSTANT:
            self.conditions[Condition(relation, i, j, outcome)] = None
        return outcome

    def shadow(self, x: torch.Tensor, sizes: Sequence[int] = (), strides: Sequence[int] = ()) -> Shadow:
        """Make the shadow of a tensor of the call. `sizes` and `strides` list the free dimensions."""
        place = len(self.given)
        known: tuple[list[Any], list[Any]] = [*x.shape], [*x.stride()]
        fixed: tuple[list[int], list[int]] = [*x.shape], [*x.stride()]
        for which, (op, free) in enumerate(((Op.SIZE, sizes), (Op.STRIDE, strides))):
            for i in free:
                if i < len(known[which]):
                    known[which][i], fixed[which][i] = self.number(op, place, i, known[which][i]), -1
        self.given.append(Given(x.dtype, tuple(fixed[0]), tuple(fixed[1])))
        return Shadow(self, known[0], tuple(known[1]), x.dtype, (From.TENSOR, place), 0, x.data_ptr())

    def room(self, shape: Sequence[Any], dtype: torch.dtype, strides: Sequence[Any] | None = None) -> Shadow:
        """Provide memory for a tensor: a result if the call returns it, else memory between launches."""
        if strides is None:
            strides, step = [], 1
            for size in reversed(shape):
                strides.insert(0, step)
                step = size * step
        shadow = Shadow(self, tuple(shape), tuple(strides), dtype, (From.SCRATCH, len(self.rooms)), 0)
        shadow.at = SOMEWHERE * (1 + len(self.rooms))
        is_empty = any(size == 0 for size in shape)  # a condition: an empty room has no bytes
        self.rooms.append(Room(shadow.shape, shadow.strides, dtype, 0 if is_empty else shadow.span()))
        return shadow

    def address(self, x: Any, before: Any = 0) -> Address:
        """Return the address of a shadow, or the address `before` bytes ahead of it."""
        if not isinstance(x, Shadow):
            raise UnfitError("a tensor that the record does not know")
        if x.base[0] is From.SCRATCH:
            room, launch = self.rooms[x.base[1]], len(self.launches)
            room.first, room.last = launch if room.first < 0 else room.first, launch
        return Address(*x.base, self.index(x.behind - before))

    def launch(
        self, kernel: Any, config: Any, values: Mapping[str, Any], grid: Any, device: int, is_dependent: bool
    ) -> None:
        """Add a launch to the record."""
        params, launcher = kernel.params_of(config), kernel.launcher(config, device, is_dependent)
        words: list[Word] = []
        encoded: list[Map] = []
        packed = dict(values)
        for each in params.fields:
            name, value = each.name, values[each.name]
            if type(value) is int:
                continue
            at, size = params.offset(name), each.kind.size
            packed[name] = 0
            if isinstance(value, Mapped):
                kind = value.map.element.value, value.map.swizzle
                numbers = map(self.places, (value.map.sizes, value.map.strides, value.map.box))
                encoded.append(Map(at, self.address(value.x, value.before), *kind, *numbers))
                packed[name] = b""
            elif isinstance(value, Number):
                words.append(Word(at, size, self.index(value)))
                packed[name] = value.value
            elif isinstance(value, tuple):
                for i, x in enumerate(value):
                    if isinstance(x, Number):
                        words.append(Word(at + size * i, size, self.index(x)))
                    elif type(x) is not int:
                        words.append(Word(at + size * i, size, 0, self.address(x)))
                packed[name] = tuple(0 if isinstance(x, Shadow) else plain(x) for x in value)
            elif isinstance(value, (int, float, bytes)):
                packed[name] = value
            elif value is not None:
                words.append(Word(at, 8, 0, self.address(value)))
        self.launches.append(Launch(launcher, self.index(grid), params.pack(packed), tuple(words), tuple(encoded)))

    def record(self, results: Sequence[Shadow]) -> Record:
        """Make the record of a call that returns these results, each in a room of its own."""
        made: list[Made] = []
        places: dict[int, Address] = {}
        for x in results:
            base, room = x.base
            if base is not From.SCRATCH or room in places or plain(x.behind):
                raise UnfitError("a result that has no memory of its own")
            places[room] = Address(From.RESULT, len(made), 0)
            of = self.rooms[room]
            is_whole = (*x.shape, *x.strides) == (*of.shape, *of.strides)
            sizes, strides, *view = map(self.places, (of.shape, of.strides, x.shape, x.strides))
            made.append(Made(sizes, strides, of.dtype, () if is_whole else tuple(view)))
        scratch = self.index(self._laid_out(places))
        launches = tuple(self._placed(launch, places) for launch in self.launches)
        return Record(
            -1 if self.place.index is None else self.place.index,
            tuple(self.given),
            self.num_stated,
            tuple(self.steps),
            tuple(self.conditions),
            self.outputs,
            tuple(made),
            scratch,
            launches,
        )

    def _laid_out(self, places: dict[int, Address]) -> Any:
        """Place all rooms but results in one buffer; return its size. Rooms share memory if no launch needs both."""
        slots: list[list[Any]] = []  # [size, last launch that uses the slot, rooms]
        rooms = [(room.first, i, room) for i, room in enumerate(self.rooms) if i not in places and room.first >= 0]
        for first, i, room in sorted(rooms, key=lambda each: each[:2]):
            size = (room.bytes + (ROOM_ALIGNMENT - 1)) // ROOM_ALIGNMENT * ROOM_ALIGNMENT
            unused = [slot for slot in slots if slot[1] < first]
            if unused:
                slot = min(unused, key=lambda each: abs(plain(each[0]) - plain(size)))
                slot[0], slot[1] = most(slot[0], size), room.last
                slot[2].append(i)
            else:
                slots.append([size, room.last, [i]])
        end: Any = 0
        for size, _, of in slots:
            places |= dict.fromkeys(of, Address(From.SCRATCH, 0, self.index(end)))
            end = end + size
        return end

    def _placed(self, launch: Launch, places: Mapping[int, Address]) -> Launch:
        def moved(address: Address) -> Address:
            if address.base is not From.SCRATCH:
                return address
            base, which, before = places[address.which]
            step = self.steps[address.behind]
            if base is From.RESULT or (step.op is Op.CONSTANT and step.a == 0):
                return Address(base, which, address.behind if base is From.RESULT else before)
            both = self.values[address.behind] + self.values[before]
            return Address(base, which, self.number(Op.ADD, address.behind, before, both).place)

        words = tuple(x if x.address is None else x._replace(address=moved(x.address)) for x in launch.words)
        maps = tuple(each._replace(address=moved(each.address)) for each in launch.maps)
        return launch._replace(words=words, maps=maps)


NEUTRAL = {Op.ADD: 0, Op.SUBTRACT: 0, Op.MULTIPLY: 1, Op.DIVIDE: 1}
"""Right operands that leave a number as it is."""


def _by(op: Op, *, turned: bool = False) -> Callable[[Number, Any], Any]:
    """Make the method of `Number` that stores an operation. `turned`: the number is the right operand."""
    compute: Callable[[Any, Any], Any] = ARITHMETIC[op]
    divides, neutral = op in (Op.DIVIDE, Op.REMAINDER), None if turned else NEUTRAL.get(op)

    def method(self: Number, other: Any) -> Any:
        if type(other) is int and other == neutral:
            return self
        if type(other) is float:  # a record holds no floats
            return compute(other, int(self)) if turned else compute(int(self), other)
        of, a, x = self.of, self.place, self.value
        b, y = of.index(other), other.value if type(other) is Number else other
        if turned:
            a, b, x, y = b, a, y, x
        if divides:
            of.holds_of(Relation.EQUAL, b, of.index(0))  # a condition, tested before the division
        return of.number(op, a, b, compute(x, y))

    return method


class Number:
    """An integer of a call that is being recorded: its value in this call, and the place of its step in the record."""

    __slots__ = ("of", "place", "value")

    def __init__(self, of: Recording, place: int, value: int) -> None:
        self.of, self.place, self.value = of, place, value

    __add__, __sub__, __mul__ = _by(Op.ADD), _by(Op.SUBTRACT), _by(Op.MULTIPLY)
    __floordiv__, __mod__ = _by(Op.DIVIDE), _by(Op.REMAINDER)
    __rfloordiv__ = _by(Op.DIVIDE, turned=True)
    __radd__, __rmul__, __rsub__ = __add__, __mul__, _by(Op.SUBTRACT, turned=True)

    def __neg__(self) -> Any:
        return 0 - self

    def __lt__(self, other: Any) -> bool:
        return self.of.holds(Relation.BELOW, self, other)

    def __gt__(self, other: Any) -> bool:
        return self.of.holds(Relation.BELOW, other, self)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float, Number)) and self.of.holds(Relation.EQUAL, self, other)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """Fix the number, because a record cannot follow operations on a plain integer."""
        self.of.holds(Relation.EQUAL, self, self.value)
        return self.value

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __truediv__(self, other: Any) -> float:
        """Fix the number, because a record holds no fractions."""
        return int(self) / other  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        """Return the integer, so that errors show the caller's size."""
        return str(self.value)

    def __format__(self, how: str) -> str:
        """Format the integer."""
        return format(self.value, how)


def plain(x: Any) -> Any:
    """Return a number's value, without a condition. Return another object, such as torch's symbolic size, unchanged."""
    return x.value if isinstance(x, Number) else x


def least(a: Any, b: Any) -> Any:
    """Return the smaller of two integers. It adds no condition about which integer is smaller."""
    return _chosen(Op.LEAST, a, b, min(plain(a), plain(b)))


def most(a: Any, b: Any) -> Any:
    """Return the larger of two integers. It adds no condition about which integer is larger."""
    return _chosen(Op.MOST, a, b, max(plain(a), plain(b)))


def _chosen(op: Op, a: Any, b: Any, value: int) -> Any:
    numbers = [x for x in (a, b) if isinstance(x, Number)]
    if not numbers:
        return value
    of = numbers[0].of
    return of.number(op, of.index(a), of.index(b), value)


class Shape(tuple[Any, ...]):
    """Sizes of a shadow."""

    def numel(self) -> Any:
        """Count elements."""
        product: Any = 1
        for size in self:
            product = size * product
        return product

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Shape(found) if isinstance(key, slice) else found


class Shadow:
    """A tensor of a call that is being recorded, without its elements. It refuses torch's operations on elements."""

    is_cuda, is_cpu, is_meta, requires_grad = True, False, False, False
    layout = torch.strided
    _base = None

    def __init__(
        self,
        of: Recording,
        shape: Sequence[Any],
        strides: tuple[Any, ...],
        dtype: torch.dtype,
        base: tuple[From, int],
        behind: Any,
        at: int = 0,
    ) -> None:
        """`behind`: bytes from the beginning of the base to the first element; `at`: the address in this call."""
        self.of, self.shape, self.strides, self.dtype, self.base = of, Shape(shape), strides, dtype, base
        self.behind, self.at = behind, at

    def __getattr__(self, name: str) -> Any:
        raise UnfitError(f"{name} of a tensor")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise UnfitError(f"{getattr(function, '__name__', function)} of tensors")

    def _like(self, shape: Sequence[Any], strides: Sequence[Any], behind: Any = 0) -> Shadow:
        """Return a view that begins `behind` bytes behind this tensor's beginning."""
        at = self.at + plain(behind)
        return Shadow(self.of, shape, tuple(strides), self.dtype, self.base, self.behind + behind, at)

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self.of.place

    def get_device(self) -> int:
        """Return the number of the device."""
        return -1 if self.of.place.index is None else self.of.place.index

    def data_ptr(self) -> int:
        """Return the address in this call. Code may decide by its last four bits only, which are in a record's key."""
        return self.at

    def stride(self, dimension: int | None = None) -> Any:
        """Return all strides, or the stride of one dimension."""
        return self.strides if dimension is None else self.strides[dimension]

    def dim(self) -> int:
        """Count dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Tell whether elements are floating-point numbers."""
        return self.dtype.is_floating_point

    def is_inference(self) -> bool:
        """Return False: a shadow has none of the limits of inference tensors."""
        return False

    def numel(self) -> Any:
        """Count elements."""
        return self.shape.numel()

    def span(self) -> Any:
        """Return the bytes from the first element to the end of the last element. The tensor must not be empty."""
        last: Any = 0
        for size, stride in zip(self.shape, self.strides, strict=True):
            last = (size - 1) * stride + last
        return (last + 1) * self.element_size()

    def reach(self) -> int:
        """Return the span in this call, without a condition."""
        sizes, strides = ([x.value if type(x) is Number else x for x in each] for each in (self.shape, self.strides))
        last: int = sum(map(mul, sizes, strides)) - sum(strides)
        return (last + 1) * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Tell whether elements follow each other in order."""
        step: Any = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if stride != step and size != 1:  # the size is compared only if strides differ
                return False
            step = size * step
        return True

    def detach(self) -> Shadow:
        """Return the tensor itself: shadows have no gradients."""
        return self

    def contiguous(self) -> Shadow:
        """Return the tensor itself if its elements follow each other; refuse a copy."""
        if not self.is_contiguous():
            raise UnfitError("a copy of a tensor")
        return self

    def to(self, dtype: torch.dtype) -> Shadow:
        """Return the tensor itself if it has this type; refuse a copy."""
        if dtype != self.dtype:
            raise UnfitError("a tensor of another type")
        return self

    def as_strided(self, shape: Sequence[Any], strides: Sequence[Any]) -> Shadow:
        """Return a view that begins at the tensor's first element."""
        return self._like(shape, strides)

    def transpose(self, i: int, j: int) -> Shadow:
        """Exchange two dimensions."""
        order = list(range(self.dim()))
        order[i], order[j] = order[j], order[i]
        return self.permute(*order)

    def permute(self, *order: int) -> Shadow:
        """Reorder the dimensions."""
        return self._like([self.shape[i] for i in order], [self.strides[i] for i in order])

    def t(self) -> Shadow:
        """Transpose a matrix."""
        return self.transpose(0, 1)

    @property
    def mT(self) -> Shadow:  # noqa: N802 - torch's name
        """Exchange the last two dimensions."""
        return self.transpose(-2, -1)

    def view(self, *shape: Any) -> Shadow:
        """Return a view with another shape, or with another type whose elements are not smaller."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            each, rest = divmod(shape[0].itemsize, self.dtype.itemsize)
            sizes, strides = self.shape, self.strides
            if each != 1 or rest:
                apart = (sizes[-1], *strides[:-1])
                if not each or rest or strides[-1] != 1 or any(x % each for x in apart):
                    raise UnfitError("elements of another size")
                sizes, strides = Shape((*sizes[:-1], sizes[-1] // each)), (*(x // each for x in strides[:-1]), 1)
            return Shadow(self.of, sizes, strides, shape[0], self.base, self.behind, self.at)
        return self.reshape(*shape)

    def storage_offset(self) -> int:
        """Return 0: a shadow knows the beginning of its tensor, but not of the storage."""
        return 0

    def reshape(self, *shape: Any) -> Shadow:
        """Return a view with another shape; refuse a copy. Trailing dimensions with equal sizes keep their strides."""
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        unknown = [i for i, size in enumerate(sizes) if type(size) is int and size == -1]
        if unknown:
            others: Any = Shape(size for i, size in enumerate(sizes) if i not in unknown).numel()
            sizes[unknown[0]] = self.numel() // others
        if tuple(sizes) == self.shape:
            return self
        same = 0  # number of trailing dimensions that stay
        while same < min(len(sizes), self.dim()) - 1 and sizes[-1 - same] is self.shape[-1 - same]:
            same += 1
        cut = self.dim() - same
        inner = self._like(self.shape[:cut], self.strides[:cut])
        step: Any = inner.strides[-1]
        for size, stride in zip(reversed(inner.shape), reversed(inner.strides), strict=True):
            if size != 1:
                if stride != step:
                    raise UnfitError("a copy of a tensor")
                step = size * step
        step, strides = inner.strides[-1], list[Any]()
        for size in reversed(sizes[: len(sizes) - same]):
            strides.insert(0, step)
            step = size * step
        return self._like(sizes, [*strides, *self.strides[cut:]])

    def expand(self, shape: Sequence[Any]) -> Shadow:
        """Repeat the tensor along new leading dimensions."""
        more = len(shape) - self.dim()
        if tuple(shape[more:]) != self.shape:
            raise UnfitError("a tensor that is repeated along its own dimensions")
        strides = list(self.strides)
        for size in reversed(shape[:more]):
            strides.insert(0, 0 if size != 1 else shape[-len(strides)] * strides[0])
        return self._like(shape, strides)

    def __getitem__(self, key: Any) -> Shadow:
        keys = list(key) if isinstance(key, tuple) else [key]
        if ... in keys:
            i = keys.index(...)
            keys[i : i + 1] = [slice(None)] * (self.dim() - sum(each not in (None, ...) for each in keys))
        shape, strides, behind, i = [], [], 0, 0
        for each in keys:
            if each is None:
                shape.append(1)
                strides.append(self.shape[i] * self.strides[i] if i < self.dim() else 1)
                continue
            size, stride = self.shape[i], self.strides[i]
            i += 1
            if isinstance(each, slice):
                if each.step is not None or any(plain(x) < 0 for x in (each.start, each.stop) if x is not None):
                    raise UnfitError("a slice with a negative bound or a step")
                start, stop = 0 if each.start is None else each.start, size if each.stop is None else each.stop
                shape.append(least(stop, size) - start if each.stop is not None else size - start)
                strides.append(stride)
            else:
                start = each
            behind = start * stride * self.element_size() + behind
        return self._like([*shape, *self.shape[i:]], [*strides, *self.strides[i:]], behind)

    def __iter__(self) -> Iterator[Shadow]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Refuse to compare elements."""
        raise UnfitError("a comparison of elements")

    def __bool__(self) -> bool:
        """Refuse to look at an element."""
        raise UnfitError("an element")

    __hash__ = object.__hash__


TENSORS = torch.Tensor, Shadow
"""Classes of tensors in calls: torch's tensors, and their shadows while a call is recorded."""
