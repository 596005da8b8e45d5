"""Dense products of BF16: D = C + A @ B.T."""

from __future__ import annotations

from torch import Tensor

from ...core.call import Key
from ...core.check.checks import nothing
from ..ask.bf16 import bf16_problem
from ..launch import derive
from ..problem import Problem
from ..product import Product, run
from .bf16_calls import bf16_product


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

    - `a`: `[m, k]`; `b`: `[n, k]`. Either dimension may be contiguous, the stride of the other is a multiple of 8. k is
      a multiple of 8 too, unless both are contiguous along m and n.
    - `d`: `[m, n]`, torch.bfloat16 or torch.float32, n a multiple of 8 or 4. Where it is given the function returns
      None; where it is left out the function makes it, of C's type, else BF16, and returns it.
    - `c`: added in FP32; of D's shape and type, D itself or disjoint from it.

    On a GPU a row's bits depend on its row of A, on B and on its row of C alone, whatever m is. `compiled_dims` is
    accepted and changes no result; `alpha` and `epilogue` are accepted as None.

    >>> bf16_gemm_nt(torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16())[0, 0].item()
    16.0
    """
    return _run("nt", a, b, d, c, alpha, epilogue)


def bf16_gemm_nn(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "nk",
    *,
    alpha: None = None,
    epilogue: None = None,
) -> Tensor | None:
    """Compute `bf16_gemm_nt` with B given as `[k, n]`.

    >>> bf16_gemm_nn(torch.ones(2, 16).bfloat16(), torch.ones(16, 8).bfloat16())[0, 0].item()
    16.0
    """
    return _run("nn", a, b, d, c, alpha, epilogue)


def bf16_gemm_tn(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    *,
    alpha: None = None,
    epilogue: None = None,
) -> Tensor | None:
    """Compute `bf16_gemm_nt` with A given as `[k, m]` and B as `[k, n]`.

    >>> bf16_gemm_tn(torch.ones(16, 8).bfloat16(), torch.ones(16, 8).bfloat16())[0, 0].item()
    16.0
    """
    return _run("tn", a, b, d, c, alpha, epilogue)


def bf16_gemm_tt(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    *,
    alpha: None = None,
    epilogue: None = None,
) -> Tensor | None:
    """Compute `bf16_gemm_nt` with A given as `[k, m]`.

    >>> bf16_gemm_tt(torch.ones(16, 8).bfloat16(), torch.ones(8, 16).bfloat16())[0, 0].item()
    16.0
    """
    return _run("tt", a, b, d, c, alpha, epilogue)


def _run(
    major: str, a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, alpha: object, epilogue: object
) -> Tensor | None:
    if alpha is not None or epilogue is not None:
        nothing("alpha", alpha, "; multiply a, b or d with it instead")
        nothing("epilogue", epilogue)
    return run(DENSE[major], a, b, d, c)


def _product(major: str) -> Product:
    def ask(a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, said: Key) -> Problem:
        return bf16_problem(a, b, d, c, major)

    # In the other two A's rows lie along m, so that other rows are another A.
    return bf16_product(f"bf16_gemm_{major}", ask, derive=derive if major in ("nt", "nn") else None)


DENSE = {major: _product(major) for major in ("nt", "nn", "tn", "tt")}
