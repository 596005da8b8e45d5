"""Checks of numbers from callers: integers (of Python, numpy, or with `__index__`), and real numbers within FP32."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from numbers import Real

from torch import SymInt
from torch.compiler import is_dynamo_compiling

from ..shadow import Number

INT32_MAX = (1 << 31) - 1
FP32_MAX = 3.4028234663852886e38


def as_integer(value: object) -> int | None:
    """Convert an integer of any library to Python's int. Return None for other objects, also booleans and tensors.

    (Python would convert a tensor, but wait until the GPU has computed the value.) A symbolic size of torch.compile is
    returned as it is, and so is a number of a record.
    """
    if type(value) is int or isinstance(value, (SymInt, Number)):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or hasattr(value, "is_cuda"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def integer_in_range(name: str, value: object, low: int, high: int = INT32_MAX) -> int:
    """Return a caller's integer. Refuse an integer out of range and any other object."""
    number = as_integer(value)
    if number is not None and (isinstance(number, SymInt) or is_dynamo_compiling()):
        return number  # a comparison would become a guard of the compiled code; the operator checks the number
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}: expected an integer in {low}..{high}, got {value!r}")
    return number


def integers_from(low: int, **values: object) -> Iterator[int]:
    """Return a caller's integers, in the order of the keywords. Refuse an integer below `low` and any other object."""
    return (integer_in_range(name, value, low) for name, value in values.items())


def magnitude(name: str, value: object) -> float:
    """Return a caller's number from 0 to FP32's maximum. Refuse any other number, a boolean and a tensor."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= FP32_MAX:
        raise ValueError(f"{name}: expected a finite FP32 number that is not negative, got {value!r}")
    return float(value)


def finite(name: str, value: object) -> float:
    """Return a caller's number if FP32 can hold it as a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(float(value)) <= FP32_MAX:
        raise ValueError(f"{name}: expected a finite FP32 number, got {value!r}")
    return float(value)


def positive(name: str, value: object) -> float:
    """Return a caller's number if it is above 0 and at most FP32's maximum."""
    number = magnitude(name, value)
    if number == 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return number
