"""The record of a call: what the call was like, and the launches that answer it, as data.

A record is made once, by code that binds kernels to `Shadow`s in place of tensors. Their free sizes and strides are
`Number`s: arithmetic on these is noted, and replayed for other sizes; a comparison becomes a condition under which the
record serves. So code that chooses by m makes one record for each range of m, without saying so. A number that is used
as a plain integer is fixed by that: the record then serves this value alone.

replay.py replays records, and defines what a record means; replay.c does the same faster.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .jit.tensor_map import TensorMap

MOST_TENSORS, MOST_DIMENSIONS = 16, 5


class Op(IntEnum):
    """Ways to get a number. Division and remainder round down, as Python's do."""

    CONSTANT = 0
    SIZE = 1
    STRIDE = 2
    ADD = 3
    SUBTRACT = 4
    MULTIPLY = 5
    DIVIDE = 6
    REMAINDER = 7
    LEAST = 8
    MOST = 9


class Step(NamedTuple):
    """One number: of a constant, its value; of a size or stride, tensor and dimension; else of two earlier numbers."""

    op: Op
    a: int
    b: int = 0


class Relation(IntEnum):
    """Relations between two numbers that a record's conditions name."""

    BELOW = 0
    EQUAL = 1


class Condition(NamedTuple):
    """A relation of two numbers that holds, or does not."""

    relation: Relation
    a: int
    b: int
    holds: bool


class From(IntEnum):
    """What an address counts from."""

    TENSOR = 0
    """A tensor that the call was given."""
    RESULT = 1
    """A tensor that the replay makes for the caller."""
    SCRATCH = 2
    """The one buffer that lies between launches."""


class Address(NamedTuple):
    """A place in memory: bytes, a number, behind the beginning of something."""

    base: From
    index: int
    behind: int


class Word(NamedTuple):
    """An address, or a number of 4 or 8 bytes, that a launch has at a byte of its parameters."""

    at: int
    size: int
    number: int
    address: Address | None = None


class Map(NamedTuple):
    """A tensor map that a launch has at a byte of its parameters. Sizes, strides and box are numbers."""

    at: int
    address: Address
    element: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Launch(NamedTuple):
    """One launch: its kernel, CTAs, and parameters with what is written over them."""

    kernel: Any
    """A `driver.Launcher`, or what stands for one."""
    grid: int
    params: bytes
    words: tuple[Word, ...]
    maps: tuple[Map, ...]


class Made(NamedTuple):
    """A tensor that the replay makes for the caller, of numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Given(NamedTuple):
    """A tensor of the call. A size or a stride of -1 is free: numbers read it."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    """Bytes, of its address."""


class Apart(NamedTuple):
    """An output and another tensor of the call, which share no memory, and the bytes that each reaches: numbers.

    Both may be the very same tensor if `or_same`.
    """

    output: int
    other: int
    span: int
    span_of_other: int
    or_same: bool


@dataclass(frozen=True, eq=False)
class Record:
    """All that a replay knows of a call."""

    device: int
    given: tuple[Given, ...]
    steps: tuple[Step, ...]
    conditions: tuple[Condition, ...]
    apart: tuple[Apart, ...]
    made: tuple[Made, ...]
    scratch: int
    """Bytes of the buffer between launches, a number."""
    launches: tuple[Launch, ...]

    @cached_property
    def asked_early(self) -> list[tuple[int, bool, int, int, bool]]:
        """List conditions as (steps that come before, is below, a, b, holds), those with few steps first."""
        each = ((max(a, b) + 1, relation is Relation.BELOW, a, b, holds) for relation, a, b, holds in self.conditions)
        return sorted(each)


class UnfitError(ValueError):
    """A record does not serve tensors that it is to be inlined for."""


@dataclass(eq=False)
class Recording:
    """A record that is being made."""

    device: int
    steps: list[Step] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    conditions: dict[Condition, None] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)
    apart: list[Apart] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    scratch: Any = 0
    _known: dict[Step, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index(1)  # the stride of the buffer between launches

    def number(self, op: Op, a: int, b: int, value: int) -> Any:
        """Note a number, once. What follows from constants is one."""
        operands = [self.steps[x] for x in (a, b)] if op >= Op.ADD else []
        if operands and all(step.op is Op.CONSTANT for step in operands):
            return value
        return Number(self, self._index(Step(op, a, b), value), value)

    def index(self, x: Any) -> int:
        """Give the place of a number, or of an integer, among the steps."""
        if isinstance(x, Number):
            if x.of is not self:
                raise ValueError("a number of another record")
            return x.place
        return self._index(Step(Op.CONSTANT, int(x)), int(x))

    def _index(self, step: Step, value: int) -> int:
        found = self._known.get(step)
        if found is None:
            found = self._known[step] = len(self.steps)
            self.steps.append(step)
            self.values.append(value)
        return found

    def holds(self, relation: Relation, a: Any, b: Any) -> bool:
        """Compare two numbers, and note the outcome as a condition."""
        i, j = self.index(a), self.index(b)
        outcome = self.values[i] < self.values[j] if relation is Relation.BELOW else self.values[i] == self.values[j]
        if i != j and any(self.steps[x].op is not Op.CONSTANT for x in (i, j)):
            self.conditions[Condition(relation, i, j, outcome)] = None
        return outcome

    def shadow(self, x: torch.Tensor, alignment: int, sizes: Sequence[int] = (), strides: Sequence[int] = ()) -> Shadow:
        """Give the shadow of a tensor of the call; `sizes` and `strides` are the dimensions in which it may differ."""
        place = len(self.given)
        fixed = [
            tuple(-1 if i in free else number for i, number in enumerate(numbers))
            for free, numbers in ((sizes, x.shape), (strides, x.stride()))
        ]
        self.given.append(Given(x.dtype, *fixed, alignment))
        shape, steps = (
            tuple(self.number(op, place, i, n) if i in free else n for i, n in enumerate(numbers))
            for op, free, numbers in ((Op.SIZE, sizes, x.shape), (Op.STRIDE, strides, x.stride()))
        )
        return Shadow(shape, steps, x.dtype, (From.TENSOR, place), 0)

    def result(self, shape: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype) -> Shadow:
        """Make a tensor that the caller gets."""
        self.made.append(Made(tuple(map(self.index, shape)), tuple(map(self.index, strides)), dtype))
        return Shadow(tuple(shape), tuple(strides), dtype, (From.RESULT, len(self.made) - 1), 0)

    def between(self, shape: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype, alignment: int = 256) -> Shadow:
        """Make a tensor that lies between launches, behind those before."""
        begins = -(-self.scratch // alignment) * alignment
        shadow = Shadow(tuple(shape), tuple(strides), dtype, (From.SCRATCH, 0), begins)
        self.scratch = begins + shadow.span()
        return shadow

    def keep_apart(self, output: Shadow, other: Shadow, *, or_same: bool = False) -> None:
        """Let the record serve only calls in which these two of its tensors share no memory."""
        spans = self.index(output.span()), self.index(other.span())
        self.apart.append(Apart(output.base[1], other.base[1], *spans, or_same))

    def address(self, x: Shadow, before: Any = 0) -> Address:
        """Give where a shadow begins, or `before` bytes ahead of that."""
        return Address(*x.base, self.index(x.behind - before))

    def launch(
        self,
        kernel: Any,
        grid: Any,
        params: Any,
        values: dict[str, Any],
        addresses: dict[str, Address],
        maps: dict[str, tuple[TensorMap, Address]],
    ) -> None:
        """Note a launch: members of `params` with numbers, with addresses, and with maps."""
        words = [Word(params.offset(name), 8, 0, address) for name, address in addresses.items()]
        plain: dict[str, Any] = dict.fromkeys(addresses, 0) | dict.fromkeys(maps, b"")
        sizes = {each.name: each.kind.size for each in params.fields}
        for name, value in values.items():
            plain[name] = value
            if isinstance(value, Number):
                words.append(Word(params.offset(name), sizes[name], self.index(value)))
                plain[name] = value.value
        encoded = []
        for name, (tensor_map, address) in maps.items():
            numbers = (tuple(map(self.index, each)) for each in (tensor_map.sizes, tensor_map.strides, tensor_map.box))
            kind = tensor_map.element.value, tensor_map.swizzle
            encoded.append(Map(params.offset(name), address, *kind, *numbers))
        self.launches.append(Launch(kernel, self.index(grid), params.pack(plain), tuple(words), tuple(encoded)))

    def inline(self, inner: Record, tensors: Sequence[Shadow], results: Sequence[Shadow | None]) -> list[Shadow]:
        """Do to these tensors what another record does. Give its results: those given here, others between launches.

        Raises `UnfitError` if it does not serve these tensors.
        """
        numbers: list[Any] = []
        for op, a, b in inner.steps:
            if op is Op.CONSTANT:
                numbers.append(a)
            elif op in (Op.SIZE, Op.STRIDE):
                numbers.append((tensors[a].shape if op is Op.SIZE else tensors[a].strides)[b])
            else:
                numbers.append(ARITHMETIC[op](numbers[a], numbers[b]))
        for relation, a, b, holds in inner.conditions:
            x, y = numbers[a], numbers[b]
            if bool(x < y if relation is Relation.BELOW else x == y) != holds:
                raise UnfitError("a condition")
        for x, given in zip(tensors, inner.given, strict=True):
            self._wants(x, given)
        made = [
            self.between([numbers[i] for i in each.sizes], [numbers[i] for i in each.strides], each.dtype)
            if result is None
            else result
            for each, result in zip(inner.made, results, strict=True)
        ]
        scratch = self.between((numbers[inner.scratch],), (1,), torch.uint8) if plain(numbers[inner.scratch]) else None
        bases = {From.TENSOR: tensors, From.RESULT: made, From.SCRATCH: [scratch]}

        def moved(address: Address) -> Address:
            of = bases[address.base][address.index]
            assert of is not None
            return Address(*of.base, self.index(of.behind + numbers[address.behind]))

        places = [self.index(x) for x in numbers]
        for output, other, span, span_of_other, or_same in inner.apart:
            first, second = tensors[output], tensors[other]
            if first.base[0] is second.base[0] is From.TENSOR:
                both = places[span], places[span_of_other]
                self.apart.append(Apart(first.base[1], second.base[1], *both, or_same))
        for kernel, grid, params, words, maps in inner.launches:
            self.launches.append(
                Launch(
                    kernel,
                    places[grid],
                    params,
                    tuple(Word(at, n, places[i], None if a is None else moved(a)) for at, n, i, a in words),
                    tuple(
                        each._replace(
                            address=moved(each.address),
                            sizes=tuple(places[i] for i in each.sizes),
                            strides=tuple(places[i] for i in each.strides),
                            box=tuple(places[i] for i in each.box),
                        )
                        for each in maps
                    ),
                )
            )
        return made

    def _wants(self, x: Shadow, given: Given) -> None:
        """Let the record serve only tensors that lie so."""
        for its, mine in ((given.sizes, x.shape), (given.strides, x.strides)):
            if len(its) != len(mine) or any(a not in (-1, b) for a, b in zip(its, mine, strict=True)):
                raise UnfitError("a shape")
        if x.dtype != given.dtype or x.behind % given.alignment != 0:
            raise UnfitError("a type or an address")
        if x.base[0] is From.TENSOR:
            own = self.given[x.base[1]]
            self.given[x.base[1]] = own._replace(alignment=max(own.alignment, given.alignment))

    def record(self) -> Record:
        """Give the record."""
        scratch = self.index(self.scratch)
        parts = self.given, self.steps, self.conditions, self.apart, self.made
        return Record(self.device, *map(tuple, parts), scratch, tuple(self.launches))  # type: ignore[arg-type]


class Number:
    """An integer of a call that is being recorded: its value there, and its place among the record's steps."""

    __slots__ = ("of", "place", "value")

    def __init__(self, of: Recording, place: int, value: int) -> None:
        self.of, self.place, self.value = of, place, value

    def _with(self, op: Op, a: Any, b: Any, value: int) -> Any:
        return self.of.number(op, self.of.index(a), self.of.index(b), value)

    def __add__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else self._with(Op.ADD, self, other, self.value + plain(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(Op.SUBTRACT, self, other, self.value - plain(other))

    def __rsub__(self, other: Any) -> Any:
        return self._with(Op.SUBTRACT, other, self, plain(other) - self.value)

    def __mul__(self, other: Any) -> Any:
        return self._with(Op.MULTIPLY, self, other, self.value * plain(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self._with(Op.DIVIDE, self, other, self.value // plain(other))

    def __mod__(self, other: Any) -> Any:
        return self._with(Op.REMAINDER, self, other, self.value % plain(other))

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
        return isinstance(other, (int, Number)) and self.of.holds(Relation.EQUAL, self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """Fix the number: code that wants an integer may do anything with it."""
        self.of.holds(Relation.EQUAL, self, self.value)
        return self.value

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __repr__(self) -> str:
        return f"Number({self.value})"


def plain(x: Any) -> int:
    """Give the value of a number or an integer, without a condition."""
    return x.value if isinstance(x, Number) else int(x)


def least(a: Any, b: Any) -> Any:
    """Give the smaller of two integers, without a condition on which one it is."""
    return _chosen(Op.LEAST, a, b, min(plain(a), plain(b)))


def most(a: Any, b: Any) -> Any:
    """Give the larger of two integers, without a condition on which one it is."""
    return _chosen(Op.MOST, a, b, max(plain(a), plain(b)))


ARITHMETIC: dict[Op, Callable[[Any, Any], Any]] = {
    Op.ADD: operator.add,
    Op.SUBTRACT: operator.sub,
    Op.MULTIPLY: operator.mul,
    Op.DIVIDE: operator.floordiv,
    Op.REMAINDER: operator.mod,
    Op.LEAST: least,
    Op.MOST: most,
}


def _chosen(op: Op, a: Any, b: Any, value: int) -> Any:
    numbers = [x for x in (a, b) if isinstance(x, Number)]
    return numbers[0]._with(op, a, b, value) if numbers else value


@dataclass(frozen=True, eq=False)
class Shadow:
    """A tensor of a call that is being recorded, as far as launches look at one: all but its elements."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    base: tuple[From, int]
    behind: Any
    """Bytes from the beginning of the base to its first element."""
    is_cuda = True

    def stride(self, dimension: int | None = None) -> Any:
        """Give all strides, or one."""
        return self.strides if dimension is None else self.strides[dimension]

    def size(self, dimension: int) -> Any:
        """Give one size."""
        return self.shape[dimension]

    def dim(self) -> int:
        """Count dimensions."""
        return len(self.shape)

    def element_size(self) -> int:
        """Give the bytes of an element."""
        return self.dtype.itemsize

    def numel(self) -> Any:
        """Count elements."""
        product: Any = 1
        for size in self.shape:
            product = size * product
        return product

    def span(self) -> Any:
        """Give the bytes from the first element to the end of the last; there is one at least."""
        last: Any = 0
        for size, stride in zip(self.shape, self.strides, strict=True):
            last = (size - 1) * stride + last
        return (last + 1) * self.element_size()

    def as_strided(self, shape: Sequence[Any], strides: Sequence[Any]) -> Shadow:
        """Give a view that begins where the tensor does."""
        return Shadow(tuple(shape), tuple(strides), self.dtype, self.base, self.behind)

    @property
    def mT(self) -> Shadow:  # noqa: N802 - torch's name
        """Turn the last two dimensions."""
        (*sizes, m, n), (*strides, of_m, of_n) = self.shape, self.strides
        return Shadow((*sizes, n, m), (*strides, of_n, of_m), self.dtype, self.base, self.behind)

    def __getitem__(self, key: None) -> Shadow:
        """Put a dimension of size 1 in front."""
        assert key is None
        steps = self.shape[0] * self.strides[0]
        return Shadow((1, *self.shape), (steps, *self.strides), self.dtype, self.base, self.behind)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a shadow has no elements")
