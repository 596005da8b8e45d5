"""Experts as models of transformers have them: all of a layer in two parameters, `gate_up_proj` and `down_proj`.

Their class says by attributes and `_apply_gate` how it computes. In training they stay as they are, and the model's
`experts_implementation` computes them in FP8. For inference they become `FrozenStackedExperts`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..moe.routing import expert_rows
from .experts import FP8, mixture
from .frozen import FrozenExperts

NAME, NAME_FP8 = "deep_gemm_bf16", "deep_gemm_fp8"
WEIGHTS = "gate_up_proj", "down_proj"
FORM_OF_EXPERTS = {
    "has_gate": (True, "experts with a gate"),
    "has_bias": (False, "experts whose products add no bias"),
    "is_transposed": (False, "weights of experts as torch.nn.Linear has its own, [experts, n, k]"),
    "is_concatenated": (True, "the gate's rows ahead of all rows of up"),
    "has_post_expert_norm": (False, "experts without a norm behind them"),
}
"""Attributes of a mixture: the values that `experts` takes, in words."""


def is_stacked(layer: torch.nn.Module) -> bool:
    """Tell whether a layer is a mixture of transformers that has experts implementations."""
    return hasattr(type(layer), "_apply_gate") and hasattr(layer, "config") and layer._parameters.keys() >= {*WEIGHTS}


def is_trained_in_fp8(layer: Any) -> bool:
    """Tell whether a layer is a mixture of transformers whose implementation is FP8's."""
    return is_stacked(layer) and layer.config._experts_implementation == NAME_FP8


def form_refusal(layer: Any) -> str | None:
    """Say why a mixture is not computed here; None if it is."""
    for name, (value, words) in FORM_OF_EXPERTS.items():
        if getattr(layer, name, value) != value:
            return f"{name}: expected {words}, got {type(layer).__name__} with {name} = {getattr(layer, name)}"
    if not hasattr(layer, "_gate_is_silu"):  # the answer is kept, and nothing changes it
        layer._gate_is_silu = _gate_is_silu(layer)
    if not layer._gate_is_silu:
        return f"gate: expected silu(gate) * up, both cut at limit = {limit_of(layer)}, got another function"
    return None


def _gate_is_silu(layer: Any) -> bool:
    """Try the layer's gate: models may soften, shift or replace it, and new ones in ways not known here."""
    cut = limit_of(layer)
    limit, reach = (torch.inf, 24) if cut is None else (cut, max(24, 2 * cut))
    steps = torch.linspace(-reach, reach, 193, device="cpu", dtype=torch.float32)
    gate, up = torch.meshgrid(steps, steps, indexing="ij")
    expected = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    with torch.no_grad():
        got: Tensor = layer._apply_gate(torch.cat([gate, up], dim=-1))
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def limit_of(layer: Any) -> float | None:
    """Give the value at which a mixture cuts gate and up."""
    limit: float | None = getattr(layer, "limit", None)
    return limit


def register_fp8() -> None:
    """Let transformers know the implementation in FP8 by its name."""
    import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME_FP8, fp8_experts_forward)


def fp8_experts_forward(
    layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, products: str = FP8
) -> Tensor:
    """Compute a mixture of experts by products in FP8, with gradients."""
    if refusal := form_refusal(layer):
        raise NotImplementedError(f"{refusal}; experts_implementation={NAME!r} computes it in BF16")
    ids = torch.where(top_k_index < layer.num_experts, top_k_index, -1)
    rows, weights = expert_rows(ids, layer.num_experts), (layer.gate_up_proj, layer.down_proj)
    return mixture(hidden_states, top_k_weights, *weights, rows, limit_of(layer), products)


class FrozenStackedExperts(FrozenExperts):
    """`FrozenExperts` under the names that models of transformers and their state dicts have."""

    WEIGHTS = WEIGHTS

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the mixture. An id behind all experts is another rank's expert."""
        if top_k_index.is_cpu:  # a GPU takes every id that no expert has for none, the CPU -1 alone
            top_k_index = top_k_index.masked_fill(top_k_index >= len(self.held(WEIGHTS[0])[0]), -1)
        return super().forward(hidden_states, top_k_index, top_k_weights)
