"""Scales that are powers of two: UE8M0 exponents in bytes, or four along k in an int32 word, lowest byte first.

Products with scales of fewer than 128 columns, or with an FP4 weight, accept such scales. Some kernels read words; for
the rest, `lay_scales` converts words to FP32. A product's problem has words if its caller passed words or bytes.
"""

from __future__ import annotations

from enum import IntFlag

import torch
from torch import Tensor

from . import checks
from .layout import SCALE_BLOCK, UE8M0_PER_WORD, align, ceil_div, whole_elements
from .recipes import WHOLE, Scales, taken
from .tracing import has_memory

FP32_MANTISSA_BITS = 23
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Types of tensors of UE8M0 exponents in bytes."""
ONE, NO_NUMBER = 127, 255
"""The exponents that mean 1 and NaN."""


class Words(IntFlag):
    """Operands of a product whose scales are words of UE8M0, not FP32, as `kWordsOfA` of core/types.cuh tells."""

    NONE = 0
    A = 1
    B = 2


def sides_in_words(sfa: Tensor, sfb: Tensor) -> Words:
    """Tell which operands' scales are words, by the types of the tensors."""
    of_a, of_b = (sf.dtype == torch.int32 for sf in (sfa, sfb))
    return (Words.A if of_a else Words.NONE) | (Words.B if of_b else Words.NONE)


def scales(
    name: str,
    sf: Tensor,
    axis: str,
    outer: tuple[int, ...],
    k: int,
    of: Scales,
    beside: Scales,
    *,
    transposed: bool = False,
    hint: str = "",
) -> Tensor:
    """Check the scales of an operand: FP32, or UE8M0 if either operand has fine scales. Return UE8M0 as words.

    Fine means fewer than 128 columns. `of` has this operand's rows and columns under a scale, `beside` the other
    operand's. Bytes are viewed as words if their memory consists of whole words.
    """
    if not of.columns:
        return _of_all_k(name, sf.mT if transposed and sf.dim() > 1 else sf, axis, outer, k, of, beside)
    is_fine = min(of.columns, beside.columns or SCALE_BLOCK) < SCALE_BLOCK
    if not is_fine or sf.dtype != torch.int32:
        also = EXPONENTS if is_fine else ()
        sf = checks.scales(name, sf, axis, outer, k, of.rows, of.columns, transposed=transposed, also=also, hint=hint)
        return words_of(sf) if sf.dtype in EXPONENTS else sf
    sf = sf.mT if transposed else sf
    words = ceil_div(ceil_div(k, of.columns), UE8M0_PER_WORD)
    expected = (*outer[:-1], ceil_div(outer[-1], of.rows), words)
    if sf.shape != expected:
        raise ValueError(f"{name}: expected shape {expected} of {sf.dtype}, got {tuple(sf.shape)}")
    whole_elements(name, sf)
    return sf


def _of_all_k(name: str, sf: Tensor, axis: str, outer: tuple[int, ...], k: int, of: Scales, beside: Scales) -> Tensor:
    """Check scales of all of k, `[..., rows, 1]`, or of whole tensors. Expand them for the kernels, without a copy."""
    checks.fp32_scales(name, sf)
    *groups, rows = outer
    if groups and not of.rows and sf.shape == (*groups,):
        sf = sf[:, None, None]
    expected = (*groups, rows if of.rows else 1, 1)
    if sf.shape != expected and (of.rows or sf.numel() != 1):
        axes = (*(["groups"] if groups else []), axis if of.rows else "1", "1")
        raise ValueError(f"{name}: expected shape ({', '.join(axes)}) = {expected}, got {tuple(sf.shape)}")
    as_ = taken(beside, of)[1] if axis == "n" else taken(of, beside)[0]
    shape = (*groups, ceil_div(rows, as_.rows), 1 if as_ == WHOLE else ceil_div(k, SCALE_BLOCK))
    strides = [0 if size == 1 else stride for size, stride in zip(sf.shape, sf.stride(), strict=True)]
    return sf.as_strided(shape, [*[0] * (len(shape) - len(strides)), *strides])


def words_of(exponents: Tensor) -> Tensor:
    """Return bytes as words: a view if their memory consists of whole words, else a copy with zeros at the end."""
    exponents = exponents.view(torch.uint8)
    groups = exponents.shape[-1]
    if not groups:  # torch does not view even an empty tensor of bytes with strides of 1 as words
        return exponents.new_empty(exponents.shape, dtype=torch.int32)
    if not lie_in_words(exponents):
        given = exponents
        exponents = given.new_zeros((*given.shape[:-1], align(groups, UE8M0_PER_WORD)))
        exponents[..., :groups] = given
    return exponents.view(torch.int32)


def lie_in_words(exponents: Tensor) -> bool:
    """Tell whether the memory of bytes consists of whole words."""
    strides = exponents.stride()
    return (
        exponents.shape[-1] % UE8M0_PER_WORD == 0
        and strides[-1] == 1
        and all(stride % UE8M0_PER_WORD == 0 for stride in strides[:-1])
        and not (has_memory(exponents) and exponents.data_ptr() % UE8M0_PER_WORD)
        and exponents.storage_offset() % UE8M0_PER_WORD == 0
    )


def exponents_of(words: Tensor) -> Tensor:
    """Return the four bytes of each int32 `[..., j]`, the lowest byte first, as int32 `[..., 4 j]`."""
    return torch.stack([words >> 8 * i & 0xFF for i in range(UE8M0_PER_WORD)], dim=-1).flatten(-2)


def powers_of(exponents: Tensor) -> Tensor:
    """Convert exponents (int32) to FP32 numbers: 0 is 2^-127, and 255 is NaN."""
    bits = torch.where(exponents == 0, 1 << FP32_MANTISSA_BITS - 1, exponents << FP32_MANTISSA_BITS)
    return torch.where(exponents == NO_NUMBER, torch.nan, bits.view(torch.float32))


def numbers_of(sf: Tensor, groups: int) -> Tensor:
    """Return scales as FP32 `[..., groups]`: words of exponents are converted, and FP32 is returned as it is."""
    return powers_of(exponents_of(sf)[..., :groups]) if sf.dtype == torch.int32 else sf
