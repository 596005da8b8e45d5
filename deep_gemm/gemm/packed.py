"""FP4 weights (MXFP4): checks of a B of E2M1 values, two in a byte, with a scale 2^s for each 32 values of a row.

Kernels read scales as words: four exponents of UE8M0 along k in an int32, the first in its lowest byte, any strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..casts.fp4 import codes_of
from ..core.check import checks
from ..core.check.checks import Axes, Operand, Sizes
from ..core.check.layout import SCALE_BLOCK, ceil_div, whole_elements
from ..core.check.recipes import MX, Recipes, Scales, scales_of
from ..core.check.ue8m0 import EXPONENTS, lie_in_words, words_of
from ..core.shadow import TENSORS

COLUMNS = MX.columns
HALF = 0x30
"""The byte of 0.5 in E4M3."""
VALUES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)


def is_packed(operand: Any) -> bool:
    """Tell whether an operand's values have a type with two values in a byte, which products read as FP4."""
    is_pair = isinstance(operand, (tuple, list)) and len(operand) == 2
    return is_pair and isinstance(operand[0], TENSORS) and operand[0].dtype in VALUES


def is_taken_as_it_lies(weight: Operand) -> bool:
    """Tell whether kernels read a checked weight without a copy: FP8, or FP4 with scales in words."""
    sf = weight[1]
    return not is_packed(weight) or sf.dtype == torch.int32 or (sf.dtype in EXPONENTS and lie_in_words(sf))


def scales_beside(recipes: Recipes) -> Scales:
    """Return the scales of A that a caller states for an FP4 weight, whose own scales are always MX."""
    recipe, of_a, of_b = recipes
    if recipe is None and of_b is None:
        return scales_of((None, of_a, None))[0]
    stated, found = scales_of(recipes)
    if found != MX:
        name, expected, got = ("recipe_b", (1, 32), of_b) if recipe is None else ("recipe", (1, 1, 32), recipe)
        raise ValueError(f"{name}: expected {expected} for packed FP4 values, got {tuple(got or ())}")
    return stated


def weight(name: str, given: Operand, axes: Axes, sizes: Sizes, *, depth: str = "k", turned: bool = False) -> Operand:
    """Check an FP4 weight of these axes; `depth` is the axis along which a byte holds two values.

    Return bytes `[..., n, k / 2]`, and scales as words, or FP32 unchanged. The caller checks the strides of the bytes.
    """
    values, sf = checks.pair(name, given)
    half = f"{depth} / 2"
    if depth in sizes:
        sizes[half] = sizes[depth] // 2
    checks.bind(name, values, tuple(half if axis == depth else axis for axis in axes), sizes)
    k = whole_groups(depth, sizes.setdefault(depth, 2 * sizes[half]))
    values, sf = values.detach().view(torch.uint8), checks.tensor(f"sf{name}", sf).detach()
    if turned:
        values, sf = values.mT, sf.mT
    checks.has_type(f"sf{name}", sf, (torch.float32, torch.int32, *EXPONENTS))
    expected = (*values.shape[:-1], ceil_div(k, SCALE_BLOCK) if sf.dtype == torch.int32 else k // COLUMNS)
    if sf.shape != expected:
        raise ValueError(f"sf{name}: expected shape {expected} of {sf.dtype}, got {tuple(sf.shape)}")
    whole_elements(f"sf{name}", sf)
    return values, words_of(sf) if sf.dtype in EXPONENTS else sf


def whole_groups(name: str, k: int) -> int:
    """Return a depth if it is a whole number of groups of 32; raise an error otherwise."""
    if k % COLUMNS:
        raise ValueError(f"{name}: expected a multiple of {COLUMNS} for packed FP4 values, got {k}")
    return k


def as_e4m3(packed: Tensor) -> Tensor:
    """Convert packed values `[..., k / 2]` to E4M3 `[..., k]`, exactly. A table would make the host wait for its copy.

    E4M3's exponents are 6 larger, and it has two bits below E2M1's one bit; E2M1's only subnormal number is 0.5.
    """
    codes = codes_of(packed)
    magnitudes = codes & 7
    bytes_of = torch.where(magnitudes > 1, (magnitudes << 2) + HALF, magnitudes * HALF)
    return (bytes_of | (codes & 8) << 4).view(torch.float8_e4m3fn)
