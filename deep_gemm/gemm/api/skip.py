"""Products into the parts of heads: columns between a left and a right part stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Operand
from ...core.check.layout import Recipe
from ..ask.skip import skip_problem
from ..product import Product, by_operator, run

SKIP_HEAD_MID = Product(
    "fp8_gemm_nt_skip_head_mid",
    skip_problem,
    ("recipes", "head_splits"),
    (),
    lambda product, a, b, d, *more: by_operator(product, a, b, checks.tensor("d", d), *more),  # none makes D
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
    """Compute A @ B.T into the heads of D, leaving columns between a left and a right part of each as they are.

    With `head_splits = (left, mid, right)` the product has `left + right` columns for each head, and D has `left`,
    then `mid` that nobody writes, then `right`. So column j of the product goes to column
    `j + (j + right) // (left + right) * mid` of D.

    - `a`, `b`: as `fp8_gemm_nt` takes them, B's scales one for each 128x128 block.
    - `d`: `[m, n / (left + right) * (left + mid + right)]`, torch.bfloat16.
    - `head_splits`: left and right are multiples of 16, mid is one of 8, and n is a multiple of left + right. The
      kernels store 64 columns at a time if left and right are multiples of 64, else 32 or 16.

    `compiled_dims` and `disable_ue8m0_cast` are accepted and change no result.

    >>> a, b = per_token_cast_to_fp8(torch.ones(4, 128)), per_block_cast_to_fp8(torch.ones(32, 128))
    >>> d = torch.zeros(4, 40, dtype=torch.bfloat16)
    >>> fp8_gemm_nt_skip_head_mid(a, b, d, (16, 8, 16))
    >>> d[0, ::8].tolist()
    [128.0, 128.0, 0.0, 128.0, 128.0]
    """
    splits = tuple(head_splits) if isinstance(head_splits, Sequence) else head_splits
    run(SKIP_HEAD_MID, a, b, d, None, ((recipe, None, None), splits))
