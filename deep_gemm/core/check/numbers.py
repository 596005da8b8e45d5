"""Numbers that callers pass as FP32: Python's, numpy's, anything that is a real number."""

from __future__ import annotations

from numbers import Real

FP32_MAX = 3.4028234663852886e38


def magnitude(name: str, value: object) -> float:
    """Get a caller's number from 0 to the largest of FP32; refuse any other, a boolean and a tensor."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= FP32_MAX:
        raise ValueError(f"{name}: expected a finite FP32 number that is not negative, got {value!r}")
    return float(value)


def finite(name: str, value: object) -> float:
    """Get a caller's number between the largest of FP32 and its negative."""
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(float(value)) <= FP32_MAX:
        raise ValueError(f"{name}: expected a finite FP32 number, got {value!r}")
    return float(value)


def positive(name: str, value: object) -> float:
    """Get a caller's number above 0 up to the largest of FP32."""
    number = magnitude(name, value)
    if number == 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return number
