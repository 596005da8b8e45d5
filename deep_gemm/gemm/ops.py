"""Operators of products, and the gradients of BF16 products of grouped rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.check.checks import Operand, refuse_gradient
from ..core.check.layout import Recipe, ids_of_groups, rows_of_counts
from ..core.check.recipes import recipes_of
from ..core.operators import Kernel, flops_of, gradients, operators
from ..core.settings import get_mk_alignment_for_contiguous_layout
from . import depths
from .api import bf16_dense, bf16_einsum, bf16_grouped, dense
from .api import grouped as rows
from .api.heads import SKIP_HEAD_MID, fp8_einsum
from .ask.dense import check_ordinary_matrices
from .ask.heads import ALONG_TOKENS, check_along_tokens, heads_problem
from .product import Product, run

OF_A = flops_of("a")


def products(arguments: str, product: Product) -> None:
    """Make the operators of a product, which take these arguments, as `operators` does."""
    schema = f"{product.operator}({arguments}) -> Tensor"
    real, fake = partial(run, product), partial(only_asked, product)
    operators(schema, real, fake, passes=passed_by(product), has_gradients=product.has_gradients, flops=OF_A)


def passed_by(product: Product) -> str:
    """Give what `run` takes behind the product, by the names of the operator's arguments."""
    c, layout, ks, *_ = *product.inputs, "None", "None", "None"
    said = "".join(f"{name}, " for name in product.options)
    return f"a, b, d, {c}, ({said}), {layout}, {ks}"


def only_asked(product: Product, a: Any, b: Any, d: Tensor | None, *behind: Any) -> Tensor | None:
    """Check a call that `run` would compute, and give a D without values."""
    problem = product.ask(a, b, d, **product.inputs_of(*behind))
    return product.output_of(problem) if d is None else None


def fake_heads(expr: str, a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe) -> Tensor | None:
    """Check a product of heads, and give a D without values."""
    if expr == ALONG_TOKENS:
        check_along_tokens(a, b, d, c, recipe)
        (x, _), (y, _) = a, b
        return None if d is not None else x.new_empty((*x.shape[1:], y.shape[2]), dtype=torch.float32)
    problem = heads_problem(expr, a, b, d, c, recipes_of(recipe))
    return None if d is not None else problem.d.transpose(0, 1)


OPERANDS = "Tensor a, Tensor sfa, Tensor b, Tensor sfb"
D = "<, Tensor(d!) d>"
ALONG_K = {True: depths.ALONG_K, False: depths.BY_ROW}
"""Products of groups along k, by `k_major_scales`."""
BF16_OPERANDS = f"Tensor a, Tensor b{D}"

for major, product in dense.DENSE.items():
    products(f"{OPERANDS}{D}, Tensor? c=None, *<, bool adds_to_d=False>, int[]? recipe=None", product)
    operators(
        f"cublaslt_gemm_{major}(Tensor a, Tensor b, Tensor(d!) d, Tensor? c=None, bool adds_to_d=False) -> ()",
        getattr(dense, f"cublaslt_gemm_{major}"),
        partial(check_ordinary_matrices, major=major),
        flops=OF_A,
    )
for product in (rows.CONTIGUOUS_NT, rows.CONTIGUOUS_NN):
    products(
        f"{OPERANDS}{D}, Tensor? grouped_layout=None, *, int[]? recipe=None, bool use_psum_layout=False, "
        "bool ensure_zero_padding=True, int? num_groups=None, Tensor? bias=None",
        product,
    )
products(
    f"{OPERANDS}{D}, Tensor masked_m, *, SymInt? expected_m=None, int[]? recipe=None, Tensor? bias=None", rows.MASKED
)
operators(
    f"k_grouped_fp8_gemm_nt_contiguous({OPERANDS}{D}, SymInt[]? ks=None, Tensor? ks_tensor=None, Tensor? c=None, "
    "*<, bool adds_to_d=False>, int[]? recipe=None, bool k_major_scales=True) -> Tensor",
    lambda k_major_scales, *given: run(ALONG_K[k_major_scales], *given),
    lambda k_major_scales, *given: only_asked(ALONG_K[k_major_scales], *given),
    passes=f"k_major_scales, {passed_by(depths.ALONG_K)}",
    flops=OF_A,
)
operators(
    f"fp8_gemm_nt_skip_head_mid.into({OPERANDS}, Tensor(d!) d, int[] head_splits, *, int[]? recipe=None) -> ()",
    partial(run, SKIP_HEAD_MID),
    partial(only_asked, SKIP_HEAD_MID),
    passes=passed_by(SKIP_HEAD_MID),
    flops=lambda _, a, b, **__: 2 * a.numel() * b.shape[0],  # the columns between D's parts are not computed
)
operators(
    f"fp8_einsum(str expr, {OPERANDS}{D}, Tensor? c, int[] recipe<, bool adds_to_d=False>) -> Tensor",
    fp8_einsum,
    fake_heads,
    flops=OF_A,
)

for product in bf16_dense.DENSE.values():
    products(f"{BF16_OPERANDS}, Tensor? c<, bool adds_to_d>", product)
for product in bf16_grouped.CONTIGUOUS.values():
    products(
        f"{BF16_OPERANDS}, Tensor grouped_layout, bool use_psum_layout, bool ensure_zero_padding, Tensor? bias=None",
        product,
    )
products(f"{BF16_OPERANDS}, Tensor masked_m, SymInt? expected_m, Tensor? bias=None", bf16_grouped.MASKED)
products(
    f"{BF16_OPERANDS}, Tensor? c, Tensor? grouped_layout, SymInt[]? ks, bool use_psum_layout<, bool adds_to_d>",
    bf16_grouped.DEPTHS,
)
operators(
    f"einsum(str expr, {BF16_OPERANDS}, Tensor? c<, bool adds_to_d>) -> Tensor",
    lambda expr, *given: run(bf16_einsum.PRODUCTS[expr], *given),
    lambda expr, *given: only_asked(bf16_einsum.PRODUCTS[expr], *given),
    passes="expr, a, b, d, c",
    flops=OF_A,
)


# Gradients of grouped rows. Rows without a group get zeros, and nothing of theirs goes to a weight's gradient.


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the tensors that gradients need."""
    a, b, layout, *ctx.said, bias = inputs
    if bias is not None and bias.requires_grad:
        refuse_gradient("bias")
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
        return of_a, of_b, None, None, None, None

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
    return of_a, of_b, None, None, None


gradients("m_grouped_bf16_gemm_nt_contiguous", contiguous_gradients(False), keep)
gradients("m_grouped_bf16_gemm_nn_contiguous", contiguous_gradients(True), keep)
gradients("m_grouped_bf16_gemm_nt_masked", masked_gradients, keep)
