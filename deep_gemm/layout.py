"""Sizes and memory layouts of scales: what TMA can load, and how to get there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TMA_ALIGNMENT_BYTES = 16
SCALE_BLOCK = 128


def ceil_div(x: int, y: int) -> int:
    """Quotient of two integers, rounded up."""
    return -(-x // y)


cell_div = ceil_div  # an older name


def align(x: int, y: int) -> int:
    """Smallest multiple of `y` that is not below `x`."""
    return ceil_div(x, y) * y


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Get `x` elements rounded up to a row pitch that TMA accepts, a multiple of 16 bytes.

    >>> get_tma_aligned_size(33, 4)
    36
    """
    return align(x, TMA_ALIGNMENT_BYTES // element_size)


def is_mn_major_tma_aligned(sf: Tensor) -> bool:
    """Tell whether TMA can load these scales as they lie: m-major, with a row pitch of a multiple of 16 bytes."""
    mn, pitch = sf.shape[-2], sf.stride(-1)
    return (
        (mn <= 1 or sf.stride(-2) == 1)
        and pitch >= mn
        and pitch % 4 == 0
        and (sf.dim() == 2 or sf.shape[0] <= 1 or sf.stride(0) % 4 == 0)
        and sf.data_ptr() % TMA_ALIGNMENT_BYTES == 0
    )


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Get scales in the layout that the kernels load: the same shape and values, m-major in memory.

    `sf` is FP32 `[mn, k_blocks]` or `[groups, mn, k_blocks]` with any strides. The result has `stride(-2) == 1`
    and `stride(-1)` a multiple of 4; where `sf` lies like that already, it is returned itself.

    >>> sf = torch.arange(6.0).view(3, 2)
    >>> out = get_mn_major_tma_aligned_tensor(sf)
    >>> out.stride(), bool((out == sf).all())
    ((1, 4), True)
    """
    if not isinstance(sf, Tensor):
        raise TypeError(f"sf: expected a tensor, got {type(sf).__name__}")
    if sf.dtype != torch.float32:
        raise ValueError(f"sf: expected dtype torch.float32, got {sf.dtype}")
    if sf.dim() not in (2, 3):
        raise ValueError(f"sf: expected shape (mn, k_blocks) or (groups, mn, k_blocks), got {tuple(sf.shape)}")
    if is_mn_major_tma_aligned(sf):
        return sf
    mn, num_k_blocks = sf.shape[-2:]
    pitch = get_tma_aligned_size(mn, 4)
    strides = (num_k_blocks * pitch, 1, pitch)[3 - sf.dim() :]
    out = torch.empty_strided(sf.shape, strides, dtype=sf.dtype, device=sf.device)
    return out.copy_(sf.detach())


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor  # an older name


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: Sequence[int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: Tensor | None = None,
) -> Tensor:
    """Check scales against a recipe and bring them into the layout that the kernels load.

    `recipe` is (rows of A, rows of B, columns) under one scale, with `is_sfa` saying which side `sf` is; or the pair
    (rows, columns) of that side. One row a scale gives the m-major form of `get_mn_major_tma_aligned_tensor`;
    128 rows a scale are kept as they are. FP32 scales are never rounded, so `disable_ue8m0_cast` changes nothing.

    >>> sf = torch.ones(5, 2)
    >>> transform_sf_into_required_layout(sf, 5, 256, (1, 128, 128), is_sfa=True).stride()
    (1, 8)
    """
    rows, columns = _scale_granularity(recipe, is_sfa)
    if (rows, columns) not in ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK)):
        raise NotImplementedError(
            f"recipe: expected one scale for 1 or 128 rows and 128 columns, got one for {rows} and {columns}"
        )
    if not isinstance(sf, Tensor):
        raise TypeError(f"sf: expected a tensor, got {type(sf).__name__}")
    if sf.dtype == torch.int32:
        raise NotImplementedError("sf: packed UE8M0 scales (torch.int32) are not supported, pass torch.float32 scales")
    if sf.dtype != torch.float32:
        raise ValueError(f"sf: expected dtype torch.float32, got {sf.dtype}")
    groups = () if num_groups is None else (num_groups,)
    expected = (*groups, ceil_div(mn, rows), ceil_div(k, columns))
    if tuple(sf.shape) != expected:
        raise ValueError(f"sf: expected shape {expected}, got {tuple(sf.shape)}")
    return get_mn_major_tma_aligned_tensor(sf) if rows == 1 else sf


def _scale_granularity(recipe: Sequence[int], is_sfa: bool | None) -> tuple[int, int]:
    if len(recipe) == 2:
        return recipe[0], recipe[1]
    if len(recipe) != 3:
        raise ValueError(f"recipe: expected 2 or 3 integers, got {tuple(recipe)}")
    if is_sfa is None and recipe[0] != recipe[1]:
        raise ValueError(f"is_sfa: expected True or False with the recipe {tuple(recipe)}, got None")
    return (recipe[0] if is_sfa else recipe[1]), recipe[2]
