"""Integers that callers pass: Python's, numpy's, anything with `__index__`."""

from __future__ import annotations

import operator

from torch import SymInt
from torch.compiler import is_dynamo_compiling

INT32_MAX = (1 << 31) - 1


def as_integer(value: object) -> int | None:
    """Convert any library's integer to Python's; None if it is not one. Booleans and tensors do not count.

    (Python would convert a tensor too, and wait for the GPU to have its value.) A size that torch.compile leaves open
    stays open.
    """
    if type(value) is int or isinstance(value, SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or hasattr(value, "is_cuda"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integer_in_range(name: str, value: object, low: int, high: int = INT32_MAX) -> int:
    """Get a caller's integer; refuse one that is out of range, and anything else."""
    number = as_integer(value)
    if number is not None and (isinstance(number, SymInt) or is_dynamo_compiling()):
        return number  # a comparison would bind what is compiled to its answer; the operator checks the number
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}: expected an integer in {low}..{high}, got {value!r}")
    return number
