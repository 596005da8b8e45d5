"""Operators of a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.operators import flops_of, gradients, operators
from ..gemm.kinds.output import USUAL_OPERANDS
from .api import linear
from .backward import bias_gradient, input_gradient
from .check import OF_ALL_K, linear_problem, operands_of


def ask_linear(out: Tensor | None, **given: Any) -> Tensor | None:
    """Check a call of `linear`, and return an empty output unless `out` is given."""
    problem = linear_problem(out=out, **given)
    return problem.whole_out if out is None else None


def keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the tensors that backward needs."""
    x, w, sfw, bias, gran_k, recipe_b = inputs
    if w.dtype != torch.float8_e4m3fn:
        raise ValueError(
            "w: expected torch.float8_e4m3fn where x or bias requires a gradient, got FP4, which is for inference: "
            "call under torch.no_grad()"
        )
    operands = operands_of("w", w, sfw, gran_k, recipe_b, OF_ALL_K)
    if operands != USUAL_OPERANDS:
        of_x, of_w = (f"{each.rows}x{each.columns or 'k'}" for each in operands[1:])
        raise ValueError(
            f"w: expected scales of 128x128 beside 1x128 of x where x or bias requires a gradient, got {of_w} beside "
            f"{of_x}, which are for inference: call under torch.no_grad()"
        )
    ctx.save_for_backward(w, sfw)
    ctx.x_shape, ctx.x_dtype, ctx.bias_dtype = x.shape, x.dtype, None if bias is None else bias.dtype


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the needed gradients of x and of the bias. The weight is frozen."""
    needs_x, needs_bias = ctx.needs_input_grad[0], ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = input_gradient(rows, ctx.saved_tensors, ctx.x_dtype).view(ctx.x_shape) if needs_x else None
    of_bias = bias_gradient(rows, ctx.bias_dtype) if needs_bias else None
    return of_x, None, None, of_bias, None, None


operators(
    "linear(Tensor x, Tensor w, Tensor sfw<, Tensor(out!) out>, Tensor? bias=None, int? gran_k=None, "
    "int[]? recipe_b=None) -> Tensor",
    linear,
    ask_linear,
    has_gradients=True,
    flops=flops_of("x"),
)
gradients("linear", linear_backward, keep_linear)
