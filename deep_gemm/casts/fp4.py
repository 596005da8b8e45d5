"""Casts to FP4 values with FP32 scales, and back.

A value is E2M1: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. An int8 holds two values, the first in its lower half. The
rules of all casts (casts/rules.py) hold, with 6 in place of 448: a scale is the block's largest finite magnitude
divided by 6, and a block without a finite non-zero value has scale 1. A quotient is rounded to the nearest value, and a
tie to the value with an even mantissa. E2M1 has no NaN, so the scale of a block with a NaN or an infinity is NaN.

On a Hopper GPU, a kernel casts if 32 or 128 columns share a scale. torch makes all other casts, on any device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.forms import accepts_names
from ..core.check.layout import SCALE_BLOCK, align, check_dense
from ..core.check.tracing import is_dispatched
from ..core.check.ue8m0 import FP32_MANTISSA_BITS, NO_NUMBER, ONE
from .by_torch import VALUES, cast_blocks, packed_codes
from .fp8 import cast_checked, scaled_back
from .rules import FP4, LAYER_TYPES, MX_BLOCK, MXFP4, Quantized, Target, check_castable, granularity
from .scales import packed_rows


def per_token_cast_to_fp4(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False
) -> Quantized:
    """Cast to FP4 with one scale for each row and each `gran_k` columns.

    `x` is `[..., m, k]` of any floating type, with an even k. The result is values int8 `[..., m, k / 2]` and scales
    FP32 `[..., m, ceil(k / gran_k)]`. With `use_ue8m0`, scales are powers of two. With `use_packed_ue8m0` too, an int32
    has four scales.

    >>> values, scales = per_token_cast_to_fp4(torch.tensor([[12.0, -6.0, 1.0, 0.0]]))
    >>> [hex(byte & 0xFF) for byte in values[0].tolist()], scales.tolist()
    (['0xd7', '0x1'], [[2.0]])
    """
    check_castable(x)
    gran_k = granularity(gran_k)
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(f"x: expected shape (..., m, k) with an even k, got {tuple(x.shape)}")
    if use_packed_ue8m0 and not use_ue8m0:
        raise ValueError("use_packed_ue8m0: expected use_ue8m0 with packed scales")
    to = Target(1, gran_k, use_ue8m0, format=FP4)
    values, scales = cast_blocks(x, to) if is_dispatched(x) else cast_checked(x, to)
    return values.view(torch.int8), packed_rows(scales) if use_packed_ue8m0 else scales


def quantize_mxfp4(w: Tensor) -> Quantized:
    """Quantize weights to MXFP4: FP4 values with a power of two as the scale of each 32 columns.

    `w` is `[n, k]` or `[groups, n, k]`, BF16, FP16 or FP32, and k is a multiple of 32. Products accept the result as an
    FP4 weight: bytes (torch.uint8) `[..., n, k / 2]`, with the value of an even k in the lower half, and exponents
    (torch.uint8) `[..., n, k / 32]`. A byte s means 2^(s - 127). `cast_back_from_fp4` with `gran_k=32` converts back.

    A scale of 32 columns is the smallest power of two, at least 2^-126, that is at least a seventh of their largest
    magnitude. Quotients are rounded to the nearest value, ties to the even code, and quotients above 6 become 6.
    Weights that already are MXFP4 numbers do not change. 32 zeros get the largest scale of their 128 columns, or 1 if
    all 128 are zeros, so that they never prevent a fold of their neighbours' scales. 32 columns with a NaN or an
    infinity have the exponent 255, which means NaN, so that a product shows it.

    >>> packed, scales = quantize_mxfp4(torch.tensor([[12.0, -6.0, 1.0, 0.0] * 8]))
    >>> [hex(byte) for byte in packed[0, :2].tolist()], scales.tolist()
    (['0xd7', '0x1'], [[128]])
    """
    check_castable(w, "w")
    if w.dtype not in LAYER_TYPES or w.dim() not in (2, 3):
        raise ValueError(
            f"w: expected BF16, FP16 or FP32 of shape (n, k) or (groups, n, k), got {w.dtype} of shape {tuple(w.shape)}"
        )
    *rows, k = w.shape
    if k % MX_BLOCK:
        raise ValueError(f"w: expected a k that is a multiple of {MX_BLOCK}, got {k}")
    with torch.no_grad():
        to = Target(1, MX_BLOCK, use_ue8m0=True, format=MXFP4)
        values, scales = cast_blocks(w, to) if is_dispatched(w) else cast_checked(w, to)
        largest = torch.linalg.vector_norm(w.reshape(*rows, k // MX_BLOCK, MX_BLOCK), torch.inf, dim=-1)
        return values.view(torch.uint8), _exponents(scales, largest)


def _exponents(scales: Tensor, largest: Tensor) -> Tensor:
    """Return the exponent of each 32 columns, from their scale and largest magnitude (which may be NaN or infinite)."""
    groups = scales.shape[-1]
    exponents = (scales.view(torch.int32) >> FP32_MANTISSA_BITS).masked_fill(largest == 0, 0)
    exponents.masked_fill_(~largest.isfinite(), 0)
    # [..., groups] -> [..., blocks of 128, groups of each]
    of_block = SCALE_BLOCK // MX_BLOCK
    padded = F.pad(exponents, (0, align(groups, of_block) - groups))
    blocks = padded.view(*padded.shape[:-1], padded.shape[-1] // of_block, of_block)
    others = blocks.amax(dim=-1, keepdim=True)
    blocks = blocks.where(blocks > 0, others.where(others > 0, ONE))
    exponents = blocks.flatten(-2)[..., :groups]
    return exponents.masked_fill(~largest.isfinite(), NO_NUMBER).to(torch.uint8)


def cast_back_from_fp4(packed: Tensor, sf: Tensor, gran_k: int = SCALE_BLOCK, use_packed_ue8m0: bool = False) -> Tensor:
    """Convert FP4 values `[..., m, k / 2]` and their scales back to FP32 numbers `[..., m, k]`.

    Scales are as in `cast_back_from_fp8`, or exponents as returned by `quantize_mxfp4`.

    >>> cast_back_from_fp4(*per_token_cast_to_fp4(torch.tensor([[12.0, -6.0, 1.0, 0.0]]))).tolist()
    [[12.0, -6.0, 1.0, 0.0]]
    """
    codes = _unpacked(packed)
    if packed.dim() < 2:
        raise ValueError(f"packed: expected shape (..., m, k / 2), got {tuple(packed.shape)}")
    numbers = torch.tensor([*VALUES, *(-value for value in VALUES)], device=packed.device, dtype=torch.float32)
    return scaled_back(numbers[codes.int()], sf, gran_k, use_packed_ue8m0, "packed")


@accepts_names(a="packed")
def transpose_packed_fp4(packed: Tensor) -> Tensor:
    """Transpose FP4 values: int8 `[..., m, k / 2]`, with an even m, becomes `[..., k, m / 2]`.

    >>> transpose_packed_fp4(torch.tensor([[0x21], [0x43]], dtype=torch.int8)).tolist() == [[0x31], [0x42]]
    True
    """
    codes = _unpacked(packed)
    if packed.dim() < 2 or packed.shape[-2] % 2:
        raise ValueError(f"packed: expected shape (..., m, k / 2) with an even m, got {tuple(packed.shape)}")
    return packed_codes(codes.mT)


def _unpacked(packed: Tensor) -> Tensor:
    check_dense("packed", packed)
    if packed.dtype not in (torch.int8, torch.uint8, torch.float4_e2m1fn_x2) or packed.dim() < 1:
        raise ValueError(f"packed: expected dtype torch.int8, got {packed.dtype} of shape {tuple(packed.shape)}")
    return codes_of(packed.view(torch.uint8))


def codes_of(packed: Tensor) -> Tensor:
    """Return the two codes of each byte, the lower half's first."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
