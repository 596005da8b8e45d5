"""Hyper-connections: a product with few columns, and sums of squares of rows. Their norm needs both.

On a GPU, kernels that choose.py chooses compute them; on the CPU, `hc_prenorm`, which defines the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.call import Function, run
from ..core.check.layout import parts_of
from ..core.operators import declared, flops_of
from ..gemm.reference import ELEMENTS_AT_A_TIME
from . import choose
from .check import BLOCK_K, HcProblem, hc_problem


def tf32_hc_prenorm_gemm(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None) -> None:
    """Multiply rows with a few vectors, D = A @ B.T, and sum up their squares, in one pass over A.

    - `a`: BF16 `[m, k]`, k a multiple of 64; `b`: FP32 `[n, k]`, n 8, 16, 24 or 32. Rows are contiguous and begin at
      multiples of 16 bytes.
    - `d`: FP32 `[m, n]`; `sqr_sum`: FP32 `[m]`, contiguous. Both are written.
    - `num_splits`: if given, the outputs are partial sums, `d` `[num_splits, m, n]` and `sqr_sum` `[num_splits, m]`,
      which the caller adds up. Blocks of 64 along k are divided evenly; if a rest remains, the first splits have one
      block more. A split without a block is zeros.

    Values of B are rounded to TF32, 10 bits of mantissa, to nearest even; products are exact, sums in FP32. (The CPU
    sums in FP64 and rounds once.) Sums have a fixed order, so the bits are the same each time. A GPU needs one launch.

    >>> d, sqr_sum = torch.empty(2, 8), torch.empty(2)
    >>> tf32_hc_prenorm_gemm(torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(8, 64), d, sqr_sum)
    >>> d[0, 0].item(), sqr_sum.tolist()
    (64.0, [64.0, 64.0])
    """
    run(PRENORM, (a, b, d, sqr_sum), (num_splits,))


@torch.no_grad()
def compute(p: HcProblem) -> None:
    """Compute a problem on the device of its operands."""
    if p.d.numel() == 0:
        return
    if p.a.is_cuda:
        choose.run(p)
    else:
        hc_prenorm(p)


def hc_prenorm(p: HcProblem) -> None:
    """Multiply by a few vectors in TF32, and sum up squares: each split in FP64, rounded once."""
    m, _, k, splits = p.sizes
    vectors = to_tf32(p.b).double()
    rows_at_a_time = max(ELEMENTS_AT_A_TIME // max(k, 1), 1)
    for split, blocks in enumerate(parts_of(k // BLOCK_K, splits)):
        ks = slice(blocks.start * BLOCK_K, blocks.stop * BLOCK_K)
        for first in range(0, m, rows_at_a_time):
            rows = slice(first, first + rows_at_a_time)
            a = p.a[rows, ks].double()
            p.d[split, rows] = (a @ vectors[:, ks].t()).float()
            p.sqr_sum[split, rows] = a.square().sum(1).float()


def to_tf32(x: Tensor) -> Tensor:
    """Round FP32 numbers to TF32, to nearest even. Infinities and NaN stay unchanged.

    >>> to_tf32(torch.tensor([1 + 2**-11, 1 + 3 * 2**-11])).tolist()
    [1.0, 1.001953125]
    """
    bits = x.view(torch.int32)
    rounded = bits + 0xFFF + ((bits >> 13) & 1) & ~0x1FFF
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


def _ask(**given: Any) -> None:
    hc_problem(**given)


OPERATOR = declared(
    "tf32_hc_prenorm_gemm(Tensor a, Tensor b, Tensor(d!) d, Tensor(s!) sqr_sum, SymInt? num_splits=None) -> ()",
    tf32_hc_prenorm_gemm,
    _ask,
    flops=flops_of("a"),
)
PRENORM = Function(lambda *given: compute(hc_problem(*given)), OPERATOR, lambda *tensors: tensors, outputs=2)
