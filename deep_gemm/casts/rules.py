"""The common rules of all casts: scales, checks of arguments, and memory for results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.check import checks
from ..core.check.checks import Sizes, integers, no_gradient
from ..core.check.layout import SCALE_BLOCK, UE8M0_PER_WORD, ceil_div, check_dense, pitch_of_scales
from ..core.check.memory import empty
from ..core.check.numbers import as_integer, magnitude
from ..core.shadow import TENSORS

FP8_MAX = 448.0
MX_BLOCK = 32
MIN_SCALE = 2.0**-126
LAYER_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of activations that layers accept."""

Quantized = tuple[Tensor, Tensor]
"""FP8 values and their FP32 scales."""
Rows = tuple[Tensor, Tensor | None]
"""FP8 values and their FP32 scales, or BF16 rows and None."""


class Format(NamedTuple):
    """A format of values that elements are cast to."""

    name: str
    largest: float
    """A block's largest magnitude divided by its scale."""
    dtype: torch.dtype
    per_byte: int
    """Values in an element of `dtype`. With scales, an element is a byte."""
    blocks: tuple[int, ...]
    """Numbers of columns under a scale that kernels support."""
    has_nan: bool
    """The format has a NaN. If not, the scale of a block with a NaN or an infinity becomes NaN."""
    source: str
    """The file of casts/cast that packs and stores this format."""


FP8 = Format("fp8", FP8_MAX, torch.float8_e4m3fn, 1, (MX_BLOCK, 64, SCALE_BLOCK), True, "fp8")
"""E4M3"""
FP4 = Format("fp4", 6.0, torch.uint8, 2, (MX_BLOCK, SCALE_BLOCK), False, "e2m1")
"""E2M1, two values in a byte."""
MXFP4 = Format("mxfp4", 7.0, torch.uint8, 2, (MX_BLOCK,), False, "e2m1")
"""E2M1, with scales for quotients up to 7. Quotients above 6 become 6: the next value, 8, would not be nearer."""
BF16 = Format("bf16", 0.0, torch.bfloat16, 1, (SCALE_BLOCK,), True, "bf16")
"""BF16 numbers, without scales."""


@dataclass(frozen=True)
class Target:
    """The result of a cast: rows and columns under a scale, rules and layout of scales, and the format of values."""

    rows: int = 1
    """Rows under a scale; 0: all rows share a given scale."""
    columns: int = SCALE_BLOCK
    """Columns under a scale; 0: all columns."""
    use_ue8m0: bool = False
    """Scales are powers of two."""
    min_amax: float = 0.0
    """A block's largest magnitude is raised to at least this."""
    mn_major: bool = False
    """Scales have the layout that products load."""
    packs: bool = False
    """Four scales, which are powers of two, are packed into an int32."""
    format: Format = FP8

    @property
    def block(self) -> int:
        """The larger of the rows and columns under a scale; 0 if a scale is for whole rows."""
        return max(self.rows, self.columns) if self.columns else 0

    def checked(self, x: Tensor) -> Target:
        """Check the tensor to cast. Return this target with `min_amax` as a checked number."""
        check_castable(x)
        if x.dim() < 2:
            raise ValueError(f"x: expected at least 2 dimensions, got shape {tuple(x.shape)}")
        granularity(min(self.rows, self.columns), 0)
        return replace(self, min_amax=magnitude("min_amax", self.min_amax))

    def empty(self, shape: Sequence[int], x: Tensor) -> Any:
        """Allocate values and scales of elements `[..., m, k]` on the device of `x`: `Quantized`, or `Rows`."""
        *batch, m, k = shape
        values = empty("values", (*batch, m, k // self.format.per_byte), self.format.dtype, x.device)
        if self.format == BF16:
            return values, None
        dtype = torch.int32 if self.packs else torch.float32
        rows = *batch, ceil_div(m, self.rows)
        return values, empty_scales(rows, k, x, mn_major=self.mn_major, gran_k=self.columns, dtype=dtype)


PER_ROW, PER_BLOCK, PER_TENSOR = Target(), Target(SCALE_BLOCK, SCALE_BLOCK), Target(0, 0)
UNSCALED = Target(format=BF16)
AMAX_OF_TENSOR = Target(0, 0, format=FP8._replace(name="amax"))
"""A cast without values: instead of scales, each team of lanes stores the largest magnitude that it has read."""


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """Round positive FP32 numbers up to powers of two, exactly.

    >>> ceil_to_ue8m0(torch.tensor([1.0, 1.1, 0.5])).tolist()
    [1.0, 2.0, 0.5]
    """
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent with the mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def scales_of(amax: Tensor, largest: float, use_ue8m0: bool) -> Tensor:
    """Compute scales by the rules of all casts: magnitudes up to `amax` become quotients up to `largest`."""
    # Divide by a tensor: torch on a GPU divides by a number inexactly, by multiplying with its reciprocal.
    scales = (amax / amax.new_full((), largest)).clamp_min(MIN_SCALE)
    if use_ue8m0:
        scales = ceil_to_ue8m0(scales)
    return torch.where(amax == 0, 1.0, scales)


def empty_values(shape: Sequence[int], x: Tensor) -> Tensor:
    """Allocate FP8 values on the device of `x`."""
    return empty("values", shape, torch.float8_e4m3fn, x.device)


def empty_scales(
    rows: Sequence[int],
    k: int,
    x: Tensor,
    *,
    mn_major: bool,
    gran_k: int = SCALE_BLOCK,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Allocate scales for `rows`, `[..., m]`. With `mn_major`, scales have the layout that products load.

    With `dtype` int32, each element holds four scales.
    """
    *batch, m = rows
    blocks = ceil_div(k, gran_k * UE8M0_PER_WORD if dtype == torch.int32 else gran_k) if gran_k else 1
    if not mn_major:
        return empty("scales", (*rows, blocks), dtype, x.device)
    pitch = pitch_of_scales(m)
    strides = (blocks * pitch,) * len(batch) + (1, pitch)
    return empty("scales", (*rows, blocks), dtype, x.device, strides)


def granularity(gran_k: object, least: int = 1) -> int:
    """Check the number of columns that share a scale. If `least` is 0, then 0 is allowed and means all columns."""
    number = as_integer(gran_k)
    if number is None or number < least:
        raise ValueError(f"gran_k: expected a positive integer{', or 0 for all' * (not least)}, got {gran_k!r}")
    return number


def check_rows(x: Tensor, mn_major: bool, masked_m: Tensor | None) -> None:
    """Check the shape of the rows to cast, and each group's count of used rows. `Target.checked` checks the rest."""
    if mn_major and isinstance(x, TENSORS) and x.dim() not in (2, 3):
        raise ValueError(f"x: expected shape (m, k) or (groups, m, k) with mn_major, got {tuple(x.shape)}")
    if masked_m is not None:
        check_counts(x, masked_m)


def check_counts(x: Tensor, masked_m: Tensor) -> None:
    """Check the number of rows that each group of x uses. The host reads no count on a GPU."""
    sizes: Sizes = {}
    checks.bind("x", checks.tensor("x", x), ("groups", "max_m", "k"), sizes)
    checks.int32("masked_m", masked_m, "groups", sizes["groups"])
    checks.same_device({"masked_m": masked_m}, x.device, "x")
    if checks.on_host(masked_m):
        checks.in_range("masked_m", masked_m, 0, sizes["max_m"])


def checked_tensor(x: Tensor, scale: Tensor | None, use_ue8m0: bool, min_amax: float) -> Target:
    """Check a tensor to cast with one scale, given or its own. Return the target for the tensor as a single row."""
    check_castable(x)
    to = Target(1, 0, use_ue8m0, magnitude("min_amax", min_amax))
    if scale is not None:
        no_gradient("scale", scale)
        checks.has_type("scale", checks.tensor("scale", scale), (torch.float32,))
        checks.same_device({"scale": scale}, x.device, "x")
        if scale.numel() != 1 or to != Target(1, 0):
            got = f"{tuple(scale.shape)}, use_ue8m0={use_ue8m0}, min_amax={min_amax}"
            raise ValueError(f"scale: expected one element, without use_ue8m0 and min_amax, got shape {got}")
    return to


def check_matrix(x: Tensor) -> None:
    """Check a matrix to cast together with its transpose."""
    check_castable(x)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (m, k), got {tuple(x.shape)}")


def check_groups(x: Tensor, ks: Sequence[int], min_amax: float) -> tuple[Sequence[int], float]:
    """Check a cast of groups of columns. Return the sizes and `min_amax` as checked numbers."""
    check_castable(x)
    min_amax = magnitude("min_amax", min_amax)
    ks = integers("ks", ks)
    if any(k < 0 for k in ks):
        raise ValueError(f"ks: expected no negative size, got {list(ks)}")
    if x.dim() != 2 or x.shape[1] != sum(ks):
        raise ValueError(f"x: expected shape (m, sum(ks)) = (m, {sum(ks)}), got {tuple(x.shape)}")
    return ks, min_amax


def check_castable(x: Tensor, name: str = "x") -> None:
    """Check that casts accept a tensor's type and gradient. Call it outside torch.no_grad(), which hides gradients."""
    no_gradient(name, x)
    check_dense(name, x)
    if not x.is_floating_point() or x.element_size() == 1:
        raise ValueError(f"{name}: expected dtype float32, bfloat16, float16 or float64, got {x.dtype}")
