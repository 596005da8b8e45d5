"""Operators of layers for training. An operator returns an empty tensor for each result that is not requested.

If torch must see the call, a module calls an operator, which has a formula for gradients; else plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..casts.rules import empty_values
from ..core.check.checks import K_MULTIPLE
from ..core.check.layout import SCALE_BLOCK, align, ceil_div
from ..core.operators import flops_of, gradients, operators
from ..linear.backward import bias_gradient
from ..moe.check import ExpertRows, flops_of_rows
from . import experts, linear, logprobs
from .gradients import gradient_beside_main_grad, once


def nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor in place of a result that is not requested."""
    return torch.empty(0, dtype=dtype, device=like.device)


def new_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, gran_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer of rows, and cast the rows along tokens: values `[k, tokens]`, and scales in one dimension.

    For a matrix of scales torch would test whether tokens exceed 128, and make a separate graph for each answer.
    """
    if not columns:
        return linear.forward_alone(x, weight, bias, gran_k), nothing(x, torch.float8_e4m3fn), nothing(x, torch.float32)
    d, kept = linear.with_columns(x, weight, bias, bool(columns), gran_k)
    assert kept is not None
    values, scales = kept
    return d, values, scales.t().reshape(-1)


def fake_linear(x: Tensor, weight: Tensor, columns: int, gran_k: int, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results of the right shapes."""
    tokens, k = x.shape
    d = x.new_empty(tokens, weight.shape[0])
    if not columns:
        return d, nothing(x, torch.float8_e4m3fn), nothing(x, torch.float32)
    depth = align(tokens, K_MULTIPLE)
    blocks = ceil_div(depth, SCALE_BLOCK) if gran_k else 1
    return d, empty_values((k, depth), x), x.new_empty(k * blocks, dtype=torch.float32)


operators(
    # `columns` is 1 or 0: DTensor distinguishes remembered shardings by a call's integers, but not by its bools.
    "nn_linear_rows(Tensor x, Tensor weight, Tensor? bias, int columns, int gran_k) -> (Tensor, Tensor, Tensor)",
    new_linear,
    fake_linear,
    has_gradients=True,
    flops=flops_of("x"),
)


def linear_gradients(
    grad: Tensor,
    weight: Tensor | None,
    x_values: Tensor | None,
    x_scales: Tensor | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    gran_k: int,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of rows and of the weight."""
    columns = None
    if x_values is not None and x_scales is not None:
        columns = x_values, x_scales.view(-1, x_values.shape[0]).t()
    of_x, of_weight = linear.gradients(grad, weight, columns, x_dtype, weight_dtype, None, gran_k)
    return (
        nothing(grad, x_dtype) if of_x is None else of_x,
        nothing(grad, weight_dtype) if of_weight is None else of_weight,
    )


def fake_linear_gradients(
    grad: Tensor,
    weight: Tensor | None,
    x_values: Tensor | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Return empty gradients of the right shapes."""
    tokens, n = grad.shape
    of_x = nothing(grad, x_dtype) if weight is None else grad.new_empty((tokens, weight.shape[1]), dtype=x_dtype)
    if x_values is None:
        return of_x, nothing(grad, weight_dtype)
    return of_x, grad.new_empty((n, x_values.shape[0]), dtype=weight_dtype)


operators(
    "nn_linear_gradients(Tensor grad, Tensor? weight, Tensor? x_values, Tensor? x_scales, ScalarType x_dtype, "
    "ScalarType weight_dtype, int gran_k) -> (Tensor, Tensor)",
    linear_gradients,
    fake_linear_gradients,
    flops=lambda _, grad, weight, x_values, **__: (
        2 * grad.numel() * ((0 if weight is None else weight.shape[1]) + (0 if x_values is None else x_values.shape[0]))
    ),
)


def new_experts(
    x: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor, rows: Sequence[Tensor], limit: float | None, products: str
) -> tuple[Tensor, Tensor]:
    """Compute a mixture of experts, and gate and up of each row."""
    out, h = experts.with_gates(x, topk_weights, w1, w2, ExpertRows(*rows), limit, products)
    return out.to(x.dtype), h  # cast here: inside a graph autograd would round the gradient of a BF16 output


def fake_experts(x: Tensor, w1: Tensor, rows: Sequence[Tensor], **_: object) -> tuple[Tensor, Tensor]:
    """Return an empty mixture, and an empty tensor for gate and up."""
    num_rows = rows[-1].shape[0]
    return x.new_empty(x.shape), x.new_empty((num_rows, w1.shape[1]), dtype=torch.bfloat16)


def keep_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the tensors that backward needs."""
    x, weight, bias, columns, ctx.gran_k = inputs
    _, values, scales = output
    ctx.mark_non_differentiable(values, scales)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, *((values, scales) if columns else (None, None)))
    ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype


@once
def linear_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """Compute the needed gradients."""
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    weight, *columns = ctx.saved_tensors
    if needs_weight and columns[0] is None:
        raise ValueError("weight: expected no gradient, because the layer was traced without one, as under no_grad()")
    x_dtype, weight_dtype, bias_dtype = ctx.types
    given = columns if needs_weight else (None, None)
    of_x, of_weight = torch.ops.deep_gemm.nn_linear_gradients(
        grad, weight if needs_x else None, *given, x_dtype, weight_dtype, ctx.gran_k
    )
    of_bias = bias_gradient(grad, bias_dtype) if needs_bias else None
    return of_x if needs_x else None, of_weight if needs_weight else None, of_bias, None, None


gradients("nn_linear_rows", linear_backward, keep_linear)
ROUTED = "Tensor[] rows, float? limit, str products"
DIFFERENTIABLE = "x", "p", "w1", "w2"
operators(
    f"nn_experts(Tensor x, Tensor topk_weights, Tensor w1, Tensor w2, {ROUTED}) -> (Tensor, Tensor)",
    new_experts,
    fake_experts,
    has_gradients=True,
    flops=lambda _, x, w1, rows, **__: flops_of_rows(rows[-1].shape[0], x, w1),
)


def experts_gradients(
    grad: Tensor,
    x: Tensor | None,
    topk_weights: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    h: Tensor,
    rows: Sequence[Tensor],
    limit: float | None,
    products: str,
    needs: Sequence[bool],
    **dtypes: torch.dtype,
) -> tuple[Tensor, ...]:
    """Compute all needed gradients of a mixture."""
    types = [dtypes[f"{name}_dtype"] for name in DIFFERENTIABLE]
    found = experts.gradients(grad, x, topk_weights, w1, w2, h, ExpertRows(*rows), limit, needs, types, products)
    return tuple(nothing(grad, dtype) if each is None else each for each, dtype in zip(found, types, strict=True))


def fake_experts_gradients(
    grad: Tensor, topk_weights: Tensor, h: Tensor, rows: Sequence[Tensor], needs: Sequence[bool], **more: Any
) -> tuple[Tensor, ...]:
    """Return empty gradients of the right shapes."""
    num_experts, hidden, both = rows[0].shape[0], grad.shape[1], h.shape[1]
    shapes = grad.shape, topk_weights.shape, (num_experts, both, hidden), (num_experts, hidden, both // 2)
    return tuple(
        grad.new_empty(shape, dtype=dtype) if need else nothing(grad, dtype)
        for shape, dtype, need in zip(shapes, (more[f"{name}_dtype"] for name in DIFFERENTIABLE), needs, strict=True)
    )


operators(
    "nn_experts_gradients(Tensor grad, Tensor? x, Tensor topk_weights, Tensor? w1, Tensor? w2, Tensor h, "
    f"{ROUTED}, bool[] needs, ScalarType x_dtype, ScalarType p_dtype, ScalarType w1_dtype, ScalarType w2_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    experts_gradients,
    fake_experts_gradients,
    # Work of products: 1 back through w2; 2 for x and 2 for w1, which have gate and up; 1 for w2. h: gate and up.
    flops=lambda _, grad, w2, h, needs, **__: (
        grad.shape[1] * h.numel() * ((w2 is not None) + 2 * needs[0] + 2 * needs[2] + needs[3])
    ),
    tags=(torch.Tag.cudagraph_unsafe,),  # products along k keep memory, possibly from a graph's pool
)


def keep_experts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors that backward needs."""
    x, topk_weights, w1, w2, rows, ctx.limit, ctx.products = inputs
    _, h = output
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, topk_weights, w1, w2, h, *rows)


@once
def experts_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Compute the needed gradients."""
    x, topk_weights, w1, w2, h, *rows = ctx.saved_tensors
    needs = [*ctx.needs_input_grad[:4]]
    needs_x, needs_p, needs_w1, _ = needs
    found = torch.ops.deep_gemm.nn_experts_gradients(
        grad,
        x if needs_w1 else None,
        topk_weights,
        w1 if needs_x else None,
        w2 if needs_x or needs_p or needs_w1 else None,
        h,
        rows,
        ctx.limit,
        ctx.products,
        needs,
        *(each.dtype for each in (x, topk_weights, w1, w2)),
    )
    return (*(each if need else None for each, need in zip(found, needs, strict=True)), [None] * len(rows), None, None)


gradients("nn_experts", experts_backward, keep_experts)


def fake_logprobs(hidden: Tensor, w: Any, ids: Tensor, temperature: float, **_: object) -> tuple[Tensor, Tensor]:
    """Return empty results, and an empty tensor for the logarithm of each row's sum."""
    logprobs.recipes_of(hidden, w, ids, temperature)
    return hidden.new_empty(ids.shape, dtype=torch.float32), hidden.new_empty((ids.numel(), 1), dtype=torch.float32)


HEAD = "Tensor hidden, Tensor w, Tensor? sfw, Tensor ids, float temperature, str? group"
operators(
    f"nn_selected_logprobs({HEAD}, Tensor? main_grad=None) -> (Tensor, Tensor)",
    logprobs.forward,
    fake_logprobs,
    has_gradients=True,
    flops=lambda _, hidden, w, **__: 2 * hidden.numel() * w.shape[0],
)
operators(
    f"nn_selected_logprobs_gradients(Tensor grad, Tensor lse, {HEAD}, bool needs_hidden, bool needs_w) "
    "-> (Tensor, Tensor)",
    logprobs.backward,
    lambda hidden, w, needs_hidden, needs_w, **_: tuple(
        x.new_empty(x.shape) if need else nothing(x, x.dtype)
        for x, need in ((hidden, needs_hidden), (w if isinstance(w, Tensor) else w[0], needs_w))
    ),
    flops=lambda _, hidden, w, needs_hidden, needs_w, **__: (
        2 * hidden.numel() * w.shape[0] * (1 + needs_hidden + needs_w)
    ),
)


def keep_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors that backward needs."""
    hidden, w, sfw, ids, ctx.temperature, ctx.group, ctx.main_grad = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], hidden, w, sfw, ids)
    ctx.marked = None if ctx.main_grad is None else w


@once
def logprobs_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Compute the needed gradients."""
    needs_hidden, needs_w, *_ = ctx.needs_input_grad
    said = ctx.temperature, ctx.group, needs_hidden, needs_w
    if ctx.marked is None:
        of_hidden, of_w = torch.ops.deep_gemm.nn_selected_logprobs_gradients(grad, *ctx.saved_tensors, *said)
    else:
        lse, hidden, w, _, ids = ctx.saved_tensors
        of_hidden, _ = logprobs.backward(grad, lse, hidden, w, ids, *said, ctx.main_grad)
        of_w = gradient_beside_main_grad(ctx.marked)
    return of_hidden if needs_hidden else None, of_w if needs_w else None, None, None, None, None, None


gradients("nn_selected_logprobs", logprobs_backward, keep_logprobs)
