"""Decide how much the tests try: all with DG_TEST_ALL, most with CI, else a part in which every feature occurs.

Only this file reads these two variables. Tests use its functions, or the marker `combinations` (conftest.py), to say
which cases a smaller run may leave out. CONTRIBUTING.md explains the runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from zlib import crc32

T = TypeVar("T")

ALL = bool(os.environ.get("DG_TEST_ALL"))
"""True before a release, and after a change of a kernel: all tests run."""
THOROUGH = ALL or bool(os.environ.get("CI"))


def up_to(most: int, few: int) -> int:
    """Return how many cases to try that differ only in their seeds."""
    return most if THOROUGH else few


def one_in(number: int, cases: Sequence[T]) -> Sequence[T]:
    """Return all cases in CI, else every `number`-th."""
    return cases if THOROUGH else cases[::number]


def few(cases: Sequence[T], features: Callable[[T], Iterable[Hashable]]) -> Sequence[T]:
    """Return a few cases in which each feature of any case occurs. The marker `few` does so for parameters' values."""
    return cases if THOROUGH else covering(cases, features)


def mutations(cases: Sequence[T]) -> Sequence[T]:
    """Return every 24th mutation in CI, every 72nd elsewhere. If you change a kernel, run all of its mutations."""
    return cases if ALL else cases[:: 24 if THOROUGH else 72]


def unbroken(number: int, cases: Sequence[T]) -> Sequence[T]:
    """Return the trials that an unbroken kernel must pass: one in `number` in CI, a sixth of this elsewhere."""
    return cases if ALL else cases[:: number if THOROUGH else 6 * number]


def ends(cases: Sequence[T]) -> Sequence[T]:
    """Return the first and the last case; other tests try every case with other forms of the same variant."""
    return cases if ALL else (cases[0], cases[-1])


def sample(configs: Sequence[T], kind: Callable[[T], Any] = lambda _: None) -> Sequence[T]:
    """Return a few dataclasses in which every value of every field occurs; in CI, every value within each kind."""
    if ALL:
        return configs
    return covering(configs, lambda case: [(THOROUGH and repr(kind(case)), *each) for each in values(case)])


def covering(cases: Sequence[T], features: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Return a few of the cases, in their order, in which each feature of any case occurs."""
    features_of = [frozenset(features(case)) for case in cases]
    missing = set().union(*features_of)
    # Ties are broken by a hash of the index: a rule blind to the order picks mixed combinations.
    order = sorted(range(len(cases)), key=lambda index: crc32(b"%d" % index))
    chosen = []
    while missing:
        best = max(order, key=lambda index: len(features_of[index] & missing))
        chosen.append(best)
        missing -= features_of[best]
    return [cases[index] for index in sorted(chosen)]


def values(config: Any) -> list[tuple[str, Hashable]]:
    """Return a dataclass's fields as features; a field that is itself a dataclass is replaced by its own fields."""
    found: list[tuple[str, Hashable]] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found += [(f"{field.name}.{name}", inner) for name, inner in values(value)]
        else:
            found.append((field.name, value))
    return found
