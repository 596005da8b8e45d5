"""How much the tests try: all with DG_TEST_ALL, most with CI, elsewhere a part in which every feature occurs.

This is the only place that asks. Tests say by these functions, or by the marker `combinations` (conftest.py), what a
smaller run may leave out. CONTRIBUTING.md says it to people.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from zlib import crc32

T = TypeVar("T")

ALL = bool(os.environ.get("DG_TEST_ALL"))
"""Before a release, and of a kernel that changes."""
THOROUGH = ALL or bool(os.environ.get("CI"))


def up_to(most: int, few: int) -> int:
    """How many of what differs only in its seed."""
    return most if THOROUGH else few


def one_in(number: int, cases: Sequence[T]) -> Sequence[T]:
    """Every so many of these."""
    return cases if THOROUGH else cases[::number]


def few(cases: Sequence[T], features: Callable[[T], Iterable[Hashable]]) -> Sequence[T]:
    """As many as have each feature of any of them. The marker `few` is for each value of each parameter."""
    return cases if THOROUGH else covering(cases, features)


def mutations(cases: Sequence[T]) -> Sequence[T]:
    """Every 24th of a list in CI, every 72nd elsewhere: whoever changes a kernel tries all of its own."""
    return cases if ALL else cases[:: 24 if THOROUGH else 72]


def unbroken(number: int, cases: Sequence[T]) -> Sequence[T]:
    """Trials that what is not broken must pass: one in so many in CI, a sixth of these elsewhere."""
    return cases if ALL else cases[:: number if THOROUGH else 6 * number]


def ends(cases: Sequence[T]) -> Sequence[T]:
    """The first and the last, for a variant of what other tests run in every form."""
    return cases if ALL else (cases[0], cases[-1])


def sample(configs: Sequence[T], kind: Callable[[T], Any] = lambda _: None) -> Sequence[T]:
    """Give as many of these dataclasses as have every value of every field; in CI each kind of them has its own."""
    if ALL:
        return configs
    return covering(configs, lambda case: [(THOROUGH and repr(kind(case)), *each) for each in values(case)])


def covering(cases: Sequence[T], features: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Few of the cases, in their order, in which each feature of any of them occurs."""
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
    """A dataclass's fields, as features; of a field that is such a dataclass too, those of its own."""
    found: list[tuple[str, Hashable]] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found += [(f"{field.name}.{name}", inner) for name, inner in values(value)]
        else:
            found.append((field.name, value))
    return found
