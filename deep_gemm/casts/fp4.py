"""Casts to FP4 values with FP32 scales, and back.

A value is E2M1, one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign. Two lie in an int8, the first in its lower half. The
rules are those of all casts (casts/rules.py) with 6 in place of 448: a scale is the block's largest finite magnitude
over 6, an infinity saturates, a block without a finite non-zero value has scale 1. A quotient is rounded to the nearest
value, a tie to the one with an even mantissa. E2M1 has no NaN: one becomes 6, as the hardware's conversion has it.

On a Hopper GPU a kernel casts where 32 or 128 columns share a scale; all else is torch's, on any device.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.check.layout import SCALE_BLOCK, align, ceil_div, check_dense
from ..core.check.tracing import is_dispatched
from .by_kernels import cast_rows_to_fp4, has_kernels
from .cast_rows import FP4_BLOCKS
from .fp8 import scaled_back
from .rules import Quantized, check_castable, granularity, scales_of
from .scales import packed_rows

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits."""
FP4_MAX = VALUES[-1]
SIGN = 8


def per_token_cast_to_fp4(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> Quantized:
    """Cast to FP4 with one scale for each row and each `gran_k` columns.

    `x` is `[..., m, k]` of any floating type, k even; the result is values int8 `[..., m, k / 2]` and scales FP32
    `[..., m, ceil(k / gran_k)]`, powers of two with `use_ue8m0`, and with `use_packed_ue8m0` too int32 of four each.

    >>> values, scales = per_token_cast_to_fp4(torch.tensor([[12.0, -6.0, 1.0, 0.0]]))
    >>> [hex(byte & 0xFF) for byte in values[0].tolist()], scales.tolist()
    (['0xd7', '0x1'], [[2.0]])
    """
    check_castable(x)
    gran_k = granularity(gran_k)
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(f"x: expected shape (..., m, k) with an even k, got {tuple(x.shape)}")
    if use_packed_ue8m0 and not use_ue8m0:
        raise ValueError("use_packed_ue8m0: expected use_ue8m0 with it")
    if gran_k in FP4_BLOCKS and not is_dispatched(x) and has_kernels(x):
        values, scales = cast_rows_to_fp4(x, use_ue8m0, gran_k)
    else:
        values, scales = cast_by_torch(x, use_ue8m0, gran_k)
    return values.view(torch.int8), packed_rows(scales) if use_packed_ue8m0 else scales


def cast_by_torch(x: Tensor, use_ue8m0: bool, gran_k: int) -> Quantized:
    """Cast to FP4 by torch's operations, on a GPU too: the definition, and a yardstick."""
    *rows, k = x.shape
    blocks = F.pad(x.detach().float(), (0, align(k, gran_k) - k)).view(*rows, ceil_div(k, gran_k), gran_k)
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(dim=-1)
    scales = scales_of(amax, FP4_MAX, use_ue8m0)
    return _packed(_codes((blocks / scales[..., None]).flatten(-2)[..., :k])), scales


def cast_back_from_fp4(packed: Tensor, sf: Tensor, gran_k: int = SCALE_BLOCK) -> Tensor:
    """Get the FP32 numbers `[..., m, k]` that FP4 values `[..., m, k / 2]` and their scales stand for.

    >>> cast_back_from_fp4(*per_token_cast_to_fp4(torch.tensor([[12.0, -6.0, 1.0, 0.0]]))).tolist()
    [[12.0, -6.0, 1.0, 0.0]]
    """
    codes = _unpacked(packed)
    if packed.dim() < 2:
        raise ValueError(f"packed: expected shape (..., m, k / 2), got {tuple(packed.shape)}")
    numbers = torch.tensor([*VALUES, *(-value for value in VALUES)], device=packed.device)
    return scaled_back(numbers[codes.int()], sf, gran_k, "packed")


def transpose_packed_fp4(packed: Tensor) -> Tensor:
    """Transpose FP4 values: int8 `[..., m, k / 2]`, m even, becomes `[..., k, m / 2]`.

    >>> transpose_packed_fp4(torch.tensor([[0x21], [0x43]], dtype=torch.int8)).tolist() == [[0x31], [0x42]]
    True
    """
    codes = _unpacked(packed)
    if packed.dim() < 2 or packed.shape[-2] % 2:
        raise ValueError(f"packed: expected shape (..., m, k / 2) with an even m, got {tuple(packed.shape)}")
    return _packed(codes.mT)


def _codes(quotients: Tensor) -> Tensor:
    """The nearest values, as numbers below 16."""
    middles = [(low + high) / 2 for low, high in pairwise(VALUES)]
    bounds = torch.tensor(middles, device=quotients.device)
    # From a bound on, the upper value is the nearest. A tie belongs to the value of an even number.
    bounds[::2] = bounds[::2].nextafter(bounds.new_full((), torch.inf))
    codes = torch.bucketize(quotients.abs().nan_to_num(torch.inf), bounds, right=True)
    is_negative = quotients.signbit() & ~quotients.isnan()
    return (codes + SIGN * is_negative).to(torch.uint8)


def _packed(codes: Tensor) -> Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous().view(torch.int8)


def _unpacked(packed: Tensor) -> Tensor:
    check_dense("packed", packed)
    if packed.dtype not in (torch.int8, torch.uint8, torch.float4_e2m1fn_x2) or packed.dim() < 1:
        raise ValueError(f"packed: expected dtype torch.int8, got {packed.dtype} of shape {tuple(packed.shape)}")
    return codes_of(packed.view(torch.uint8))


def codes_of(packed: Tensor) -> Tensor:
    """Give the two codes of each byte, the one in its lower half first."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
