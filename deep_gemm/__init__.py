"""FP8 and BF16 matrix products for NVIDIA Hopper: dense, and grouped for mixtures of experts.

Tensors are torch's. On CUDA tensors the products run kernels compiled at first need; on CPU tensors the same functions
run the reference, which defines the arithmetic. Start with `fp8_gemm_nt`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .compat.absent import refuse
from .compat.installed import is_command, warn_of_others, without_torch

if TYPE_CHECKING or not is_command():  # a command shows its options at once, and imports modules when it needs them
    try:
        from torch.distributed import is_available
    except ModuleNotFoundError as error:
        without_torch(error)

    from . import convert, nn, testing, utils
    from .casts.fp4 import cast_back_from_fp4, per_token_cast_to_fp4, quantize_mxfp4, transpose_packed_fp4
    from .casts.fp8 import (
        cast_back_from_fp8,
        cast_both_to_fp8,
        k_grouped_cast_to_fp8,
        per_block_cast_to_fp8,
        per_channel_cast_to_fp8,
        per_custom_dims_cast_to_fp8,
        per_tensor_cast_to_fp8,
        per_token_cast_to_fp8,
    )
    from .casts.rules import ceil_to_ue8m0
    from .casts.scales import (
        get_col_major_tma_aligned_tensor,
        get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
        get_mn_major_tma_aligned_packed_ue8m0_tensor,
        get_mn_major_tma_aligned_tensor,
        pack_ue8m0_to_int,
        transform_sf_into_required_layout,
        unpack_ue8m0_from_int,
    )
    from .core.check.layout import align, ceil_div, cell_div, get_tma_aligned_size
    from .core.operators import register_at_need
    from .core.settings import (
        get_batch_invariant,
        get_compile_mode,
        get_deterministic_algorithms,
        get_k_alignment_for_contiguous_layout,
        get_m_alignment_for_contiguous_layout,
        get_mk_alignment_for_contiguous_layout,
        get_num_sms,
        get_pdl,
        get_tc_util,
        get_theoretical_mk_alignment_for_contiguous_layout,
        set_batch_invariant,
        set_block_size_multiple_of,
        set_compile_mode,
        set_ignore_compile_dims,
        set_mk_alignment_for_contiguous_layout,
        set_num_sms,
        set_pdl,
        set_tc_util,
        shutdown,
        use_deterministic_algorithms,
    )
    from .gemm.api.bf16_dense import bf16_gemm_nn, bf16_gemm_nt, bf16_gemm_tn, bf16_gemm_tt
    from .gemm.api.bf16_einsum import batched_symm, batched_syrk, einsum
    from .gemm.api.bf16_grouped import (
        bf16_m_grouped_gemm_nt_masked,
        k_grouped_bf16_gemm_tn_contiguous,
        m_grouped_bf16_gemm_nn_contiguous,
        m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nt_masked,
    )
    from .gemm.api.dense import (
        cublaslt_gemm_nn,
        cublaslt_gemm_nt,
        cublaslt_gemm_tn,
        cublaslt_gemm_tt,
        fp8_fp4_gemm_nn,
        fp8_fp4_gemm_nt,
        fp8_fp4_gemm_tn,
        fp8_fp4_gemm_tt,
        fp8_gemm_nn,
        fp8_gemm_nt,
        fp8_gemm_tn,
        fp8_gemm_tt,
        gemm_fp8_fp8_bf16_nt,
        wgrad_gemm_fp8_fp8_fp32_nt,
    )
    from .gemm.api.grouped import (
        fp8_m_grouped_gemm_nt_masked,
        k_grouped_fp8_gemm_nt_contiguous,
        k_grouped_wgrad_gemm_fp8_fp8_fp32_nt,
        m_grouped_fp8_fp4_gemm_nn_contiguous,
        m_grouped_fp8_fp4_gemm_nt_contiguous,
        m_grouped_fp8_fp4_gemm_nt_masked,
        m_grouped_fp8_gemm_nn_contiguous,
        m_grouped_fp8_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_masked,
        m_grouped_gemm_fp8_fp8_bf16_nt_contiguous,
        m_grouped_gemm_fp8_fp8_bf16_nt_masked,
    )
    from .gemm.api.heads import fp8_einsum, fp8_gemm_nt_skip_head_mid
    from .gemm.explain import explain
    from .hyper.api import tf32_hc_prenorm_gemm
    from .indexer.api import (
        fp8_fp4_mqa_logits,
        fp8_fp4_paged_mqa_logits,
        fp8_mqa_logits,
        fp8_paged_mqa_logits,
        get_paged_mqa_logits_metadata,
    )
    from .linear.api import linear
    from .moe.activation import silu_mul_cast_to_fp8
    from .moe.api import experts, experts_workspace_bytes
    from .moe.routing import ExpertRows, expert_rows, gather_cast_to_fp8, gather_weighted
    from .nn.logprobs import selected_logprobs
    from .nn.refit import refit_
    from .testing import bench, bench_kineto, calc_diff
    from .utils.dist import init_dist, uneven_all_gather

    register_at_need(f"{__name__}.ops")

    if is_available():  # torch is built without it for some systems
        from . import distributed
        from .distributed import (
            SM90SymmBuffer,
            fp8_fp4_mega_moe,
            fp8_mega_moe,
            get_symm_buffer_for_mega_moe,
            get_symm_buffer_for_sm90_mega_moe,
            mega_moe_pre_dispatch_sm90,
            transform_weights_for_mega_moe,
            transform_weights_for_mega_moe_sm90,
        )

warn_of_others()

__version__ = "0.2.0"

__all__ = [
    "ExpertRows",
    "SM90SymmBuffer",
    "align",
    "batched_symm",
    "batched_syrk",
    "bench",
    "bench_kineto",
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "bf16_m_grouped_gemm_nt_masked",
    "calc_diff",
    "cast_back_from_fp4",
    "cast_back_from_fp8",
    "cast_both_to_fp8",
    "ceil_div",
    "ceil_to_ue8m0",
    "cell_div",
    "convert",
    "cublaslt_gemm_nn",
    "cublaslt_gemm_nt",
    "cublaslt_gemm_tn",
    "cublaslt_gemm_tt",
    "distributed",
    "einsum",
    "expert_rows",
    "experts",
    "experts_workspace_bytes",
    "explain",
    "fp8_einsum",
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_fp4_mega_moe",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_nt_skip_head_mid",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp8_mega_moe",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "gather_cast_to_fp8",
    "gather_weighted",
    "gemm_fp8_fp8_bf16_nt",
    "get_batch_invariant",
    "get_col_major_tma_aligned_tensor",
    "get_compile_mode",
    "get_deterministic_algorithms",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_pdl",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "get_tc_util",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "init_dist",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_cast_to_fp8",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
    "linear",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    "mega_moe_pre_dispatch_sm90",
    "nn",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_tensor_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "quantize_mxfp4",
    "refit_",
    "selected_logprobs",
    "set_batch_invariant",
    "set_block_size_multiple_of",
    "set_compile_mode",
    "set_ignore_compile_dims",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "shutdown",
    "silu_mul_cast_to_fp8",
    "testing",
    "tf32_hc_prenorm_gemm",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "transpose_packed_fp4",
    "uneven_all_gather",
    "unpack_ue8m0_from_int",
    "use_deterministic_algorithms",
    "utils",
    "wgrad_gemm_fp8_fp8_fp32_nt",
]

__all__ = [name for name in __all__ if name in globals()]  # torch is built without torch.distributed for some systems

if not TYPE_CHECKING:  # it would tell a type checker that every name exists

    def __getattr__(name: str) -> object:
        """Import the operators. Of a name that other libraries of this family have, say what to use instead."""
        return import_module(".ops", __name__) if name == "ops" else refuse(__name__, name)
