"""The products at sizes of real models, on a GPU if the machine has one. As a script: `python tests/test_core.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers import some

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds a package that is not installed

import deep_gemm

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = [(1, 576, 512), (64, 2112, 1024), (200, 512, 576), (300, 1032, 256)]
GPU_SHAPES = [(128, 2112, 7168), (4096, 7168, 2048)] if ON_GPU else []
MAX_DIFF = 1e-3


@pytest.fixture(autouse=True)
def _same_data_every_time() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES + GPU_SHAPES)
def test_dense(m: int, n: int, k: int) -> None:
    x, w = randn(m, k), randn(n, k)
    d = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(w), d)
    assert deep_gemm.calc_diff(d, x.float() @ w.float().t()) < MAX_DIFF


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_weight_gradient_accumulates(m: int, n: int, k: int) -> None:
    x, y = randn(m, k), randn(n, k)
    d = torch.randn(m, n, device=DEVICE)
    expected = d + x.float() @ y.float().t()
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_token_cast_to_fp8(y), d)
    assert deep_gemm.calc_diff(d, expected) < MAX_DIFF


@pytest.mark.parametrize("sizes", [[1, 1, 300, 129], [0, 0, 64], [128, 256], [16, 0, 7, 1]])
def test_contiguous_groups_of_any_size(sizes: list[int]) -> None:
    n, k = 520, 384
    x, w = randn(sum(sizes), k), randn(len(sizes), n, k)
    ids = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes)).to(DEVICE)
    a, b = deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(w)
    d = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, grouped_layout=ids)
    expected = torch.cat([x[ids == g].float() @ w[g].float().t() for g in range(len(sizes))])
    assert deep_gemm.calc_diff(some(d), expected) < MAX_DIFF


@pytest.mark.parametrize("max_m", [8, 16, 32, 96, 200])
def test_masked_groups(max_m: int) -> None:
    groups, n, k = 4, 520, 384
    x, w = randn(groups, max_m, k), randn(groups, n, k)
    counts = torch.tensor([0, 1, max_m // 2, max_m], dtype=torch.int32, device=DEVICE)
    a, b = deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(w)
    d = torch.full((groups, max_m, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, counts, expected_m=max_m // 2)
    valid = torch.arange(max_m, device=DEVICE) < counts[:, None]
    assert deep_gemm.calc_diff(d[valid], (x.float() @ w.float().mT)[valid]) < MAX_DIFF
    assert bool(d[~valid].isnan().all()), "rows past a group's count were written"


def test_groups_along_k() -> None:
    m, n, ks = 136, 264, [128, 0, 384, 16]
    x, y = randn(m, sum(ks)), randn(n, sum(ks))
    a, b = deep_gemm.k_grouped_cast_to_fp8(x, ks), deep_gemm.k_grouped_cast_to_fp8(y, ks)
    d = some(deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, ks=ks))
    first = 0
    for group, k in enumerate(ks):
        expected = x[:, first : first + k].float() @ y[:, first : first + k].float().t()
        assert deep_gemm.calc_diff(d[group], expected) < MAX_DIFF
        first += k


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "--verbose", *sys.argv[1:]]))
