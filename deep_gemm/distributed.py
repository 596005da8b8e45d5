"""Mixtures whose experts are split among the processes of a `torch.distributed` group."""

from .across.experts import Experts as Experts
from .across.mega_moe import (
    SM90SymmBuffer as SM90SymmBuffer,
    fp8_fp4_mega_moe as fp8_fp4_mega_moe,
    fp8_mega_moe as fp8_mega_moe,
    get_symm_buffer_for_mega_moe as get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe as get_symm_buffer_for_sm90_mega_moe,
    mega_moe_pre_dispatch_sm90 as mega_moe_pre_dispatch_sm90,
    transform_weights_for_mega_moe as transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90 as transform_weights_for_mega_moe_sm90,
)
from .across.message import decode_bytes as decode_bytes, prefill_bytes as prefill_bytes
from .across.owners import owned_experts as owned_experts

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # shown in `help`, not to type checkers
