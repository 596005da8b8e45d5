"""A linear layer with an FP8 or FP4 weight, for activations as models have them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..casts.fp8 import cast_checked
from ..casts.rules import Target
from ..core.call import CallPlan, Function, recorded, run
from ..core.check.checks import Operand, cuts_gradient, pair, wants_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, Recipe
from ..core.check.recipes import E2M1
from ..core.record import Record, Recording, Shadow
from ..core.replay import run as run_record
from ..gemm.api.dense import BEHIND_CAST, fp8_gemm_nt
from ..gemm.kinds.output import USUAL_OPERANDS
from ..gemm.plan import SCALE_BYTES
from ..gemm.product import run as run_product
from ..gemm.recorded import record_of
from . import kernel
from .check import LinearProblem, linear_problem

__all__ = ["linear"]


def linear(
    x: Tensor,
    w: Operand,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    gran_k: int | None = None,
    recipe_b: Recipe | None = None,
) -> Tensor | None:
    """Compute x @ w.T + bias: cast x to FP8 as `per_token_cast_to_fp8` does, and multiply as `fp8_gemm_nt` does.

    - `x`: `[..., k]`, BF16, FP16 or FP32, with any leading dimensions and strides.
    - `w`: values `[n, k]` (torch.float8_e4m3fn) and scales `[ceil(n / 128), ceil(k / 128)]`, as `per_block_cast_to_fp8`
      gives them. k is a multiple of 16 and n of 8. Scales may be finer: one for each 64x64 or 32x32 block, or for 32
      columns of a row, FP32 or UE8M0 as `fp8_gemm_nt` takes them. Or FP4 (MXFP4) as `fp8_fp4_gemm_nt` takes it: values
      `[n, k / 2]`, two to a byte, and scales `[n, k / 32]`, k a multiple of 32.
    - `out`: BF16 `[..., n]`, its rows at equal distances. Where it is given the function returns None; where it is left
      out the function makes it and returns it.
    - `bias`: `[n]`, BF16, FP16 or FP32, added in FP32 before the one rounding to BF16.
    - `gran_k`: 32, 64 or 128 columns of x share a scale; as many as of w where it is left out, 128 beside FP4.
    - `recipe_b`: rows and columns of w that share a scale, if int32 words leave it open; else their shape says it.

    Where `out` is left out x and bias have gradients, in their types: dx = dy @ w with dy cast to FP8 as x is. The
    weight has none. Beside FP4 or finer scales nothing has one, and what requires one is refused.

    >>> w = per_block_cast_to_fp8(torch.ones(8, 128))
    >>> linear(torch.ones(2, 3, 128), w, bias=torch.ones(8)).shape
    torch.Size([2, 3, 8])
    """
    said = () if gran_k is None and recipe_b is None else (gran_k, recipe_b)
    result: Tensor | None = run(MADE if out is None else INTO, (x, w, out, bias), said)
    return result


def _answer(
    x: Tensor,
    w: Operand,
    out: Tensor | None,
    bias: Tensor | None,
    gran_k: int | None = None,
    recipe_b: Recipe | None = None,
) -> tuple[Tensor | None, CallPlan | Record | None]:
    p = linear_problem(x, w, out, bias, gran_k, recipe_b)
    plan = compute_linear(p, x, is_made=out is None)
    # A call like one whose rows, or scales of the weight, were copied has others to copy.
    is_here = p.x.data_ptr() == x.data_ptr() and p.w[1].data_ptr() == w[1].data_ptr()
    return p.whole_out if out is None else None, plan if is_here else None


@torch.no_grad()
def compute_linear(p: LinearProblem, whole_x: Tensor, *, is_made: bool) -> CallPlan | Record | None:
    """Compute `linear`; give the plan if it serves other calls. `is_made`: these make their output too."""
    d, c = output_and_c(p.out, p.bias)
    values, of_x, _ = p.operands
    if values == E2M1 and (p.w[1].dtype == torch.float32 or of_x.columns < SCALE_BLOCK):
        # No kernel has such scales: each call makes other operands of them.
        if c is not None and c is not d:
            c = d.copy_(c)  # products take a C with rows of its own
        fp8_gemm_nt(cast_checked(p.x, Target(*of_x, mn_major=True))[0], p.w, d, c, recipe_a=of_x)
        if d is not p.out:
            p.out.copy_(d)
        return None
    in_one = kernel.run(p.x, p.w, d, c) if p.operands == USUAL_OPERANDS else None
    if in_one is None and d is p.out and c is not d:
        return cast_and_multiply(p, whole_x, d, c, is_made=is_made)
    launch, ctas = in_one or (cast_and_multiply(p, whole_x, d, c, is_made=is_made), 0)
    if d is not p.out:
        p.out.copy_(d)
    if launch is None or d is not p.out or c is d:
        return None
    bias = [] if p.bias is None else [(3, 0)]
    output = 3 + len(bias)
    shape, device = p.whole_out.shape, p.whole_out.device
    return CallPlan(
        launch,
        ctas,
        [(1, 0), (0, 0), (2, 0), (output, 0), *bias],
        (ADDRESS_ALIGNMENT, ADDRESS_ALIGNMENT, SCALE_BYTES, ADDRESS_ALIGNMENT, ADDRESS_ALIGNMENT),
        () if is_made else (output,),
        (lambda: (torch.empty(shape, dtype=torch.bfloat16, device=device),)) if is_made else tuple,
    )


def cast_and_multiply(
    p: LinearProblem, whole_x: Tensor, d: Tensor, c: Tensor | None, *, is_made: bool
) -> Record | None:
    """Compute D = C + cast(x) @ w.T by two launches. Give the record of both if it serves other calls.

    Nothing may come between these two, because the product reads the weight beside the cast, except a launch that lays
    scales of w out for TMA: a kernel that loads these waits before it reads anything.
    """
    a, cast = cast_checked(p.x, Target(*p.operands[1], mn_major=True))
    if not p.x.is_cuda:
        run_product(BEHIND_CAST, a, p.w, d, c, p.operands)
        return None
    problem = BEHIND_CAST.ask(a, p.w, d, **BEHIND_CAST.inputs_of(c, p.operands))
    tensors = (*a, *p.w, d) if c is None or c is d else (*a, *p.w, d, c)
    product = record_of(problem, tensors, (), True, is_behind_cast=True)
    if product is None:
        run_product(BEHIND_CAST, a, p.w, d, c, p.operands)
        return None
    run_record(product, tensors)
    of_x = None if cast is None else recorded(cast, (p.x,))
    if of_x is None or c is d or d is not p.out:
        return None
    r = Recording(of_x.device)
    x, *weight = (r.shadow(each, 1) for each in (whole_x, *p.w))
    more = [r.shadow(p.bias, 1)] if p.bias is not None else []
    whole = p.whole_out
    whole_d = r.result(whole.shape, whole.stride(), whole.dtype) if is_made else r.shadow(whole, 1)
    x, out = (whole.as_strided(each.shape, each.stride()) for whole, each in ((x, p.x), (whole_d, d)))
    bias = [Shadow(tuple(d.shape), (0, 1), each.dtype, each.base, 0) for each in more]
    values = r.inline(of_x, [x], [None, None])
    r.inline(product, [*values, *weight, out, *bias], [])
    for each in () if is_made else (x, *weight, *more):
        r.keep_apart(whole_d, each)
    return r.record()


def output_and_c(out: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Give the D and the C of a product that adds a bias: C has D's type, and is read in rows of whole 16 bytes."""
    if bias is None:
        return out, None
    if bias.dtype == out.dtype and bias.is_contiguous() and bias.data_ptr() % ADDRESS_ALIGNMENT == 0:
        return out, bias.expand_as(out)
    d = out if bias.dtype == out.dtype else torch.empty(out.shape, device=out.device, dtype=torch.float32)
    return d, d.copy_(bias.expand_as(d))


def _as_operator(
    x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None, *said: int | Recipe | None
) -> Tensor | None:
    # Weights in Parameters require a gradient, but nobody trains them.
    operator, (values, scales) = torch.ops.deep_gemm.linear, (each.detach() for each in pair("w", w))
    if out is None:
        return operator.default(x, values, scales, bias, *said)  # type: ignore[no-any-return]
    operator.into(x, values, scales, out, bias, *said)
    return None


def _tensors(x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    inputs = (x, *w) if bias is None else (x, *w, bias)
    return inputs if out is None else (*inputs, out)


INTO = Function(
    _answer, _as_operator, _tensors, lambda tensors: cuts_gradient(tensors[1:3], (tensors[0], *tensors[3:]))
)
MADE = replace(INTO, has_gradient=lambda x, w, out, bias: wants_gradient(x, bias))
