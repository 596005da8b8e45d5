"""Dense products of BF16: D = C + A @ B.T."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...compat.forms import like
from ...core.call import FREE_ROWS, requires_gradient
from ...core.check.checks import nothing
from ...core.replay import FIXED
from ..ask.bf16 import bf16_problem
from ..product import Product, run

bf16_product = partial(Product, has_scales=False, wants_checks=requires_gradient)
"""Make the `Product` of a BF16 function: operands have no scales, and an operand with a gradient needs the checks."""
DENSE = {
    # m is the second dimension of an A given as [k, m], so a record of its call holds for one m only.
    major: bf16_product(
        f"bf16_gemm_{major}",
        partial(bf16_problem, major=major),
        free=(FREE_ROWS, FIXED, FREE_ROWS, FREE_ROWS) if major[0] == "n" else (),
    )
    for major in ("nt", "nn", "tn", "tt")
}
NT, NN, TN, TT = DENSE.values()


def bf16_gemm_nt(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "nk",
    *,
    alpha: None = None,
    epilogue: None = None,
) -> Tensor | None:
    """Compute D = C + A @ B.T of BF16 matrices, summed in FP32 and rounded once.

    - `a`: `[m, k]`; `b`: `[n, k]`. Each has one contiguous dimension; the stride of the other is a multiple of 8.
      k is a multiple of 8 too, unless A is contiguous along m and B along n.
    - `d`: `[m, n]`, torch.bfloat16 or torch.float32, n a multiple of 8 or 4. If `d` is given, the function returns
      None; if not, it makes D in C's type (BF16 without C) and returns it.
    - `c`: added in FP32; it has D's shape and type, and is D itself or disjoint from D; or a bias `[n]`, BF16 or FP32.

    On a GPU the bits of a row of D depend only on its row of A, on B and on its row of C, not on m. `compiled_dims` is
    accepted and changes no result; `alpha` and `epilogue` must be None.

    >>> bf16_gemm_nt(torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16())[0, 0].item()
    16.0
    """
    if alpha is not None or epilogue is not None:
        nothing("alpha", alpha, "; multiply a, b or d with it instead")
        nothing("epilogue", epilogue)
    return run(NT, a, b, d, c)


@like(bf16_gemm_nt, NT="NN")
def bf16_gemm_nn() -> None:
    """Compute `bf16_gemm_nt` with B given as `[k, n]`.

    >>> bf16_gemm_nn(torch.ones(2, 16).bfloat16(), torch.ones(16, 8).bfloat16())[0, 0].item()
    16.0
    """


@like(bf16_gemm_nt, NT="TN", compiled_dims="mn")
def bf16_gemm_tn() -> None:
    """Compute `bf16_gemm_nt` with A given as `[k, m]` and B as `[k, n]`.

    >>> bf16_gemm_tn(torch.ones(16, 8).bfloat16(), torch.ones(16, 8).bfloat16())[0, 0].item()
    16.0
    """


@like(bf16_gemm_nt, NT="TT", compiled_dims="mn")
def bf16_gemm_tt() -> None:
    """Compute `bf16_gemm_nt` with A given as `[k, m]`.

    >>> bf16_gemm_tt(torch.ones(16, 8).bfloat16(), torch.ones(8, 16).bfloat16())[0, 0].item()
    16.0
    """
