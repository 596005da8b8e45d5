"""A linear layer with an FP8 weight, for activations as models have them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..casts.fp8 import per_token_cast_to_fp8
from ..core.check.checks import Operand, pair, wants_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT
from ..core.check.tracing import is_dispatched
from ..gemm.dense.api import product_behind_cast
from . import kernel
from .check import LinearProblem, linear_problem

__all__ = ["linear"]


def linear(x: Tensor, w: Operand, *, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor | None:
    """Compute x @ w.T + bias: cast x to FP8 as `per_token_cast_to_fp8` does, and multiply as `fp8_gemm_nt` does.

    - `x`: `[..., k]`, BF16, FP16 or FP32, with any leading dimensions and strides.
    - `w`: values `[n, k]` (torch.float8_e4m3fn) and scales `[ceil(n / 128), ceil(k / 128)]`, as `per_block_cast_to_fp8`
      gives them. k is a multiple of 16 and n of 8.
    - `out`: BF16 `[..., n]`, its rows at equal distances. Where it is given the function returns None; where it is left
      out the function makes it and returns it.
    - `bias`: `[n]`, BF16, FP16 or FP32, added in FP32 before the one rounding to BF16.

    Where `out` is left out x and bias have gradients, in their types: dx = dy @ w with dy cast to FP8 as x is. The
    weight has none.

    >>> w = per_block_cast_to_fp8(torch.ones(8, 128))
    >>> linear(torch.ones(2, 3, 128), w, bias=torch.ones(8)).shape
    torch.Size([2, 3, 8])
    """
    if is_dispatched(x) or (out is None and wants_gradient(x, bias)):
        # Weights in Parameters require a gradient, but nobody trains them.
        operator, (values, scales) = torch.ops.deep_gemm.linear, (each.detach() for each in pair("w", w))
        if out is None:
            return operator.default(x, values, scales, bias)  # type: ignore[no-any-return]
        operator.into(x, values, scales, out, bias)
        return None
    problem = linear_problem(x, w, out, bias)
    compute_linear(problem)
    return problem.whole_out if out is None else None


@torch.no_grad()
def compute_linear(problem: LinearProblem) -> None:
    """Compute `linear`."""
    d, c = output_and_c(problem.out, problem.bias)
    if not kernel.run(problem.x, problem.w, d, c):
        # Nothing may come between these two: the product reads the weight beside the cast.
        a = per_token_cast_to_fp8(problem.x, mn_major=True)
        product_behind_cast(a, problem.w, d, c)
    if d is not problem.out:
        problem.out.copy_(d)


def output_and_c(out: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Give the D and the C of a product that adds a bias: C has D's type, and is read in rows of whole 16 bytes."""
    if bias is None:
        return out, None
    if bias.dtype == out.dtype and bias.is_contiguous() and bias.data_ptr() % ADDRESS_ALIGNMENT == 0:
        return out, bias.expand_as(out)
    d = out if bias.dtype == out.dtype else torch.empty(out.shape, device=out.device)
    return d, d.copy_(bias.expand_as(d))
