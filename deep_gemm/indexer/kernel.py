"""The kernel of indexer/fp8_mqa_logits.cuh: how it is compiled for a configuration, and launched for the indexer."""

from __future__ import annotations

import struct
from functools import lru_cache

from ..core.check.layout import align
from ..core.code_plan import CodePlan
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import Kernel
from ..core.params import Field, Kind, Params
from ..core.settings import num_sms_of
from ..core.sm90 import WARPGROUP_THREADS
from ..core.wgmma_header import wgmma_header
from .check import MqaLogits
from .config import DEPTHS, HEADS, PRODUCER_REGISTERS, UNITS, MqaConfig, grid, mqa_config

PARAMS = Params(
    "MqaParams",
    Field("map_q", Kind.MAP),
    Field("map_keys", Kind.MAP),
    Field("map_scales", Kind.MAP),
    Field("weights", Kind.POINTER),
    Field("starts", Kind.POINTER),
    Field("ends", Kind.POINTER),
    Field("logits", Kind.POINTER),
    Field("weights_pitch", Kind.UINT64),
    Field("logits_pitch", Kind.UINT64),
    Field("tokens", Kind.UINT32),
    Field("keys", Kind.UINT32),
    Field("row_keys", Kind.UINT32),
)
"""`MqaParams` of indexer/logits/mqa_params.cuh."""
MAX_MAPS = 1024
USUAL_HEADS, USUAL_DEPTH = (32, 64), 128
_NUMBERS = struct.Struct("<" + "".join(field.kind.format for field in PARAMS.fields))
"""All members behind the maps, which have no letter: packed at once, without names."""


def run(p: MqaLogits) -> None:
    """Compute the logits on the GPU that the operands are on."""
    device = p.q.get_device()
    config = config_of(p)
    ctas = grid(config, p.q.shape[0], p.keys.shape[0], num_sms_of(gpu_of(device).num_sms))
    KERNEL.run(config, lambda launcher: params_of(config, launcher, p), ctas, device)


def config_of(p: MqaLogits) -> MqaConfig:
    """Configure the kernel for a problem."""
    _, heads, depth = p.q.shape
    return mqa_config(heads, depth, p.logits.element_size(), p.is_compressed, p.clean_logits)


def reachable_mqa() -> list[MqaConfig]:
    """Every configuration that `config_of` can give."""
    forms = ((False, False), (False, True), (True, False))
    return [
        mqa_config(heads, depth, output_bytes, *form)
        for heads in HEADS
        for depth in DEPTHS
        for output_bytes in (4, 2)
        for form in forms
    ]


def usual_mqa() -> list[MqaConfig]:
    """Give the configurations of models that exist."""
    return [config for config in reachable_mqa() if config.heads in USUAL_HEADS and config.depth == USUAL_DEPTH]


def params_of(config: MqaConfig, launcher: driver.Launcher, p: MqaLogits) -> bytes:
    """Give the kernel's parameters."""
    q, keys = p.q, p.keys
    tokens = q.shape[0]
    maps = _maps(config, launcher, tokens, keys.shape[0], q.data_ptr(), keys.data_ptr(), p.scales.data_ptr())
    return maps + _NUMBERS.pack(
        p.weights.data_ptr(),
        p.starts.data_ptr(),
        p.ends.data_ptr(),
        p.logits.data_ptr(),
        p.weights.stride(0),
        p.logits.stride(0) * p.logits.element_size(),
        tokens,
        keys.shape[0],
        p.logits.shape[1],
    )


@lru_cache(MAX_MAPS)
def _maps(
    config: MqaConfig, launcher: driver.Launcher, tokens: int, keys: int, q_at: int, keys_at: int, scales_at: int
) -> bytes:
    """Encode the maps. Allocators give the same addresses again and again."""
    depth, swizzle = config.depth, config.depth
    maps = (
        (
            TensorMap(ElementType.UINT8, (depth, tokens * config.heads), (depth,), (depth, config.columns), swizzle),
            q_at,
        ),
        (TensorMap(ElementType.UINT8, (depth, keys), (depth,), (depth, config.block_keys), swizzle), keys_at),
        (TensorMap(ElementType.FLOAT32, (keys, 1), (align(keys * 4, 16),), (config.block_keys, 1)), scales_at),
    )
    return b"".join(launcher.encode(tensor_map, address, address) for tensor_map, address in maps)


def code_plan(config: MqaConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of. It writes logits by ordinary stores."""
    math_threads = WARPGROUP_THREADS * config.num_math_warpgroups
    return CodePlan(
        roles=((WARPGROUP_THREADS, PRODUCER_REGISTERS), (math_threads, config.math_registers)),
        shared_bytes=config.shared_bytes,
        qgmma=config.products,
        tma_loads=UNITS + 4,  # q of each unit; keys and scales, with waiting and without
        multicast_loads=0,
    )


KERNEL: Kernel[MqaConfig] = Kernel(
    "fp8_mqa_logits",
    PARAMS,
    reachable_mqa,
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.columns])},
)
