"""Programs of this family import casts, layouts and measurements from here."""

from ..problem.layout import align, ceil_div, get_tma_aligned_size
from ..quantize import per_block_cast_to_fp8, per_channel_cast_to_fp8, per_token_cast_to_fp8
from ..testing import bench, bench_kineto, calc_diff
from . import layout, math

__all__ = [
    "align",
    "bench",
    "bench_kineto",
    "calc_diff",
    "ceil_div",
    "get_tma_aligned_size",
    "layout",
    "math",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_token_cast_to_fp8",
]
