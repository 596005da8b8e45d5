"""Operators of FP8 products. Those of BF16 are in ops_bf16.py, and made in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.check.checks import Operand
from ..core.check.layout import Recipe
from ..core.check.recipes import Recipes
from ..core.operators import Flops, flops_of, operators
from . import depths
from .api import dense
from .api import grouped as rows
from .api.heads import fp8_einsum
from .api.skip import SKIP_HEAD_MID
from .ask.dense import check_ordinary_matrices
from .ask.heads import ALONG_TOKENS, check_along_tokens, heads_problem
from .product import Product, run

Compute = Callable[..., Tensor | None]
"""`(product, a, b, d, c, said) -> d`, or None where the caller gave d, as `run` has it; of a layer, as its function."""


OF_A = flops_of("a")


def products(schema: str, call: Compute, *, has_gradients: bool = False, flops: Flops = OF_A) -> None:
    """Make the operators of a product, as `operators` does.

    `call` takes `run` or what asks the same, and behind it, by name, what the operator is given.
    """
    operators(schema, partial(call, run), partial(call, only_asked), has_gradients=has_gradients, flops=flops)


def only_asked(product: Product, a: Any, b: Any, d: Tensor | None, *more: Any) -> Tensor | None:
    """Ask what `run` computes, without an answer."""
    problem = product.ask(a, b, d, *more)
    return product.output_of(problem) if d is None else None


def recipes_of(recipe: Recipe | None) -> Recipes:
    """Give the recipes of `whole_recipe`: one for both sides, or of four numbers two for each."""
    if recipe is not None and len(recipe) == 4:
        return None, recipe[:2], recipe[2:]
    return recipe, None, None


def dense_product(
    product: Product,
    compute: Compute,
    a: Operand,
    b: Operand,
    d: Tensor | None,
    c: Tensor | None,
    recipe: Recipe | None,
) -> Tensor | None:
    """Compute what operators of dense products take."""
    return compute(product, a, b, d, c, recipes_of(recipe))


def contiguous(
    product: Product,
    compute: Compute,
    a: Operand,
    b: Operand,
    d: Tensor | None,
    grouped_layout: Tensor | None,
    recipe: Recipe | None,
    use_psum_layout: bool,
    ensure_zero_padding: bool,
    num_groups: int | None,
) -> Tensor | None:
    """Compute what operators of stacked rows take."""
    said = recipes_of(recipe), num_groups, use_psum_layout, ensure_zero_padding
    return compute(product, a, b, d, grouped_layout, said)


def masked(
    compute: Compute,
    a: Operand,
    b: Operand,
    d: Tensor | None,
    masked_m: Tensor,
    expected_m: int | None,
    recipe: Recipe | None,
) -> Tensor | None:
    """Compute what operators of counted rows take."""
    return compute(rows.MASKED, a, b, d, masked_m, (recipes_of(recipe), expected_m, type(expected_m)))


def along_k(
    compute: Compute,
    a: Operand,
    b: Operand,
    d: Tensor | None,
    ks: Sequence[int] | None,
    ks_tensor: Tensor | None,
    c: Tensor | None,
    recipe: Recipe | None,
    k_major_scales: bool,
) -> Tensor | None:
    """Compute what operators of groups along k take, of scales that lie either way."""
    return compute(depths.OPERATORS[k_major_scales], a, b, d, c, (recipe,), ks_tensor, ks)


def skip_head_mid(
    compute: Compute, a: Operand, b: Operand, d: Tensor, head_splits: tuple[int, ...], recipe: Recipe | None
) -> None:
    """Compute what the operator into parts of heads takes."""
    compute(SKIP_HEAD_MID, a, b, d, None, (recipes_of(recipe), head_splits))


def fake_heads(expr: str, a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe) -> Tensor | None:
    """Stand for a product of heads."""
    if expr == ALONG_TOKENS:
        check_along_tokens(a, b, d, c, recipe)
        (x, _), (y, _) = a, b
        return None if d is not None else x.new_empty((*x.shape[1:], y.shape[2]), dtype=torch.float32)
    problem = heads_problem(expr, a, b, d, c, recipes_of(recipe))
    return None if d is not None else problem.d.transpose(0, 1)


OPERANDS = "Tensor a, Tensor sfa, Tensor b, Tensor sfb"
D = "<, Tensor(d!) d>"

for major, product in (("nt", dense.NT), ("nn", dense.NN), ("tn", dense.TN), ("tt", dense.TT)):
    behind = "Tensor? c=None, *<, bool adds_to_d=False>, int[]? recipe=None"
    products(f"fp8_gemm_{major}({OPERANDS}{D}, {behind}) -> Tensor", partial(dense_product, product))
    operators(
        f"cublaslt_gemm_{major}(Tensor a, Tensor b, Tensor(d!) d, Tensor? c=None, bool adds_to_d=False) -> ()",
        getattr(dense, f"cublaslt_gemm_{major}"),
        partial(check_ordinary_matrices, major=major),
        flops=OF_A,
    )
for major, product in (("nt", rows.CONTIGUOUS_NT), ("nn", rows.CONTIGUOUS_NN)):
    products(
        f"m_grouped_fp8_gemm_{major}_contiguous({OPERANDS}{D}, Tensor? grouped_layout=None, *, int[]? recipe=None, "
        "bool use_psum_layout=False, bool ensure_zero_padding=True, int? num_groups=None) -> Tensor",
        partial(contiguous, product),
    )
products(
    f"m_grouped_fp8_gemm_nt_masked({OPERANDS}{D}, Tensor masked_m, *, SymInt? expected_m=None, int[]? recipe=None) "
    "-> Tensor",
    masked,
)
products(
    f"k_grouped_fp8_gemm_nt_contiguous({OPERANDS}{D}, SymInt[]? ks=None, Tensor? ks_tensor=None, Tensor? c=None, "
    "*<, bool adds_to_d=False>, int[]? recipe=None, bool k_major_scales=True) -> Tensor",
    along_k,
)
products(
    f"fp8_gemm_nt_skip_head_mid.into({OPERANDS}, Tensor(d!) d, int[] head_splits, *, int[]? recipe=None) -> ()",
    skip_head_mid,
    flops=lambda _, a, b, **__: 2 * a.numel() * b.shape[0],  # D has columns that are no product
)
operators(
    f"fp8_einsum(str expr, {OPERANDS}{D}, Tensor? c, int[] recipe<, bool adds_to_d=False>) -> Tensor",
    fp8_einsum,
    fake_heads,
    flops=OF_A,
)
