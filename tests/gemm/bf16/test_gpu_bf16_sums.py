"""Sums over BF16 products on a GPU: right over shapes, strides and majors; the same bits each time; in a graph."""

from __future__ import annotations

import pytest
import torch
from test_gpu_bf16 import TOLERANCE, assert_frame, framed, numbers
from torch import Tensor

import deep_gemm
from deep_gemm import calc_diff

pytestmark = pytest.mark.gpu
SUM = "bmk,bnk->mn"
OF_D = [(128, 384, 128), (256, 256, 256), (384, 128, 384)]


def right_of(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device="cuda")
    for i in range(0, len(a), 512):
        total += torch.einsum(SUM, a[i : i + 512].double(), b[i : i + 512].double())
    return total


@pytest.mark.parametrize("products", [1, 129, 4096, 8192])
@pytest.mark.parametrize("of_d", OF_D)
def test_sums_are_right_and_the_same_each_time(of_d: tuple[int, int, int], products: int) -> None:
    m, n, k = of_d
    a, b = numbers(products, m, k), numbers(products, n, k, seed=1)
    right = right_of(a, b)
    for dtype in (torch.bfloat16, torch.float32):
        d, whole = framed(m, n, dtype=dtype)
        deep_gemm.einsum(SUM, a, b, d)
        first = d.clone()
        assert calc_diff(first, right) < TOLERANCE
        for _ in range(20):
            d.fill_(torch.nan)
            deep_gemm.einsum(SUM, a, b, d)
            assert torch.equal(d, first)
        if dtype == torch.float32:
            d.fill_(32)
            deep_gemm.einsum(SUM, a, b, d, d)
            assert calc_diff(d, right + 32) < TOLERANCE
        assert_frame(d, whole)


@pytest.mark.parametrize("shape", [(129, 65, 72, 64), (300, 1, 8, 128), (70, 321, 264, 192), (3, 1000, 1000, 64)])
def test_any_m_and_n(shape: tuple[int, int, int, int]) -> None:
    products, m, n, k = shape
    a, b = numbers(products, m, k), numbers(products, n, k, seed=1)
    d, whole = framed(m, n)
    deep_gemm.einsum(SUM, a, b, d)
    assert calc_diff(d, right_of(a, b)) < TOLERANCE
    assert_frame(d, whole)


def test_strides_and_majors() -> None:
    a, b = numbers(129, 131, 192)[:, 1:-2, 32:-32], numbers(129, 387, 192, seed=1)[:, 1:-2, 32:-32]
    turned_a, turned_b = (x.mT.contiguous().mT for x in (a, b))
    inside_a, inside_b = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (a, b))
    for x, y in ((a, b), (turned_a, turned_b), (a, turned_b), (turned_a, b), (inside_a, inside_b)):
        made = deep_gemm.einsum(SUM, x, y)
        assert made is not None
        assert calc_diff(made, right_of(a, b)) < TOLERANCE


def test_a_graph_computes_what_its_operands_then_are() -> None:
    a, b, d = numbers(129, 128, 128), numbers(129, 384, 128, seed=1), torch.zeros(128, 384, device="cuda")
    deep_gemm.einsum(SUM, a, b, d, d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.einsum(SUM, a, b, d, d)
    a.copy_(numbers(129, 128, 128, seed=2))
    d.fill_(3)
    graph.replay()
    assert calc_diff(d, right_of(a, b) + 3) < TOLERANCE
