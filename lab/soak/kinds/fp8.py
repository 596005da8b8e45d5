"""Common code of FP8 trials: operands with exact sums, or operands of any magnitude with an error bound for D."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div
from deep_gemm.core.check.recipes import USUAL

from ...casts import spread
from ...sim.rounding import FP32_UNIT, TENSOR_CORES, within_units
from ..draw import Draw
from ..trial import Part, Tensors, Trial

VALUES = OUTPUT = "dtype address stride shape device"
SCALES = INTS = "dtype shape device"


def fill_values(draw: Draw, x: Tensor, exact: bool) -> None:
    """Draw small integers, which tensor cores add up exactly, or any FP8 numbers except NaN."""
    if exact:
        x.copy_(draw.integers(x.shape, -2, 2).to(torch.float8_e4m3fn))
        return
    bits = draw.integers(x.shape, 0, 255, torch.int32)
    bits = torch.where(bits & 0x7F == 0x7F, bits & 0x80, bits)
    x.copy_(bits.to(torch.uint8).view(torch.float8_e4m3fn))


def fill_scales(draw: Draw, x: Tensor, exact: bool, low: int = -2, high: int = 2) -> None:
    """Draw powers of two; multiply them by random mantissas unless sums must be exact."""
    scales = draw.powers_of_two(x.shape, low, high)
    x.copy_(
        scales
        if exact
        else scales * (1 + torch.rand(x.shape, generator=draw.generator, device=x.device, dtype=torch.float32))
    )


def product(
    a: Tensor, b: Tensor, c: Tensor | None, dtype: torch.dtype, exact: bool, columns: int = SCALE_BLOCK
) -> tuple[Tensor, Tensor | None]:
    """Return A @ B.T + C of FP64 numbers, rounded to D's type, and the allowed error of D (None: D must be exact).

    The sum of each `columns` columns is promoted with its scales.
    """
    total = a @ b.mT
    if c is not None:
        total += c.double()
    if exact:
        return total.to(dtype), None
    share = TENSOR_CORES + (2 * ceil_div(a.shape[-1], columns) + 3) * FP32_UNIT
    bound = a.abs() @ b.abs().mT * (share / (1 - share)) + 2 * FP32_UNIT * total.abs()
    right = total.to(dtype)
    return right, within_units(right, bound)


class Weight(Part):
    """A weight of a trial: its layout, contents, and FP64 numbers. This weight is FP8; fp4.py has the FP4 weight."""

    depths: ClassVar[int] = 16
    """k is a multiple of this number."""
    columns: int = SCALE_BLOCK
    columns_of_a: int = SCALE_BLOCK
    """Number of A's columns that share a scale."""
    of_a, of_b = USUAL
    faults: ClassVar[tuple[str, str, str]] = (VALUES, SCALES, SCALES)
    """Faults of values, of scales, and of A's scales."""

    def __init__(self, draw: Draw, exact: bool, low: int = -2, high: int = 2) -> None:
        """Set whether sums are exact, and the range of the scales' exponents."""
        self.draw, self.exact, self.low, self.high = draw, exact, low, high

    @property
    def recipes(self) -> dict[str, Any]:
        """Return the keywords that describe scales in a call, if they are not the usual ones."""
        stated = {"recipe_a": tuple(self.of_a), "recipe_b": tuple(self.of_b)}
        return {} if (self.of_a, self.of_b) == USUAL else stated

    block: tuple[int, int] = (SCALE_BLOCK, SCALE_BLOCK)
    """Rows and columns of a scale, as passed to a layer."""
    usual_beside: int = SCALE_BLOCK
    """Number of A's columns that share a scale, in a layer whose call has no `gran_k`."""
    is_open: bool = False
    """True: the shape of the scales may fit blocks of several sizes."""

    def said(self, is_stated: bool) -> dict[str, Any]:
        """Return the keywords that describe scales in a call of a layer."""
        of_rows = {} if self.columns_of_a == self.usual_beside else {"gran_k": self.columns_of_a}
        return of_rows | ({"recipe_b": self.block} if is_stated or self.is_open else {})

    def refused(self, is_stated: bool) -> str:
        """Return the faults of scales that a layer refuses: scales of another type or shape may be valid."""
        return SCALES if is_stated else "device"

    def is_beside(self, other: Weight) -> None:
        """Copy facts from the layer's other weight: a call passes these facts once for both weights."""
        self.columns_of_a = other.columns_of_a

    def room(self, shape: Sequence[int], rows: int = SCALE_BLOCK) -> tuple[Tensor, Tensor]:
        """Allocate a weight `[..., n, k]`, and one scale for every `rows` rows."""
        *outer, n, k = shape
        values = self.draw.matrix(shape, torch.float8_e4m3fn)
        return values, self.draw.scales((*outer, ceil_div(n, rows), ceil_div(k, SCALE_BLOCK)))

    def fill(self, values: Tensor, sf: Tensor) -> None:
        """Draw values and scales anew."""
        fill_values(self.draw, values, self.exact)
        fill_scales(self.draw, sf, self.exact, self.low, self.high)

    def given(self, values: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and scales in the form of a call."""
        return values, sf

    def numbers(self, values: Tensor, sf: Tensor, rows: int = SCALE_BLOCK) -> Tensor:
        """Return the FP64 numbers `[..., n, k]`."""
        return spread(values, sf, rows)


class OfFp8(Trial):
    """The code that kinds of FP8 products share."""

    exact: bool
    k: int
    make_weight: ClassVar[type[Weight]] = Weight
    turned: bool = False
    """True: B is passed as `[..., k, n]`."""
    turned_a: bool = False
    """True: A is passed as `[k, m]`."""
    rows_of_b: int = SCALE_BLOCK
    """Rows of B that share a scale."""

    @cached_property
    def weight(self) -> Weight:
        """Return the weight of the trial, B."""
        return self.make_weight(self.draw, self.exact)

    def drawn_depth(self, most: int) -> int:
        """Draw k."""
        return self.draw.size(self.make_weight.depths, most, self.make_weight.depths)

    def room_of_a(self, *rows: int) -> dict[str, Tensor]:
        """Allocate A and its scales, in the form of the call."""
        a = self.draw.matrix((*rows, self.k), torch.float8_e4m3fn)
        sfa = self.draw.scales((*rows, ceil_div(self.k, self.weight.columns_of_a)))
        return {"a": a.mT, "sfa": sfa.mT} if self.turned_a else {"a": a, "sfa": sfa}

    def room_of_b(self, *rows: int) -> dict[str, Tensor]:
        """Allocate B and its scales, in the form of the call."""
        b, sfb = self.weight.room((*rows, self.k), self.rows_of_b)
        return {"b": b.mT, "sfb": sfb.mT} if self.turned else {"b": b, "sfb": sfb}

    def drawn_exactness(self) -> bool:
        """Draw whether sums are exact."""
        return self.draw.flag(0.8)

    def fill(self) -> None:
        """Draw everything anew."""
        self.fill_operands()

    def fill_operands(self) -> None:
        """Draw values and scales anew."""
        x = self.operands
        fill_values(self.draw, x["a"], self.exact)
        fill_scales(self.draw, x["sfa"], self.exact)
        self.weight.fill(*((x["b"].mT, x["sfb"].mT) if self.turned else (x["b"], x["sfb"])))

    def given(self, x: Tensors) -> tuple[Any, Any]:
        """Return A and B in the form of a call."""
        return (x["a"], x["sfa"]), self.weight.given(x["b"], x["sfb"])

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the FP64 numbers of A `[..., m, k]` and B `[..., n, k]`."""
        x = self.operands
        a, sfa = (x["a"].mT, x["sfa"].mT) if self.turned_a else (x["a"], x["sfa"])
        b, sfb = (x["b"].mT, x["sfb"].mT) if self.turned else (x["b"], x["sfb"])
        return spread(a, sfa, 1, self.weight.columns_of_a), self.weight.numbers(b, sfb, self.rows_of_b)
