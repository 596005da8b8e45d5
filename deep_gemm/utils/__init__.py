"""Programs of this family import casts, layouts and measurements from here."""

from typing import NoReturn

from ..casts.fp4 import cast_back_from_fp4, per_token_cast_to_fp4, transpose_packed_fp4
from ..casts.fp8 import (
    cast_back_from_fp8,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
)
from ..compat.absent import refuse
from ..core.check.layout import align, ceil_div, get_tma_aligned_size
from ..testing import bench, bench_kineto, calc_diff
from . import dist, layout, math
from .dist import init_dist, uneven_all_gather
from .layout import (
    get_col_major_tma_aligned_tensor,
    get_k_alignment_for_contiguous_layout,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
)
from .math import ceil_to_ue8m0, pack_ue8m0_to_int, unpack_ue8m0_from_int

__all__ = [
    "align",
    "bench",
    "bench_kineto",
    "calc_diff",
    "cast_back_from_fp4",
    "cast_back_from_fp8",
    "ceil_div",
    "ceil_to_ue8m0",
    "dist",
    "get_col_major_tma_aligned_tensor",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "init_dist",
    "layout",
    "math",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
    "transpose_packed_fp4",
    "uneven_all_gather",
    "unpack_ue8m0_from_int",
]


def __getattr__(name: str) -> NoReturn:
    """Say what to use instead of a name that other libraries of this family have."""
    refuse(__name__, name)
