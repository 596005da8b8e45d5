r"""A public product, and what becomes of a call: the plan of a call like it is launched, or it is asked anew.

    call --signature--> PlanCache --> Plan.fits(addresses) --> Plan.launch(addresses)
      \--- unknown ---> ask (ask/) --> choose (choose.py) --> a plan, kept for calls like this one

Why that is right, and what a signature is, says core/call.py. Calls that differ in what changes with the size of a
batch alone are a family: torch tells whether a call is of one. If its rows are new, its plan is derived from those of
the family, without checks that are already answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..casts.lay_scales import laid_out
from ..core import settings
from ..core.call import Key, requires_gradient, signature
from ..core.check import checks
from ..core.check.checks import Operand, cuts_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT
from ..core.check.recipes import whole_recipe
from ..core.check.tracing import dispatch_is_on, handles_operators, is_dynamo_compiling, num_modes, refuse_transforms
from ..core.replay import Records, native, numbers_of, replay
from ..core.seen import FREE_ROWS, STAYS, Free
from ..core.settings import get_compile_mode
from .launch import run as launch
from .plan import PLANS, Plan
from .problem import Problem
from .recorded import record_of
from .reference import compute


def would_cut_gradient(tensors: Sequence[Tensor]) -> bool:
    """Tell whether FP8 values or scales come from something that requires a gradient: the checks refuse them."""
    return cuts_gradient(tensors[:4], tensors[4:])


def serves_like_calls(plan: Plan, turned: tuple[bool, bool], problem: Problem, call: Sequence[Any]) -> bool:
    """Tell whether the plan suits calls like this one: values and scales of the problem are where calls say."""
    a, b, _, c = call
    asked, given = (problem.a, problem.sfa, problem.b, problem.sfb), (*a, *b)
    if any(mine is None or mine.data_ptr() != its.data_ptr() for mine, its in zip(asked, given, strict=True)):
        return False
    if plan.needs_c and c is None:
        return False
    return not (plan.copies_sfa and turned[0]) and not (plan.copies_sfb and turned[1])


def by_operator(
    product: Product,
    a: Any,
    b: Any,
    d: Tensor | None,
    c: Tensor | None,
    said: Key,
    layout: Tensor | None = None,
    ks: Sequence[int] | None = None,
    **more: Any,
) -> Tensor | None:
    """Compute a product by its operator, which gives D, or by the overload that writes a caller's D.

    `more`: further arguments of the operator.
    """
    operator, given = getattr(torch.ops.deep_gemm, product.operator), product.inputs_of(c, said, layout, ks) | more
    if product.has_scales:
        (given["a"], given["sfa"]), (given["b"], given["sfb"]) = checks.pair("a", a), checks.pair("b", b)
    else:
        given["a"], given["b"] = a, b
    if "recipes" in given:
        given["recipe"] = whole_recipe(given.pop("recipes"))
    if d is None:
        return operator.default(**given)  # type: ignore[no-any-return]
    if "c" in given:  # a tensor that an operator writes is given once
        given["adds_to_d"], given["c"] = c is d, None if c is d else c
    operator.into(d=checks.tensor("d", d), **given)
    return None


@dataclass(eq=False)
class Product:
    """A public product: how a call of it is asked, and who computes it. Where there are no scales, A and B are tensors.

    `run` and the product's operator take `(a, b, d, c, said, layout, ks)`. Checks and operators know what stands behind
    D by the names of `inputs` and `options`.
    """

    operator: str
    """The operator of `torch.ops.deep_gemm` that computes it."""
    ask: Callable[..., Any]
    """`(a, b, d, **inputs) -> problem`: checks everything, makes D where it was left out."""
    options: Sequence[str] = ()
    """Names of the options in `said`, in order. Operators have one `recipe` for a caller's `recipes`."""
    inputs: Sequence[str] = ("c",)
    """C, or the layout in its place; beside C a tensor that says where groups are, and depths from the host."""
    as_operator: Callable[..., Tensor | None] = by_operator
    """`(product, a, b, d, c, said, layout, ks) -> D or None`: passes a call to the operator."""
    on_gpu: Callable[[Any], Plan | None] = launch
    """Computes a problem of CUDA tensors; gives the plan if it can serve other calls."""
    reference: Callable[[Any], None] = compute
    """Computes a problem of CPU tensors."""
    derive: Callable[[dict[Any, Any], Sequence[Any]], Plan | None] | None = None
    """Makes a plan for other rows from those of the same family, by configuration, and from a call's operands.

    None if these want a closer look: of what is `free` in them nobody has checked anything.
    """
    turned: tuple[bool, bool] = (False, False)
    """A and B are given transposed."""
    has_scales: bool = True
    records: bool = True
    has_gradients: bool = False
    """The operator that makes its D has a gradient."""
    free: Sequence[Free] = (FREE_ROWS, ((0,), (1,)), STAYS, STAYS, FREE_ROWS, FREE_ROWS)
    """The parts of each tensor of a call that change within a family: A, its scales, B, its scales, others behind them.

    Scales of A lie m-major, so that their pitch follows from m.
    """
    wants_checks: Callable[[Sequence[Tensor]], bool] = would_cut_gradient
    """Tells whether a call must be asked although one like it was: for the sake of a gradient."""
    serves: Callable[..., bool] = serves_like_calls
    """Tells whether a plan suits calls like one that was computed by it."""
    output_of: Callable[[Any], Tensor] = lambda problem: problem.d
    """Gives the D of a problem as its caller has it."""
    lay_scales: Callable[[Tensor, int], Tensor] = laid_out
    """Lays scales out as TMA loads them, so many of each row, for plans that copy them."""

    def inputs_of(
        self, c: Tensor | None, said: Key = (), layout: Tensor | None = None, ks: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Name the arguments of a call behind D."""
        return dict(zip(self.inputs, (c, layout, ks), strict=False)) | dict(zip(self.options, said, strict=False))


def run(
    product: Product,
    a: Any,
    b: Any,
    d: Tensor | None,
    c: Tensor | None = None,
    said: Key = (),
    layout: Tensor | None = None,
    ks: Sequence[int] | None = None,
) -> Tensor | None:
    """Compute a product by the plan of a call like it; else check, choose, and keep the plan. Give a D that is made.

    `said` has the caller's options; products of groups have `layout` and `ks`.
    """
    if is_dynamo_compiling() or (num_modes() and dispatch_is_on()):
        return product.as_operator(product, a, b, d, c, said, layout, ks)
    plan: Plan | None = None
    key: Key = ()
    name: Any = None
    tensors: tuple[Any, ...]
    try:
        if product.has_scales:
            (x, sx), (y, sy) = a, b
            tensors = (x, sx, y, sy) if d is None else (x, sx, y, sy, d)
        else:
            x, y, sx, sy = a, b, None, None
            tensors = (x, y) if d is None else (x, y, d)
        if x.is_cuda and (type(x) is Tensor or not handles_operators(x)):
            if c is not None and c is not d:
                tensors = (*tensors, c)
            if layout is not None:
                tensors = (*tensors, layout)
            of = (product, said, settings.in_force.generation, d is None, c is None, c is d, layout is None, ks is None)
            if (records := RECORDS.get(of)) is not None:
                name, answer = records.recall(tensors)
                if answer is not NotImplemented:
                    return answer[0] if d is None else None
            at_sfa, at_sfb = (0, 0) if sx is None else (sx.data_ptr(), sy.data_ptr())
            offsets = at_sfa % ADDRESS_ALIGNMENT, at_sfb % ADDRESS_ALIGNMENT
            absent = d is None, c is None, c is d, layout is None
            num_ks = None if ks is None else len(ks)
            hint = (product, said, settings.in_force.generation, x.shape, y.shape, offsets, absent, num_ks)
            for check, found in PLANS.seen.get(hint, ()):  # `Seen.find`, without a call
                if check(*tensors):
                    plan = found
                    break
            else:
                if product.derive is not None:
                    plan = _derived(product, hint, tensors, (x, sx, y, sy, d, c))
                if plan is None and not (handles_operators(*tensors) or product.wants_checks(tensors)):
                    key = signature(hint, tensors)
                    plan = PLANS.find_by_signature(key, hint, tensors, product.wants_checks)
    except (TypeError, ValueError, AttributeError, RuntimeError):  # malformed: the checks say how
        key, plan = (), None
    if plan is not None:
        out = plan.new_output() if d is None else d
        if plan.copies_sfa:
            sx = product.lay_scales(sx, plan.copies_sfa)
            at_sfa = sx.data_ptr()
        if plan.copies_sfb:
            sy = product.lay_scales(sy, plan.copies_sfb)
            at_sfb = sy.data_ptr()
        at = (x.data_ptr(), at_sfa, y.data_ptr(), at_sfb, out.data_ptr(), 0 if c is None else c.data_ptr())
        if layout is None and ks is None:
            if plan.fits(at):
                plan.launch(at)
                return out if d is None else None
        else:
            with plan.lock:
                steps = plan.steps(at, layout, ks)
                for each, at_all, tail, tail_at in steps:
                    each.launch(at_all, tail, tail_at)
            if steps:
                return out if d is None else None
    refuse_transforms()
    trained = [x for x in (a, b) if isinstance(x, Tensor)] if product.has_gradients and d is None else []
    if handles_operators(a, b, d, c, layout) or requires_gradient(trained):
        return product.as_operator(product, a, b, d, c, said, layout, ks)
    problem = product.ask(a, b, d, **product.inputs_of(c, said, layout, ks))
    if problem.d.is_cuda:
        if ks is None and product.records and get_compile_mode() == 0 and not settings.settings().print_configs:
            made = _recorded(product, of, name, tensors, problem, d)
            if made is not None:
                return made[0] if d is None else None
        plan = product.on_gpu(problem)
        if plan is not None and key and product.serves(plan, product.turned, problem, (a, b, d, c)):
            _keep(product, key, hint, tensors, plan)
    elif get_compile_mode() == 0:
        product.reference(problem)
    return product.output_of(problem) if d is None else None


RECORDS: dict[Key, Records] = {}


def _recorded(product: Product, of: Key, name: Any, tensors: Any, problem: Problem, d: Any) -> list[Tensor] | None:
    """Record a call, keep the record, and replay it; None if there is no record."""
    how = product.on_gpu.keywords if isinstance(product.on_gpu, partial) else {}
    if product.on_gpu is not launch and getattr(product.on_gpu, "func", None) is not launch:
        return None
    free = product.free if product.derive is not None else ()
    record = record_of(problem, tensors, free, d is not None, **how)
    if record is None:
        return None
    records = RECORDS.get(of)
    if records is None:
        free = [*free, *[STAYS] * 8][: len(tensors)]
        records = RECORDS[of] = Records(free, native())
    key = records.recall(tensors)[0] if name is None else name
    if key is None:
        return None
    records.keep(key, record, problem.d.device)
    values = numbers_of(record, tensors)
    if values is None:
        return None
    made = replay(record, tensors, values, problem.d.device)
    return made if d is None else [d]


def run_checked(product: Product, a: Operand, b: Operand, d: Tensor, c: Tensor | None, said: Key = ()) -> Plan | None:
    """Compute a product on a GPU of operands that are checked, and give the plan if it serves such calls."""
    (x, sx), (y, sy) = a, b
    offsets = sx.data_ptr() % ADDRESS_ALIGNMENT, sy.data_ptr() % ADDRESS_ALIGNMENT
    tensors = (x, sx, y, sy, d) if c is None or c is d else (x, sx, y, sy, d, c)
    hint = (product, said, settings.in_force.generation, x.shape, y.shape, offsets, (c is None, c is d), None)
    plan = PLANS.seen.find(hint, tensors) or _derived(product, hint, tensors, (x, sx, y, sy, d, c))
    key: Key = ()
    if plan is None:
        key = signature(hint, tensors)
        plan = PLANS.find_by_signature(key, hint, tensors, product.wants_checks)
    if plan is not None and not (plan.copies_sfa or plan.copies_sfb):
        at_c = 0 if c is None else c.data_ptr()
        plan.launch((x.data_ptr(), sx.data_ptr(), y.data_ptr(), sy.data_ptr(), d.data_ptr(), at_c))
        return plan
    plan = product.on_gpu(product.ask(a, b, d, **product.inputs_of(c, said)))
    if plan is None or plan.copies_sfa or plan.copies_sfb:
        return None
    _keep(product, key or signature(hint, tensors), hint, tensors, plan)
    return plan


def _derived(product: Product, hint: Key, tensors: Sequence[Tensor], operands: Sequence[Any]) -> Plan | None:
    """Derive a plan for other rows of a known family; None if there is none, or the call wants a closer look.

    Rows that come again are recognized by torch from then on; if choices are printed, at once, so that each is once.
    """
    assert product.derive is not None
    templates = PLANS.families.find(_family(hint), tensors)
    plan = None if templates is None else product.derive(templates, operands)
    if plan is not None and (PLANS.was_met(hint) or settings.settings().print_configs):
        PLANS.seen.keep(hint, tensors, plan, product.wants_checks)
    return plan


def _keep(product: Product, key: Key, hint: Key, tensors: Sequence[Tensor], plan: Plan) -> None:
    """Keep a plan for calls like this one, and to derive others from. (Not of a row, whose strides say nothing.)"""
    PLANS.keep(key, plan)
    if product.derive is not None and plan.rows.shape[0] > 1:
        PLANS.seen.keep(hint, tensors, plan, product.wants_checks)
        PLANS.keep_to_derive(_family(hint), tensors, plan, product.wants_checks, product.free)


def _family(hint: Key) -> Key:
    """Give what calls of a family have in common: of groups along k the shape of B changes too."""
    _, _, _, _, shape_b, *_, num_ks = hint
    return (*hint[:3], shape_b if num_ks is None else None, *hint[5:])
