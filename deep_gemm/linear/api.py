"""A linear layer with an FP8 or FP4 weight, for activations in a model's layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..casts.fp8 import cast_checked
from ..casts.rules import Target
from ..core.call import FREE_ROWS, Function, run
from ..core.check import ue8m0
from ..core.check.checks import Operand, cuts_gradient, pair, wants_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, Recipe
from ..core.check.memory import empty
from ..core.check.recipes import E2M1, taken
from ..core.replay import FIXED
from ..gemm.api.dense import BEHIND_CAST, fp8_gemm_nt
from ..gemm.problem import Problem
from . import kernel
from .check import LinearProblem, linear_problem


def linear(
    x: Tensor,
    w: Operand,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    gran_k: int | None = None,
    recipe_b: Recipe | None = None,
) -> Tensor | None:
    """Compute x @ w.T + bias: cast x to FP8 like `per_token_cast_to_fp8`, and multiply like `fp8_gemm_nt`.

    - `x`: `[..., k]`, BF16, FP16 or FP32, with any leading dimensions and strides.
    - `w`: values `[n, k]` (torch.float8_e4m3fn) and scales `[ceil(n / 128), ceil(k / 128)]`, as returned by
      `per_block_cast_to_fp8`. k is a multiple of 16 and n of 8. Scales may be finer: one for each 64x64 or 32x32 block,
      or for 32 columns of a row, in FP32 or UE8M0 as for `fp8_gemm_nt`. FP32 scales may be coarser: `[n, 1]` for whole
      rows, as in checkpoints in FP8_DYNAMIC, or a single element. The weight may be FP4 (MXFP4) as for
      `fp8_fp4_gemm_nt`: values `[n, k / 2]`, two to a byte, and scales `[n, k / 32]`, k a multiple of 32.
    - `out`: BF16 `[..., n]`, its rows at equal distances. If it is given, the function returns None; if it is left out,
      the function makes it and returns it.
    - `bias`: `[n]`, BF16, FP16 or FP32, added in FP32 before the one rounding to BF16.
    - `gran_k`: columns of x that share a scale: 32, 64 or 128, or 0 for a whole row. The default is the number of
      columns of w that share a scale; for an FP4 weight it is 128.
    - `recipe_b`: rows and columns of w that share a scale. Pass it for int32 scales that fit several recipes.

    If `out` is left out, x and bias have gradients of their types: dx = dy @ w, with dy cast to FP8 like x. The weight
    has no gradient. For FP4, or scales other than 1x128 of x and 128x128 of w, a required gradient is refused.

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
) -> Tensor | None:
    p = linear_problem(x, w, out, bias, gran_k, recipe_b)
    compute_linear(p)
    return p.whole_out if out is None else None


@torch.no_grad()
def compute_linear(p: LinearProblem) -> None:
    """Compute `linear`."""
    d, c = output_and_c(p.out, p.bias)
    values, of_x, of_w = p.operands
    w, sfw = p.w
    if not of_w.columns:  # expand scales of all of k to the view that kernels read
        sfw = ue8m0.scales("sfw", sfw, "n", w.shape[:1], w.shape[1], of_w, of_x)
    of_a, of_b = taken(of_x, of_w)
    if values == E2M1 and (sfw.dtype == torch.float32 or of_x.columns < SCALE_BLOCK):
        # No kernel reads these scales: `fp8_gemm_nt` converts them in each call. The bias is one row for all rows of D.
        fp8_gemm_nt(cast_checked(p.x, Target(*of_x, mn_major=True)), p.w, d, d if c is d else p.bias, recipe_a=of_x)
    elif not kernel.run(p.x, (w, sfw), d, c, (values, of_a, of_b)):
        # No kernel may run between cast and product: the product reads the weight during the cast. One exception is a
        # launch that lays out scales of w for TMA: a kernel that loads these scales waits before it reads anything.
        a, sfa = cast_checked(p.x, Target(*of_x, mn_major=True))
        if not of_w.columns:
            sfa = ue8m0.scales("sfa", sfa, "m", a.shape[:1], a.shape[1], of_x, of_w)
        BEHIND_CAST.compute(Problem(a, sfa, w, sfw, d, c, of_b=of_b, of_a=of_a))
    if d is not p.out:
        p.out.copy_(d)


def output_and_c(out: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return D and C of a product that adds a bias: C has D's type or FP32, and rows of a multiple of 16 bytes."""
    if bias is None:
        return out, None
    if bias.dtype in (out.dtype, torch.float32) and bias.is_contiguous() and bias.data_ptr() % ADDRESS_ALIGNMENT == 0:
        return out, bias.expand(out.shape)
    d = out if bias.dtype == out.dtype else empty("the sum", out.shape, torch.float32, out.device)
    return d, d.copy_(bias.expand(d.shape))


def _as_operator(
    x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None, *said: int | Recipe | None
) -> Tensor | None:
    # Weights in Parameters require a gradient, but this function does not train them.
    operator, (values, scales) = torch.ops.deep_gemm.linear, (each.detach() for each in pair("w", w))
    if out is None:
        return operator.default(x, values, scales, bias, *said)  # type: ignore[no-any-return]
    operator.into(x, values, scales, out, bias, *said)
    return None


def _tensors(x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    inputs = (x, *w) if bias is None else (x, *w, bias)
    return inputs if out is None else (*inputs, out)


INTO = Function(
    _answer,
    _as_operator,
    _tensors,
    lambda tensors: cuts_gradient(tensors[1:3], (tensors[0], *tensors[3:])),
    free=(FREE_ROWS, FIXED, FIXED, FREE_ROWS, FREE_ROWS),
    outputs=1,
)
MADE = replace(INTO, has_gradient=lambda x, w, out, bias: wants_gradient(x, bias), outputs=0)
