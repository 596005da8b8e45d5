"""A linear layer with three FP8 products: forward, the gradient of its input, the gradient of its weight.

    x     [m, k] --cast 1x128----------------> A   \
    w     [n, k] --cast 128x128--------------> B    } y  = A B^T + bias
    dy    [m, n] --cast 1x128----------------> A   \
    w     [n, k] --cast 128x128, transposed--> B    } dx = A B^T
    dy^T  [n, m] --cast 1x128 along tokens---> A   \
    x^T   [k, m] --cast 1x128 along tokens---> B    } dw = A B^T, in FP32

x and dy are read once each for both casts. From forward to backward the layer keeps x^T in FP8, and the weight itself.

The scheme above is the recipe "block". With recipe "row" each row has one scale; transposes are copied, then cast.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts.fp8 import cast_both_to_fp8, per_token_cast_to_fp8
from ..casts.rules import Quantized
from ..core.call import FREE_ROWS, Function, run
from ..core.check.checks import K_MULTIPLE, Operand, tensor, wants_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT, RECIPE_1D1D, SCALE_BLOCK, Recipe
from ..core.check.memory import empty
from ..core.check.tracing import is_dispatched, refuse_transforms
from ..gemm.api.dense import NT, fp8_gemm_nt
from ..gemm.problem import Problem
from ..linear.api import linear, output_and_c
from ..linear.backward import bias_gradient, cast_turned_rows, output_type, product_back
from .gradients import (
    Trained,
    as_autocast_says,
    features,
    gradient_beside_main_grad,
    in_shape,
    main_grad_of,
    once,
    outside_of_graphs,
    weight_type,
)
from .kept import Weight, cast_weight, cast_weight_back, for_backward, for_forward, tensors_of
from .sharding import know_shardings

RECIPES = {"block": SCALE_BLOCK, "row": 0}
"""Values of `recipe`, and the columns of an operand's row that share a scale (`gran_k`); 0: the whole row."""
OF_ROWS: Recipe = (1, 0)
"""The recipe of A, and of B, in a product whose operands have one scale for each row."""


def known_recipe(recipe: str) -> str:
    """Check the name of a recipe."""
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe: expected {' or '.join(map(repr, RECIPES))}, got {recipe!r}")
    return recipe


class Linear(Trained, torch.nn.Linear):
    """`torch.nn.Linear` with FP8 products, forward and backward.

    Arguments, `weight`, `bias`, their initial values and the state dict are as in `torch.nn.Linear`. Both numbers of
    features are multiples of 16; the number of tokens is free. The result has the type of the input, or of autocast;
    each gradient has the type of its input or parameter. With `accumulates_main_grad` the product for the weight's
    gradient adds to `weight.main_grad` (FP32), as Megatron expects, and `weight.grad` stays
    unchanged. `recipe="row"` gives each operand of the three products one scale for each row, instead of scales for
    128 columns of a row and for 128x128 blocks of the weight.

    >>> layer = Linear(32, 16, dtype=torch.bfloat16)
    >>> y = layer(torch.ones(2, 3, 32, dtype=torch.bfloat16))
    >>> y.sum().backward()
    >>> y.shape, layer.weight.grad.dtype, layer.weight.grad[0, 0].item()
    (torch.Size([2, 3, 16]), torch.bfloat16, 6.0)
    """

    recipe = "block"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        accumulates_main_grad: bool = False,
        recipe: str = "block",
    ) -> None:
        sizes = features("in_features", in_features), features("out_features", out_features)
        super().__init__(*sizes, bias, device, weight_type(dtype))
        self.accumulates_main_grad, self.recipe = accumulates_main_grad, known_recipe(recipe)

    def extra_repr(self) -> str:
        """Return sizes and the type of the products, for `print`."""
        return f"{super().extra_repr()}, products=fp8" + (", recipe=row" if self.recipe == "row" else "")

    def forward(self, input: Tensor) -> Tensor:
        """Compute input @ weight.T + bias."""
        x = as_autocast_says(tensor("input", input))
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"input: expected shape (..., {self.in_features}), got {tuple(x.shape)}")
        weight, bias, gran_k = self.weight, self.bias, RECIPES[known_recipe(self.recipe)]
        needs_gradient = wants_gradient(x, weight, bias)
        if not needs_gradient and not is_dispatched(x):
            return forward_alone(x, weight, bias, gran_k)
        needs_weight = needs_gradient and weight.requires_grad
        main_grad = main_grad_of("weight", weight, self.accumulates_main_grad and needs_weight)
        if main_grad is not None:
            return apply_beside_main_grad(x, weight, bias, main_grad, gran_k)
        if not is_dispatched(x):
            refuse_transforms()
            return _Linear.apply(x, weight, bias, None, gran_k)  # type: ignore[no-any-return, no-untyped-call]
        know_shardings()  # call an operator of nn/ops.py, with a formula for its gradients
        rows = x.reshape(-1, self.in_features)
        d, *_ = torch.ops.deep_gemm.nn_linear_rows(rows, weight, bias, int(needs_weight), gran_k)
        return in_shape(d, (*x.shape[:-1], self.out_features))


@torch.no_grad()
def forward_alone(x: Tensor, weight: Tensor, bias: Tensor | None, gran_k: int) -> Tensor:
    """Compute the layer if no gradient is needed."""
    if x.dtype != torch.bfloat16 or not gran_k:
        return with_columns(x, weight, bias, False, gran_k)[0]
    bias = None if bias is None else bias.to(x.dtype)
    return linear(x, cast_weight(for_forward(weight)), bias=bias)  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    """The three products for x `[..., k]`. Only needed tensors are computed and saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, gran_k: int
    ) -> Tensor:
        """Compute the product, and save the tensors that backward needs."""
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        d, columns = with_columns(x, weight, bias, needs_weight, gran_k)
        ctx.save_for_backward(*(columns or (None, None)), weight if needs_x else None)
        ctx.x_shape, ctx.main_grad, ctx.gran_k = x.shape, main_grad, gran_k
        ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.marked = weight if main_grad is not None else None
        return d

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the needed gradients."""
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        values, scales, weight = ctx.saved_tensors
        columns = (values, scales) if needs_weight else None
        x_dtype, weight_dtype, bias_dtype = ctx.types
        rows, w = as_matrix(grad), weight if needs_x else None
        of_x, of_weight = gradients(rows, w, columns, x_dtype, weight_dtype, ctx.main_grad, ctx.gran_k)
        if ctx.marked is not None:
            of_weight = gradient_beside_main_grad(ctx.marked)
        of_bias = bias_gradient(rows, bias_dtype) if needs_bias else None
        return None if of_x is None else of_x.view(ctx.x_shape), of_weight, of_bias, None, None


apply_beside_main_grad = outside_of_graphs(_Linear.apply)
"""Computes the layer. Backward adds the weight's gradient to `main_grad`, an effect that no graph can express."""


def with_columns(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns_too: bool, gran_k: int = SCALE_BLOCK
) -> tuple[Tensor, Quantized | None]:
    """Compute the layer for x `[..., k]`, and the cast of x along tokens for the weight's gradient."""
    bias = None if bias is None else bias.to(output_type(x.dtype))
    call = (x, for_forward(weight, gran_k), bias), (columns_too, gran_k, bias is None)
    # With scales of rows torch computes a step, which no record can hold, so each launch has a separate record.
    d, columns = run(FORWARD, *call) if gran_k else _forward(*call[0], *call[1])
    return d.to(x.dtype), columns


@torch.no_grad()
def _forward(
    x: Tensor, weight: Weight, bias: Tensor | None, columns_too: bool, gran_k: int, _: bool
) -> tuple[Tensor, Quantized | None]:
    a, columns = casts(as_matrix(x), gran_k, rows_too=True, columns_too=columns_too)
    assert a is not None
    return product(a, cast_weight(weight, gran_k), bias, x, gran_k), columns


FORWARD = Function(_forward, _forward, lambda x, *others: (x, *tensors_of(*others)), free=[FREE_ROWS])


def as_matrix(x: Tensor) -> Tensor:
    """View `[..., k]` as a matrix of all its rows."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def gradients(
    grad: Tensor,
    weight: Tensor | None,
    x_columns: Quantized | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    main_grad: Tensor | None = None,
    gran_k: int = SCALE_BLOCK,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradient of x's rows if `weight` is given, and of the weight if `x_columns` are given."""
    w = None if weight is None else for_backward(weight, gran_k)
    said: tuple[Any, ...] = (x_dtype, weight_dtype, gran_k, w is None, x_columns is None)
    rows = grad if grad.stride(-1) == 1 else grad.contiguous()
    given = rows, w, x_columns, main_grad
    if not gran_k:
        return _gradients(*given, *said)
    return run(BACKWARD if main_grad is None else BACKWARD_INTO, given, said)  # type: ignore[no-any-return]


@torch.no_grad()
def _gradients(
    grad: Tensor,
    weight: Weight | None,
    x_columns: Quantized | None,
    main_grad: Tensor | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    gran_k: int,
    *_: bool,
) -> tuple[Tensor | None, Tensor | None]:
    a, columns = casts(grad, gran_k, rows_too=weight is not None, columns_too=x_columns is not None)
    of_x = of_weight = None
    if a is not None and weight is not None:
        of_x = product_back(a, cast_weight_back(weight, gran_k), x_dtype, None if gran_k else OF_ROWS)
    if columns is not None and x_columns is not None:
        of_weight = weight_gradient(columns, x_columns, weight_dtype, main_grad, gran_k)
    return of_x, of_weight


BACKWARD = Function(_gradients, _gradients, lambda grad, *others: (grad, *tensors_of(*others)))
BACKWARD_INTO = replace(BACKWARD, outputs=1)


def product(a: Operand, w: Operand, bias: Tensor | None, x: Tensor, gran_k: int) -> Tensor:
    """Compute a @ w.T + bias for a cast x, with the leading dimensions of x. The bias has the output's type.

    The result is not a view: autograd refuses changes in place of a view that a Function made.
    """
    d = empty("the output", (*x.shape[:-1], w[0].shape[0]), output_type(x.dtype), x.device)
    if gran_k:
        NT.compute(Problem(*a, *w, *output_and_c(as_matrix(d), bias)))
    else:
        if bias is not None and not (bias.is_contiguous() and bias.data_ptr() % ADDRESS_ALIGNMENT == 0):
            bias = bias.clone(memory_format=torch.contiguous_format)  # C needs an address of a multiple of 16 bytes
        fp8_gemm_nt(a, w, as_matrix(d), bias, recipe_a=OF_ROWS, recipe_b=OF_ROWS)
    return d


def casts(x: Tensor, gran_k: int, *, rows_too: bool, columns_too: bool) -> tuple[Quantized | None, Quantized | None]:
    """Cast `x` `[m, k]` along rows, and its transpose along tokens; return None for a cast that is not requested.

    Tokens are the depth of the weight gradient's product, so rows of zeros extend x to a depth that it accepts.
    """
    cast = partial(per_token_cast_to_fp8, gran_k=gran_k, mn_major=True)
    if not columns_too:
        return cast(x) if rows_too else None, None
    tokens = x.shape[0]
    more = -tokens % K_MULTIPLE
    whole = F.pad(x, (0, 0, 0, more)) if more else x
    if not gran_k:
        return cast(x) if rows_too else None, cast_turned_rows(whole)
    if not rows_too:
        return None, cast(whole.t())
    of_rows, columns = cast_both_to_fp8(whole)
    return (of_rows[0][:tokens], of_rows[1][:tokens]) if more else of_rows, columns


def weight_gradient(
    grad: Operand, x: Operand, dtype: torch.dtype, main_grad: Tensor | None, gran_k: int
) -> Tensor | None:
    """Compute grad @ x.T along tokens, summed up in FP32; add it to `main_grad`, or return it in `dtype`."""
    d = main_grad
    if d is None:
        d = empty("the gradient", (grad[0].shape[0], x[0].shape[0]), output_type(dtype), x[0].device)
    whole, sides = (RECIPE_1D1D, None) if gran_k else (None, OF_ROWS)
    fp8_gemm_nt(grad, x, d, main_grad, whole, recipe_a=sides, recipe_b=sides)
    return d.to(dtype) if main_grad is None else None
