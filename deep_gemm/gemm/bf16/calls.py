"""A call of a BF16 product: the plan of a call like it is launched, or it is asked anew: see gemm/product.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import settings
from ...core.check.layout import rows_of_counts, rows_of_groups
from ...core.check.tracing import dispatch_is_on, handles_operators, is_dynamo_compiling, num_modes
from ...core.settings import get_compile_mode
from ..output import Groups
from ..plan import PLANS, Key, Plan
from ..reference import padding_rows
from . import counted as bf16_counted
from . import depths as bf16_depths
from . import rows as bf16_rows
from .config import BLOCK_K
from .depths_check import Bf16DepthsProblem
from .rows_check import Bf16RowsProblem


@dataclass(eq=False)
class Bf16Product:
    """A public product: how a call of it is asked, and who computes it."""

    operator: str
    """Operator of `torch.ops.deep_gemm`: it takes a, b, (d,) c, a layout if there is one, then what the caller said."""
    ask: Callable[..., Any]
    """`(a, b, d, c, layout, said) -> problem`: checks everything, makes D where it was left out."""
    reference: Callable[[Any], None]
    on_gpu: Callable[[Any], Plan | None]
    """Computes a problem of CUDA tensors; gives the plan if it can serve other calls."""
    has_c: bool = True
    has_layout: bool = False
    has_gradients: bool = False
    """The operator that makes its D has a gradient."""
    heads_are_second: bool = False
    """D is `[b, h, n]`, of which a problem has the heads first."""
    first: Key = ()
    """Arguments that the operator takes before its operands."""

    def as_operator(
        self, a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, layout: Tensor | None, said: Key
    ) -> Tensor | None:
        """Pass the call to the operator that computes it."""
        operator = getattr(torch.ops.deep_gemm, self.operator)
        others = (*((layout,) if self.has_layout else ()), *said)
        if d is None:
            made: Tensor = operator.default(*self.first, a, b, *((c,) if self.has_c else ()), *others)
            return made
        if self.has_c:
            operator.into(*self.first, a, b, d, None if c is d else c, *others, c is d)
        else:
            operator.into(*self.first, a, b, d, *others)
        return None

    def output_of(self, problem: Any) -> Tensor:
        """Give D as a caller has it."""
        d: Tensor = problem.d
        return d.transpose(0, 1) if self.heads_are_second else d


def run(
    product: Bf16Product,
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    c: Tensor | None = None,
    layout: Tensor | None = None,
    said: Key = (),
) -> Tensor | None:
    """Compute a product: by the plan of a call like one before; else ask, choose, and keep the plan.

    D is returned where the caller left it out.
    """
    if is_dynamo_compiling() or (num_modes() and dispatch_is_on()):
        return product.as_operator(a, b, d, c, layout, said)
    plan: Plan | None = None
    key: Key = ()
    try:
        if a.is_cuda and (type(a) is Tensor or not handles_operators(a)):
            tensors = (a, b) if d is None else (a, b, d)
            if c is not None and c is not d:
                tensors = (*tensors, c)
            if layout is not None:
                tensors = (*tensors, layout)
            grad = torch.is_grad_enabled()
            shape = (d is None, c is None, c is d, layout is None, grad)
            hint = (product, said, settings.in_force.generation, a.shape, b.shape, shape)
            for check, found in PLANS.seen.get(hint, ()):
                if check(*tensors):
                    plan = found
                    break
            else:
                if not (handles_operators(*tensors) or (grad and any(x.requires_grad for x in tensors))):
                    key = (*hint, *((x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors))
                    plan = PLANS.plans.get(key)
                    if plan is not None:
                        PLANS.seen.keep(hint, tensors, plan)
    except (TypeError, ValueError, AttributeError, RuntimeError):  # malformed: the checks say how
        key = ()
    if plan is not None:
        out = plan.new_output() if d is None else d
        at_layout = 0 if layout is None else layout.data_ptr()
        at_second, third = (at_layout, 0 if c is None else c.data_ptr()) if product.has_c else (0, at_layout)
        at = (a.data_ptr(), at_second, b.data_ptr(), 0, out.data_ptr(), third)
        if plan.fits(at):
            plan.launch(at)
            return out if d is None else None
    if handles_operators(a, b, d, c, layout):
        return product.as_operator(a, b, d, c, layout, said)
    if product.has_gradients and d is None and _wants_gradient(a, b):
        return product.as_operator(a, b, d, c, layout, said)
    problem = product.ask(a, b, d, c, layout, said)
    if not problem.d.is_cuda:
        if get_compile_mode() == 0:
            product.reference(problem)
    else:
        plan = product.on_gpu(problem)
        # A D that heads were moved in is not what a plan would make.
        if plan is not None and key and not (d is None and product.heads_are_second):
            PLANS.keep(key, plan)
    return product.output_of(problem) if d is None else None


def _wants_gradient(*operands: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in operands)


def run_rows(p: Bf16RowsProblem) -> Plan | None:
    """Compute a product of grouped rows on a GPU."""
    if p.d.numel() == 0 or len(p.b) == 0:
        return None
    if p.a.shape[-1] == 0:
        if get_compile_mode() == 0:
            p.d.masked_fill_(written_rows(p)[..., None], 0)
        return None
    if p.is_masked:
        return bf16_rows.run(bf16_rows.RowsProblem(p.a, p.b, p.d, p.layout, Groups.COUNTS, p.expected_m, 1))
    groups = Groups.ENDS if p.layout_is_ends else Groups.IDS
    stacked = p.a[None], p.b, p.d[None], p.layout, groups, p.expected_m, p.alignment, p.zero_padding
    return bf16_rows.run(bf16_rows.RowsProblem(*stacked))


def written_rows(p: Bf16RowsProblem) -> Tensor:
    """Tell of each row of D whether the product writes it. The host reads nothing."""
    if p.is_masked:
        return rows_of_counts(p.layout, p.a.shape[1])
    is_owned = rows_of_groups(p.layout, len(p.a), p.alignment) if p.layout_is_ends else p.layout >= 0
    if not p.zero_padding or len(is_owned) == 0:
        return is_owned
    return is_owned | padding_rows(is_owned.int() - 1, p.alignment)


def run_depths(p: Bf16DepthsProblem) -> Plan | None:
    """Compute a product of groups along k on a GPU. The host waits for no depth: those that it lacks the GPU reads."""
    if p.ks is not None and not any(k % BLOCK_K for k in p.ks):
        rows = sum(p.ks)
        plans = bf16_depths.run(bf16_depths.DepthsProblem(p.a[:rows], p.b[:rows], p.d, p.c, p.ks))
        return plans[0] if len(plans) == 1 else None
    counted = bf16_counted.problem(p.a, p.b, p.d, p.c, p.ks, p.ks_tensor)
    plans = bf16_counted.run(counted)
    # Another call has depths of its own where this one's were made of something else.
    is_callers = counted.sfa is None or counted.sfa is p.layout
    return plans[0] if len(plans) == 1 and is_callers else None
