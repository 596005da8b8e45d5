"""How much the tests try: all with DG_TEST_ALL, most with CI, else a part that has every feature.

Only this file reads these variables. Tests use its functions, or the marker `combinations` (conftest.py), to tell which
cases a smaller run may leave out. CONTRIBUTING.md explains the runs to people.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from zlib import crc32

T = TypeVar("T")

ALL = bool(os.environ.get("DG_TEST_ALL"))
"""Set before a release, and to test a kernel that changes."""
THOROUGH = ALL or bool(os.environ.get("CI"))


def up_to(most: int, few: int) -> int:
    """How many cases to try that differ only in their seeds."""
    return most if THOROUGH else few


def one_in(number: int, cases: Sequence[T]) -> Sequence[T]:
    """Give all cases in CI, else every `number`-th."""
    return cases if THOROUGH else cases[::number]


def few(cases: Sequence[T], features: Callable[[T], Iterable[Hashable]]) -> Sequence[T]:
    """Give few cases, with each feature of any case. The marker `few` does so for each value of each parameter."""
    return cases if THOROUGH else covering(cases, features)


def mutations(cases: Sequence[T]) -> Sequence[T]:
    """Every 24th of a list in CI, every 72nd elsewhere. If you change a kernel, run all of its mutations."""
    return cases if ALL else cases[:: 24 if THOROUGH else 72]


def unbroken(number: int, cases: Sequence[T]) -> Sequence[T]:
    """Trials that an unbroken kernel must pass: one in `number` in CI, a sixth of these elsewhere."""
    return cases if ALL else cases[:: number if THOROUGH else 6 * number]


def ends(cases: Sequence[T]) -> Sequence[T]:
    """The first and the last case, for a variant whose other forms are tried by other tests in every case."""
    return cases if ALL else (cases[0], cases[-1])


def sample(configs: Sequence[T], kind: Callable[[T], Any] = lambda _: None) -> Sequence[T]:
    """Give few of these dataclasses, with every value of every field; in CI, every value in each kind."""
    if ALL:
        return configs
    return covering(configs, lambda case: [(THOROUGH and repr(kind(case)), *each) for each in values(case)])


def covering(cases: Sequence[T], features: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Give few of the cases, in their order, with each feature of any case."""
    features_of = [frozenset(features(case)) for case in cases]
    missing = set().union(*features_of)
    # Among equals the first by a hash: a rule that knows nothing of the order leaves mixed combinations.
    order = sorted(range(len(cases)), key=lambda index: crc32(b"%d" % index))
    chosen = []
    while missing:
        best = max(order, key=lambda index: len(features_of[index] & missing))
        chosen.append(best)
        missing -= features_of[best]
    return [cases[index] for index in sorted(chosen)]


def values(config: Any) -> list[tuple[str, Hashable]]:
    """Give a dataclass's fields as features; a field that is a dataclass too gives its own fields."""
    found: list[tuple[str, Hashable]] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found += [(f"{field.name}.{name}", inner) for name, inner in values(value)]
        else:
            found.append((field.name, value))
    return found
