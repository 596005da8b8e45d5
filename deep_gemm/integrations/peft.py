"""LoRA by peft (0.21 and newer) on layers in FP8: adapters in FP32 or BF16 beside each `FrozenLinear`.

    register_lora()
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))

The layers are peft's own, so adapters are saved, loaded and switched as usual. No adapter is merged into FP8 weights.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import model as dispatching
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from ..nn import FrozenLinear
from ..nn.frozen import Frozen

__all__ = ["LoraFrozenLinear", "register_lora"]

INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that neither read nor change the layer's weight."""


class LoraFrozenLinear(Linear):
    """Peft's LoRA layer for a `FrozenLinear`."""

    lora_variants = {(): None}  # noqa: RUF012 - as in peft. No variants, because they read the weight

    def update_layer(self, *args: Any, config: Any, **kwargs: Any) -> None:
        """Add an adapter."""
        if config.init_lora_weights not in INITS:
            raise ValueError(f"init_lora_weights: expected one of {INITS}, got {config.init_lora_weights!r}")
        super().update_layer(*args, config=config, **kwargs)

    def merge(self, *_: Any, **__: Any) -> None:
        """Refuse to merge, and tell how to merge in BF16."""
        raise NotImplementedError(
            "merge: expected weights in BF16, got FP8, which rounds most of a small adapter away: save it, load it "
            "with the BF16 model, call PeftModel.from_pretrained(model, folder).merge_and_unload(), and convert again"
        )

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.weight.shape[1], module.weight.shape[0]

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        return base_layer.weight.device, torch.bfloat16  # the type of adapters: FP8 would round them


def register_lora() -> None:
    """Let peft add LoRA to each `FrozenLinear` that `target_modules` names, in the whole process."""
    own: Any = dispatching.dispatch_default

    def dispatch_fp8(target: Any, adapter_name: str, **more: Any) -> Any:
        layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if not isinstance(layer, Frozen):
            return own(target, adapter_name, **more)
        kind, dtype = type(layer).__name__, next(layer.parameters()).dtype
        if not isinstance(layer, FrozenLinear) or dtype != torch.float8_e4m3fn:
            raise ValueError(f"target_modules: expected layers that are FrozenLinear in FP8, got {kind} of {dtype}")
        return LoraFrozenLinear(target, adapter_name, **more)

    if own.__name__ != dispatch_fp8.__name__:
        dispatching.dispatch_default = dispatch_fp8
