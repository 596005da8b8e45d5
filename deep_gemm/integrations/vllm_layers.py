"""Layers that vLLM may choose. vllm.py offers the layers. Importing this module needs vLLM."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from ..core.check.layout import SCALE_BLOCK
from ..linear.api import linear
from ..moe.api import experts
from .engine import BY_BLOCKS, BY_ROWS, FP4, PLAIN, experts_refusal, linear_refusal, row_operand
from .transformers import as_fp32
from .vllm import take_mode

Answer = tuple[bool, str | None]
ROWS_OR_ALL = (-1, 1), (1, -1), (-1, -1)
"""vLLM's group shapes for scales of a weight's rows (two forms), and for one scale of the whole weight."""


class DeepGemmLinear(Fp8BlockScaledMMLinearKernel):
    """A linear layer with an FP8 weight that has scales of blocks. Input and output are BF16."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Tell whether this GPU can run the layer. When vLLM makes a layer by rows, it passes no capability."""
        return compute_capability in (None, 90), "is for Hopper GPUs"

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        """Tell whether this kind takes a layer."""
        take_mode()
        both = config.weight_quant_key, config.activation_quant_key
        of_weight, of_activations = (key.scale.group_shape for key in both)
        refusal = linear_refusal(config.out_dtype, of_weight, *config.weight_shape)
        if tuple(of_activations) != (1, of_weight[1]):
            refusal = f"needs activation scales for the same number of columns, not {of_activations}"
        if refusal is not None:
            return False, refusal
        return super().can_implement(config)  # type: ignore[no-any-return]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert scales of 128x128 to FP32, exactly, if they are UE8M0. Finer scales may stay UE8M0."""
        super().process_weights_after_loading(layer)
        name = self._name_of_scales(layer)
        if self.weight_group_shape[0] == SCALE_BLOCK:
            replace_parameter(layer, name, as_fp32(getattr(layer, name).data))
        if getattr(layer, "is_bmm", False):
            self._view_by_heads(layer, name)

    def _view_by_heads(self, layer: Any, name_of_scales: str) -> None:
        """View weight and scales as operands of `fp8_einsum`, which a model calls instead of this layer."""
        heads, rows, block = layer.bmm_batch_size, layer.weight[..., 0].numel(), self.weight_group_shape[0]
        if block != SCALE_BLOCK or rows % (heads * SCALE_BLOCK):
            expected = f"{heads} heads, each of a multiple of 128 rows, with a scale for 128x128"
            raise NotImplementedError(f"is_bmm: expected {expected}, got {rows} rows in all, for {block}x{block}")
        for name in ("weight", name_of_scales):
            x = getattr(layer, name).data
            replace_parameter(layer, name, x.view(heads, -1, x.shape[-1]))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
        """Compute x @ weight.T + bias."""
        w = layer.weight, getattr(layer, self._name_of_scales(layer))
        return linear(x, w, bias=bias)  # type: ignore[return-value]

    def apply_block_scaled_mm(self, *_: object, **__: object) -> Tensor:
        """Refuse to multiply operands that are already cast: `apply_weights` never calls this."""
        raise NotImplementedError(f"{type(self).__name__} casts activations by itself")

    def _name_of_scales(self, layer: Any) -> str:
        params = self._get_layer_params(layer)
        name: str = params.WEIGHT_SCALE if params.weight_scale_inv is None else params.WEIGHT_SCALE_INV
        return name


class DeepGemmRowLinear(getattr(kernels, "FP8ScaledMMLinearKernel", object)):  # type: ignore[misc]
    """A linear layer whose FP8 weight has a scale for each row, or a single scale. Activations are cast by row."""

    is_supported = DeepGemmLinear.is_supported
    apply_scaled_mm = DeepGemmLinear.apply_block_scaled_mm

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        """Tell whether this kind takes a layer. Activations may have static scales, which are not used."""
        take_mode()
        of_weight = tuple(config.weight_quant_key.scale.group_shape)
        refusal = linear_refusal(config.out_dtype, None, *config.weight_shape)
        if of_weight not in ROWS_OR_ALL:
            refusal = f"has a scale for each row or one for all, not {of_weight}"
        return refusal is None, refusal

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight + bias. vLLM stores this weight as `[k, n]`, a view of `[n, k]`."""
        weight, scales, _, bound = self._get_layer_params(layer)
        if bound is not None:  # FBGEMM bounds activations
            x = x.clamp(-bound, bound)
        return linear(x, row_operand(weight.t(), scales), bias=bias)  # type: ignore[return-value]


class DeepGemmExperts(mk.FusedMoEExpertsModular):
    """A layer of experts, from BF16 tokens to the weighted sum of their experts, in FP8 by 128x128 or in MXFP4."""

    weights = BY_BLOCKS
    expects_unquantized_inputs = True  # `experts` casts tokens

    @staticmethod
    def activation_format() -> Any:
        """Tell vLLM to pass tokens in their own order, with their routes."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        kind: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> Answer:
        """Tell whether this kind takes a layer."""
        take_mode()
        sizes = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
        is_fp4 = weight_key == keys.kMxfp4Static
        refusal = experts_refusal(moe_config.in_dtype, *sizes, FP4 if is_fp4 else kind.weights)
        if moe_config.has_bias and is_fp4:
            refusal = "experts in MXFP4 have biases"
        if moe_config.moe_backend not in ("auto", "deep_gemm"):
            refusal = f"the user chose moe_backend={moe_config.moe_backend}"
        if refusal is not None:
            return False, refusal
        layer = moe_config, weight_key, activation_key, activation_format
        return mk.FusedMoEExpertsModular.is_supported_config(kind, *layer)  # type: ignore[no-any-return]

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() and current_platform.is_device_capability(90))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        weights = keys.kFp8Static128BlockSym, keys.kMxfp4Static
        return weight_key in weights and activation_key == keys.kFp8Dynamic128Sym

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.use_ag_rs_all2all_kernels

    @property
    def post_gemm2_hook(self) -> None:
        """Return None: no function runs between the second product and the sum of a token's rows."""

    @post_gemm2_hook.setter
    def post_gemm2_hook(self, hook: object) -> None:
        if hook is not None:
            raise NotImplementedError("post_gemm2_hook: a token's rows are summed up here; use --moe-backend triton")

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Tell vLLM that `apply` itself weights and adds up the routes."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *_: object) -> tuple[tuple[int, ...], ...]:  # noqa: N803
        """Request memory only for the output."""
        return (M, K), (1,), (M, K)

    @cached_property
    def _gating(self) -> dict[str, Any]:
        """Arguments of `experts` for the activation, from the weights' configuration, or else the model's."""
        of, model = self.quant_config, self.moe_config
        told = {
            "limit": (of.gemm1_clamp_limit, model.swiglu_limit),
            "alpha": (of.gemm1_alpha, model.swiglu_alpha),
            "beta": (of.gemm1_beta, model.swiglu_beta),
        }
        return {name: by_model if by_weights is None else by_weights for name, (by_weights, by_model) in told.items()}

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        **_: object,
    ) -> None:
        """Compute the layer into `output`."""
        experts(
            hidden_states,
            topk_ids if expert_map is None else local_ids(topk_ids, expert_map),
            torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights,
            self.weights.operand(w1, self.w1_scale),
            self.weights.operand(w2, self.w2_scale),
            out=output,
            w1_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            **({"limit": self._gating["limit"]} if activation == MoEActivation.SILU else self._gating),
        )


class DeepGemmRowExperts(DeepGemmExperts):
    """FP8 experts with a scale for each row of a weight, or for each expert. Tokens are cast by row."""

    weights = BY_ROWS

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        if weight_key == keys.kFp8StaticChannelSym:
            return bool(activation_key == keys.kFp8DynamicTokenSym)
        casts = keys.kFp8StaticTensorSym, keys.kFp8DynamicTensorSym, keys.kFp8DynamicTokenSym
        return weight_key == keys.kFp8StaticTensorSym and activation_key in casts


class DeepGemmBF16Experts(DeepGemmExperts):
    """Experts in BF16: neither weights nor tokens are cast to FP8."""

    weights = PLAIN

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None


def local_ids(topk_ids: Tensor, expert_map: Tensor) -> Tensor:
    """Convert ids of all ranks' experts to this rank's numbers; -1 for experts of other ranks."""
    return expert_map[topk_ids.clamp(min=0).long()].masked_fill(topk_ids < 0, -1)
