"""vLLM's plugin, which vLLM loads into each of its processes by the entry point `vllm.general_plugins`.

On a Hopper GPU, the plugin offers vLLM five kinds of layers. vLLM considers these before its own kinds:

    linear layers, FP8 by blocks            DeepGemmLinear        `linear`: cast and product
    linear layers, FP8 by rows or tensors   DeepGemmRowLinear
    experts, FP8 by 128x128 and MXFP4       DeepGemmExperts       `experts`: from routes to their weighted sum
    experts, FP8 by rows or tensors         DeepGemmRowExperts
    experts, BF16                           DeepGemmBF16Experts

vLLM still asks each kind whether it takes a layer. The plugin does not replace kernels that a user names
(`--moe-backend triton`). `DG_DISABLE_VLLM_PLUGIN=1` turns the plugin off, and so does `VLLM_USE_DEEP_GEMM=0`.

With `VLLM_BATCH_INVARIANT=1`, each process calls `set_batch_invariant(True)`, and vLLM still uses all these layers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from importlib import import_module
from typing import Any

from ..core.settings import set_batch_invariant, settings
from .engine import Places, all_or_nothing, parts_there, replace, why_not

__all__ = ["register"]

logger = logging.getLogger("vllm.plugins.deep_gemm")

OF_MOE = "vllm.model_executor.layers.fused_moe"
_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
_KERNELS = "vllm.model_executor.kernels.linear"
_BLOCK_SCALED = f"{_KERNELS}.scaled_mm.BlockScaledMMLinearKernel"
PLACES: Places = {
    (_KERNELS, "_POSSIBLE_FP8_BLOCK_KERNELS"): None,
    (_KERNELS, "_LINEAR_BACKEND_KERNEL_MAP"): None,
    (f"{OF_MOE}.oracle.fp8", "_get_priority_backends"): ("moe_config", "weight_key", "activation_key"),
    (f"{OF_MOE}.oracle.fp8", "backend_to_kernel_cls"): ("backend",),
    (f"{OF_MOE}.oracle.mxfp4", "backend_to_kernel_cls"): ("backend",),
    (f"{OF_MOE}.oracle.mxfp4", "_pack_deepgemm_mxfp4_scales"): (
        *("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"),
    ),
    (f"{OF_MOE}.modular_kernel", "FusedMoEExpertsModular.apply"): (
        *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
        *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
        *("expert_tokens_meta", "apply_router_weight_on_input"),
    ),
    (f"{OF_MOE}.modular_kernel", "FusedMoEActivationFormat.Standard"): None,
    **dict.fromkeys(((f"{OF_MOE}.modular_kernel", f"FusedMoEExperts.w{i}_bias") for i in (1, 2)), None),
    **dict.fromkeys(((f"{OF_MOE}.config", f"FusedMoEConfig.swiglu_{it}") for it in ("limit", "alpha", "beta")), None),
    (f"{OF_MOE}.activation", "MoEActivation.SWIGLUOAI_UNINTERLEAVE"): None,
    (f"{OF_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP"): None,
    (_BLOCK_SCALED, "Fp8BlockScaledMMLinearKernel._get_layer_params"): None,
    **dict.fromkeys((_KEYS, name) for name in ("kFp8Dynamic128Sym", "kFp8Static128BlockSym", "kMxfp4Static")),
    ("vllm.model_executor.utils", "replace_parameter"): None,
}
"""Parts of vLLM that the plugin changes, extends or uses, as in the known releases (0.26 to 0.33)."""

_KINDS = ("StaticChannel", "StaticTensor", "DynamicToken", "DynamicTensor")
PARTS: dict[str, Places] = {
    "DeepGemmRowLinear": {
        (_KERNELS, "_POSSIBLE_FP8_KERNELS"): None,
        (_KERNELS, "CutlassFP8ScaledMMLinearKernel"): None,
        (_KERNELS, "FP8ScaledMMLinearKernel.apply_weights"): ("self", "layer", "x", "bias"),
        (_KERNELS, "FP8ScaledMMLinearKernel._get_layer_params"): ("self", "layer"),
    },
    "DeepGemmRowExperts": dict.fromkeys((_KEYS, f"kFp8{kind}Sym") for kind in _KINDS),
    "DeepGemmBF16Experts": {
        (f"{OF_MOE}.oracle.unquantized", "_get_priority_backends"): ("moe_config",),
        (f"{OF_MOE}.oracle.unquantized", "backend_to_kernel_cls"): ("backend",),
    },
}
"""Parts of vLLM that only one kind of layers needs. If a release lacks them, the other kinds are still offered."""

OURS: Any = Enum("OwnBackend", {"DEEP_GEMM": "deep_gemm"}).DEEP_GEMM  # type: ignore[attr-defined]
"""A backend of unquantized experts that vLLM does not know, so vLLM does not change their weights."""


def register() -> None:
    """Offer this package's layers to vLLM in this process, unless a setting or the release forbids it."""
    all_or_nothing("vLLM", logger, _register)


def _register(undo: ExitStack) -> None:
    if settings().disable_vllm_plugin or os.environ.get("VLLM_USE_DEEP_GEMM") == "0":
        logger.info("deep_gemm: the plugin is turned off")
        return
    platforms = import_module("vllm.platforms")
    if not (platforms.current_platform.is_cuda() and platforms.current_platform.is_device_capability(90)):
        return
    if refusal := why_not("vllm", PLACES):
        logger.warning("deep_gemm leaves all layers to vLLM: %s", refusal)
        return
    take_mode()
    layers = import_module("deep_gemm.integrations.vllm_layers")
    linear = import_module("vllm.model_executor.kernels.linear")
    if layers.DeepGemmLinear in linear._POSSIBLE_FP8_BLOCK_KERNELS[platforms.PlatformEnum.CUDA]:
        return
    row_linear, row_experts, bf16_experts = parts_there("vllm", logger, PARTS, layers)
    of_backend = linear._LINEAR_BACKEND_KERNEL_MAP["deep_gemm"]
    for kind in (layers.DeepGemmLinear, *row_linear):
        name = "_POSSIBLE_FP8_KERNELS" if kind in row_linear else "_POSSIBLE_FP8_BLOCK_KERNELS"
        kinds = getattr(linear, name)[platforms.PlatformEnum.CUDA]
        kinds.insert(0, kind)
        undo.callback(kinds.remove, kind)
        of_backend.add(kind)
        undo.callback(of_backend.discard, kind)
    if row_linear:
        # In batch invariant mode, vLLM's FP8 layers call only kernels of this class; with others they multiply in BF16.
        linear.CutlassFP8ScaledMMLinearKernel.register(row_linear[0])
    fp8: Any
    mxfp4: Any
    fp8, mxfp4 = (import_module(f"{OF_MOE}.oracle.{name}") for name in ("fp8", "mxfp4"))
    by_blocks, of_fp8 = [layers.DeepGemmExperts], [layers.DeepGemmExperts, *row_experts]
    _offer_experts(undo, fp8, {fp8.Fp8MoeBackend.TRITON: of_fp8, fp8.Fp8MoeBackend.DEEPGEMM: by_blocks})
    _offer_experts(undo, mxfp4, {mxfp4.Mxfp4MoeBackend.DEEPGEMM_MXFP4: by_blocks})
    # vLLM would convert these bytes to FP32, but products read the bytes. On Hopper no other kind has this backend.
    replace(undo, mxfp4, "_pack_deepgemm_mxfp4_scales", lambda w13, w2, of_w13, of_w2: (of_w13.data, of_w2.data))
    # TRITON does not change the checkpoint's weights, but DEEPGEMM rounds their scales to powers of two.
    own: Callable[..., list[Any]] = fp8._get_priority_backends

    def in_order(moe_config: Any, weight_key: Any, activation_key: Any) -> list[Any]:
        backends = own(moe_config, weight_key, activation_key)
        layer = moe_config, weight_key, activation_key, layers.DeepGemmExperts.activation_format()
        if any(kind.is_supported_config(kind, *layer)[0] for kind in of_fp8):
            backends.sort(key=lambda backend: backend != fp8.Fp8MoeBackend.TRITON)
        return backends

    replace(undo, fp8, "_get_priority_backends", in_order)
    if bf16_experts:
        # vLLM uses TRITON's first kind for experts with LoRA without a check, so our kind has a backend of its own.
        plain: Any = import_module(f"{OF_MOE}.oracle.unquantized")
        order: Callable[[Any], list[Any]] = plain._get_priority_backends
        _offer_experts(undo, plain, {OURS: bf16_experts})
        replace(undo, plain, "_get_priority_backends", lambda moe_config: [OURS, *order(moe_config)])
    logger.info("deep_gemm: vLLM is offered linear layers and experts")


def take_mode() -> None:
    """Start this process's batch invariant mode if vLLM's is on: then no row's bits depend on the batch.

    vLLM reads its variable again at each use, so each choice of a layer calls this function again.
    """
    if import_module("vllm.envs").VLLM_BATCH_INVARIANT:
        set_batch_invariant(True)


def _offer_experts(undo: ExitStack, oracle: Any, kinds: dict[Any, list[type]]) -> None:
    """Let vLLM consider our kinds of experts first whenever it considers these backends."""
    own: Callable[[Any], list[type]] = oracle.backend_to_kernel_cls

    def backend_to_kernel_cls(backend: Any) -> list[type]:
        return [*kinds.get(backend, ()), *(() if backend is OURS else own(backend))]

    replace(undo, oracle, "backend_to_kernel_cls", backend_to_kernel_cls)
