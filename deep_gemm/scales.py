"""Layouts of scales, as callers ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.lay_scales import mn_major
from .problem.layout import Recipe, check_scales, is_mn_major, rows_under_a_scale
from .problem.tracing import is_dispatched


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Get scales in the layout that the kernels load: the same shape and values, m-major in memory.

    `sf` is FP32 `[mn, k_blocks]` or `[groups, mn, k_blocks]` with any strides. The result has `stride(-2) == 1` if
    there are several rows, and a `stride(-1)` that is a multiple of 4 if there are several blocks. If `sf` already has
    this layout, it is returned itself.

    >>> sf = torch.arange(6.0).view(3, 2)
    >>> out = get_mn_major_tma_aligned_tensor(sf)
    >>> out.stride(), bool((out == sf).all())
    ((1, 4), True)
    """
    check_scales(sf)
    if is_dispatched(sf):  # nobody knows an address; scales that are m-major serve at any, as products copy the others
        if is_mn_major(sf):
            return sf
        return torch.ops.deep_gemm.get_mn_major_tma_aligned_tensor.default(sf)  # type: ignore[no-any-return]
    return mn_major(sf)


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
    `get_mn_major_tma_aligned_tensor`; scales of 128 rows stay as they are. FP32 scales are never rounded, so
    `disable_ue8m0_cast` changes nothing.

    >>> sf = torch.ones(5, 2)
    >>> transform_sf_into_required_layout(sf, 5, 256, (1, 128, 128), is_sfa=True).stride()
    (1, 8)
    """
    rows = rows_under_a_scale(sf, mn, k, recipe, num_groups, is_sfa)
    return get_mn_major_tma_aligned_tensor(sf) if rows == 1 else sf
