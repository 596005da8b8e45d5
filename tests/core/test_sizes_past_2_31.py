"""Parameters of launches when an operand, D, or all groups have more than 2^31 elements. No memory is touched."""

from __future__ import annotations

from math import prod

import pytest
import torch
from fake_gpu import FakeGpu, on_gpu
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.layout import ceil_div

FP8 = torch.float8_e4m3fn


def scales_by_row(*shape: int) -> Tensor:
    """Make scales in the layout that TMA reads, so that nothing copies them: columns of a multiple of 4 rows."""
    *groups, rows, k = shape
    return torch.empty(*groups, ceil_div(k, 128), rows).mT


def assert_reach(gpu: FakeGpu, *operands: Tensor) -> None:
    """Check that some map reaches the last element of each operand, and nothing behind it."""
    [launch] = gpu.launches
    found = [
        (prod(each.sizes), sum((n - 1) * stride for n, stride in zip(each.sizes[1:], each.strides, strict=True)))
        for each in launch.maps
    ]
    for x in operands:
        last_row = (x.numel() - x.shape[-1]) * x.element_size()
        assert (x.numel(), last_row) in found, (tuple(x.shape), found)


@pytest.mark.parametrize(("m", "n", "k"), [(70000, 256, 32768), (256, 70016, 32768), (50000, 50048, 128)])
def test_one_product(gpu: FakeGpu, m: int, n: int, k: int) -> None:
    a, b, d = torch.empty(m, k, dtype=FP8), torch.empty(n, k, dtype=FP8), torch.empty(m, n, dtype=torch.bfloat16)
    assert max(x.numel() for x in (a, b, d)) > 1 << 31
    deep_gemm.fp8_gemm_nt((on_gpu(a), scales_by_row(m, k)), (b, torch.empty(ceil_div(n, 128), k // 128)), on_gpu(d))
    assert_reach(gpu, a, b, d)


def test_all_groups(gpu: FakeGpu) -> None:
    groups, max_m, n, k = 160, 4096, 4096, 4096
    a, b = torch.empty(groups, max_m, k, dtype=FP8), torch.empty(groups, n, k, dtype=FP8)
    d = torch.empty(groups, max_m, n, dtype=torch.bfloat16)
    sfb = torch.empty(groups, n // 128, k // 128)
    counts = torch.zeros(groups, dtype=torch.int32)
    sfa = scales_by_row(groups, max_m, k)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((on_gpu(a), sfa), (b, sfb), on_gpu(d), counts, 100)
    assert_reach(gpu, a, b, d)
