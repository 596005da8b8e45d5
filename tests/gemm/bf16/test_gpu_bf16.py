"""BF16 products on a GPU: right over majors, edges and outputs; a row's bits whatever m is; the same bits each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import deep_gemm
from deep_gemm import calc_diff
from deep_gemm.integrations.torch_mm import batch_invariant_mm

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-5
MS = (1, 2, 7, 8, 16, 17, 31, 64, 65, 100, 128, 129, 256, 300, 512, 1000, 2048, 4096, 8192)
WEIGHTS = [(576, 7168), (2112, 7168), (4096, 512), (7168, 2048)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def framed(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """An output of NaN inside of a larger tensor of 42, and that."""
    whole = torch.full((*shape[:-2], shape[-2] + 2, shape[-1] + 16), 42.0, dtype=dtype, device="cuda")
    inside = whole[..., 1:-1, 8:-8]
    inside.fill_(torch.nan)
    return inside, whole


def assert_frame(inside: Tensor, whole: Tensor) -> None:
    inside.fill_(42)
    assert (whole == 42).all()


@pytest.mark.parametrize(("a_is_mn", "b_is_mn"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_majors_edges_and_c(a_is_mn: bool, b_is_mn: bool, dtype: torch.dtype) -> None:
    for m, n, k in ((8, 8, 8), (72, 136, 200), (200, 584, 1096), (1000, 776, 4096), (4096, 2112, 72), (128, 24, 16384)):
        a = numbers(k, m).t() if a_is_mn else numbers(m, k)
        b = numbers(k, n, seed=1).t() if b_is_mn else numbers(n, k, seed=1)
        right = a.float() @ b.float().t()
        for c in (None, torch.full((m, n), 32.0, dtype=dtype, device="cuda")):
            d, whole = framed(m, n, dtype=dtype)
            deep_gemm.bf16_gemm_nt(a, b, d, c)
            assert calc_diff(d, right if c is None else right + 32) < TOLERANCE, (m, n, k)
            d.fill_(32)
            deep_gemm.bf16_gemm_nt(a, b, d, d)
            assert calc_diff(d, right + 32) < TOLERANCE, (m, n, k)
            assert_frame(d, whole)


@pytest.fixture(params=["default", "batch invariant"])
def setting(request: pytest.FixtureRequest) -> Iterator[None]:
    deep_gemm.set_batch_invariant(request.param == "batch invariant")
    yield
    deep_gemm.set_batch_invariant(False)


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@pytest.mark.usefixtures("setting")
def test_a_rows_bits_do_not_depend_on_m(n: int, k: int) -> None:
    a, b = numbers(max(MS), k), numbers(n, k, seed=1)
    every = deep_gemm.bf16_gemm_nt(a, b)
    assert every is not None
    for m in MS:
        first, last = deep_gemm.bf16_gemm_nt(a[:m], b), deep_gemm.bf16_gemm_nt(a[-m:], b)
        assert first is not None
        assert last is not None
        assert torch.equal(first, every[:m]), m
        assert torch.equal(last, every[-m:]), m


def test_twenty_repeats_give_the_same_bits() -> None:
    a, b, ids = numbers(500, 2048), numbers(4, 576, 2048, seed=1), torch.arange(500, device="cuda").int() // 125
    x, w = numbers(300, 64, 128), numbers(64, 96, 128, seed=2)
    calls: list[Callable[[], Tensor | None]] = [
        lambda: deep_gemm.bf16_gemm_nt(a, b[0]),
        lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, None, ids),
        lambda: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, a, ks_cpu=[128, 0, 300, 72]),
        lambda: deep_gemm.einsum("bhr,hdr->bhd", x, w),
        lambda: deep_gemm.einsum("bhd,bhr->hdr", x, x),
        lambda: deep_gemm.einsum("bmk,bnk->mn", x[:, :, :64], x[:, :, 64:]),
    ]
    for call in calls:
        first = call()
        assert first is not None
        for _ in range(20):
            again = call()
            assert again is not None
            assert torch.equal(first, again)


def test_torchs_products_by_ours_do_not_depend_on_the_batch() -> None:
    x, w, bias = numbers(700, 1000), numbers(301, 1000, seed=1), numbers(301, seed=2)
    with batch_invariant_mm():
        every = torch.nn.functional.linear(x, w, bias)
        for m in (1, 3, 64, 129):
            assert torch.equal(torch.nn.functional.linear(x[:m], w, bias), every[:m])
    assert calc_diff(every, torch.nn.functional.linear(x.float(), w.float(), bias.float())) < TOLERANCE


def test_a_graph_may_capture_products_of_calls_that_were_made() -> None:
    a, b, d = numbers(64, 512), numbers(256, 512, seed=1), torch.empty(64, 256, dtype=torch.bfloat16, device="cuda")
    deep_gemm.bf16_gemm_nt(a, b, d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.bf16_gemm_nt(a, b, d)
    a.copy_(numbers(64, 512, seed=5))
    graph.replay()
    assert calc_diff(d, a.float() @ b.float().t()) < TOLERANCE
