"""Which backend runs a problem."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from .kernels import dense, grouped, k_grouped
from .kernels.plan import Plan
from .problem import ContiguousProblem, DenseProblem, KGroupedProblem, MaskedProblem
from .settings import get_compile_mode


class ReferenceFallbackWarning(UserWarning):
    """A product of CUDA tensors ran the reference on the GPU, because no kernel computes it yet."""


class Problem(Protocol):
    """Any problem of `problem.py`: what dispatch needs to know of it."""

    @property
    def a(self) -> Tensor:
        """Values of A."""

    @property
    def b(self) -> Tensor:
        """Values of B."""

    @property
    def d(self) -> Tensor:
        """The output."""


P = TypeVar("P", bound=Problem)
PACKAGE = str(Path(__file__).parent) + os.sep
_warned: set[str] = set()


def run(problem: P, reference: Callable[[P], None]) -> Plan | None:
    """Write the problem's output: by a kernel on a GPU, by the reference on the CPU or where there is no kernel yet.

    A kernel's plan is returned if it can serve later calls as it is.
    """
    if isinstance(problem, DenseProblem) and problem.d.is_cuda:
        return dense.run(problem)
    if isinstance(problem, ContiguousProblem | MaskedProblem) and problem.d.is_cuda:
        return grouped.run(problem)
    if isinstance(problem, KGroupedProblem) and problem.d.is_cuda:
        k_grouped.run(problem)
        return None
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
        stacklevel=_callers_level(),
    )
    _warned.add(product)  # after the warning: where a filter makes it an error, it stays one


def _callers_level() -> int:
    """Count the frames from `_warn_once` to the first outside this package, as `warnings.warn` does."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
