"""Casts and size functions under the module path from which programs for DeepGEMM import them."""

from functools import partial as _partial

from ..casts.fp4 import (
    cast_back_from_fp4 as cast_back_from_fp4,
    per_token_cast_to_fp4 as per_token_cast_to_fp4,
    transpose_packed_fp4 as transpose_packed_fp4,
)
from ..casts.fp8 import (
    cast_back_from_fp8 as cast_back_from_fp8,
    per_block_cast_to_fp8 as per_block_cast_to_fp8,
    per_channel_cast_to_fp8 as per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8 as per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8 as per_token_cast_to_fp8,
)
from ..casts.rules import ceil_to_ue8m0 as ceil_to_ue8m0
from ..casts.scales import pack_ue8m0_to_int as pack_ue8m0_to_int, unpack_ue8m0_from_int as unpack_ue8m0_from_int
from ..compat.absent import refuse as _refuse
from ..core.check.layout import align as align, ceil_div as ceil_div

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # shown in `help`, not to type checkers
__getattr__ = _partial(_refuse, __name__)
