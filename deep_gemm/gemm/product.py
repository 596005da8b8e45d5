r"""A public product, and what becomes of a call: the plan of a call like it is launched, or it is asked anew.

    call --signature--> PlanCache --> Plan.fits(addresses) --> Plan.launch(addresses)
      \--- unknown ---> ask (check.py) --> choose (choose.py) --> a plan, kept for calls like this one

A signature is everything that decides whether a call is right and what it launches, but for addresses: shapes, strides,
types, devices, what the caller said, the settings in force. So a call with the signature of one that was checked is
right as well, if only its addresses are: they are aligned, and the output overlaps nothing that it must not.

A signature has two parts. The first is the weight: B and what else stays the same from call to call. The second is the
rows: shapes and strides that change with the size of a batch. If the weight is known and the rows are new, a plan is
derived from another of the same weight, without checks that are already answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..casts.lay_scales import mn_major
from ..core import settings
from ..core.check import checks
from ..core.check.checks import Operand, cuts_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT
from ..core.check.tracing import dispatch_is_on, handles_operators, is_dynamo_compiling, num_modes
from ..core.settings import get_compile_mode
from .plan import PLANS, Key, Operands, Plan


class Problem(Operands, Protocol):
    """A problem as check.py gives it."""


@dataclass(eq=False)
class Product:
    """A public product: how a call of it is asked, and who computes it."""

    ask: Callable[..., Any]
    """`(a, b, d, c, said) -> problem`: checks everything, makes D where it was left out."""
    reference: Callable[[Any], None]
    """Computes a problem of CPU tensors."""
    on_gpu: Callable[[Any], Plan | None]
    """Computes a problem of CUDA tensors; gives the plan if it can serve other calls."""
    as_operator: Callable[[Operand, Operand, Tensor | None, Tensor | None, Any], Tensor | None]
    """Passes the arguments of `ask` to the operator of `torch.ops.deep_gemm` that computes the product."""
    derive: Callable[[dict[Any, Any], Sequence[Any]], Plan | None] | None = None
    """Makes a plan for other rows from those of the same family, by configuration, and from a call's operands.

    None if these want a closer look: nobody has checked them.
    """
    turned: tuple[bool, bool] = field(default=(False, False))
    """A and B are given transposed."""


def run(product: Product, a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, said: Key = ()) -> Tensor | None:
    """Compute a product: by the plan of a call like one before; else ask, choose, and keep the plan.

    `said` is what else the caller stated. D is returned where the caller left it out.
    """
    if is_dynamo_compiling() or (num_modes() and dispatch_is_on()):
        return product.as_operator(a, b, d, c, said)
    plan: Plan | None = None
    key: Key = ()
    try:
        (x, sx), (y, sy) = a, b
        if x.is_cuda and (type(x) is Tensor or not handles_operators(x)):
            at_sfa, at_sfb = sx.data_ptr(), sy.data_ptr()
            tensors = (x, sx, y, sy) if d is None else (x, sx, y, sy, d)
            if c is not None and c is not d:
                tensors = (*tensors, c)
            hint = (
                product,
                said,
                settings.in_force.generation,
                x.shape,
                y.shape,
                at_sfa % ADDRESS_ALIGNMENT,
                at_sfb % ADDRESS_ALIGNMENT,
                d is None,
                c is None,
                c is d,
            )
            for check, found in PLANS.seen.get(hint, ()):
                if check(*tensors):
                    plan = found
                    break
            else:
                # The checks refuse what would cut a gradient.
                if not (handles_operators(*tensors) or cuts_gradient(tensors[:4], tensors[4:])):
                    key = _signature(hint, x, sx, y, sy, d, c)
                    plan = PLANS.plans.get(key)
                    if plan is not None:
                        PLANS.seen.keep(hint, tensors, plan)
                    elif product.derive is not None:
                        plan = _derived(product, key, (x, sx, y, sy, d, c))
    except (TypeError, ValueError, AttributeError, RuntimeError):  # malformed: the checks say how
        key = ()
    if plan is not None:
        out = plan.new_output() if d is None else d
        if plan.copies_sfa:
            sx = mn_major(sx)
            at_sfa = sx.data_ptr()
        if plan.copies_sfb:
            sy = mn_major(sy)
            at_sfb = sy.data_ptr()
        at = (x.data_ptr(), at_sfa, y.data_ptr(), at_sfb, out.data_ptr(), 0 if c is None else c.data_ptr())
        if plan.fits(at):
            plan.launch(at)
            return out if d is None else None
    if handles_operators(a, b, d, c):
        return product.as_operator(a, b, d, c, said)
    problem = product.ask(a, b, d, c, said)
    if not problem.d.is_cuda:
        if get_compile_mode() == 0:
            product.reference(problem)
        return problem.d if d is None else None
    plan = product.on_gpu(problem)
    if plan is not None and key and _serves(plan, product, problem, a, b, c):
        PLANS.keep(key, plan)
        if product.derive is not None:
            PLANS.keep_to_derive(key, plan)
    return problem.d if d is None else None


def call_operator(name: str, a: Operand, b: Operand, d: Tensor | None, *inputs: Any, **said: Any) -> Tensor | None:
    """Compute a product by the operator of this name, which gives D, or by its overload that writes a caller's D."""
    operator = getattr(torch.ops.deep_gemm, name)
    operands = *checks.pair("a", a), *checks.pair("b", b)
    if d is None:
        return operator.default(*operands, *inputs, **said)  # type: ignore[no-any-return]
    operator.into(*operands, checks.tensor("d", d), *inputs, **said)
    return None


def _signature(hint: Key, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, d: Tensor | None, c: Tensor | None) -> Key:
    """Everything that decides whether a call is right and what it launches, but for addresses."""
    product, said, generation, shape_a, shape_b, offset_sfa, offset_sfb, *_ = hint
    return (
        product,
        said,
        generation,
        shape_b,
        y.stride(),
        y.dtype,
        y.get_device(),
        sy.shape,
        sy.stride(),
        sy.dtype,
        sy.get_device(),
        offset_sfb,
        x.dtype,
        x.get_device(),
        sx.dtype,
        sx.get_device(),
        # The weight ends here; what follows are the rows.
        shape_a,
        x.stride(),
        sx.shape,
        sx.stride(),
        offset_sfa,
        None if d is None else (d.shape, d.stride(), d.dtype, d.get_device()),
        None if c is None else c is d or (c.shape, c.stride(), c.dtype, c.get_device()),
    )


def _derived(product: Product, key: Key, operands: Sequence[Any]) -> Plan | None:
    """Derive a plan for other rows of a known weight, and keep it; None if nothing like it is known."""
    assert product.derive is not None
    templates = PLANS.templates(key)
    plan = None if templates is None else product.derive(templates, operands)
    if plan is not None:
        PLANS.keep(key, plan)
    return plan


def _serves(plan: Plan, product: Product, problem: Problem, a: Operand, b: Operand, c: Tensor | None) -> bool:
    """Tell whether the plan suits calls like this one: their values are not copied, and scales are where calls say."""
    if problem.a.data_ptr() != a[0].data_ptr() or problem.b.data_ptr() != b[0].data_ptr():
        return False
    if plan.needs_c and c is None:
        return False
    return not (plan.copies_sfa and product.turned[0]) and not (plan.copies_sfb and product.turned[1])
