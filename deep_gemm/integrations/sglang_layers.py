"""Hooks around SGLang's layers. sglang.py registers the hooks. Importing this module needs SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
from sglang.srt.layers.dp_attention import is_allocation_symmetric
from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from ..core.check.recipes import PER_BLOCK
from ..core.settings import set_batch_invariant
from ..linear.api import linear
from ..moe.api import experts
from .engine import BY_BLOCKS, BY_ROWS, FP4, PLAIN, Weights, experts_refusal, linear_refusal, row_operand
from .sglang import logger

Function = Callable[..., Any]

_HEEDED = """
    activation gate_up_interleaved gemm1_alpha gemm1_beta gemm1_clamp_limit swiglu_limit routed_scaling_factor
    w13_weight w2_weight w13_scale w2_scale b13 b2 block_shape is_fp4_experts
"""
_FREE = """
    num_experts num_local_experts hidden_size intermediate_size_per_partition layer_id top_k num_fused_shared_experts
    params_dtype routing_method_type runner_backend inplace layer silu_mul_keep_fp32 use_fp8 use_fp8_w8a8
    a13_scale a2_scale per_channel_quant
"""
KNOWN = frozenset((_HEEDED + _FREE).split())
"""Fields of a layer's configuration and weights that the hooks read, and fields that cannot change a result here. All
other fields, also of newer releases, must have their default."""

_taken: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""For each runner, the weights and the activation of its experts if the plugin takes the layer, else None."""


def with_mode(own: Function, *args: Any, **options: Any) -> Any:
    """Start this package's batch invariant mode when SGLang starts its own: no row's bits depend on the batch."""
    set_batch_invariant(True)
    return own(*args, **options)


def linear_or(
    own: Function,
    input: Tensor,
    weight: Tensor,
    block_size: Sequence[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *later: Any,
    **options: Any,
) -> Any:
    """Compute input @ weight.T + bias by `linear` if the layer is taken, else by SGLang's function."""
    refusal = linear_refusal(input.dtype, block_size, *weight.shape[-2:])
    if weight.dim() != 2:
        refusal = f"expects a weight of 2 dimensions, not {weight.dim()}"
    if weight_scale.dtype != torch.float32:
        refusal = f"expects scales in FP32, not {weight_scale.dtype}"
    if any(later[:1]) or options.get("act_scale_ue8m0"):
        refusal = "activations are cast with FP32 scales here, not with powers of two"
    if input_scale is not None:
        refusal = "activations are cast already"
    if not torch.compiler.is_compiling():
        _tell("a linear layer", refusal)
    if refusal is None:
        return linear(input, (weight, weight_scale), bias=bias)
    return own(input, weight, block_size, weight_scale, input_scale, bias, *later, **options)


def row_linear_or(
    own: Function,
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    input_scale_ub: Tensor | None = None,
    bias: Tensor | None = None,
    *more: Any,
    **options: Any,
) -> Any:
    """Compute input @ weight + bias by `linear` if the layer is taken, else by SGLang's function.

    The weight is `[k, n]`. Activations are cast by row: a static scale of activations is not used.
    """
    asked = fp8_utils.get_fp8_gemm_runner_backend()
    refusal = linear_refusal(input.dtype, None, weight.shape[-1], weight.shape[0])
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or weight.stride(0) != 1:
        refusal = f"expects an E4M3 weight, stored as [n, k], not {weight.dtype} with strides {weight.stride()}"
    if weight_scale.dtype != torch.float32 or weight_scale.numel() not in (1, weight.shape[-1]):
        refusal = f"expects a scale in FP32 for each row or one for all, not {tuple(weight_scale.shape)}"
    if input.dtype == torch.float8_e4m3fn or input_scale_ub is not None:
        refusal = "activations are cast already, or have a bound"
    if not (asked.is_auto() or asked.is_deep_gemm()) or fp8_utils.use_triton_w8a8_fp8_kernel:
        refusal = "the user chose another kernel"
    if not torch.compiler.is_compiling():
        _tell("a linear layer with scales of rows", refusal)
    if refusal is None:
        return linear(input, row_operand(weight.t(), weight_scale), bias=bias)
    return own(input, weight, weight_scale, input_scale, input_scale_ub, bias, *more, **options)


def experts_or(own: Function, self: Any, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
    """Compute a layer of experts by `experts` if it is taken, else by SGLang's runner `self`."""
    if self not in _taken:
        refusal = _refusal(self, dispatch_output, quant_info)
        _taken[self] = (_weights(quant_info), _gating(self.config)) if refusal is None else None
        _tell("experts", refusal)
    if _taken[self] is None:
        return own(self, dispatch_output, quant_info, lora_info)
    weights, gating = _taken[self]
    x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    scaling = self.config.routed_scaling_factor
    with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
        out = torch.empty_like(x)
    experts(
        x,
        topk.topk_ids,
        topk.topk_weights if scaling in (None, 1.0) else topk.topk_weights * scaling,
        weights.operand(quant_info.w13_weight, quant_info.w13_scale),
        weights.operand(quant_info.w2_weight, quant_info.w2_scale),
        out=out,
        w1_bias=getattr(quant_info, "b13", None),
        w2_bias=getattr(quant_info, "b2", None),
        **gating,
    )
    return StandardCombineInput(hidden_states=out)


def _refusal(runner: Any, dispatch_output: Any, quant_info: Any) -> str | None:
    """Return why a layer of experts is not taken; None if it is. The answer never changes for a runner."""
    asked = get_moe_runner_backend()
    if not (asked.is_auto() or asked.is_deep_gemm()):
        return f"the user chose --moe-runner-backend {asked.value}"
    if runner.lora_enabled:
        return "there may be LoRA"
    if not isinstance(quant_info, (DeepGemmMoeQuantInfo, TritonMoeQuantInfo)):
        return f"weights are a {type(quant_info).__name__}"
    if not isinstance(dispatch_output, StandardDispatchOutput) or dispatch_output.hidden_states_scale is not None:
        return f"tokens are in a {type(dispatch_output).__name__}"
    if not TopKOutputChecker.format_is_standard(dispatch_output.topk_output):
        return f"routes are a {type(dispatch_output.topk_output).__name__}"
    for given in (runner.config, quant_info):
        for field in fields(given):
            value = getattr(given, field.name)
            if field.name not in KNOWN and (isinstance(value, Tensor) or value != field.default):
                return f"{field.name} must be {field.default}"
    w13, weights = quant_info.w13_weight, _weights(quant_info)
    if weights is None:
        return f"weights are {w13.dtype} with a scale for {quant_info.block_shape}"
    if _gating(runner.config) is None:
        return f"activation {runner.config.activation} is not supported with its parameters"
    x = dispatch_output.hidden_states
    return experts_refusal(x.dtype, x.shape[1], w13.shape[1] // 2, weights)


def _weights(quant_info: Any) -> Weights | None:
    """Return the kind of a layer's experts' weights; None for an unknown kind."""
    dtype, block = quant_info.w13_weight.dtype, tuple(quant_info.block_shape or ())
    if getattr(quant_info, "is_fp4_experts", False):
        return FP4 if dtype == torch.int8 else None
    if dtype == torch.bfloat16:
        return None if block else PLAIN
    return {(): BY_ROWS, PER_BLOCK: BY_BLOCKS}.get(block) if dtype == torch.float8_e4m3fn else None


def _gating(config: Any) -> dict[str, Any] | None:
    """Return a layer's activation as arguments of `experts`; None for an unknown activation."""
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if config.activation == "situ" and limit is not None:
        return {"activation": "situ", "alpha": alpha, "beta": limit}
    if config.activation != "silu":
        return None
    if alpha is None:  # SGLang's `gemm1_clamp_limit` then clamps after silu
        return {"limit": config.swiglu_limit} if limit is None else None
    is_known = config.swiglu_limit is None and limit is not None and config.gemm1_beta in (None, 1.0)
    return {"alpha": alpha, "beta": 1.0, "limit": limit} if is_known and not config.gate_up_interleaved else None


@cache
def _tell(layer: str, refusal: str | None) -> None:
    """Log once that a layer is taken, or why SGLang computes it."""
    if refusal is None:
        logger.info("deep_gemm computes %s", layer)
    else:
        logger.info("deep_gemm leaves %s to SGLang: %s", layer, refusal)
