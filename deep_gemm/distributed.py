"""A mixture whose experts are spread over the processes of a `torch.distributed` group."""

from .across.experts import Experts
from .across.mega_moe import (
    SM90SymmBuffer,
    fp8_fp4_mega_moe,
    fp8_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    mega_moe_pre_dispatch_sm90,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
)
from .across.message import decode_bytes, prefill_bytes
from .across.owners import owned_experts

__all__ = [
    "Experts",
    "SM90SymmBuffer",
    "decode_bytes",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch_sm90",
    "owned_experts",
    "prefill_bytes",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
]
