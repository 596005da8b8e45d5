"""Dense products: D = C + A @ B.T, FP8 operands with fine-grained scales."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compat.forms import Request, accepts_every_form, like
from ...core.call import never
from ...core.check.checks import Operand, fp8, nothing, pair
from ...core.check.layout import ADDRESS_ALIGNMENT, RECIPE_1D1D, Recipe
from ...core.check.tracing import is_dispatched, without_autocast
from ..ask.dense import block_sums_problem, check_ordinary_matrices, dense_problem
from ..launch import run as launch
from ..problem import Problem
from ..product import FREE, Product, run


def _ask_gradient(a: Operand, b: Operand, d: Tensor | None, **inputs: Any) -> Problem:
    fp8("b", pair("b", b)[0])  # FP4 needs another recipe, and this function accepts none
    return dense_problem(a, b, d, **inputs)


DENSE = {
    # Axes of A (n: `[m, k]`) and of B (t: `[n, k]`).
    major: Product(
        f"fp8_gemm_{major}", partial(dense_problem, major=major), ("recipes",), free=FREE if major[0] == "n" else ()
    )
    for major in ("nt", "nn", "tn", "tt")
}
NT, NN, TN, TT = DENSE.values()
GRADIENT_NT = replace(NT, ask=_ask_gradient)
BEHIND_CAST = replace(NT, on_gpu=partial(launch, is_behind_cast=True))
"""`fp8_gemm_nt` for an `a` that the previous launch on the same stream casts."""

_OF_SUMS = partial(
    Product, "", block_sums_problem, ("first", "scale", "recipes"), ("tokens", "chosen"), wants_checks=never
)
BLOCK_SUMS_OF = _OF_SUMS(free=FREE), _OF_SUMS(free=(FREE[0], *FREE[3:]), has_scales=False)
"""Products of FP8, and of BF16, that add up blocks of logits. In place of C they take tokens, and in place of a layout
the tensor to which they write the tokens' logits."""


@accepts_every_form()
def fp8_gemm_nt(
    a: Operand,
    b: Operand,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: None = None,
    epilogue: None = None,
) -> Request:
    """Compute D = C + A @ B.T with FP8 operands and FP32 scales.

    - `a`: values `[m, k]` (torch.float8_e4m3fn, contiguous along k) and scales `[m, ceil(k / 128)]` (torch.float32),
      row-major or in the m-major form of `get_mn_major_tma_aligned_tensor`, which the kernels load directly.
    - `b`: values `[n, k]`, contiguous along k; scales `[ceil(n / 128), ceil(k / 128)]`, one for each 128x128 block.
      With `recipe=(1, 1, 128)` one for each row and 128 columns instead: `[n, ceil(k / 128)]`.
    - `recipe` (1, 32, 32), (1, 64, 64) or (1, 1, 32): finer scales of A and B, FP32, or UE8M0 in bytes or int32 words.
    - `recipe_a`, `recipe_b` (1, 0): one scale for a whole row, `[m, 1]` or `[n, 1]`; (0, 0): one number for the tensor.
    - `d`: `[m, n]`, torch.bfloat16 or torch.float32. If `d` is given, the function returns None; if not, it makes D in
      C's type, else BF16 (FP32 with `recipe=(1, 1, 128)`), and returns it.
    - `c`: added to the product in FP32; it has D's shape and type, and is D itself or disjoint from D; or a bias `[n]`,
      BF16 or FP32, added to each row.

    k is a multiple of 16, n of 8 (BF16 output) or 4 (FP32); addresses are multiples of 16 bytes. `recipe_a` and
    `recipe_b` state the recipe of each side alone. `compiled_dims` and `disable_ue8m0_cast` are accepted and change no
    result: FP32 scales are never rounded. `alpha` and `epilogue` must be None: scales can hold any factor. The function
    has no gradient; the layers of `deep_gemm.nn` have one. In grad mode, operands that were computed from a tensor
    with `requires_grad` are refused.

    >>> x, w = torch.randn(4, 256), torch.randn(128, 256)
    >>> a, b = per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)
    >>> y = fp8_gemm_nt(a, b)
    >>> y.shape, y.dtype, bool(calc_diff(y, x @ w.t()) < 1e-2)
    (torch.Size([4, 128]), torch.bfloat16, True)
    """
    if alpha is not None or epilogue is not None:
        nothing("alpha", alpha, "; multiply the scales of a or b with it instead")
        nothing("epilogue", epilogue)
    return run, NT, a, b, d, c, ((recipe, recipe_a, recipe_b),)


@like(fp8_gemm_nt, NT="NN")
def fp8_gemm_nn() -> None:
    """Compute `fp8_gemm_nt` with B given as `[k, n]` and its scales as `[ceil(k / 128), ceil(n / 128)]`.

    A view `w.t()` of a row-major `[n, k]` matrix costs nothing; a row-major `[k, n]` matrix is copied.

    >>> a, (w, sw) = per_token_cast_to_fp8(torch.ones(4, 128)), per_block_cast_to_fp8(torch.ones(8, 128))
    >>> fp8_gemm_nn(a, (w.t(), sw.t()))[0, 0].item()
    128.0
    """


@like(fp8_gemm_nt, NT="TN", compiled_dims="mn")
def fp8_gemm_tn() -> None:
    """Compute `fp8_gemm_nt` with A given as `[k, m]`, B as `[k, n]`, and the scales of A and B transposed too.

    >>> (x, sx), (w, sw) = per_token_cast_to_fp8(torch.ones(4, 128)), per_block_cast_to_fp8(torch.ones(8, 128))
    >>> fp8_gemm_tn((x.t(), sx.t()), (w.t(), sw.t()))[0, 0].item()
    128.0
    """


@like(fp8_gemm_nt, NT="TT", compiled_dims="mn")
def fp8_gemm_tt() -> None:
    """Compute `fp8_gemm_nt` with A given as `[k, m]` and its scales as `[ceil(k / 128), m]`.

    >>> (x, sx), b = per_token_cast_to_fp8(torch.ones(4, 128)), per_block_cast_to_fp8(torch.ones(8, 128))
    >>> fp8_gemm_tt((x.t(), sx.t()), b)[0, 0].item()
    128.0
    """


@accepts_every_form()
def wgrad_gemm_fp8_fp8_fp32_nt(a: Operand, b: Operand, d: Tensor | None = None) -> Request:
    """Accumulate a weight gradient: D += A @ B.T, with one scale for each row and 128 columns on both sides.

    `a` is `[m, k]` with scales `[m, ceil(k / 128)]`, `b` `[n, k]` with scales `[n, ceil(k / 128)]`, `d` FP32 `[m, n]`.
    If `d` is left out, the function returns the product alone.

    >>> a, b = per_token_cast_to_fp8(torch.ones(4, 128)), per_token_cast_to_fp8(torch.ones(8, 128))
    >>> grad = torch.ones(4, 8)
    >>> wgrad_gemm_fp8_fp8_fp32_nt(a, b, grad)
    >>> grad[0, 0].round().item()
    129.0
    """
    if isinstance(d, Tensor) and d.dtype != torch.float32:
        raise ValueError(f"d: expected dtype torch.float32, got {d.dtype}")
    return run, GRADIENT_NT, a, b, d, d, ((RECIPE_1D1D, None, None),)


fp8_fp4_gemm_nt = fp8_gemm_nt
fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt
gemm_fp8_fp8_bf16_nt = fp8_gemm_nt


def cublaslt_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """Compute D = C + A @ B.T of ordinary tensors through torch: A `[m, k]`, B `[n, k]`.

    A and B have one type, BF16, FP16, FP32 or FP64; D has that type too, or FP32 if that type has 16 bits. Or A and B
    are FP8 values without scales, torch.float8_e4m3fn, and D is BF16 or FP32. C has D's type, and is D itself or
    disjoint from D.

    >>> d = torch.empty(2, 3)
    >>> cublaslt_gemm_nt(torch.ones(2, 4), torch.ones(3, 4), d)
    >>> d[0, 0].item()
    4.0
    """
    _torch_gemm("nt", a, b, d, c)


def cublaslt_gemm_nn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """Compute `cublaslt_gemm_nt` with B `[k, n]`."""
    _torch_gemm("nn", a, b, d, c)


def cublaslt_gemm_tn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """Compute `cublaslt_gemm_nt` with A `[k, m]` and B `[k, n]`."""
    _torch_gemm("tn", a, b, d, c)


def cublaslt_gemm_tt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """Compute `cublaslt_gemm_nt` with A `[k, m]`."""
    _torch_gemm("tt", a, b, d, c)


def _torch_gemm(major: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None) -> None:
    if is_dispatched(a):
        operator = getattr(torch.ops.deep_gemm, f"cublaslt_gemm_{major}").default
        operator(a, b, d, None if c is d else c, c is d)
        return
    check_ordinary_matrices(a, b, d, c, major)
    with torch.no_grad(), without_autocast():
        if major[0] == "t":
            a = a.t()
        if major[1] == "t":
            b = b.t()
        if a.dtype == torch.float8_e4m3fn:
            product = _fp8_product(a, b, torch.float32 if c is not None else d.dtype)
        elif d.dtype == a.dtype:
            product = a @ b
        elif a.is_cuda:
            product = torch.mm(a, b, out_dtype=d.dtype)
        else:
            product = a.to(d.dtype) @ b.to(d.dtype)
        d.copy_(product if c is None else product + c)


def _fp8_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A @ B of FP8 values with scale 1, in type `dtype` if torch has such a product on this device, else in FP32."""
    if not a.is_cuda or a.numel() == 0 or b.numel() == 0:
        return a.float() @ b.float()
    k, n = b.shape
    a, b = a.contiguous(), b.t().contiguous().t()  # cuBLASLt requires FP8 operands contiguous along k
    if (k | n | a.data_ptr() | b.data_ptr()) % ADDRESS_ALIGNMENT == 0:
        one = torch.ones((), device=a.device, dtype=torch.float32)
        return torch._scaled_mm(a, b, one, one, out_dtype=dtype, use_fast_accum=False)
    return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)  # every FP8 value is a BF16 number
