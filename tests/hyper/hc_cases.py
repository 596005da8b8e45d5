"""Operands of the product of hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.sim import hc_prenorm as sim


def special_operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Zeros of both signs, infinities, NaN, numbers that round to infinity, the smallest; beside whole numbers."""
    a, b = sim.random_operands(m, n, k)
    a, b = (a * 4).round(), (b * 4).round()
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-126
    b[0, :7] = torch.tensor([0.0, -0.0, 1.0, -2.0, largest / 2, smallest, -smallest * 2.0**-7])
    b[1, 5], b[2, 6], b[3, 7] = torch.inf, -torch.inf, torch.nan
    b[4, 8] = largest
    b[5, 9] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    a[0] = 0
    a[1, 2], a[2, 3] = torch.inf, -torch.inf
    a[3, 4] = torch.nan
    a[4, 0] = torch.inf  # meets 0
    a[5, 5:9] = torch.tensor([2.0**-120, 2.0**120, 0, 0])
    return a, b
