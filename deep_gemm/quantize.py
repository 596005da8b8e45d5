"""Casts of ordinary tensors to FP8 values with FP32 scales, for one row, one column or one block at a time.

All casts share their rules. A scale is the block's largest finite magnitude over 448, the largest E4M3 value, so that
every finite input fits. An infinity saturates to +-448 (as the hardware's saturating conversion does). A NaN of either
sign becomes the byte 0x7F in its own element. Neither influences the scale. A block without a finite non-zero value has
scale 1. No scale is below 2^-126, the smallest normal FP32 number. With `use_ue8m0` a scale is rounded up to a power of
two. With `min_amax`, rounded to FP32, the block's largest magnitude counts as at least this, in blocks of zeros too.
FP64 input is rounded to FP32 first, so values beyond FP32's range count as infinities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem.layout import SCALE_BLOCK, align, ceil_div
from .problem.numbers import magnitude

FP8_MAX = 448.0
MIN_SCALE = 2.0**-126

Quantized = tuple[Tensor, Tensor]


def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each row and each `gran_k` columns: activations.

    `x` is `[..., m, k]` of any floating type; the result is values `[..., m, k]` (torch.float8_e4m3fn) and scales
    `[..., m, ceil(k / gran_k)]` (torch.float32), both row-major. As in every cast, `use_ue8m0` rounds scales up to
    powers of two, and `min_amax` is the least that a block's largest magnitude counts as.

    >>> values, scales = per_token_cast_to_fp8(torch.tensor([[896.0, -448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -224.0, 0.0]], [[2.0]])
    """
    return _cast(x, 1, gran_k, use_ue8m0, min_amax)


def per_channel_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each column and each `gran_k` rows: operands that are transposed afterwards.

    `x` is `[..., k, n]` of any floating type; the result is values `[..., k, n]` and scales
    `[..., ceil(k / gran_k), n]`.

    >>> values, scales = per_channel_cast_to_fp8(torch.tensor([[896.0, 448.0], [448.0, 0.0]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, 448.0], [224.0, 0.0]], [[2.0, 1.0]])
    """
    return _cast(x, gran_k, 1, use_ue8m0, min_amax)


def per_block_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, *, min_amax: float = 0.0
) -> Quantized:
    """Cast with one scale for each block of `gran_k` rows and columns: weights.

    `x` is `[..., n, k]` of any floating type; the result is values `[..., n, k]` and scales
    `[..., ceil(n / gran_k), ceil(k / gran_k)]`.

    >>> values, scales = per_block_cast_to_fp8(torch.full((130, 256), 448.0))
    >>> values.shape, scales.shape
    (torch.Size([130, 256]), torch.Size([2, 2]))
    """
    return _cast(x, gran_k, gran_k, use_ue8m0, min_amax)


def k_grouped_cast_to_fp8(x: Tensor, ks: Sequence[int], use_ue8m0: bool = False, *, min_amax: float = 0.0) -> Quantized:
    """Cast operands of a k-grouped product: `x` is `[m, sum(ks)]`, the groups' columns side by side.

    The result is what `k_grouped_fp8_gemm_nt_contiguous` takes: the one-dimensional concatenation of each group's
    row-major `[m, k_g]` values, and scales `[m, sum(ceil(k_g / 128))]`. No scale spans two groups.

    >>> values, scales = k_grouped_cast_to_fp8(torch.ones(4, 160), [128, 32])
    >>> values.shape, scales.shape
    (torch.Size([640]), torch.Size([4, 2]))
    """
    _check_castable(x)
    min_amax = magnitude("min_amax", min_amax)
    if any(k < 0 for k in ks):
        raise ValueError(f"ks: expected no negative size, got {list(ks)}")
    if x.dim() != 2 or x.shape[1] != sum(ks):
        raise ValueError(f"x: expected shape (m, sum(ks)) = (m, {sum(ks)}), got {tuple(x.shape)}")
    groups = [per_token_cast_to_fp8(part, use_ue8m0, min_amax=min_amax) for part in torch.split(x, list(ks), dim=1)]
    if not groups:
        empty = x.new_empty(0).to(torch.float8_e4m3fn)
        return empty, x.new_empty((x.shape[0], 0), dtype=torch.float32)
    return torch.cat([values.flatten() for values, _ in groups]), torch.cat([scales for _, scales in groups], dim=1)


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """Round positive FP32 numbers up to powers of two, exactly.

    >>> ceil_to_ue8m0(torch.tensor([1.0, 1.1, 0.5])).tolist()
    [1.0, 2.0, 0.5]
    """
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent with the mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


@torch.no_grad()
def _cast(x: Tensor, rows: int, columns: int, use_ue8m0: bool, min_amax: float) -> Quantized:
    """Cast with one scale for each `rows` x `columns` block of the last two dimensions."""
    _check_castable(x)
    if x.dim() < 2:
        raise ValueError(f"x: expected at least 2 dimensions, got shape {tuple(x.shape)}")
    if rows < 1 or columns < 1:
        raise ValueError(f"gran_k: expected a positive integer, got {min(rows, columns)}")
    min_amax = magnitude("min_amax", min_amax)

    *batch, m, k = x.shape
    padding = (0, align(k, columns) - k, 0, align(m, rows) - m)
    # [..., m, k] -> [..., row blocks, rows, column blocks, columns]
    blocks = F.pad(x.float(), padding).view(*batch, ceil_div(m, rows), rows, ceil_div(k, columns), columns)
    finite = torch.where(blocks.isfinite(), blocks.abs(), 0.0)
    amax = finite.amax(dim=(-3, -1), keepdim=True).clamp_min(min_amax)
    scales = (amax / FP8_MAX).clamp_min(MIN_SCALE)
    if use_ue8m0:
        scales = ceil_to_ue8m0(scales)
    scales = torch.where(amax == 0, 1.0, scales)
    # The clamp saturates infinities, and quotients that round to just above 448. The conversion keeps a NaN's sign.
    quotients = (blocks / scales).clamp(-FP8_MAX, FP8_MAX)
    values = quotients.masked_fill(quotients.isnan(), torch.nan).to(torch.float8_e4m3fn)
    values = values.view(*batch, align(m, rows), align(k, columns))[..., :m, :k].contiguous()
    return values, scales[..., 0, :, 0].contiguous()


def _check_castable(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point() or x.element_size() == 1:
        raise ValueError(f"x: expected dtype float32, bfloat16, float16 or float64, got {x.dtype}")
