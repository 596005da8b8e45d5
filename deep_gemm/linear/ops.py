"""Operators of a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.check.checks import Operand
from ..core.operators import Kernel, gradients, operator
from ..gemm.ops import Compute
from .api import linear
from .backward import input_gradient
from .check import linear_problem


def kernels(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a linear layer as its two operators take it."""

    def new(x: Tensor, w: Tensor, sfw: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return compute(x, (w, sfw), out=None, bias=bias)

    def into(x: Tensor, w: Tensor, sfw: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        compute(x, (w, sfw), out=out, bias=bias)

    return new, into


def ask_linear(x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Ask what `linear` computes, without an answer."""
    problem = linear_problem(x, w, out, bias)
    return problem.whole_out if out is None else None


def keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients take."""
    x, w, sfw, bias = inputs
    if w.dtype != torch.float8_e4m3fn:
        raise ValueError(
            "w: expected torch.float8_e4m3fn where x or bias requires a gradient, got FP4, which is for inference: "
            "call under torch.no_grad()"
        )
    ctx.save_for_backward(w, sfw)
    ctx.x_shape, ctx.x_dtype, ctx.bias_dtype = x.shape, x.dtype, None if bias is None else bias.dtype


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and of the bias that are needed. The weight is frozen."""
    needs_x, needs_bias = ctx.needs_input_grad[0], ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = input_gradient(rows, ctx.saved_tensors, ctx.x_dtype).view(ctx.x_shape) if needs_x else None
    of_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
    return of_x, None, None, of_bias


TENSORS = "Tensor x, Tensor w, Tensor sfw"
(new, into), (fake_new, fake_into) = kernels(linear), kernels(ask_linear)
operator(f"linear({TENSORS}, Tensor? bias=None) -> Tensor", new, fake_new, has_gradients=True)
operator(f"linear.into({TENSORS}, Tensor(out!) out, Tensor? bias=None) -> ()", into, fake_into)
gradients("linear", linear_backward, keep_linear)
