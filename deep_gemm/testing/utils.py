"""Decorators for tests that run under conditions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from ..core.gpu import HOPPER

Function = TypeVar("Function", bound=Callable[..., Any])


def get_arch_major() -> int:
    """Return the major number of the GPU's architecture; without a GPU 9 (Hopper), the target of the kernels."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else HOPPER


@contextmanager
def ignore_env(name: str, condition: Callable[[], bool]) -> Iterator[None]:
    """Decorate a function to run without an environment variable if `condition()` holds."""
    saved = os.environ.pop(name, None) if condition() else None
    try:
        yield
    finally:
        if saved is not None:
            os.environ[name] = saved


def test_filter(condition: Callable[[], bool]) -> Callable[[Function], Function]:
    """Decorate a test to run only if `condition()` holds; otherwise the test prints that it is left out."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if condition():
                return function(*args, **kwargs)
            print(f"{function.__name__}: left out, its condition does not hold")
            return None

        return cast(Function, call)

    return decorate


test_filter.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it as a test
