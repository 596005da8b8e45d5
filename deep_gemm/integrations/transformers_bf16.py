"""BF16 experts of transformers (5.17 and newer) on our grouped products, in inference and in training.

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation=NAME)

It is an experts implementation like transformers' own "grouped_mm", for every mixture that has that one. `NAME_FP8`
is one whose products are FP8's, forward and backward, as those of `nn.Experts`, where the gate is SiLU's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..gemm.api.bf16_grouped import m_grouped_bf16_gemm_nn_contiguous, m_grouped_bf16_gemm_nt_contiguous
from ..nn.experts import BF16
from ..nn.stacked import NAME, NAME_FP8, form_refusal, fp8_experts_forward, register_fp8

__all__ = ["NAME", "NAME_FP8", "experts_forward", "fp8_experts_forward", "register_experts"]


def register_experts() -> None:
    """Let transformers know both implementations by their names."""
    import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    register_fp8()


def experts_forward(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a mixture of experts: as `nn.Experts` does, or with biases and other gates by grouped products alone."""
    if form_refusal(layer) is None and layer.gate_up_proj.dtype == torch.bfloat16:
        return fp8_experts_forward(layer, hidden_states, top_k_index, top_k_weights, BF16)
    num_tokens, top_k = top_k_index.shape
    ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    has_expert = (ids < layer.num_experts)[
        :, None
    ]  # under expert parallelism the experts of others are numbered behind
    layout = torch.where(ids < layer.num_experts, ids, -1).to(torch.int32)
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
