"""Names of the wider family of libraries that this package does not have yet.

They exist, so that `from deep_gemm import ...` works in programs that name them and use them on other machines only;
a call raises NotImplementedError and says what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_TORCH = "torch.matmul or cublaslt_gemm_nt"
_LOOP = "torch.matmul for each group"
_FP8 = "per_token_cast_to_fp8 and the FP8 products"
_FP32_SCALES = "FP32 scales with get_mn_major_tma_aligned_tensor"

UNAVAILABLE: dict[str, str] = {
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
    "fp8_mqa_logits": "torch.matmul on dequantized tensors",
    "fp8_paged_mqa_logits": "torch.matmul on dequantized tensors",
    "fp8_fp4_mqa_logits": "torch.matmul on dequantized tensors",
    "fp8_fp4_paged_mqa_logits": "torch.matmul on dequantized tensors",
    "get_paged_mqa_logits_metadata": "torch.matmul on dequantized tensors",
    "tf32_hc_prenorm_gemm": _TORCH,
    "fp8_mega_moe": "m_grouped_fp8_gemm_nt_masked or m_grouped_fp8_gemm_nt_contiguous",
    "fp8_fp4_mega_moe": "m_grouped_fp8_gemm_nt_masked or m_grouped_fp8_gemm_nt_contiguous",
    "get_symm_buffer_for_mega_moe": "torch.distributed._symmetric_memory",
    "transform_weights_for_mega_moe": "the weights as they are",
    "per_token_cast_to_fp4": _FP8,
    "transpose_packed_fp4": _FP8,
    "cast_back_from_fp4": _FP8,
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": _FP32_SCALES,
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": _FP32_SCALES,
}


def _unavailable(name: str, instead: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"deep_gemm.{name} does not exist yet; use {instead} instead")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Not there yet: use {instead} instead."
    return call


globals().update({name: _unavailable(name, instead) for name, instead in UNAVAILABLE.items()})
__all__ = list(UNAVAILABLE)
