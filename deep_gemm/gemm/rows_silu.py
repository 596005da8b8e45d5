"""Products of grouped rows that are activated and cast on their way out: gemm/epilogue/silu.cuh."""

from __future__ import annotations

from typing import Any

from ..core.call import Key
from ..core.settings import in_force
from .ask.silu import activated
from .kinds.epilogues import SILU, SILU_OF_HALVES
from .kinds.output import Output
from .kinds.works import ENDS
from .launch import run as run_product
from .plan import PLANS, addresses_of
from .problem import Problem

IN_TURN = Output(work=ENDS, epilogue=SILU)
APART = Output(work=ENDS, epilogue=SILU_OF_HALVES)


def again(*operands: Any) -> bool:
    """Launch the plan of an equal call before, without checks. Return False to send the call through the checks.

    `operands` are those of `activated`.
    """
    try:
        p = activated(*operands)
        plan = PLANS.plans.get(signature(p)) if p.d.is_cuda else None
        if plan is None or not plan.fits(at := addresses_of(p)):
            return False
    except (AttributeError, IndexError, TypeError, RuntimeError):  # malformed: the checks say how
        return False
    plan.launch(at)
    return True


def signature(p: Problem) -> Key:
    """Give everything but addresses that decides whether a call is right, and its launch."""
    tensors = p.a, p.sfa, p.b, p.sfb, p.d, p.scales, p.c, p.row_weights
    lie = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors)
    return run, lie, p.limit, p.epilogue, in_force.generation


def run(p: Problem) -> None:
    """Multiply, activate and cast on the GPU that the tensors are on. The host does not wait for ends."""
    plan = run_product(p)
    if plan is not None and not plan.copies_sfa:  # others are copied anew by each call
        PLANS.keep(signature(p), plan)
