"""Products of many small matrices at once, in the notation of `torch.einsum`, and products stored in parts of heads.

Columns between the left and the right part of a head stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import K_MULTIPLE, Operand
from ...core.check.layout import RECIPE_1D2D, Recipe, align, recipe_numbers
from ...core.check.recipes import Recipes
from ...core.check.tracing import is_dispatched
from ..ask.heads import (
    ALONG_TOKENS,
    BY_HEADS,
    BY_HEADS_TURNED,
    check_along_tokens,
    expression,
    heads_problem,
    skip_problem,
)
from ..product import Product, by_operator, run
from .grouped import k_grouped_fp8_gemm_nt_contiguous


def fp8_einsum(
    expr: str,
    a: Operand,
    b: Operand,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe = RECIPE_1D2D,
    epilogue: None = None,
) -> Tensor | None:
    """Multiply each head's matrices, FP8 with FP32 scales: b tokens, h heads, vectors of length d and r.

    - "bhr,hdr->bhd": each head's rows of tokens times the head's weights `[d, r]`. `a`: values `[b, h, r]` and scales
      `[b, h, ceil(r / 128)]`; `b`: values `[h, d, r]` and scales `[h, ceil(d / 128), ceil(r / 128)]`, or with
      `recipe=(1, 1, 128)` `[h, d, ceil(r / 128)]`; `d`: `[b, h, d]`, BF16 or FP32.
    - "bhd,hdr->bhr": the same with the weights transposed. `a` is `[b, h, d]` with scales `[b, h, ceil(d / 128)]`, `b`
      as before, but the function copies its values; `d`: `[b, h, r]`.
    - "bhd,bhr->hdr": the gradient of the weights, with `recipe=(1, 1, 128)`. `a`: values `[b, h, d]` and scales
      `[ceil(b / 128), h, d]`; `b`: values `[b, h, r]` and scales `[ceil(b / 128), h, r]`; the function copies both
      values. `d`: FP32 `[h, d, r]`, or BF16 without `c`; `c` is FP32.

    `c` is added in FP32; it has D's type and shape, and is D itself or disjoint from D.

    Values are contiguous along their last dimension; their other strides may be any multiples of 16 bytes, so values
    may be a part of a wider tensor. Scales may have any strides. Kernels load the scales of `a` without a copy if
    tokens are contiguous: `get_mn_major_tma_aligned_tensor(scales.transpose(0, 1)).transpose(0, 1)`. If `d` is given,
    the function returns None; if not, it makes D and returns it. `epilogue` must be None.

    >>> a = per_token_cast_to_fp8(torch.ones(3, 2, 256))
    >>> w = per_block_cast_to_fp8(torch.ones(2, 128, 256))
    >>> fp8_einsum("bhr,hdr->bhd", a, w)[:, 0, 0].tolist()
    [256.0, 256.0, 256.0]
    """
    if epilogue is not None:
        checks.nothing("epilogue", epilogue)
    expr = expression(expr)
    if is_dispatched(a[0]) if isinstance(a, tuple | list) and a else False:
        return _as_operator(expr, a, b, d, c, recipe)
    if expr == ALONG_TOKENS:
        return _along_tokens(a, b, d, c, recipe)
    made = run(PRODUCTS[expr], a, b, d, c, ((recipe, None, None),))
    return None if made is None else made.transpose(0, 1)  # a problem's first dimension is heads


def _as_operator(
    expr: str, a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe
) -> Tensor | None:
    operands = *checks.pair("a", a), *checks.pair("b", b)
    recipe = recipe_numbers("recipe", recipe)
    if d is None:
        return torch.ops.deep_gemm.fp8_einsum.default(expr, *operands, c, recipe)  # type: ignore[no-any-return]
    is_same = c is d
    torch.ops.deep_gemm.fp8_einsum.into(expr, *operands, d, None if is_same else c, recipe, is_same)
    return None


def _product(expr: str) -> Product:
    """Make the `Product` of an expression."""

    def as_operator(_: Product, a: Operand, b: Operand, d: Any, c: Any, said: tuple[Recipes], *__: None) -> Any:
        made = _as_operator(expr, a, b, d, c, said[0][0] or RECIPE_1D2D)
        return None if made is None else made.transpose(0, 1)

    return Product("fp8_einsum", partial(heads_problem, expr), ("recipes",), as_operator=as_operator)


PRODUCTS = {expr: _product(expr) for expr in (BY_HEADS, BY_HEADS_TURNED)}


def _along_tokens(a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe) -> Tensor | None:
    """Compute the gradient of the weights as groups along k: each group is a head with all tokens."""
    tokens, heads = check_along_tokens(a, b, d, c, recipe)
    depth = align(tokens, K_MULTIPLE)
    operands = []
    for values, scales in (tuple(x.detach() for x in operand) for operand in (a, b)):  # a copied leaf is no leaf
        width = values.shape[2]
        rows_of_heads = values.new_empty(heads, width, depth)
        rows_of_heads.view(torch.uint8)[..., tokens:] = 0
        rows_of_heads[..., :tokens] = values.permute(1, 2, 0)
        operands.append((rows_of_heads.view(-1), scales.permute(2, 1, 0).reshape(width, heads * scales.shape[0])))
    of_a, of_b = operands
    return k_grouped_fp8_gemm_nt_contiguous(of_a, of_b, d, [depth] * heads, None, c)


SKIP_HEAD_MID = Product(
    "fp8_gemm_nt_skip_head_mid",
    skip_problem,
    ("recipes", "head_splits"),
    (),
    lambda product, a, b, d, *more: by_operator(product, a, b, checks.tensor("d", d), *more),  # D is never made
)


def fp8_gemm_nt_skip_head_mid(
    a: Operand,
    b: Operand,
    d: Tensor,
    head_splits: Sequence[int],
    recipe: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Compute A @ B.T into D, whose heads have a left and a right part; columns between the two stay unchanged.

    With `head_splits = (left, mid, right)` the product has `left + right` columns for each head, and D has `left`,
    then `mid` unwritten columns, then `right`. So column j of the product goes to column
    `j + (j + right) // (left + right) * mid` of D.

    - `a`, `b`: as for `fp8_gemm_nt`, B with one scale for each 128x128 block.
    - `d`: `[m, n / (left + right) * (left + mid + right)]`, torch.bfloat16.
    - `head_splits`: left and right are multiples of 16, mid is a multiple of 8, and n is a multiple of left + right.
      The kernels store 64 columns at a time if left and right are multiples of 64, else 32 or 16.

    `compiled_dims` and `disable_ue8m0_cast` are accepted and change no result.

    >>> a, b = per_token_cast_to_fp8(torch.ones(4, 128)), per_block_cast_to_fp8(torch.ones(32, 128))
    >>> d = torch.zeros(4, 40, dtype=torch.bfloat16)
    >>> fp8_gemm_nt_skip_head_mid(a, b, d, (16, 8, 16))
    >>> d[0, ::8].tolist()
    [128.0, 128.0, 0.0, 128.0, 128.0]
    """
    splits = tuple(head_splits) if isinstance(head_splits, Sequence) else head_splits
    run(SKIP_HEAD_MID, a, b, d, None, ((recipe, None, None), splits))
