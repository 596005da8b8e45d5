"""The record of a call: what the call was like, and the launches that answer it, as data.

shadow.py makes records; replay.py replays them, and defines their meaning; replay.c does the same faster.
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
    """One number: of a constant, its value; of a size or stride, tensor and dimension; else of two earlier numbers.

    The place of an integer among all that the caller states.
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
    """A relation of two numbers that holds, or does not."""

    relation: Relation
    a: int
    b: int
    holds: bool


class From(IntEnum):
    """Beginnings that addresses count from."""

    TENSOR = 0
    """A tensor that the call was given."""
    RESULT = 1
    """A tensor that the replay makes for the caller."""
    SCRATCH = 2
    """The one buffer that lies between launches."""


class Address(NamedTuple):
    """A place in memory: bytes, a number, behind the beginning of something."""

    base: From
    which: int
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
    """One launch: its kernel, CTAs, parameters, and the words and maps that are written over these."""

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
    view: tuple[tuple[int, ...], ...] = ()
    """Sizes and strides of the view of it that the caller gets, if it is not the tensor itself."""


class Given(NamedTuple):
    """A tensor of the call. A size or a stride of -1 is free: numbers read it."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """All that a replay knows of a call."""

    device: int
    given: tuple[Given, ...]
    stated: int
    """Integers that the caller states."""
    steps: tuple[Step, ...]
    conditions: tuple[Condition, ...]
    outputs: int
    """How many tensors, the last ones, are written: these share no memory with each other or the rest."""
    made: tuple[Made, ...]
    scratch: int
    """Bytes of the buffer between launches, a number."""
    launches: tuple[Launch, ...]

    @cached_property
    def constants(self) -> list[int]:
        """Give the numbers that are constants, and 0 in the places of others."""
        return [step.a if step.op is Op.CONSTANT else 0 for step in self.steps]

    @cached_property
    def read(self) -> dict[Op, list[tuple[int, int, int]]]:
        """List the numbers that a call gives, by where it has them: (place, a, b) of each step."""
        each = [(place, *step) for place, step in enumerate(self.steps)]
        return {of: [(i, a, b) for i, op, a, b in each if op is of] for of in (Op.SIZE, Op.STRIDE, Op.STATED)}

    @cached_property
    def program(self) -> list[Any]:
        """List conditions as (numbers to compute before, is below, a, b, holds), earliest first; the last one holds.

        A number to compute is (place, function, a, b).
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
