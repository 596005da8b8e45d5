"""A program as users write it, which only mypy reads: a wrong call must fail, or mypy reports its comment as unused.

Forms of other eras (`lhs`, values and scales apart) work at run time, but type checkers accept only today's form.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

import deep_gemm

Operand = tuple[Tensor, Tensor]


def right(x: Tensor, a: Operand, b: Operand, d: Tensor, ids: Tensor) -> None:
    """Make calls that must pass."""
    assert_type(deep_gemm.fp8_gemm_nt(a, b), Tensor | None)
    assert_type(deep_gemm.fp8_gemm_nn(a, b, d, c=d, recipe=(1, 128, 128), compiled_dims="nk"), Tensor | None)
    assert_type(deep_gemm.fp8_fp4_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=[32, 32], alpha=None), Tensor | None)
    assert_type(deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, d), Tensor | None)
    assert_type(deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ids, use_psum_layout=True), Tensor | None)
    assert_type(deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, ids, 4), Tensor | None)
    assert_type(deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, [16], ids, d), Tensor | None)
    assert_type(deep_gemm.per_token_cast_to_fp8(x), Operand)
    assert_type(deep_gemm.fp8_mqa_logits(x, a, x, ids, ids, max_seqlen_k=4), Tensor)
    assert_type(deep_gemm.fp8_paged_mqa_logits(x, x, x, ids, ids, ids, 4), Tensor)
    assert_type(deep_gemm.bf16_gemm_nt(x, x, d), Tensor | None)
    assert_type(deep_gemm.linear(x, b), Tensor | None)
    assert_type(deep_gemm.get_num_sms(), int)


def wrong(x: Tensor, a: Operand, b: Operand, d: Tensor) -> None:
    """Make calls that must not pass."""
    deep_gemm.fp8_gemm_nt(1, "x", nonsense=3)  # type: ignore[arg-type, call-arg]
    deep_gemm.fp8_gemm_nt(a)  # type: ignore[call-arg]
    deep_gemm.fp8_gemm_nt(a, b, recipe="1, 128, 128", d=4)  # type: ignore[arg-type]
    deep_gemm.fp8_gemm_tn(x, b)  # type: ignore[arg-type]
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, d, d)  # type: ignore[call-arg]
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, [0, 1])  # type: ignore[arg-type]
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, counts=d)  # type: ignore[call-arg]
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, ks=16)  # type: ignore[arg-type]
    deep_gemm.fp8_mqa_logits(x, a, x, x, x, clean=True)  # type: ignore[call-arg]
    deep_gemm.bf16_gemm_nt(a, b)  # type: ignore[arg-type]
    deep_gemm.get_tma_aligned_size("33", 4)  # type: ignore[arg-type]
