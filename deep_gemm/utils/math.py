"""Programs of this family import casts and sizes from here."""

from ..problem.layout import align, ceil_div
from ..quantize import ceil_to_ue8m0, per_block_cast_to_fp8, per_channel_cast_to_fp8, per_token_cast_to_fp8

__all__ = [
    "align",
    "ceil_div",
    "ceil_to_ue8m0",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_token_cast_to_fp8",
]
