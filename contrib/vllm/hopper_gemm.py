"""FP8 layers with scales of blocks in one call each, computed by the package hopper-gemm, for vLLM.

Both classes have the form of vLLM's own backends. In vLLM they would be in two files:

    vllm/model_executor/kernels/linear/scaled_mm/hopper_gemm.py        HopperGemmFp8BlockScaledMMKernel
    vllm/model_executor/layers/fused_moe/experts/hopper_gemm_moe.py    HopperGemmExperts

`register.patch` in this folder adds them to vLLM's lists, after vLLM's own: with the patch,
`--linear-backend hopper_gemm` and `--moe-backend hopper_gemm` select them.
"""

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from vllm.platforms import current_platform

BLOCKS = ((128, 128), (64, 64), (32, 32))


def has_hopper_gemm() -> bool:
    """Tell whether the installed `deep_gemm` is hopper-gemm: DeepGEMM has no `experts`."""
    try:
        import deep_gemm
    except ImportError:
        return False
    return hasattr(deep_gemm, "experts")


def _is_hopper() -> bool:
    return current_platform.is_cuda() and current_platform.is_device_capability(90)


class HopperGemmFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
    """Casts its BF16 activations itself: for up to 16 tokens the cast and the GEMM are one launch."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not _is_hopper():
            return False, "hopper-gemm is only supported on Hopper GPUs"
        if not has_hopper_gemm():
            return False, "hopper-gemm is not installed, or another package is `deep_gemm`"
        return True, None

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        can_implement_base, reason = super().can_implement(config)
        if not can_implement_base:
            return can_implement_base, reason
        if config.out_dtype != torch.bfloat16:
            return False, "Supports only output dtype of bfloat16"
        block = tuple(config.weight_quant_key.scale.group_shape)
        if block not in BLOCKS:
            return False, f"Supports only weight blocks in {BLOCKS}"
        if tuple(config.activation_quant_key.scale.group_shape) != (1, block[1]):
            return False, "Supports only activation groups as wide as a weight block"
        n, k = config.weight_shape
        if n % 8 or k % 16:
            return False, "Supports only n % 8 == 0 and k % 16 == 0"
        if envs.VLLM_BATCH_INVARIANT:
            import deep_gemm

            deep_gemm.set_batch_invariant(True)
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if getattr(layer, "is_bmm", False):
            raise NotImplementedError("hopper_gemm: bmm layers need --linear-backend deep_gemm")
        super().process_weights_after_loading(layer)

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply BF16 `A`, which `apply_input_quant` leaves unquantized; `As` is a placeholder."""
        import deep_gemm

        return deep_gemm.linear(A, (B, Bs))


class HopperGemmExperts(mk.FusedMoEExpertsModular):
    """A whole MoE layer in one call: casts, both GEMMs, activation, and the weighted sum of a token's experts.

    Rows of experts are not padded to 128, and tokens are not copied in permuted order.
    """

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        if moe_config.in_dtype != torch.bfloat16:
            return False, "kernel supports only bfloat16 activations"
        if moe_config.intermediate_size_per_partition % 128:
            return False, "kernel supports only intermediate sizes per partition that are multiples of 128"
        return mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )

    @staticmethod
    def _supports_current_device() -> bool:
        return _is_hopper() and has_hopper_gemm()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.use_ag_rs_all2all_kernels

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % 16 == 0

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (M, K), (1,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        import deep_gemm

        of, model = self.quant_config, self.moe_config  # the model's numbers, if the weights' configuration has none
        gating = {"limit": model.swiglu_limit if of.gemm1_clamp_limit is None else of.gemm1_clamp_limit}
        if activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
            gating["alpha"] = model.swiglu_alpha if of.gemm1_alpha is None else of.gemm1_alpha
            gating["beta"] = model.swiglu_beta if of.gemm1_beta is None else of.gemm1_beta
        if expert_map is not None:  # another rank's expert becomes -1, which is skipped
            topk_ids = expert_map[topk_ids.clamp(min=0).long()].masked_fill(topk_ids < 0, -1)
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        deep_gemm.experts(
            hidden_states,
            topk_ids,
            topk_weights,
            (w1, self.w1_scale),
            (w2, self.w2_scale),
            out=output,
            w1_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            **gating,
        )
