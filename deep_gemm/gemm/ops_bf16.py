"""Operators of BF16 products, and the gradients of those of grouped rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.check.layout import ids_of_groups, rows_of_counts
from ..core.operators import Kernel, gradients
from ..core.settings import get_mk_alignment_for_contiguous_layout
from .api import bf16_dense as dense
from .api import bf16_einsum as expressions
from .api import bf16_grouped as grouped
from .ops import Compute, products
from .product import Product

OPERANDS = "Tensor a, Tensor b<, Tensor(d!) d>"


def contiguous(
    product: Product,
    compute: Compute,
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    grouped_layout: Tensor,
    use_psum_layout: bool,
    ensure_zero_padding: bool,
) -> Tensor | None:
    """Compute a product of stacked rows of what its operators take."""
    return compute(product, a, b, d, grouped_layout, (use_psum_layout, ensure_zero_padding))


def masked(
    compute: Compute, a: Tensor, b: Tensor, d: Tensor | None, masked_m: Tensor, expected_m: int | None
) -> Tensor | None:
    """Compute a product of counted rows of what its operators take."""
    return compute(grouped.MASKED, a, b, d, masked_m, (expected_m,))


def along_k(
    compute: Compute,
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    c: Tensor | None,
    grouped_layout: Tensor | None,
    ks: tuple[int, ...] | None,
    use_psum_layout: bool,
) -> Tensor | None:
    """Compute a product of groups along k of what its operators take."""
    return compute(grouped.DEPTHS, a, b, d, c, (ks, use_psum_layout), grouped_layout, None)


def einsum(compute: Compute, expr: str, a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None) -> Tensor | None:
    """Compute an expression of what its operators take."""
    return compute(expressions.PRODUCTS[expr], a, b, d, c, ())


def ungrouped(
    product: Product, compute: Compute, a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None
) -> Tensor | None:
    """Compute a dense product of what its operators take."""
    return compute(product, a, b, d, c, ())


for major, product in dense.DENSE.items():
    products(f"bf16_gemm_{major}({OPERANDS}, Tensor? c<, bool adds_to_d>) -> Tensor", partial(ungrouped, product))
for major, product in grouped.CONTIGUOUS.items():
    behind = "Tensor grouped_layout, bool use_psum_layout, bool ensure_zero_padding"
    schema = f"m_grouped_bf16_gemm_{major}_contiguous({OPERANDS}, {behind}) -> Tensor"
    products(schema, partial(contiguous, product), has_gradients=True)
schema = f"m_grouped_bf16_gemm_nt_masked({OPERANDS}, Tensor masked_m, SymInt? expected_m) -> Tensor"
products(schema, masked, has_gradients=True)
behind = "Tensor? c, Tensor? grouped_layout, SymInt[]? ks, bool use_psum_layout<, bool adds_to_d>"
products(f"k_grouped_bf16_gemm_tn_contiguous({OPERANDS}, {behind}) -> Tensor", along_k)
products(f"einsum(str expr, {OPERANDS}, Tensor? c<, bool adds_to_d>) -> Tensor", einsum)


# Gradients of grouped rows. Rows without a group get zeros, and nothing of theirs goes to a weight's gradient.


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients are made of."""
    a, b, layout, *ctx.said = inputs
    ctx.save_for_backward(a, b, layout)


def contiguous_gradients(turned: bool) -> Kernel:
    """Give the formula for stacked rows; the weights of the product were turned, `[groups, k, n]`, or not."""
    ops = torch.ops.deep_gemm
    product_back = ops.m_grouped_bf16_gemm_nt_contiguous if turned else ops.m_grouped_bf16_gemm_nn_contiguous

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, layout = ctx.saved_tensors
        use_psum_layout, _ = ctx.said
        grad, of_a, of_b = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            of_a = torch.zeros_like(a, memory_format=torch.contiguous_format)
            product_back.into(grad, b, of_a, layout, use_psum_layout, False)
        if ctx.needs_input_grad[1]:
            alignment = get_mk_alignment_for_contiguous_layout()
            ids = ids_of_groups(layout, len(a), alignment) if use_psum_layout else layout
            groups = b.shape[0]
            order = torch.where(ids < 0, groups, ids).argsort(stable=True)
            depths = (ids[:, None] == torch.arange(groups, device=ids.device)).sum(0, dtype=torch.int32)
            left, right = (a, grad) if turned else (grad, a)
            of_b = torch.empty_like(b, memory_format=torch.contiguous_format)
            summed = ops.k_grouped_bf16_gemm_tn_contiguous
            summed.into(left[order], right[order], of_b, None, depths, None, False, False)
        return of_a, of_b, None, None, None

    return backward


def masked_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Give the gradients of rows that are counted for each group."""
    a, b, masked_m = ctx.saved_tensors
    ops = torch.ops.deep_gemm
    grad, of_a, of_b = grad.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        of_a = torch.zeros_like(a, memory_format=torch.contiguous_format)
        ops.m_grouped_bf16_gemm_nt_masked.into(grad, b.mT, of_a, masked_m, *ctx.said)
    if ctx.needs_input_grad[1]:
        is_used = rows_of_counts(masked_m, a.shape[1])[..., None]
        left, right = (x.masked_fill(~is_used, 0).transpose(0, 1) for x in (grad, a))
        of_b = torch.empty_like(b, memory_format=torch.contiguous_format)
        ops.einsum.into("bhd,bhr->hdr", left, right, of_b, None, False)
    return of_a, of_b, None, None


gradients("m_grouped_bf16_gemm_nt_contiguous", contiguous_gradients(False), keep)
gradients("m_grouped_bf16_gemm_nn_contiguous", contiguous_gradients(True), keep)
gradients("m_grouped_bf16_gemm_nt_masked", masked_gradients, keep)
