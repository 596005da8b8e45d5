"""Programs of this family import casts and sizes from here."""

from functools import partial

from ..casts.fp4 import cast_back_from_fp4, per_token_cast_to_fp4, transpose_packed_fp4
from ..casts.fp8 import (
    cast_back_from_fp8,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
)
from ..casts.rules import ceil_to_ue8m0
from ..casts.scales import pack_ue8m0_to_int, unpack_ue8m0_from_int
from ..compat.absent import refuse
from ..core.check.layout import align, ceil_div

__all__ = [
    "align",
    "cast_back_from_fp4",
    "cast_back_from_fp8",
    "ceil_div",
    "ceil_to_ue8m0",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "transpose_packed_fp4",
    "unpack_ue8m0_from_int",
]


__getattr__ = partial(refuse, __name__)
"""Says what to use instead of a name that other libraries of this family have."""
