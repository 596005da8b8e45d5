"""Operators of BF16 products, and the gradients of those of grouped rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.check.layout import rows_of_counts, rows_of_groups
from ...core.operators import Kernel, gradients, operator
from ...core.settings import get_mk_alignment_for_contiguous_layout
from ..ops import c_of
from ..product import Product, run
from . import dense, expressions, grouped

Compute = Callable[..., Tensor | None]


def only_asked(product: Product, a: Tensor, b: Tensor, d: Tensor | None, *more: Any) -> Tensor | None:
    """Ask what `run` computes, without an answer."""
    problem = product.ask(a, b, d, *more)
    return product.output_of(problem) if d is None else None


def make(name: str, product: Product, others: str, *, has_c: bool = True) -> None:
    """Make a product's two operators. Others stand behind a and b: C or a layout, a layout, what was said."""

    def kernels(compute: Compute) -> tuple[Compute, Compute]:
        def new(a: Tensor, b: Tensor, *more: Any) -> Tensor | None:
            return compute(product, a, b, None, *call(product, more))

        def into(a: Tensor, b: Tensor, d: Tensor, *more: Any) -> None:
            if has_c:
                c, *rest, adds_to_d = more
                more = (c_of(d, c, adds_to_d), *rest)
            compute(product, a, b, d, *call(product, more))

        return new, into

    (new, into), (fake_new, fake_into) = kernels(run), kernels(only_asked)
    operands, adds = "Tensor a, Tensor b", ", bool adds_to_d" if has_c else ""
    operator(f"{name}({operands}, {others}) -> Tensor", new, fake_new, has_gradients=product.has_gradients)
    operator(f"{name}.into({operands}, Tensor(d!) d, {others}{adds}) -> ()", into, fake_into)


def call(product: Product, more: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give what stands behind the operands in a schema as `run` takes it."""
    c, *said = more
    layout = (said.pop(0), None) if product.has_layout else ()
    return c, tuple(tuple(x) if isinstance(x, list) else x for x in said), *layout


for major, of_major in dense.DENSE.items():
    make(f"bf16_gemm_{major}", of_major, "Tensor? c")
for major, of_major in grouped.CONTIGUOUS.items():
    layout = "Tensor grouped_layout, bool use_psum_layout, bool ensure_zero_padding"
    make(f"m_grouped_bf16_gemm_{major}_contiguous", of_major, layout, has_c=False)
make("m_grouped_bf16_gemm_nt_masked", grouped.MASKED, "Tensor masked_m, SymInt? expected_m", has_c=False)
make(
    "k_grouped_bf16_gemm_tn_contiguous",
    grouped.DEPTHS,
    "Tensor? c, Tensor? grouped_layout, SymInt[]? ks, bool use_psum_layout",
)


def einsum_kernels(compute: Compute) -> tuple[Compute, Compute]:
    """Give einsum as its two operators take it."""

    def new(expr: str, a: Tensor, b: Tensor, c: Tensor | None) -> Tensor | None:
        return compute(expressions.PRODUCTS[expr], a, b, None, c, ())

    def into(expr: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, adds_to_d: bool) -> None:
        compute(expressions.PRODUCTS[expr], a, b, d, c_of(d, c, adds_to_d), ())

    return new, into


(new, into), (fake_new, fake_into) = einsum_kernels(run), einsum_kernels(only_asked)
operator("einsum(str expr, Tensor a, Tensor b, Tensor? c) -> Tensor", new, fake_new)
operator("einsum.into(str expr, Tensor a, Tensor b, Tensor(d!) d, Tensor? c, bool adds_to_d) -> ()", into, fake_into)


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
            ids = ids_of_ends(layout, len(a)) if use_psum_layout else layout
            groups = b.shape[0]
            order = torch.where(ids < 0, groups, ids).argsort(stable=True)
            depths = (ids[:, None] == torch.arange(groups, device=ids.device)).sum(0, dtype=torch.int32)
            left, right = (a, grad) if turned else (grad, a)
            of_b = torch.empty_like(b, memory_format=torch.contiguous_format)
            summed = ops.k_grouped_bf16_gemm_tn_contiguous
            summed.into(left[order], right[order], of_b, None, depths, None, False, False)
        return of_a, of_b, None, None, None

    return backward


def ids_of_ends(ends: Tensor, m: int) -> Tensor:
    """Group of each of m rows, -1 for none, given where groups end. The host reads nothing."""
    rows = torch.arange(m, dtype=torch.int32, device=ends.device)
    group = torch.searchsorted(ends, rows, right=True).to(torch.int32)
    is_owned = rows_of_groups(ends, m, get_mk_alignment_for_contiguous_layout())
    return torch.where(is_owned, group, torch.full_like(group, -1))


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
