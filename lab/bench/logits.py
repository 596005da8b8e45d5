"""Works on logits that `bench attention` times, and kinds of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .cases import Shape


class Logits(NamedTuple):
    """A work on logits: its size, our call, the same in torch if that can be, and how far ours are from right."""

    operations: int
    bytes: int
    ours: Callable[[], Any]
    in_torch: Callable[[], Any] | None
    error: Callable[[], float]


class Kind(NamedTuple):
    """A kind of logits."""

    shapes: Sequence[Shape]
    quick: Sequence[Shape]
    make: Callable[[Shape], Logits]
