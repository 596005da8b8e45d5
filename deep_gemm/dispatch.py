"""Which backend runs a problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from .kernels import fp8_gemm
from .problem import DenseProblem
from .settings import get_compile_mode


class ReferenceFallbackWarning(UserWarning):
    """A product of CUDA tensors ran the reference on the GPU, because no kernel computes it yet."""


class Problem(Protocol):
    """Any problem of `problem.py`: what dispatch needs to know of it."""

    @property
    def d(self) -> Tensor:
        """The output."""


P = TypeVar("P", bound=Problem)
_warned: set[str] = set()


def run(problem: P, reference: Callable[[P], None]) -> fp8_gemm.Plan | None:
    """Write the problem's output: by a kernel on a GPU, by the reference on the CPU or where there is no kernel yet.

    A kernel's plan is returned if it can serve later calls as it is.
    """
    if isinstance(problem, DenseProblem) and problem.d.is_cuda and fp8_gemm.can_run(problem):
        return fp8_gemm.run(problem)
    if get_compile_mode() == 0:
        if problem.d.is_cuda:
            _warn_once(reference.__name__)
        reference(problem)
    return None


def forget_warnings() -> None:
    """Warn anew of products that have been warned of."""
    _warned.clear()


def _warn_once(product: str) -> None:
    if product in _warned:
        return
    warnings.warn(
        f"deep_gemm has no {product} kernel for this GPU yet: the reference runs instead, correct and very slow",
        ReferenceFallbackWarning,
        stacklevel=4,
    )
    _warned.add(product)  # after the warning: where a filter makes it an error, it stays one
