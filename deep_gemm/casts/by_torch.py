"""Casts by operations of torch, on any device: for casts without a kernel, and as the reference of the kernels."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.check.layout import align, ceil_div
from .rules import FP8_MAX, Quantized, Target, scales_of

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1, indexed by the code's lower three bits."""
SIGN = 8


@torch.no_grad()
def cast_blocks(x: Tensor, to: Target, scale: Tensor | None = None) -> Quantized:
    """Cast blocks of the last two dimensions of a tensor that `to.checked` accepts. Scales are FP32 and row-major.

    This defines a cast. FP4 values are int8 and need an even number of columns. `scale`: a scale for all blocks.
    """
    *batch, m, k = x.shape
    rows, columns = to.rows or 1, to.columns or max(k, 1)
    width = align(k, columns) if to.columns else columns
    # [..., m, k] -> [..., row blocks, rows, column blocks, columns]
    blocks = F.pad(x.float(), (0, width - k, 0, align(m, rows) - m))
    blocks = blocks.view(*batch, ceil_div(m, rows), rows, width // columns, columns)
    is_finite = blocks.isfinite()
    amax = torch.where(is_finite, blocks.abs(), 0.0).amax(dim=(-3, -1), keepdim=True).clamp_min(to.min_amax)
    scales = scales_of(amax, to.format.largest, to.use_ue8m0) if scale is None else scale.view(()).expand(amax.shape)
    # Some quotients round to just above 448: clamp them. The fill drops a NaN's sign, which the conversion would keep.
    quotients = (blocks / scales).clamp(-FP8_MAX, FP8_MAX)
    quotients = quotients.masked_fill(~is_finite | quotients.isnan(), torch.nan)
    if not to.format.has_nan:
        scales = scales.masked_fill(~is_finite.all(dim=-1, keepdim=True).all(dim=-3, keepdim=True), torch.nan)
    quotients = quotients.view(*batch, align(m, rows), width)[..., :m, :k]
    values = quotients.to(to.format.dtype).contiguous() if to.format.has_nan else packed_codes(nearest_codes(quotients))
    return values, scales[..., 0, :, 0].contiguous()


def nearest_codes(numbers: Tensor) -> Tensor:
    """Return the codes of the nearest E2M1 values, 0 to 15."""
    middles = [(low + high) / 2 for low, high in pairwise(VALUES)]
    bounds = torch.tensor(middles, device=numbers.device, dtype=torch.float32)
    # A number at a bound is rounded up. Ties must be rounded to even codes, so every other bound is moved up.
    bounds[::2] = bounds[::2].nextafter(bounds.new_full((), torch.inf))
    codes = torch.bucketize(numbers.abs().nan_to_num(torch.inf).contiguous(), bounds, right=True)
    is_negative = numbers.signbit() & ~numbers.isnan()
    return (codes + SIGN * is_negative).to(torch.uint8)


def packed_codes(codes: Tensor) -> Tensor:
    """Pack two codes into each byte, the first into the lower half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous().view(torch.int8)
