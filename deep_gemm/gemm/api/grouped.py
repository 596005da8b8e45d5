"""Grouped products, for mixtures of experts: along m (rows of tokens) and along k (weight gradients)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ...compat.forms import Request, accepts_every_form, like
from ...core.check.checks import Operand, depths_of_ends, nothing, tensor
from ...core.check.layout import Recipe
from ...core.check.recipes import NO_RECIPES, PER_64, Recipes
from ...core.settings import get_mk_alignment_for_contiguous_layout
from .. import depths
from ..ask.rows import contiguous_problem, masked_problem
from ..launch import run as launch
from ..product import FREE, Product, by_operator, run


def _no_operator(*_: object) -> Tensor | None:
    raise NotImplementedError("products of experts' rows: torch has no operator for them, so they cannot be traced")


CONTIGUOUS_NT, CONTIGUOUS_NN = (
    Product(
        f"m_grouped_fp8_gemm_{major}_contiguous",
        partial(contiguous_problem, major=major),
        ("recipes", "num_groups", "use_psum_layout", "ensure_zero_padding"),
        ("grouped_layout", "bias"),
        free=FREE,
    )
    for major in ("nt", "nn")
)
"""Products of stacked rows; B is `[groups, n, k]` for nt, `[groups, k, n]` for nn."""
BEHIND_CAST = replace(CONTIGUOUS_NT, on_gpu=partial(launch, is_behind_cast=True))
BY_64 = replace(CONTIGUOUS_NT, ask=partial(CONTIGUOUS_NT.ask, of_a=PER_64), as_operator=_no_operator, free=())
BY_ENDS = replace(CONTIGUOUS_NT, ask=partial(CONTIGUOUS_NT.ask, alignment=1), as_operator=_no_operator)
MASKED = Product(
    "m_grouped_fp8_gemm_nt_masked",
    masked_problem,
    ("recipes", "expected_m"),
    ("masked_m", "bias"),
    lambda product, a, b, d, counts, *more: by_operator(product, a, b, d, tensor("masked_m", counts), *more),
)


@accepts_every_form()
def m_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor | None = None,
    grouped_layout: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
    ensure_zero_padding: bool = True,
    num_groups: int | None = None,
    bias: Tensor | None = None,
    epilogue: None = None,
) -> Request:
    """Multiply stacked rows of tokens, each by its group's weights: `d[i] = a[i] @ b[group of i].T`.

    - `a`: values `[m, k]` and scales `[m, ceil(k / 128)]`; `b`: values `[groups, n, k]` and scales
      `[groups, ceil(n / 128), ceil(k / 128)]`; groups may share one weight through a stride of 0 (`w.expand(...)`);
      `d`: `[m, n]`, BF16 or FP32, made and returned if it is left out.
    - `grouped_layout`: int32 `[m]`, the group of each row. Rows of a group form runs of any length, in any order; -1
      skips a row. With `use_psum_layout=True` it is int32 `[groups]`: group g has the rows from `ends[g - 1]`, aligned
      to `get_mk_alignment_for_contiguous_layout()`, to `ends[g]`. Left out, it means `num_groups` groups of equal size.
    - A row without a group is written as zeros if it shares a 128-aligned block of rows with a row of a group. Any
      other row without a group is neither read nor written. With ends, zeros are written up to the next group's aligned
      start, unless `ensure_zero_padding` is False; with ids that argument changes nothing, as callers expect.
    - `bias`: FP32 or BF16 `[groups, n]`, added in FP32 to each row of a group. BF16 is converted in each call.

    The other keywords are as for `fp8_gemm_nt`; `expected_m_for_psum_layout` is accepted as a hint. `b` may be FP4
    (MXFP4): values `[groups, n, k / 2]`, two to a byte, and scales `[groups, n, k / 32]`, k a multiple of 32.

    >>> a, b = per_token_cast_to_fp8(torch.ones(3, 128)), per_block_cast_to_fp8(torch.ones(2, 8, 128))
    >>> layout = torch.tensor([0, 1, -1], dtype=torch.int32)
    >>> m_grouped_fp8_gemm_nt_contiguous(a, b, grouped_layout=layout)[:, 0].tolist()
    [128.0, 128.0, 0.0]
    """
    if epilogue is not None:
        nothing("epilogue", epilogue)
    zero_padding = ensure_zero_padding or not use_psum_layout
    said = (recipe, recipe_a, recipe_b), num_groups, use_psum_layout, zero_padding
    return run, CONTIGUOUS_NT, a, b, d, grouped_layout, said, bias


@like(m_grouped_fp8_gemm_nt_contiguous, CONTIGUOUS_NT="CONTIGUOUS_NN")
def m_grouped_fp8_gemm_nn_contiguous() -> None:
    """Compute `m_grouped_fp8_gemm_nt_contiguous` with B `[groups, k, n]` and the scales of B transposed too.

    >>> a, (w, sw) = per_token_cast_to_fp8(torch.ones(2, 128)), per_block_cast_to_fp8(torch.ones(2, 8, 128))
    >>> m_grouped_fp8_gemm_nn_contiguous(a, (w.mT, sw.mT), num_groups=2)[:, 0].tolist()
    [128.0, 128.0]
    """


@accepts_every_form(can_be_asked_to_overlap=True)
def m_grouped_fp8_gemm_nt_masked(
    a: Operand,
    b: Operand,
    d: Tensor | None = None,
    masked_m: Tensor | None = None,
    expected_m: int | None = None,
    recipe: Recipe | None = None,
    *,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    bias: Tensor | None = None,
    epilogue: None = None,
) -> Request:
    """Multiply the first `masked_m[g]` rows of each group: `d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T`.

    - `a`: values `[groups, max_m, k]` and scales `[groups, max_m, ceil(k / 128)]`; `b`: as for
      `m_grouped_fp8_gemm_nt_contiguous`; `d`: `[groups, max_m, n]`, BF16 or FP32, made and returned if it is left out.
    - `masked_m`: int32 `[groups]`, on the operands' device. The host never reads it from a GPU, so a captured CUDA
      graph can be replayed with other counts.
    - `expected_m`: roughly the number of rows of a group, a hint for choosing a kernel; max_m if it is left out.
    - `bias`: as for `m_grouped_fp8_gemm_nt_contiguous`.

    Rows of `a` from `masked_m[g]` on may hold anything, and the same rows of `d` stay unchanged.

    >>> a, b = per_token_cast_to_fp8(torch.ones(2, 4, 128)), per_block_cast_to_fp8(torch.ones(2, 8, 128))
    >>> d = torch.zeros(2, 4, 8)
    >>> m_grouped_fp8_gemm_nt_masked(a, b, d, torch.tensor([1, 3], dtype=torch.int32), 2)
    >>> d[..., 0].round().tolist()
    [[128.0, 0.0, 0.0, 0.0], [128.0, 128.0, 128.0, 0.0]]
    """
    if epilogue is not None:
        nothing("epilogue", epilogue)
    return run, MASKED, a, b, d, masked_m, ((recipe, recipe_a, recipe_b), expected_m, type(expected_m)), bias


@accepts_every_form(grouped_layout="ks_tensor")
def k_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor | None = None,
    ks: Sequence[int] | None = None,
    ks_tensor: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    use_padded_sf_layout: bool = False,
    epilogue: None = None,
) -> Request:
    """Multiply groups along k, the weight gradients of experts: `d[g] = c[g] + a_g @ b_g.T`.

    - `a`: values `[m * sum(ks)]`, the row-major `[m, k_g]` of each group one after another, and scales
      `[m, sum(ceil(k_g / 128))]`; `b`: the same with n in place of m. `k_grouped_cast_to_fp8` makes both.
    - `ks`: the groups' k, multiples of 16, on the host; None if only the GPU knows them. `ks_tensor`: the same numbers
      in an int32 tensor on the operands' device. With `use_psum_layout=True` the tensor holds instead the k where each
      group ends. All ends but the last must be multiples of `get_mk_alignment_for_contiguous_layout()`.
    - `d`: FP32 `[groups, m, n]`, made and returned if it is left out; BF16 is allowed without C. `c`: FP32, added to
      the product, D itself or disjoint from D. An empty group's part of D is C, or zero.
    - `use_padded_sf_layout` and `epilogue`: must be False and None.

    >>> ks = [128, 0, 16]
    >>> a, b = k_grouped_cast_to_fp8(torch.ones(4, 144), ks), k_grouped_cast_to_fp8(torch.ones(8, 144), ks)
    >>> k_grouped_fp8_gemm_nt_contiguous(a, b, ks=ks)[:, 0, 0].round().tolist()
    [128.0, 0.0, 16.0]
    """
    if epilogue is not None:
        nothing("epilogue", epilogue)
    nothing("use_padded_sf_layout", use_padded_sf_layout, expected=False)
    if use_psum_layout:
        ks_tensor = depths_of_ends(ks_tensor, get_mk_alignment_for_contiguous_layout())
    return run, depths.ALONG_K, a, b, d, c, (recipe,), ks_tensor, ks


@accepts_every_form()
def k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(
    a: Operand, b: Operand, d: Tensor | None = None, ks: Sequence[int] | None = None
) -> Request:
    """Accumulate the weight gradients of experts, with the arguments of DeepGEMM's 2025 version: `d[g] += a_g @ b_g.T`.

    Like `k_grouped_fp8_gemm_nt_contiguous`, with scales `[sum(ceil(k_g / 128)), m]` and `[sum(ceil(k_g / 128)), n]`.
    If `d` is left out, the function returns the products alone.

    >>> (x, sx), (y, sy) = (k_grouped_cast_to_fp8(torch.ones(rows, 144), [128, 16]) for rows in (4, 8))
    >>> grads = torch.ones(2, 4, 8)
    >>> k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((x, sx.t()), (y, sy.t()), grads, [128, 16])
    >>> grads[:, 0, 0].round().tolist()
    [129.0, 17.0]
    """
    return run, depths.BY_ROW, a, b, d, d, (None,), None, ks


m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
m_grouped_gemm_fp8_fp8_bf16_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
m_grouped_gemm_fp8_fp8_bf16_nt_masked = m_grouped_fp8_gemm_nt_masked


def product_of_stacked_rows(
    a: Operand,
    b: Operand,
    d: Tensor,
    ids: Tensor,
    recipes: Recipes = NO_RECIPES,
    bias: Tensor | None = None,
    *,
    is_behind_cast: bool = False,
) -> None:
    """Compute `m_grouped_fp8_gemm_nt_contiguous` by ids of unpadded rows: rows of D whose id is -1 stay unchanged.

    `is_behind_cast`: as for `launch.run`.
    """
    run(BEHIND_CAST if is_behind_cast else CONTIGUOUS_NT, a, b, d, ids, (recipes, None, False, False), bias)


def product_of_stacked_groups(
    a: Operand, b: Operand, d: Tensor, ends: Tensor, recipes: Recipes = NO_RECIPES, bias: Tensor | None = None
) -> None:
    """Multiply stacked rows by ends, without gaps between groups; rows of D after the last group stay unchanged."""
    run(BY_ENDS, a, b, d, ends, (recipes, None, True, False), bias)


def product_of_rows_by_64(a: Operand, b: Operand, d: Tensor, ids: Tensor) -> None:
    """Compute `product_of_stacked_rows`; A has a scale per row and 64 columns, as `activated_product_of_rows` makes."""
    run(BY_64, a, b, d, ids, (NO_RECIPES, None, False, False))
