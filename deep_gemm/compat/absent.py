"""Names that related libraries have and the package lacks, and the substitute for each name.

Programs use a fallback if a name is missing. So unsupported names must be missing: `hasattr` is False, and an
import fails. Only the error's text names the substitute.
"""

from __future__ import annotations

from typing import NoReturn

_FP8 = "per_token_cast_to_fp8 and the FP8 products"
_MOE = "distributed.Experts, experts, m_grouped_fp8_gemm_nt_masked or m_grouped_fp8_gemm_nt_contiguous"

INSTEAD: dict[str, str] = {
    "k_grouped_fp8_gemm_tn_contiguous": "k_grouped_fp8_gemm_nt_contiguous",
    "SymmBuffer": "SM90SymmBuffer",
    "bf16_mega_moe": _MOE,
    "bf16_mega_gate": "torch.topk",
    "mega_mhc": "bf16_gemm_nt or cublaslt_gemm_nt",
    "nvfp4_mega_moe": _MOE,
    "mega_moe_pre_dispatch": "mega_moe_pre_dispatch_sm90",
    "get_mqa_logits_metadata": "torch.matmul on dequantized tensors",
    "fp4_gemm_nt": _FP8,
    "m_grouped_fp4_gemm_nt_contiguous": _FP8,
    "m_grouped_fp4_gemm_nt_masked": _FP8,
    "k_grouped_fp4_gemm_nt_contiguous": _FP8,
    "cublaslt_nvfp4_gemm_nt": "cublaslt_gemm_nt",
    "legacy": "the names of deep_gemm itself",
    "_C": "the names of deep_gemm itself",
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise the AttributeError of a missing name. The text names the substitute if one is known."""
    advice = f"; use {INSTEAD[name]} instead" if name in INSTEAD else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")
