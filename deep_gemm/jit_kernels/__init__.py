"""Programs of 2025 import the products from here; `deep_gemm` itself has them all."""

from ..gemm.api.dense import (
    gemm_fp8_fp8_bf16_nt as gemm_fp8_fp8_bf16_nt,
    wgrad_gemm_fp8_fp8_fp32_nt as wgrad_gemm_fp8_fp8_fp32_nt,
)
from ..gemm.api.grouped import (
    k_grouped_wgrad_gemm_fp8_fp8_fp32_nt as k_grouped_wgrad_gemm_fp8_fp8_fp32_nt,
    m_grouped_gemm_fp8_fp8_bf16_nt_contiguous as m_grouped_gemm_fp8_fp8_bf16_nt_contiguous,
    m_grouped_gemm_fp8_fp8_bf16_nt_masked as m_grouped_gemm_fp8_fp8_bf16_nt_masked,
)
from . import utils as utils

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # for `help`, but not for checkers
