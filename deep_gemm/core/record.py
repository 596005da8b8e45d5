"""The record of a call: the layout of its tensors, and the launches that answer it, as data.

shadow.py makes records. replay.py replays records and defines their meaning. replay.c replays them faster.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch

MOST_TENSORS, MOST_DIMENSIONS, MOST_STATED = 16, 5, 256


class Op(IntEnum):
    """Operations that yield a number. Division and remainder round down, as in Python."""

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
    STATED = 10

    __hash__ = int.__hash__


ARITHMETIC: dict[Op, Callable[[int, int], int]] = {
    Op.ADD: operator.add,
    Op.SUBTRACT: operator.sub,
    Op.MULTIPLY: operator.mul,
    Op.DIVIDE: operator.floordiv,
    Op.REMAINDER: operator.mod,
    Op.LEAST: min,
    Op.MOST: max,
}


class Step(NamedTuple):
    """A step that yields one number. A CONSTANT has its value in `a`. A SIZE or STRIDE has a tensor and a dimension.

    STATED has the index of an integer that the caller states. Arithmetic has the places of two earlier steps.
    """

    op: Op
    a: int
    b: int = 0


class Relation(IntEnum):
    """Relations between two numbers that a record's conditions name."""

    BELOW = 0
    EQUAL = 1

    __hash__ = int.__hash__


class Condition(NamedTuple):
    """A relation between two numbers, and whether it must hold or must fail."""

    relation: Relation
    a: int
    b: int
    holds: bool


class From(IntEnum):
    """Kinds of memory in which an address may be."""

    TENSOR = 0
    """A tensor of the call."""
    RESULT = 1
    """A tensor that the replay makes for the caller."""
    SCRATCH = 2
    """The one buffer that passes values from launches to later launches."""


class Address(NamedTuple):
    """An address: tensor `which` of kind `base`, and the number of bytes behind its beginning."""

    base: From
    which: int
    behind: int


class Word(NamedTuple):
    """An address, or a number of 4 or 8 bytes. It is written at byte `at` of a launch's parameters."""

    at: int
    size: int
    number: int
    address: Address | None = None


class Map(NamedTuple):
    """A tensor map, written at byte `at` of a launch's parameters. Sizes, strides and box are numbers."""

    at: int
    address: Address
    element: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Launch(NamedTuple):
    """One launch: its kernel, number of CTAs and parameters, and the words and maps to write into the parameters."""

    kernel: Any
    """A `driver.Launcher`, or a test's stand-in for one."""
    grid: int
    params: bytes
    words: tuple[Word, ...]
    maps: tuple[Map, ...]


class Made(NamedTuple):
    """A tensor that the replay makes for the caller. Its sizes and strides are numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    view: tuple[tuple[int, ...], ...] = ()
    """Sizes and strides of the view that the caller gets; empty if the caller gets the tensor itself."""


class Given(NamedTuple):
    """A tensor of the call. A size or stride of -1 is free: steps read it from each call."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """Everything that a replay knows about a call."""

    device: int
    given: tuple[Given, ...]
    stated: int
    """Number of integers that the caller states."""
    steps: tuple[Step, ...]
    conditions: tuple[Condition, ...]
    outputs: int
    """Number of tensors that launches write: the last ones. They share no memory with each other or the rest."""
    made: tuple[Made, ...]
    scratch: int
    """The number (its place) that holds the bytes of the buffer between launches."""
    launches: tuple[Launch, ...]

    @cached_property
    def constants(self) -> list[int]:
        """Return the value of each constant step, and 0 for every other step."""
        return [step.a if step.op is Op.CONSTANT else 0 for step in self.steps]

    @cached_property
    def read(self) -> dict[Op, list[tuple[int, int, int]]]:
        """List the steps that read a size, a stride or a stated integer from a call, as (place, a, b)."""
        each = [(place, *step) for place, step in enumerate(self.steps)]
        return {of: [(i, a, b) for i, op, a, b in each if op is of] for of in (Op.SIZE, Op.STRIDE, Op.STATED)}

    @cached_property
    def program(self) -> list[Any]:
        """List conditions as (numbers to compute first, is below, a, b, holds), in the order of their numbers.

        A number to compute is (place, function, a, b). The last condition always holds: it computes the rest.
        """
        asked = sorted([(max(a, b) + 1, of is Relation.BELOW, a, b, holds) for of, a, b, holds in self.conditions])
        found, at = [], 0
        for until, *condition in (*asked, (len(self.steps), False, 0, 0, True)):
            computed = []
            for op, a, b in self.steps[at:until]:
                if op in ARITHMETIC:
                    computed.append((at, ARITHMETIC[op], a, b))
                at += 1
            found.append((computed, *condition))
        return found
