"""Names of the wider family of libraries that this package lacks, and what to use instead of each.

Programs choose a fallback by presence, so a name that cannot work must be absent: `hasattr` is False, and importing it
fails. Only the error's text mentions it.
"""

from __future__ import annotations

from typing import NoReturn

_TORCH = "torch.matmul or cublaslt_gemm_nt"
_LOOP = "torch.matmul for each group"
_FP8 = "per_token_cast_to_fp8 and the FP8 products"
_FP32_SCALES = "FP32 scales with get_mn_major_tma_aligned_tensor"
_DEQUANTIZED = "torch.matmul on dequantized tensors"
_MOE = "experts, m_grouped_fp8_gemm_nt_masked or m_grouped_fp8_gemm_nt_contiguous"

INSTEAD: dict[str, str] = {
    "bf16_gemm_nt": _TORCH,
    "bf16_gemm_nn": _TORCH,
    "bf16_gemm_tn": _TORCH,
    "bf16_gemm_tt": _TORCH,
    "m_grouped_bf16_gemm_nt_contiguous": _LOOP,
    "m_grouped_bf16_gemm_nn_contiguous": _LOOP,
    "m_grouped_bf16_gemm_nt_masked": _LOOP,
    "k_grouped_bf16_gemm_tn_contiguous": _LOOP,
    "k_grouped_fp8_gemm_tn_contiguous": "k_grouped_fp8_gemm_nt_contiguous",
    "fp8_gemm_nt_skip_head_mid": "fp8_gemm_nt",
    "einsum": "torch.einsum",
    "fp8_einsum": "fp8_gemm_nt for each batch",
    "fp8_mqa_logits": _DEQUANTIZED,
    "fp8_paged_mqa_logits": _DEQUANTIZED,
    "fp8_fp4_mqa_logits": _DEQUANTIZED,
    "fp8_fp4_paged_mqa_logits": _DEQUANTIZED,
    "get_paged_mqa_logits_metadata": _DEQUANTIZED,
    "tf32_hc_prenorm_gemm": _TORCH,
    "fp8_mega_moe": _MOE,
    "fp8_fp4_mega_moe": _MOE,
    "get_symm_buffer_for_mega_moe": "torch.distributed._symmetric_memory",
    "transform_weights_for_mega_moe": "the weights as they are",
    "per_token_cast_to_fp4": _FP8,
    "transpose_packed_fp4": _FP8,
    "cast_back_from_fp4": _FP8,
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": _FP32_SCALES,
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": _FP32_SCALES,
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise the AttributeError of a missing name, and say what to use instead if that is known."""
    advice = f"; use {INSTEAD[name]} instead" if name in INSTEAD else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")
