"""Operators of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import layers
from ..nn.linear import input_gradient
from ..problem import Operand, experts_problem, linear_problem
from .library import Kernel, gradients, operator
from .products import Compute


def linear(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a linear layer as its two operators take it."""

    def new(x: Tensor, w: Tensor, sfw: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return compute(x, (w, sfw), out=None, bias=bias)

    def into(x: Tensor, w: Tensor, sfw: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        compute(x, (w, sfw), out=out, bias=bias)

    return new, into


def ask_linear(x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Ask what `layers.linear` computes, without an answer."""
    problem = linear_problem(x, w, out, bias)
    return problem.whole_out if out is None else None


def experts(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a mixture of experts as its two operators take it."""

    def new(
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        sfw1: Tensor,
        w2: Tensor,
        sfw2: Tensor,
        limit: float | None = None,
    ) -> Tensor | None:
        return compute(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out=None, limit=limit)

    def into(
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        sfw1: Tensor,
        w2: Tensor,
        sfw2: Tensor,
        out: Tensor,
        limit: float | None = None,
    ) -> None:
        compute(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out=out, limit=limit)

    return new, into


def ask_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Operand,
    w2: Operand,
    out: Tensor | None,
    limit: float | None,
) -> Tensor | None:
    """Ask what `layers.experts` computes, without an answer."""
    problem = experts_problem(x, topk_ids, topk_weights, w1, w2, out, limit)
    return problem.out if out is None else None


WEIGHTED = "Tensor x, Tensor w, Tensor sfw"
ROUTED = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor sfw1, Tensor w2, Tensor sfw2"
for name, kernels, real, ask, tensors, more in (
    ("linear", linear, layers.linear, ask_linear, WEIGHTED, "Tensor? bias=None"),
    ("experts", experts, layers.experts, ask_experts, ROUTED, "float? limit=None"),
):
    (new, into), (fake_new, fake_into) = kernels(real), kernels(ask)
    operator(f"{name}({tensors}, {more}) -> Tensor", new, fake_new, has_gradients=name == "linear")
    operator(f"{name}.into({tensors}, Tensor(out!) out, {more}) -> ()", into, fake_into)


def keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients take."""
    x, w, sfw, bias = inputs
    ctx.save_for_backward(w, sfw)
    ctx.x_shape, ctx.x_dtype, ctx.bias_dtype = x.shape, x.dtype, None if bias is None else bias.dtype


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and of the bias that are needed. The weight is frozen."""
    needs_x, needs_bias = ctx.needs_input_grad[0], ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = input_gradient(rows, ctx.saved_tensors, ctx.x_dtype).view(ctx.x_shape) if needs_x else None
    of_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
    return of_x, None, None, of_bias


gradients("linear", linear_backward, keep_linear)
