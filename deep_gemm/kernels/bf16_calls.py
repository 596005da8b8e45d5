"""A call of a BF16 product: the plan of a call like it is launched, or it is asked anew, as kernels/product.py has it.

What a caller may ask and a kernel does not take is made to fit here: groups along k of any depth, and depths that only
a GPU has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import settings
from ..choose.config_bf16 import BLOCK_K
from ..choose.output import Groups
from ..problem.bf16_depths import Bf16DepthsProblem, check_depths
from ..problem.bf16_rows import Bf16RowsProblem
from ..problem.layout import align, rows_of_counts, rows_of_groups
from ..problem.tracing import dispatch_is_on, handles_operators, is_dynamo_compiling, num_modes
from ..reference import padding_rows
from ..settings import get_compile_mode
from . import bf16_depths, bf16_rows
from .plan import PLANS, Key, Plan


@dataclass(eq=False)
class Bf16Product:
    """A public product: how a call of it is asked, and who computes it."""

    operator: str
    """Of `torch.ops.deep_gemm`: it takes a, b, (d,) c, then the layout if there is one, then what the caller said."""
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
    """What the operator takes before its operands."""

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
        third = c if product.has_c else layout
        at = (a.data_ptr(), 0, b.data_ptr(), 0, out.data_ptr(), 0 if third is None else third.data_ptr())
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
    """Compute a product of groups along k on a GPU.

    A block of k must lie in one group, so groups of other depths are copied apart. The host waits for depths that it
    does not have.
    """
    is_read, ks = p.ks is None, p.ks
    if ks is None:
        ks = tuple(p.ks_tensor.tolist())  # type: ignore[union-attr]
        check_depths(ks, p.a.shape[0])
    a, b = p.a, p.b
    is_copied = any(k % BLOCK_K for k in ks)
    if is_copied:
        a, b = (_apart(x, ks) for x in (a, b))
        ks = tuple(align(k, BLOCK_K) for k in ks)
    elif sum(ks) < len(a):
        a, b = a[: sum(ks)], b[: sum(ks)]
    plans = bf16_depths.run(bf16_depths.DepthsProblem(a, b, p.d, p.c, ks))
    return plans[0] if len(plans) == 1 and not is_copied and not is_read else None


def _apart(x: Tensor, ks: tuple[int, ...]) -> Tensor:
    """Copy each group's rows, with zeros behind them up to whole blocks."""
    groups = torch.split(x[: sum(ks)], list(ks))
    return torch.cat([F.pad(group, (0, 0, 0, -len(group) % BLOCK_K)) for group in groups])
