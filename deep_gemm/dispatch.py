"""Which backend runs a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from .kernels.plan import Plan, keep
from .problem.checks import Operand
from .settings import get_compile_mode


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


def run(problem: P, kernel: Callable[[P], Plan | None], reference: Callable[[P], None]) -> Plan | None:
    """Write the problem's output: by its kernel on a GPU, by the reference elsewhere.

    A kernel's plan is returned if it can serve later calls as it is.
    """
    if problem.d.is_cuda:
        return kernel(problem)
    if get_compile_mode() == 0:
        reference(problem)
    return None


def keep_for_calls_like_this(
    plans: dict[tuple[object, ...], Plan],
    signature: tuple[object, ...],
    plan: Plan | None,
    problem: Problem,
    a: Operand,
    b: Operand,
) -> None:
    """Keep what `run` gave, if a call of this signature may use it: its operands were not copied for this one."""
    if plan is None or not signature:
        return
    was_copied = problem.a.data_ptr() != a[0].data_ptr() or problem.b.data_ptr() != b[0].data_ptr()
    if not was_copied:
        keep(plans, signature, plan)
