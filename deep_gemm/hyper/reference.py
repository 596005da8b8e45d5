"""The definition of the product ahead of the norm of hyper-connections, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.check.layout import parts_of
from ..gemm.reference import ELEMENTS_AT_A_TIME
from .check import BLOCK_K, HcProblem


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
    """Round FP32 numbers to TF32, to nearest even. Infinities and NaN stay.

    >>> to_tf32(torch.tensor([1 + 2**-11, 1 + 3 * 2**-11])).tolist()
    [1.0, 1.001953125]
    """
    bits = x.view(torch.int32)
    rounded = bits + 0xFFF + ((bits >> 13) & 1) & ~0x1FFF
    return torch.where(x.isnan(), x, rounded.view(torch.float32))
