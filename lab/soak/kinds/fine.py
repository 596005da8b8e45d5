"""FP8 products with scales of fewer than 128 columns: dense; rows by ids or ends; counted rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.core.check.layout import SCALE_BLOCK, UE8M0_PER_WORD, ceil_div
from deep_gemm.core.check.recipes import BLOCKS_OF_32, BLOCKS_OF_64, MX, PER_64, PER_ROW
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.gemm.kinds.output import FINE_OPERANDS

from ...casts import spread
from ..draw import Draw
from . import dense, fp8, layers, rows

FORMS: Mapping[str, Any] = {
    "FP32": lambda sf: sf,
    "bytes": lambda sf: (sf.view(torch.int32) >> 23).to(torch.uint8),
    "words": lambda sf: words_of(FORMS["bytes"](sf)),
}


SCALES = "shape device"
"""Faults of scales; other types of scales may be valid."""


class FineWeight(fp8.Weight):
    """A weight of products in which A, B or both have fine scales. If sums are exact, scales are powers of two."""

    faults: ClassVar[tuple[str, str, str]] = (fp8.VALUES, SCALES, SCALES)

    def __init__(self, draw: Draw, exact: bool, low: int = -2, high: int = 2) -> None:
        super().__init__(draw, exact, low, high)
        _, of_a, of_b = draw.rng.choice(FINE_OPERANDS)
        assert of_a is not None
        assert of_b is not None
        self.of_a, self.of_b = of_a, of_b
        self.columns_of_a, self.columns = of_a.columns, min(of_a.columns, of_b.columns)
        self.form = draw.rng.choice([*FORMS]) if exact else "FP32"

    def room(self, shape: Sequence[int], rows: int = SCALE_BLOCK) -> tuple[Tensor, Tensor]:
        """Allocate a weight `[..., n, k]` and its scales."""
        *outer, n, k = shape
        groups = ceil_div(n, self.of_b.rows), ceil_div(k, self.of_b.columns)
        return self.draw.matrix(shape, torch.float8_e4m3fn), self.draw.scales((*outer, *groups))

    def given(self, values: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and scales in the form of a call. Words hold scales along k, even if B is turned."""
        if self.form == "words" and values.stride(-1) != 1:
            return values, FORMS["words"](sf.mT).mT
        return values, FORMS[self.form](sf)

    def numbers(self, values: Tensor, sf: Tensor, rows: int = SCALE_BLOCK) -> Tensor:
        """Return the FP64 numbers `[..., n, k]`."""
        return spread(values, sf, *self.of_b)


class LayerWeight(FineWeight):
    """A weight of a layer with fine scales. If the call states no recipe, the shape of the scales tells it."""

    def __init__(self, draw: Draw, exact: bool, low: int = -2, high: int = 2) -> None:
        super().__init__(draw, exact, low, high)
        self.of_a, self.of_b = draw.rng.choice((PER_ROW, PER_64, MX)), draw.rng.choice((BLOCKS_OF_64, BLOCKS_OF_32, MX))
        self.form = draw.rng.choice([*FORMS])
        self.is_beside(self)

    def is_beside(self, other: fp8.Weight) -> None:
        """Copy facts from the layer's other weight: a call passes these facts once for both weights."""
        assert isinstance(other, LayerWeight)
        self.of_a, self.of_b, self.form = other.of_a, other.of_b, other.form
        self.columns_of_a, self.columns = self.of_a.columns, min(self.of_a.columns, self.of_b.columns)
        self.block, self.usual_beside = (self.of_b.rows, self.of_b.columns), self.of_b.columns
        self.is_open = self.form == "words"

    def refused(self, is_stated: bool) -> str:
        """Return the faults of scales that a layer refuses. An extra scale is right if it fits into the last word."""
        return SCALES if is_stated and not self.is_open else "device"

    def fill(self, values: Tensor, sf: Tensor) -> None:
        """Draw values and scales anew; the scales are powers of two if their form is UE8M0."""
        fp8.fill_values(self.draw, values, self.exact)
        fp8.fill_scales(self.draw, sf, self.exact or self.form != "FP32", self.low, self.high)


class OfFine(fp8.OfFp8):
    """The code that kinds of products with scales of fewer than 128 columns share."""

    make_weight: ClassVar[type[fp8.Weight]] = FineWeight
    weight: FineWeight

    def refused_faults(self) -> Mapping[str, str]:
        """Return the faults that a call must refuse. B's last word may have space for an extra scale: no fault."""
        groups = self.operands["sfb"].shape[-1]
        is_in_a_word = self.weight.form == "words" and not self.turned and groups % UE8M0_PER_WORD
        return {**super().refused_faults(), "sfa": SCALES, "sfb": "device" if is_in_a_word else SCALES}


class DenseFine(OfFine, dense.Dense):
    """`fp8_gemm_nt` and its relatives."""

    kind = "fp8_gemm_fine"
    has_rows: ClassVar[bool] = False

    def refused_faults(self) -> Mapping[str, str]:
        """Return the faults that a call must refuse. No address is a fault in a turned B: a call may copy it."""
        return {**super().refused_faults(), "b": "dtype shape device" if self.turned else fp8.VALUES}


class ContiguousFine(OfFine, rows.Contiguous):
    """`m_grouped_fp8_gemm_nt_contiguous` and its nn form."""

    kind = "m_grouped_fp8_contiguous_fine"


class MaskedFine(OfFine, rows.Masked):
    """`m_grouped_fp8_gemm_nt_masked`."""

    kind = "m_grouped_fp8_masked_fine"


class LinearFine(layers.Linear):
    """`linear` with a weight of fine scales."""

    kind = "linear_fine"
    faults: ClassVar = {**layers.Linear.faults, "sfw": SCALES}
    make_weight: ClassVar[type[fp8.Weight]] = LayerWeight


class ExpertsFine(layers.Experts):
    """`experts` with weights of fine scales."""

    kind = "experts_fine"
    faults: ClassVar = layers.Experts.faults | dict.fromkeys(("sf1", "sf2"), SCALES)
    make_weight: ClassVar[type[fp8.Weight]] = LayerWeight
