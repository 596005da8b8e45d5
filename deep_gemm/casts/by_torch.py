"""Casts by operations of torch, on any device: what casts without a kernel are, and a yardstick for those with one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.check.layout import align, ceil_div
from .rules import FP8_MAX, Quantized, check_blocks, scales_of


def cast_by_torch(x: Tensor, rows: int, columns: int) -> Quantized:
    """Cast with one scale for each `rows` x `columns` block by torch's operations, on a GPU too: a yardstick."""
    return cast_blocks(x, rows, columns, use_ue8m0=False, min_amax=0.0)


@torch.no_grad()
def cast_blocks(x: Tensor, rows: int, columns: int, use_ue8m0: bool, min_amax: float) -> Quantized:
    """Cast with one scale for each `rows` x `columns` block of the last two dimensions."""
    min_amax = check_blocks(x, rows, columns, min_amax)
    *batch, m, k = x.shape
    padding = (0, align(k, columns) - k, 0, align(m, rows) - m)
    # [..., m, k] -> [..., row blocks, rows, column blocks, columns]
    blocks = F.pad(x.float(), padding).view(*batch, ceil_div(m, rows), rows, ceil_div(k, columns), columns)
    finite = torch.where(blocks.isfinite(), blocks.abs(), 0.0)
    amax = finite.amax(dim=(-3, -1), keepdim=True).clamp_min(min_amax)
    scales = scales_of(amax, FP8_MAX, use_ue8m0)
    # The clamp is for quotients that round to just above 448. The conversion would keep a NaN's sign.
    quotients = (blocks / scales).clamp(-FP8_MAX, FP8_MAX)
    values = quotients.masked_fill(~blocks.isfinite(), torch.nan).to(torch.float8_e4m3fn)
    values = values.view(*batch, align(m, rows), align(k, columns))[..., :m, :k].contiguous()
    return values, scales[..., 0, :, 0].contiguous()
