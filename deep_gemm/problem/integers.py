"""Integers that callers pass: Python's, numpy's, any that says it is one."""

from __future__ import annotations

import operator

INT32_MAX = (1 << 31) - 1


def as_integer(value: object) -> int | None:
    """Get Python's integer of any library's; None if it is no integer. A truth value is none, a tensor neither.

    (Python would take an integer out of a tensor too, and wait for the GPU to have it.)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or hasattr(value, "is_cuda"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integer_in_range(name: str, value: object, low: int, high: int = INT32_MAX) -> int:
    """Get a caller's integer, or refuse what is none or out of range."""
    number = as_integer(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}: expected an integer in {low}..{high}, got {value!r}")
    return number
