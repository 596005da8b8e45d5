"""Public functions that change the layout of scales.

Newer GPUs load scales that are powers of two as UE8M0: only the exponent, with a bias of 127. An int32 has four
exponents, the first in the lowest byte. Here, only products with FP4 weights, or with scales of fewer than 128 columns,
accept UE8M0. But programs make UE8M0 scales on any GPU, so torch makes them here on any device. Bytes of 0 fill the
last int32 of a row, and are unpacked as 0.0.
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
    """Return scales in the layout that the kernels load: the same shape and values, m-major in memory.

    `sf` is FP32 `[mn, k_blocks]` or `[groups, mn, k_blocks]` with any strides. The result has `stride(-2) == 1` and a
    `stride(-1)` that is a multiple of 4, also for a single row or block. If `sf` already has this layout, `sf` itself
    is returned.

    >>> sf = torch.arange(6.0).view(3, 2)
    >>> out = get_mn_major_tma_aligned_tensor(sf)
    >>> out.stride(), bool((out == sf).all())
    ((1, 4), True)
    """
    check_scales(sf)
    no_gradient("sf", sf)
    if is_dispatched(sf):  # the address is unknown: m-major scales pass, as products copy unaligned scales
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
    """Check scales against a recipe and convert them to the layout that the kernels load.

    `recipe` is (rows of A, rows of B, columns) under one scale, and `is_sfa` tells whether `sf` is of A or of B; or a
    pair (rows, columns) for this operand. None means (1, 128, 128). Scales of single rows get the m-major layout
    of `get_mn_major_tma_aligned_tensor`. Scales of blocks do not change. FP32 scales are never rounded, so
    `disable_ue8m0_cast` changes nothing. Scales of 32 or 64 columns may be UE8M0 too: bytes (uint8, float8_e8m0fnu), or
    int32 words of four scales along k. UE8M0 scales of 32 columns of a row become words, as a view if their memory
    consists of whole words. Other UE8M0 scales become FP32 numbers.

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

    Numbers that are not powers of two are refused only on the CPU, because the host reads no value on a GPU.

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
    """Pack each row of scales, which are powers of two. Zeros fill the last int32 of a row."""
    return pack_ue8m0_to_int(F.pad(sf, (0, align(sf.shape[-1], UE8M0_PER_WORD) - sf.shape[-1])))


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor, psum_layout: Tensor | None = None) -> Tensor:
    """Pack scales as UE8M0 words in an m-major layout, with a pitch that is a multiple of 16 bytes.

    `sf` is FP32 `[mn, k_blocks]` or `[groups, mn, k_blocks]` of powers of two, or their exponents (uint8,
    float8_e8m0fnu). The result is int32 `[..., mn, ceil(k_blocks / 4)]`. `sf` may also be such words: they are returned
    as they are if they have this layout. `psum_layout` is ignored: rows without a group are packed too.

    >>> out = get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(5, 6))
    >>> out.shape, out.stride(), hex(out[0, 1])
    (torch.Size([5, 2]), (1, 8), '0x7f7f')
    """
    if isinstance(sf, Tensor) and sf.dtype in (torch.int32, *EXPONENTS):
        check_shape_of_scales(sf)
        words = sf if sf.dtype == torch.int32 else words_of(sf)
        lies_so = is_mn_major(words) and not (has_memory(words) and words.data_ptr() % ADDRESS_ALIGNMENT)
        return with_usual_strides(words) if lies_so else words_laid_out(words)
    check_scales(sf)
    no_gradient("sf", sf)
    check_powers_of_two("sf", sf)
    return words_laid_out(packed_rows(sf.detach()))


def words_laid_out(words: Tensor) -> Tensor:
    """Copy words of scales to the layout that TMA loads."""
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
    """Pack scales of groups along k as UE8M0 words in an m-major layout. No int32 spans two groups.

    `sf` is FP32 `[sum(ceil(k_g / gran_k)), mn]`, as from `per_channel_cast_to_fp8`. The result is int32
    `[sum(ceil(k_g / (4 gran_k))), mn]`, with a pitch that is a multiple of 16 bytes. `ks_cpu` has the groups' k, which
    are multiples of `k_alignment`. If `ks_cpu` is None, the host waits for `grouped_layout`, int32 `[groups]`, which
    has the groups' k or, with `use_psum_layout`, their ends. `use_padded_sf_layout` must be False.

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
    return words_laid_out(packed).t()


def _depths(ks: Sequence[int] | None, layout: Tensor | None, alignment: int, layout_is_ends: bool) -> tuple[int, ...]:
    """Return the depths of groups whose scales are packed, from a list or from a tensor, which the host reads."""
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
