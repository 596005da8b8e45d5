"""FP8 layers in one call each, computed by the package hopper-gemm, for SGLang.

Both functions have the form of SGLang's own backends. In SGLang they would be in one file,
`sglang/srt/layers/moe/moe_runner/hopper_gemm.py`. `register.patch` in this folder adds them to SGLang's lists; then
`--moe-runner-backend hopper_gemm` and `--fp8-gemm-backend hopper_gemm` select them, and no other option does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.moe_runner.base import register_fused_func

if TYPE_CHECKING:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput


@functools.cache
def has_hopper_gemm() -> bool:
    """Return True if the installed ``deep_gemm`` is hopper-gemm: DeepGEMM has no ``experts``."""
    try:
        import deep_gemm
    except ImportError:
        return False
    return hasattr(deep_gemm, "experts")


def hopper_gemm_w8a8_block_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    act_scale_ue8m0: bool = False,
    weight_bf16: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cast BF16 activations and multiply them: in one launch for up to 16 tokens."""
    import deep_gemm
    from sglang.srt.layers.quantization.fp8_utils import triton_w8a8_block_fp8_linear

    n, k = weight.shape[-2:]
    is_supported = (
        input.dtype == torch.bfloat16
        and input_scale is None
        and not act_scale_ue8m0
        and weight.ndim == 2
        and weight_scale.dtype == torch.float32
        and list(block_size) in ([128, 128], [64, 64], [32, 32])
        and n % 8 == 0
        and k % 16 == 0
    )
    if not is_supported:
        return triton_w8a8_block_fp8_linear(
            input,
            weight,
            block_size,
            weight_scale,
            input_scale,
            bias,
            act_scale_ue8m0=act_scale_ue8m0,
            weight_bf16=weight_bf16,
        )
    return deep_gemm.linear(input, (weight, weight_scale), bias=bias)


def _gating(config: MoeRunnerConfig) -> dict[str, Any]:
    """Return the activation as arguments for ``deep_gemm.experts``."""
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if config.activation == "situ" and limit is not None:
        return {"activation": "situ", "alpha": alpha, "beta": limit}
    if config.activation == "silu" and alpha is None and limit is None:
        return {"limit": config.swiglu_limit}
    is_usual = config.swiglu_limit is None and not config.gate_up_interleaved
    if config.activation == "silu" and alpha is not None and limit is not None and is_usual:
        return {"alpha": alpha, "beta": 1.0 if config.gemm1_beta is None else config.gemm1_beta, "limit": limit}
    raise ValueError(
        "The hopper_gemm MoE runner backend supports silu(gate) * up, with swiglu_limit or with gemm1_alpha and "
        f"gemm1_clamp_limit on weights that are not interleaved, and situ; got activation={config.activation}, "
        f"gemm1_alpha={alpha}, gemm1_clamp_limit={limit}, swiglu_limit={config.swiglu_limit}, "
        f"gate_up_interleaved={config.gate_up_interleaved}."
    )


def _check_runner_config_supported(config: MoeRunnerConfig) -> None:
    if not config.is_gated:
        raise ValueError("The hopper_gemm MoE runner backend only supports gated activations.")
    if config.apply_router_weight_on_input or config.no_combine or config.no_combine_keep_router_weight:
        raise ValueError(
            "The hopper_gemm MoE runner backend weights and sums the experts of each token: it does not support "
            "apply_router_weight_on_input, no_combine and no_combine_keep_router_weight."
        )


def _operand(weight: torch.Tensor, scale: torch.Tensor | None, block_shape: list[int] | None) -> Any:
    """Return experts' weights in the form of ``deep_gemm.experts``, with scales of blocks, rows or experts."""
    if weight.dtype != torch.float8_e4m3fn or scale is None:
        raise ValueError(f"The hopper_gemm MoE runner backend expects E4M3 weights and scales, got {weight.dtype}.")
    if block_shape is not None:
        if list(block_shape) != [128, 128]:
            raise ValueError(f"The hopper_gemm MoE runner backend expects blocks of [128, 128], got {block_shape}.")
        return weight, scale
    experts, rows, _ = weight.shape
    return weight, scale.reshape(experts, rows, 1) if scale.numel() == experts * rows else scale.reshape(experts)


@register_fused_func("none", "hopper_gemm")
def fused_experts_none_to_hopper_gemm(
    dispatch_output: StandardDispatchOutput,
    quant_info: TritonMoeQuantInfo,
    runner_config: MoeRunnerConfig,
) -> StandardCombineInput:
    """Compute a MoE layer in one call, from routes to the weighted sum; no expert's rows are padded.

    Weights have the Triton runner's layout. Another rank's expert is -1 in ``topk_ids``, and is skipped.
    """
    import deep_gemm
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.moe.topk import TopKOutputChecker

    _check_runner_config_supported(runner_config)
    x, topk_output = dispatch_output.hidden_states, dispatch_output.topk_output
    if dispatch_output.hidden_states_scale is not None or x.dtype != torch.bfloat16:
        raise ValueError(f"The hopper_gemm MoE runner backend casts BF16 activations by itself, got {x.dtype}.")
    if not TopKOutputChecker.format_is_standard(topk_output):
        routes = type(topk_output).__name__
        raise ValueError(f"The hopper_gemm MoE runner backend expects standard routes, got {routes}.")
    scaling = runner_config.routed_scaling_factor
    topk_weights = topk_output.topk_weights
    out = deep_gemm.experts(
        x,
        topk_output.topk_ids,
        topk_weights if scaling in (None, 1.0) else topk_weights * scaling,
        _operand(quant_info.w13_weight, quant_info.w13_scale, quant_info.block_shape),
        _operand(quant_info.w2_weight, quant_info.w2_scale, quant_info.block_shape),
        w1_bias=quant_info.b13,
        w2_bias=quant_info.b2,
        **_gating(runner_config),
    )
    return StandardCombineInput(hidden_states=out)
