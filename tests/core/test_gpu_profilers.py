"""Profilers on a GPU find exactly one kernel of each product by the text that they search for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import deep_gemm
from deep_gemm.testing import bench_kineto

pytestmark = pytest.mark.gpu

M, N, K, GROUPS = 256, 512, 1024, 4
KS = [256] * GROUPS


def products() -> dict[str, tuple[Callable[[], object], str]]:
    """Return calls of each kind, each with the text that programs of 2025 search for in a profile."""
    x, w = torch.randn(M, K, device="cuda"), torch.randn(N, K, device="cuda")
    a, b = deep_gemm.per_token_cast_to_fp8(x, mn_major=True), deep_gemm.per_block_cast_to_fp8(w)
    of_groups = deep_gemm.per_block_cast_to_fp8(torch.randn(GROUPS, N, K, device="cuda"))
    of_tokens = deep_gemm.per_token_cast_to_fp8(torch.randn(GROUPS, M, K, device="cuda"), mn_major=True)
    ids = torch.arange(GROUPS, device="cuda", dtype=torch.int32).repeat_interleave(M // GROUPS)
    counts = torch.full((GROUPS,), 100, device="cuda", dtype=torch.int32)
    by_row, other = deep_gemm.cast_both_to_fp8(w)[0], deep_gemm.cast_both_to_fp8(x)[0]
    grad = torch.zeros(M, N, device="cuda")
    of_x, of_w = (deep_gemm.k_grouped_cast_to_fp8(each, KS, mn_major=True) for each in (x, w))
    few = a[0][:4].contiguous(), deep_gemm.get_mn_major_tma_aligned_tensor(a[1][:4])
    return {
        "dense": (lambda: deep_gemm.fp8_gemm_nt(a, b), "fp8_gemm"),
        "few rows": (lambda: deep_gemm.fp8_gemm_nt(few, b), "fp8_gemm"),
        "contiguous": (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, of_groups, None, ids), "fp8_gemm"),
        "masked": (lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(of_tokens, of_groups, None, counts, M), "fp8_gemm"),
        "weight gradient": (lambda: deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(other, by_row, grad), "fp8_wgrad_gemm"),
        "along k": (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(of_x, of_w, ks=KS), "fp8_wgrad_gemm"),
    }


@pytest.mark.parametrize("name", ["dense", "few rows", "contiguous", "masked", "weight gradient", "along k"])
def test_a_product_is_one_kernel_to_a_profiler(name: str) -> None:
    call, text = products()[name]
    begun: list[int] = []
    for searched in (text, "gemm_"):  # raises an error if several kernels of a call match
        barrier = partial(begun.append, 1)
        time = bench_kineto(call, searched, num_tests=5, suppress_kineto_output=True, barrier=barrier)
        assert isinstance(time, float)
        assert 0 < time < 1e-2
    assert len(begun) == 2 * 5
