"""The common parts of kinds of FP8 products: operands whose sums are exact, or of all magnitudes with a bound."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div

from ...sim.rounding import FP32_UNIT, TENSOR_CORES, within_units
from ..draw import Draw
from ..trial import Trial

VALUES = "dtype address stride shape device"
SCALES = "dtype shape device"
INTS = "dtype shape device"
OUTPUT = "dtype address stride shape device"


def fill_values(draw: Draw, x: Tensor, exact: bool) -> None:
    """Small whole numbers, which tensor cores add up exactly, or any FP8 number but NaN."""
    if exact:
        x.copy_(draw.integers(x.shape, -2, 2).to(torch.float8_e4m3fn))
        return
    bits = draw.integers(x.shape, 0, 255, torch.int32)
    bits = torch.where(bits & 0x7F == 0x7F, bits & 0x80, bits)
    x.copy_(bits.to(torch.uint8).view(torch.float8_e4m3fn))


def fill_scales(draw: Draw, x: Tensor, exact: bool) -> None:
    """Powers of two; with random mantissas unless sums are to be exact."""
    scales = draw.powers_of_two(x.shape)
    x.copy_(scales if exact else scales * (1 + torch.rand(x.shape, generator=draw.generator, device=x.device)))


def spread(values: Tensor, scales: Tensor, rows: int) -> Tensor:
    """The FP64 numbers of values `[..., m, k]` with a scale for each `rows` rows and 128 columns."""
    m, k = values.shape[-2:]
    scales = scales.double().repeat_interleave(rows, -2)[..., :m, :].repeat_interleave(SCALE_BLOCK, -1)[..., :k]
    return values.double() * scales


def product(a: Tensor, b: Tensor, c: Tensor | None, dtype: torch.dtype, exact: bool) -> tuple[Tensor, Tensor | None]:
    """Give A @ B.T + C of FP64 numbers, rounded to D's type, and how far D may be from it: None, not at all."""
    total = a @ b.mT
    if c is not None:
        total += c.double()
    if exact:
        return total.to(dtype), None
    share = TENSOR_CORES + (2 * ceil_div(a.shape[-1], SCALE_BLOCK) + 3) * FP32_UNIT
    bound = a.abs() @ b.abs().mT * (share / (1 - share)) + 2 * FP32_UNIT * total.abs()
    right = total.to(dtype)
    return right, within_units(right, bound)


class OfFp8(Trial):
    """The common part of products of FP8."""

    exact: bool

    def fill(self) -> None:
        """Draw values and scales anew."""
        for name in ("a", "b"):
            fill_values(self.draw, self.operands[name], self.exact)
            fill_scales(self.draw, self.operands["sf" + name], self.exact)
