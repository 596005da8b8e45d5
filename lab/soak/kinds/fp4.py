"""FP4 weights (MXFP4) in all products and layers that have FP8 kinds, and casts to FP4: every form of scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.casts import fp4
from deep_gemm.casts.by_torch import VALUES, cast_blocks
from deep_gemm.casts.rules import FP4, Target
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div
from deep_gemm.core.check.ue8m0 import exponents_of
from deep_gemm.distributed import fp8_fp4_mega_moe, transform_weights_for_mega_moe

from ..draw import Draw
from ..trial import Right, Tensors, Trial
from . import dense, fp8, layers, mega_moe, rows
from .casts import TYPES, of_many_magnitudes

GROUP, WORD, ONE, NAN = 32, 128, 127, 255
"""Columns of a scale, and of a word of four scales; exponents that mean 1 and NaN."""
EXACT_CODES = (0, 2, 4, 10, 12)
"""Codes of 0, 1, 2, -1, -2, which tensor cores add up exactly."""
SCALES = "shape device"
"""Faults of scales: scales of another type may be valid words."""
NUMBERS = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)


class Weight(fp8.Weight):
    """Two values in a byte, and a scale for each 32 values of a row: bytes, E8M0, words in either layout, or FP32."""

    depths = GROUP
    columns = GROUP
    block = (1, GROUP)
    faults: ClassVar = ("address shape device", SCALES, SCALES)

    def __init__(self, draw: Draw, exact: bool, low: int = -2, high: int = 2) -> None:
        super().__init__(draw, exact, low, high)
        self.type = draw.rng.choice((torch.uint8, torch.int8, torch.float4_e2m1fn_x2))
        self.form = draw.rng.choice(("bytes", "e8m0", "words", "words, MN-major", "fp32"))
        self.apart = 1 if exact else draw.rng.choice((3, 11, 30))  # range of a block's exponents; 30 does not fold
        self.columns_of_a = draw.rng.choice((128, 128, 128, 64, 32))

    @property
    def recipes(self) -> dict[str, Any]:
        """Return the keywords that describe scales in a call."""
        return {} if self.columns_of_a == 128 else {"recipe_a": (1, self.columns_of_a), "recipe_b": (1, GROUP)}

    def room(self, shape: Sequence[int], rows: int = 1) -> tuple[Tensor, Tensor]:
        """Allocate a weight `[..., n, k]` and its scales."""
        *outer, n, k = shape
        values = self.draw.matrix((*outer, n, k // 2), torch.float8_e4m3fn).view(torch.uint8)
        device, words = values.device, (*outer, n, ceil_div(k, WORD))
        if self.form == "words":
            return values, torch.zeros(words, dtype=torch.int32, device=device)
        if self.form == "words, MN-major":
            return values, torch.zeros((*outer, words[-1], n), dtype=torch.int32, device=device).mT
        dtype = torch.float32 if self.form == "fp32" else torch.uint8
        return values, torch.empty((*outer, n, k // GROUP), dtype=dtype, device=device)

    def refused(self, is_stated: bool) -> str:
        """Return the faults of scales that a layer refuses."""
        return SCALES

    def fill(self, values: Tensor, sf: Tensor) -> None:
        """Draw values and exponents anew; FP32 scales are powers of two only if sums must be exact."""
        draw = self.draw
        codes = torch.tensor(EXACT_CODES if self.exact else range(16), device=values.device, dtype=torch.int64)
        low, high = (codes[draw.integers(values.shape, 0, len(codes) - 1, torch.int64)] for _ in range(2))
        values.copy_(low | high << 4)
        groups = values.shape[-1] * 2 // GROUP
        shape = (*values.shape[:-1], ceil_div(groups, 4), 4)
        exponents = draw.integers((*shape[:-1], 1), ONE + self.low, ONE + self.high, torch.int32)
        exponents = exponents + draw.integers(shape, 0, self.apart, torch.int32)
        of_groups = exponents.flatten(-2)[..., :groups]
        if sf.dtype == torch.float32:
            scales = torch.ldexp(torch.ones(of_groups.shape, device=sf.device, dtype=torch.float32), of_groups - ONE)
            if not self.exact:
                scales *= 1 + torch.rand(scales.shape, generator=draw.generator, device=sf.device, dtype=torch.float32)
            sf.copy_(scales)
        elif sf.dtype == torch.uint8:
            sf.copy_(of_groups)
        else:
            exponents[..., -1, 1 + (groups - 1) % 4 :] = 0  # the bytes after the last group
            first, second, third, fourth = exponents.unbind(-1)
            sf.copy_(first | second << 8 | third << 16 | fourth << 24)

    def spoil(self, sf: Tensor) -> None:
        """Set one scale to NaN: the first of the last row."""
        if sf.dtype == torch.float32:
            sf[..., -1, 0] = torch.nan
        elif sf.dtype == torch.uint8:
            sf[..., -1, 0] = NAN
        else:
            sf[..., -1, 0] |= NAN

    def given(self, values: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and scales in the caller's form."""
        if sf.dtype == torch.uint8 and self.form == "e8m0":
            sf = sf.view(torch.float8_e8m0fnu)
        return values.view(self.type) if values.dtype == torch.uint8 else values, sf

    def numbers(self, values: Tensor, sf: Tensor, rows: int = 1) -> Tensor:
        """Return the FP64 numbers of a weight."""
        codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        if sf.dtype == torch.float32:
            scales = sf.double()
        else:
            exponents = sf.int() if sf.dtype == torch.uint8 else exponents_of(sf)[..., : codes.shape[-1] // GROUP]
            scales = (2.0 ** (exponents.double() - ONE)).masked_fill(exponents == NAN, torch.nan)
        return NUMBERS.to(values.device)[codes.int()] * scales.repeat_interleave(GROUP, -1)


class OfFp4(fp8.OfFp8):
    """The code that kinds of FP4 products share: in some trials a scale is NaN, which a product must not hide."""

    make_weight: ClassVar = Weight
    weight: Weight

    def fill(self) -> None:
        """Draw everything anew."""
        super().fill()
        if self.exact and self.draw.flag(0.1):
            self.weight.spoil(self.scales_of_b)

    @property
    def scales_of_b(self) -> Tensor:
        """Return the scales of B `[..., n, columns]`, for either layout of B."""
        sfb = self.operands["sfb"]
        return sfb.mT if self.turned else sfb


class DenseFp4(OfFp4, dense.Dense):
    """`fp8_fp4_gemm_nt` and `fp8_fp4_gemm_nn`."""

    kind = "fp8_fp4_gemm"
    majors: ClassVar = ("nt", "nt", "nn")
    has_rows = False


class ContiguousFp4(OfFp4, rows.Contiguous):
    """`m_grouped_fp8_fp4_gemm_nt_contiguous` and its nn form."""

    kind = "m_grouped_fp8_fp4_contiguous"
    faults: ClassVar = {**rows.Contiguous.faults, "sfa": SCALES, "b": "shape device", "sfb": SCALES}


class MaskedFp4(OfFp4, rows.Masked):
    """`m_grouped_fp8_fp4_gemm_nt_masked`."""

    kind = "m_grouped_fp8_fp4_masked"
    faults: ClassVar = {**rows.Masked.faults, "sfa": SCALES, "b": "address shape device", "sfb": SCALES}


class LinearFp4(layers.Linear):
    """`linear` with an FP4 weight."""

    kind = "linear_fp4"
    faults: ClassVar = {**layers.Linear.faults, "w": "shape device", "sfw": SCALES}
    make_weight: ClassVar = Weight


class ExpertsFp4(layers.Experts):
    """`experts` with FP4 weights."""

    kind = "experts_fp4"
    faults: ClassVar = {**layers.Experts.faults, "w1": "device", "w2": "device"} | dict.fromkeys(("sf1", "sf2"), SCALES)
    make_weight: ClassVar = Weight


class MegaMoeFp4(mega_moe.MegaMoe):
    """`fp8_fp4_mega_moe`. With the memory of peers, as on a GPU, the second weight's scales are not FP32."""

    kind = "fp8_fp4_mega_moe"
    columns, type_of_first = SCALE_BLOCK, torch.bfloat16
    faults: ClassVar = mega_moe.MegaMoe.faults | dict.fromkeys(("l1", "l2", "sfl1", "sfl2"), SCALES)
    make_weight: ClassVar = Weight

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        second = self.weights["l2"]
        assert isinstance(second, Weight)
        if draw.device == "cuda" and second.form == "fp32":
            second.form = "words"
            _, self.operands["sfl2"] = second.room((self.experts, self.hidden, self.middle))

    def compute(self, y: Tensor, l1: Operand, l2: Operand, counts: Tensor) -> None:
        """Transform the weights, which keeps their memory, and make the call."""
        made = transform_weights_for_mega_moe(l1, l2)
        fp8_fp4_mega_moe(y, *made, self.buffer, counts, activation_clamp=self.limit)

    def first_weight(self, expert: int) -> Tensor:
        """Return the FP64 numbers of an expert's first weight."""
        x = self.operands
        return self.weights["l1"].numbers(x["l1"][expert], x["sfl1"][expert])


class CastFp4(Trial):
    """`per_token_cast_to_fp4` and `quantize_mxfp4`."""

    kind = "casts_fp4"
    faults: ClassVar = {"x": "cast_type"}

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.is_mx, self.rounds_up = draw.flag(), draw.flag()
        others = (16, 100) if draw.device == "cpu" else ()  # a GPU casts these by torch, with a table from the host
        self.columns = GROUP if self.is_mx else draw.rng.choice((GROUP, 128, *others))
        k = draw.size(GROUP, 2000, GROUP) if self.is_mx else draw.size(2, 2000, 2)
        groups = draw.rng.choice((0, 0, 1, 4))
        shape = (*([groups] if groups else []), draw.size(1, 300 if groups else 2000), k)
        self.operands = {"x": draw.matrix(shape, draw.rng.choice(TYPES))}

    def fill(self) -> None:
        """Draw numbers of many magnitudes, zeros, whole groups of zeros, and sometimes an infinity or a NaN."""
        x, draw = self.operands["x"], self.draw
        x.copy_(of_many_magnitudes(draw, x, 0.2, 0.3))

    def call(self, x: Tensors) -> Tensors:
        """Cast; the call makes values and scales."""
        if self.is_mx:
            values, sf = fp4.quantize_mxfp4(x["x"])
        else:
            values, sf = fp4.per_token_cast_to_fp4(x["x"], self.rounds_up, self.columns)
        return {"values": values.view(torch.uint8), "scales": sf}

    def right(self) -> dict[str, Right]:
        """Cast by torch operations. For MXFP4, compute codes and scales by the rules of its groups."""
        x = self.operands["x"]
        if not self.is_mx:
            values, sf = cast_blocks(x, Target(1, self.columns, self.rounds_up, format=FP4))
            return {"values": Right(values.view(torch.uint8)), "scales": Right(sf)}
        of_groups = x.double().reshape(*x.shape[:-1], -1, GROUP)
        largest = of_groups.abs().amax(-1)
        # The smallest power of two such that the largest magnitude is at most 7 times as large.
        mantissa, exponent = torch.frexp(largest / 7)
        exponents = (exponent - (mantissa == 0.5).int()).clamp(-126) + ONE
        exponents = exponents.masked_fill(~largest.isfinite(), 0).masked_fill(largest == 0, 0)
        exponents = self._beside(exponents).masked_fill(~largest.isfinite(), NAN)
        quotients = of_groups / 2.0 ** (exponents.double() - ONE)[..., None]
        steps = (quotients.abs()[..., None] - NUMBERS[:8].to(x.device)).abs()
        # If two codes are equally near, the even one is right.
        codes = (steps + torch.tensor([0, 1e-9] * 4, device=x.device, dtype=torch.float32)).argmin(-1)
        codes = codes + 8 * (quotients.signbit() & ~quotients.isnan())
        low, high = codes.flatten(-2)[..., ::2], codes.flatten(-2)[..., 1::2]
        finite = largest.isfinite().repeat_interleave(GROUP // 2, -1)
        return {
            "values": Right((low | high << 4).to(torch.uint8), None, finite),
            "scales": Right(exponents.to(torch.uint8)),
        }

    @staticmethod
    def _beside(exponents: Tensor) -> Tensor:
        """Replace the exponents of zero groups by the largest exponent of their 128 columns, or by that of 1."""
        groups = exponents.shape[-1]
        found = exponents.clone()
        for first in range(0, groups, 4):
            block = exponents[..., first : first + 4]
            most = block.amax(-1, keepdim=True)
            found[..., first : first + 4] = torch.where(block > 0, block, torch.where(most > 0, most, ONE))
        return found
