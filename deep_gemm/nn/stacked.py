"""Mixtures of transformers models, which hold a layer's experts in two parameters, `gate_up_proj` and `down_proj`.

Attributes and `_apply_gate` of a mixture's class define the function. In training the modules stay, and the model's
`experts_implementation` computes them in FP8 or BF16. For inference they become `FrozenStackedExperts`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..gemm.api.bf16_grouped import m_grouped_bf16_gemm_nn_contiguous, m_grouped_bf16_gemm_nt_contiguous
from ..moe.routing import expert_rows
from .experts import BF16, FP8, mixture
from .frozen import FrozenExperts

NAME, NAME_FP8 = "deep_gemm_bf16", "deep_gemm_fp8"
PRODUCTS = {NAME: BF16, NAME_FP8: FP8}
WEIGHTS = "gate_up_proj", "down_proj"
FORM_OF_EXPERTS = {
    "has_gate": (True, "experts with a gate"),
    "has_bias": (False, "experts whose products add no bias"),
    "is_transposed": (False, "weights of experts as torch.nn.Linear has its own, [experts, n, k]"),
    "is_concatenated": (True, "the gate's rows ahead of all rows of up"),
    "has_post_expert_norm": (False, "experts without a norm behind them"),
}
"""Attributes of a mixture: the value that this package supports, and its meaning in words."""


def is_stacked(layer: torch.nn.Module) -> bool:
    """Tell whether a layer is a mixture of transformers that supports experts implementations."""
    return hasattr(type(layer), "_apply_gate") and hasattr(layer, "config") and layer._parameters.keys() >= {*WEIGHTS}


def products_of(layer: Any) -> str | None:
    """Name the products, FP8 or BF16, for training a mixture with this package; return None for other layers."""
    return PRODUCTS.get(layer.config._experts_implementation) if is_stacked(layer) else None


def form_refusal(layer: Any) -> str | None:
    """Return the reason that a mixture is not supported, or None."""
    for name, (value, words) in FORM_OF_EXPERTS.items():
        if getattr(layer, name, value) != value:
            return f"{name}: expected {words}, got {type(layer).__name__} with {name} = {getattr(layer, name)}"
    if not hasattr(layer, "_gate_is_silu"):  # the answer never changes, so it is kept
        layer._gate_is_silu = _gate_is_silu(layer)
    if not layer._gate_is_silu:
        return f"gate: expected silu(gate) * up, both cut at limit = {limit_of(layer)}, got another function"
    return None


def _gate_is_silu(layer: Any) -> bool:
    """Try the layer's gate on sample values, because models may soften, shift or replace the gate in unknown ways."""
    cut = limit_of(layer)
    limit, reach = (torch.inf, 24) if cut is None else (cut, max(24, 2 * cut))
    steps = torch.linspace(-reach, reach, 193, device="cpu", dtype=torch.float32)
    gate, up = torch.meshgrid(steps, steps, indexing="ij")
    expected = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    with torch.no_grad():
        got: Tensor = layer._apply_gate(torch.cat([gate, up], dim=-1))
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def limit_of(layer: Any) -> float | None:
    """Return the value at which a mixture cuts gate and up."""
    return getattr(layer, "limit", None)


def register_experts() -> None:
    """Register both implementations with transformers, by their names."""
    known = import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    known.register(NAME, experts_forward)
    known.register(NAME_FP8, fp8_experts_forward)


def fp8_experts_forward(
    layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, products: str = FP8
) -> Tensor:
    """Compute a mixture of experts with FP8 products, with gradients."""
    if refusal := form_refusal(layer):
        raise NotImplementedError(f"{refusal}; experts_implementation={NAME!r} computes it in BF16")
    ids = torch.where(top_k_index < layer.num_experts, top_k_index, -1)
    rows, weights = expert_rows(ids, layer.num_experts), (layer.gate_up_proj, layer.down_proj)
    return mixture(hidden_states, top_k_weights, *weights, rows, limit_of(layer), products)


def experts_forward(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a mixture of experts like `nn.Experts`; with biases or other gates, use grouped products only."""
    if form_refusal(layer) is None:
        return fp8_experts_forward(layer, hidden_states, top_k_index, top_k_weights, BF16)
    num_tokens, top_k = top_k_index.shape
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    is_here = ids < layer.num_experts  # expert parallelism numbers other ranks' experts from num_experts on
    has_expert, layout = is_here[:, None], torch.where(is_here, ids, -1).to(torch.int32)
    of_rows = ids.clamp(max=layer.num_experts - 1)
    name = "gate_up_proj" if layer.has_gate else "up_proj"
    x = hidden_states[order // top_k].masked_fill(~has_expert, 0)
    x = _product(layer, x, name, layout, of_rows).masked_fill(~has_expert, 0)
    x = layer._apply_gate(x) if layer.has_gate else layer.act_fn(x)
    x = _product(layer, x, "down_proj", layout, of_rows)
    if getattr(layer, "has_post_expert_norm", False):
        x = layer.post_expert_norm(x)
    weighted = (x * top_k_weights.reshape(-1)[order, None]).masked_fill(~has_expert, 0)
    in_order = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return weighted[in_order].view(num_tokens, top_k, -1).sum(1).to(hidden_states.dtype)


def _product(layer: Any, x: Tensor, name: str, layout: Tensor, of_rows: Tensor) -> Tensor:
    product = m_grouped_bf16_gemm_nn_contiguous if layer.is_transposed else m_grouped_bf16_gemm_nt_contiguous
    made = product(x, getattr(layer, name), grouped_layout=layout)
    assert made is not None
    return made + getattr(layer, f"{name}_bias")[of_rows] if layer.has_bias else made


class FrozenStackedExperts(FrozenExperts):
    """`FrozenExperts` with the parameter names of transformers models and their state dicts."""

    WEIGHTS = WEIGHTS

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the mixture. Ids of `num_experts` and more belong to other ranks."""
        if top_k_index.is_cpu:  # a GPU treats every unknown id as none, the CPU only -1
            top_k_index = top_k_index.masked_fill(top_k_index >= len(self.held(WEIGHTS[0])[0]), -1)
        return super().forward(hidden_states, top_k_index, top_k_weights)
