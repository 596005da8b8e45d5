"""SGLang's plugin, which SGLang loads into each of its processes by the entry point `sglang.srt.plugins`.

On a Hopper GPU, the plugin adds four hooks around functions of SGLang, by SGLang's own registry of hooks:

    the linear layer of SGLang for DeepGEMM               `linear`: cast and product, in one launch up to 16 rows
    the FP8 linear layer with scales of rows, or one      `linear`
    a layer of experts, with any of SGLang's kernels      `experts`: from routes to their weighted sum
    the start of SGLang's batch invariant mode            also `set_batch_invariant(True)`, so layers stay taken

If a layer is not taken, SGLang's own function computes it, and a line in the log tells why. The plugin does not replace
kernels that a user names (`--moe-runner-backend triton`). `DG_DISABLE_SGLANG_PLUGIN=1` turns the plugin off, and so
does `SGLANG_ENABLE_JIT_DEEPGEMM=0`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import ExitStack
from importlib import import_module

from ..core.settings import settings
from .engine import Places, all_or_nothing, parts_there, replace, why_not

__all__ = ["register"]

logger = logging.getLogger("sglang.plugins.deep_gemm")

OF_LAYERS = "sglang.srt.layers"
LINEAR = f"{OF_LAYERS}.quantization.fp8_utils", "deepgemm_w8a8_block_fp8_linear_with_fallback"
ROW_LINEAR = f"{OF_LAYERS}.quantization.fp8_utils", "apply_fp8_linear"
MODE = "sglang.srt.batch_invariant_ops", "enable_batch_invariant_mode"
"""With `--enable-deterministic-inference`, each process that runs a model calls this before any layer."""
EXPERTS = f"{OF_LAYERS}.moe.moe_runner.runner", "MoeRunner.run"
PLACES: Places = {
    LINEAR: (
        *("input", "weight", "block_size", "weight_scale"),
        *("input_scale", "bias", "act_scale_ue8m0?", "weight_bf16?"),
    ),
    EXPERTS: ("self", "dispatch_output", "quant_info", "lora_info"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register"): ("target", "hook", "hook_type", "source"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry._hooks"): None,
    ("sglang.srt.plugins.hook_registry", "HookType.AROUND"): None,
    (f"{OF_LAYERS}.deep_gemm_wrapper.configurer", "ENABLE_JIT_DEEPGEMM"): None,
    (f"{OF_LAYERS}.moe.moe_runner.base", "MoeRunnerConfig"): None,
    (f"{OF_LAYERS}.moe.moe_runner.deep_gemm", "DeepGemmMoeQuantInfo"): None,
    (f"{OF_LAYERS}.moe.moe_runner.triton", "TritonMoeQuantInfo"): None,
    (f"{OF_LAYERS}.moe.token_dispatcher.standard", "StandardCombineInput"): ("hidden_states",),
    (f"{OF_LAYERS}.moe.token_dispatcher.standard", "StandardDispatchOutput"): (
        *("hidden_states", "hidden_states_scale", "topk_output", "hidden_states_pre_quant"),
    ),
    (f"{OF_LAYERS}.moe.topk", "TopKOutputChecker.format_is_standard"): ("topk_output",),
    (f"{OF_LAYERS}.moe.utils", "get_moe_runner_backend"): (),
    (f"{OF_LAYERS}.dp_attention", "is_allocation_symmetric"): (),
    ("sglang.srt.distributed.device_communicators.pynccl_allocator", "use_symmetric_memory"): (
        *("group_coordinator", "disabled"),
    ),
    MODE: None,
    ("sglang.srt.runtime_context", "get_parallel"): (),
}
"""Functions of SGLang that the plugin hooks or calls, as in the known releases (0.5.17, 0.5.22, 0.5.23). A layer's
fields are checked one by one, when the layer first runs."""

PARTS: dict[str, Places] = {
    "row_linear_or": {
        ROW_LINEAR: (
            *("input", "weight", "weight_scale", "input_scale", "input_scale_ub", "bias", "cutlass_fp8_supported"),
            *("use_per_token_if_dynamic", "pad_output", "compressed_tensor_quant", "pre_quant_output_dtype?"),
        ),
        (ROW_LINEAR[0], "get_fp8_gemm_runner_backend"): (),
        (ROW_LINEAR[0], "use_triton_w8a8_fp8_kernel"): None,
    },
}
"""Functions that only one hook needs. If a release lacks them, the other hooks are still added."""


def register() -> None:
    """Add the hooks around SGLang's functions in this process, unless a setting or the release forbids it."""
    all_or_nothing("SGLang", logger, _register)


def _register(undo: ExitStack) -> None:
    if settings().disable_sglang_plugin or not import_module("sglang.srt.utils").is_sm90_supported():
        return
    if refusal := why_not("sglang", PLACES):
        logger.warning("deep_gemm leaves all layers to SGLang: %s", refusal)
        return
    if not import_module(f"{OF_LAYERS}.deep_gemm_wrapper.configurer").ENABLE_JIT_DEEPGEMM:
        return
    layers = import_module("deep_gemm.integrations.sglang_layers")
    hooks = import_module("sglang.srt.plugins.hook_registry")
    registered = {target: [*there] for target, there in hooks.HookRegistry._hooks.items()}
    replace(undo, hooks.HookRegistry, "_hooks", defaultdict(list, registered))
    [of_rows] = parts_there("sglang", logger, PARTS, layers)
    there = [(MODE, layers.with_mode), (LINEAR, layers.linear_or), (EXPERTS, layers.experts_or)]
    for place, hook in (*there, *((ROW_LINEAR, hook) for hook in of_rows)):
        hooks.HookRegistry.register(".".join(place), hook, hooks.HookType.AROUND)
