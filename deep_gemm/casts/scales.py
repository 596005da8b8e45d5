"""Layouts of scales, as callers ask for them.

Other GPUs load scales that are powers of two as UE8M0: the exponent alone, biased by 127, four of them in an int32, the
first in its lowest byte. Products with FP4 weights or scales of fewer than 128 columns take these, others do not.
Programs make them on any GPU all the same, and they are made by torch, on any device. A byte of 0, which fills up the
last int32 of a row, counts as 0.0 when it is unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.forms import accepts_names
from ..core.check import checks
from ..core.check.checks import has_type, no_gradient, nothing
from ..core.check.layout import (
    ADDRESS_ALIGNMENT,
    UE8M0_PER_WORD,
    Recipe,
    align,
    block_under_a_scale,
    ceil_div,
    check_dense,
    check_powers_of_two,
    check_scales,
    check_shape_of_scales,
    empty_mn_major,
    is_mn_major,
    with_usual_strides,
)
from ..core.check.numbers import integer_in_range
from ..core.check.recipes import MX
from ..core.check.tracing import has_memory, is_dispatched
from ..core.check.ue8m0 import EXPONENTS, FP32_MANTISSA_BITS, NO_NUMBER, exponents_of, numbers_of, powers_of, words_of
from .lay_scales import mn_major


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Get scales in the layout that the kernels load: the same shape and values, m-major in memory.

    `sf` is FP32 `[mn, k_blocks]` or `[groups, mn, k_blocks]` with any strides. The result has `stride(-2) == 1` and a
    `stride(-1)` that is a multiple of 4, for a single row or block too. If `sf` already has this layout, it is returned
    itself.

    >>> sf = torch.arange(6.0).view(3, 2)
    >>> out = get_mn_major_tma_aligned_tensor(sf)
    >>> out.stride(), bool((out == sf).all())
    ((1, 4), True)
    """
    check_scales(sf)
    no_gradient("sf", sf)
    if is_dispatched(sf):  # addresses are unknown; m-major scales serve at any address, as products copy unaligned ones
        if is_mn_major(sf):
            return with_usual_strides(sf)
        return torch.ops.deep_gemm.get_mn_major_tma_aligned_tensor.default(sf)  # type: ignore[no-any-return]
    return with_usual_strides(mn_major(sf))


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor  # an older name


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: Recipe | None,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """Check scales against a recipe and bring them into the layout that the kernels load.

    `recipe` is (rows of A, rows of B, columns) under one scale, and `is_sfa` says which side `sf` is; or it is the pair
    (rows, columns) of that side. None means (1, 128, 128). Scales of single rows get the m-major form of
    `get_mn_major_tma_aligned_tensor`; scales of blocks stay as they are. FP32 scales are never rounded, so
    `disable_ue8m0_cast` changes nothing. Scales of 32 or 64 columns may be UE8M0 too: bytes (uint8, float8_e8m0fnu), or
    int32 words of four along k. UE8M0 scales of 32 columns of a row become such words, in the same memory if it has
    whole ones; other UE8M0 scales become the FP32 numbers that they stand for.

    >>> sf = torch.ones(5, 2)
    >>> transform_sf_into_required_layout(sf, 5, 256, (1, 128, 128), is_sfa=True).stride()
    (1, 8)
    """
    rows, columns = block = block_under_a_scale(sf, mn, k, recipe, num_groups, is_sfa)
    if sf.dtype != torch.float32 and block == MX:
        return sf if sf.dtype == torch.int32 else words_of(sf)
    if sf.dtype == torch.int32:
        sf = numbers_of(sf, ceil_div(k, columns))
    elif sf.dtype != torch.float32:
        sf = powers_of(sf.view(torch.uint8).int())
    return get_mn_major_tma_aligned_tensor(sf) if rows == 1 else sf


def pack_ue8m0_to_int(x: Tensor) -> Tensor:
    """Pack FP32 powers of two `[..., 4 j]` as UE8M0, int32 `[..., j]`. NaN and infinity become 255, UE8M0's NaN.

    Whether all are powers of two is checked on the CPU alone, because the host reads no value of a GPU.

    >>> [hex(word) for word in pack_ue8m0_to_int(torch.tensor([1.0, 2.0, 0.5, 1.0])).tolist()]
    ['0x7f7e807f']
    """
    no_gradient("x", x)
    check_powers_of_two("x", x)
    if x.dim() < 1 or x.shape[-1] % UE8M0_PER_WORD:
        raise ValueError(f"x: expected a multiple of {UE8M0_PER_WORD} columns, got shape {tuple(x.shape)}")
    exponents = x.detach().view(torch.int32) >> FP32_MANTISSA_BITS & NO_NUMBER
    first, second, third, fourth = (exponents[..., i::UE8M0_PER_WORD] for i in range(UE8M0_PER_WORD))
    return first | second << 8 | third << 16 | fourth << 24


@accepts_names(packed_sf="packed")
def unpack_ue8m0_from_int(packed: Tensor) -> Tensor:
    """Unpack UE8M0, int32 `[..., j]`, to FP32 `[..., 4 j]`.

    >>> unpack_ue8m0_from_int(torch.tensor([0x7F7E807F])).tolist()
    Traceback (most recent call last):
    ValueError: packed: expected dtype torch.int32, got torch.int64
    >>> unpack_ue8m0_from_int(torch.tensor([0x7F7E807F], dtype=torch.int32)).tolist()
    [1.0, 2.0, 0.5, 1.0]
    """
    check_dense("packed", packed)
    has_type("packed", packed, (torch.int32,))
    if packed.dim() < 1:
        raise ValueError(f"packed: expected at least 1 dimension, got shape {tuple(packed.shape)}")
    return (exponents_of(packed) << FP32_MANTISSA_BITS).view(torch.float32)


def packed_rows(sf: Tensor) -> Tensor:
    """Pack each row of scales, powers of two, filling up its last int32."""
    return pack_ue8m0_to_int(F.pad(sf, (0, align(sf.shape[-1], UE8M0_PER_WORD) - sf.shape[-1])))


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor, psum_layout: Tensor | None = None) -> Tensor:
    """Pack scales as UE8M0 and lay them m-major, in rows of a multiple of 16 bytes.

    `sf` is FP32 `[mn, k_blocks]` or `[groups, mn, k_blocks]`, all powers of two, or the exponents themselves (uint8,
    float8_e8m0fnu); the result is int32 `[..., mn, ceil(k_blocks / 4)]`. Such words are taken too, and given back if
    they lie so. `psum_layout` is accepted: rows without a group are packed as well.

    >>> out = get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(5, 6))
    >>> out.shape, out.stride(), hex(out[0, 1])
    (torch.Size([5, 2]), (1, 8), '0x7f7f')
    """
    if isinstance(sf, Tensor) and sf.dtype in (torch.int32, *EXPONENTS):
        check_shape_of_scales(sf)
        words = sf if sf.dtype == torch.int32 else words_of(sf)
        lies_so = is_mn_major(words) and not (has_memory(words) and words.data_ptr() % ADDRESS_ALIGNMENT)
        return with_usual_strides(words) if lies_so else _laid_out(words)
    check_scales(sf)
    no_gradient("sf", sf)
    check_powers_of_two("sf", sf)
    return words_laid_out(sf.detach())


def words_laid_out(sf: Tensor) -> Tensor:
    """Pack scales that are powers of two, and lay them as TMA loads them."""
    return _laid_out(packed_rows(sf))


def _laid_out(words: Tensor) -> Tensor:
    return empty_mn_major(words).copy_(words)


@accepts_names(ks="ks_cpu")
def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor,
    grouped_layout: Tensor | None,
    ks_cpu: Sequence[int] | None,
    gran_k: int,
    k_alignment: int,
    use_psum_layout: bool = False,
    use_padded_sf_layout: bool = False,
) -> Tensor:
    """Pack scales of groups along k as UE8M0, and lay them m-major. No int32 spans two groups.

    `sf` is FP32 `[sum(ceil(k_g / gran_k)), mn]`, as `per_channel_cast_to_fp8` gives them; the result is int32
    `[sum(ceil(k_g / (4 gran_k))), mn]`, in rows of a multiple of 16 bytes. `ks_cpu` has the groups' k, multiples of
    `k_alignment`; where it is None, `grouped_layout` has them, int32 `[groups]`, or with `use_psum_layout` where groups
    end, and the host waits for it. `use_padded_sf_layout` is accepted as False.

    >>> sf = torch.ones(3, 8)
    >>> out = get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [256, 128], 128, 128)
    >>> out.shape, out.stride(), [hex(word) for word in out[:, 0].tolist()]
    (torch.Size([2, 8]), (8, 1), ['0x7f7f', '0x7f'])
    """
    nothing("use_padded_sf_layout", use_padded_sf_layout, expected=False)
    gran_k, k_alignment = integer_in_range("gran_k", gran_k, 1), integer_in_range("k_alignment", k_alignment, 1)
    no_gradient("sf", sf)
    check_powers_of_two("sf", sf)
    ks = _depths(ks_cpu, grouped_layout, k_alignment, use_psum_layout)
    blocks = [ceil_div(k, gran_k) for k in ks]
    if sf.dim() != 2 or sf.shape[0] != sum(blocks):
        raise ValueError(f"sf: expected shape (sum(ceil(k / gran_k)), mn) = ({sum(blocks)}, mn), got {tuple(sf.shape)}")
    packed = torch.cat([packed_rows(part) for part in torch.split(sf.detach().t(), blocks, dim=1)], dim=1)
    return _laid_out(packed).t()


def _depths(ks: Sequence[int] | None, layout: Tensor | None, alignment: int, layout_is_ends: bool) -> tuple[int, ...]:
    """Depths of groups whose scales are packed, from the host or from a tensor, which the host then reads."""
    if ks is None and layout is None:
        raise ValueError("ks_cpu: expected a list, or grouped_layout with the same numbers, got neither")
    name = "ks_cpu" if ks is not None else "grouped_layout"
    if ks is None:
        layout = checks.tensor(name, layout)
        checks.readable(name, layout)
        layout = layout.cpu()
        layout = checks.depths_of_ends(layout, alignment, name) if layout_is_ends else layout
    sizes = checks.integers(name, layout if ks is None else ks)
    for index, k in enumerate(sizes):
        if k < 0 or k % alignment:
            raise ValueError(f"{name}: expected multiples of k_alignment = {alignment}, got {k} at index {index}")
    return sizes
