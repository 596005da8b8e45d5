"""Hyper-connections: the product with a few columns, and the sums of squares, that come ahead of their norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.call import CallPlan, Function, run
from . import choose, reference
from .check import HcProblem, hc_problem

__all__ = ["tf32_hc_prenorm_gemm"]


def tf32_hc_prenorm_gemm(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None) -> None:
    """Multiply rows with a few vectors, D = A @ B.T, and sum up their squares, in one pass over A.

    - `a`: BF16 `[m, k]`, k a multiple of 64; `b`: FP32 `[n, k]`, n 8, 16, 24 or 32. Rows are contiguous and begin at
      multiples of 16 bytes.
    - `d`: FP32 `[m, n]`; `sqr_sum`: FP32 `[m]`, contiguous. Both are written.
    - `num_splits`: the outputs are partial sums, `d` `[num_splits, m, n]` and `sqr_sum` `[num_splits, m]`, which the
      caller adds up. Blocks of 64 along k are dealt evenly, the earlier splits being longer by a block if they do not
      come out even. A split without a block is zeros.

    Values of B are rounded to TF32, 10 bits of mantissa, to nearest even; products are exact, sums in FP32. (The CPU
    sums in FP64 and rounds once.) Sums have one order, so the bits are the same each time. On a GPU it is one launch.

    >>> d, sqr_sum = torch.empty(2, 8), torch.empty(2)
    >>> tf32_hc_prenorm_gemm(torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(8, 64), d, sqr_sum)
    >>> d[0, 0].item(), sqr_sum.tolist()
    (64.0, [64.0, 64.0])
    """
    run(PRENORM, (a, b, d, sqr_sum), (num_splits,))


@torch.no_grad()
def compute(p: HcProblem) -> CallPlan | None:
    """Compute a problem where its operands are; on a GPU give the plan, which serves other calls."""
    if p.d.numel() == 0:
        return None
    if p.a.is_cuda:
        return choose.run(p)
    reference.hc_prenorm(p)
    return None


def _answer(*given: Any) -> tuple[None, CallPlan | None]:
    return None, compute(hc_problem(*given))


def _as_operator(*given: Any) -> None:
    torch.ops.deep_gemm.tf32_hc_prenorm_gemm.default(*given)


PRENORM = Function(_answer, _as_operator, lambda *tensors: tensors)
