"""Scales laid out by their kernel on a GPU: the bits that torch's copy gives, in all layouts, streams and graphs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import deep_gemm
from deep_gemm.casts import lay_scales
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import empty_mn_major, is_mn_major_tma_aligned

pytestmark = pytest.mark.gpu

POISON = -0x5A5A5A5A
SHAPES = [(2, 2), (5, 3), (64, 32), (65, 33), (129, 56), (4096, 56), (8191, 129), (3, 70, 5), (8, 130, 16), (2, 1, 35)]


def words(*shape: int) -> Tensor:
    """Every element has bits of its own; NaNs are among them."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int().view(torch.float32).cuda()


def assert_laid(sf: Tensor) -> None:
    """The kernel writes what torch would, and nothing between rows and behind the last."""
    out = empty_mn_major(sf)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
    memory = torch.full((extent + 64,), POISON, dtype=torch.int32, device="cuda")
    right = memory.clone()
    right.as_strided(out.shape, out.stride()).copy_(sf.view(torch.int32))
    lay_scales.run(sf, memory.view(torch.float32).as_strided(out.shape, out.stride()))
    assert torch.equal(memory, right)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_in_every_layout(shape: tuple[int, ...]) -> None:
    sf = words(*shape)
    wider, higher = torch.cat([sf, sf], -1), torch.cat([sf, sf], -2)
    layouts = [sf, sf.mT.contiguous().mT, wider[..., : shape[-1]], wider[..., ::2], higher[..., 1 : shape[-2] + 1, :]]
    layouts += [higher.mT, sf[..., :1].expand(sf.shape), sf[..., :1, :].expand(sf.shape)]
    if sf.dim() == 3:
        layouts += [sf.transpose(0, 1).contiguous().transpose(0, 1), sf[:1].expand(3, -1, -1)]
    for layout in layouts:
        assert_laid(layout)
        out = get_mn_major_tma_aligned_tensor(layout)
        assert is_mn_major_tma_aligned(out)
        assert torch.equal(out.view(torch.int32), layout.view(torch.int32))
        assert get_mn_major_tma_aligned_tensor(out) is out


def test_any_strides() -> None:
    rng = random.Random(0)
    numbers = words(2_000_000)
    for _ in range(200):
        shape = rng.randint(1, 4), rng.randint(1, 300), rng.randint(1, 150)
        assert_laid(numbers.as_strided(shape, (rng.randint(0, 9000), rng.randint(0, 999), rng.randint(0, 999))))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 5, 3), (2, 0, 3), (2, 3, 0)])
def test_no_scales_are_laid_too(shape: tuple[int, ...]) -> None:
    sf = torch.empty(shape, device="cuda")
    assert get_mn_major_tma_aligned_tensor(sf).shape == shape


def test_scales_that_require_a_gradient_give_no_graph() -> None:
    assert not get_mn_major_tma_aligned_tensor(words(5, 3).requires_grad_()).requires_grad


def test_copies_follow_their_stream() -> None:
    sf = torch.zeros(2048, 56, device="cuda")
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(20):
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            sf.fill_(float(number))
            out = get_mn_major_tma_aligned_tensor(sf)
            sf.fill_(-1.0)
            assert bool((out == number).all())


@pytest.mark.parametrize("pdl", [False, True])
def test_products_in_a_captured_graph_lay_changed_scales(pdl: bool) -> None:
    """By rows of A, by single rows of both, grouped, masked and along k: each converts its scales by the kernel."""
    m, n, k, groups = 512, 256, 1024, 2
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16)
    (a, sfa), (b, sfb) = deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(w)
    by_row = deep_gemm.per_token_cast_to_fp8(w[0])
    flat = deep_gemm.k_grouped_cast_to_fp8(x, [768, 256])
    assert not is_mn_major_tma_aligned(sfa)
    assert not is_mn_major_tma_aligned(flat[1])
    ids = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(m // groups)
    counts = torch.full((groups,), m // groups, device="cuda", dtype=torch.int32)

    def products(lay: bool) -> list[Tensor]:
        """The products, of scales that are laid ahead by torch, or by the products themselves."""

        def laid(sf: Tensor) -> Tensor:
            return empty_mn_major(sf).copy_(sf) if lay else sf

        outs = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        outs += [torch.empty(m, n, device="cuda"), torch.empty(groups, m // groups, n, device="cuda").bfloat16()]
        outs.append(torch.zeros(groups, m, m, device="cuda"))
        deep_gemm.fp8_gemm_nt((a, laid(sfa)), (b[0], sfb[0]), outs[0])
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, laid(sfa)), (b, sfb), outs[1], ids)
        one = by_row[0], laid(by_row[1])
        deep_gemm.fp8_gemm_nt((a, laid(sfa)), one, outs[2], recipe=(1, 1, 128))
        planes, sf_planes = a.view(groups, -1, k), sfa.view(groups, m // groups, -1)
        deep_gemm.fp8_m_grouped_gemm_nt_masked((planes, laid(sf_planes)), (b, sfb), outs[3], counts, m // groups)
        along_k = flat[0], laid(flat[1])
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(along_k, along_k, outs[4], [768, 256], c=outs[4])
        return outs

    deep_gemm.set_pdl(pdl)
    try:
        products(False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = products(False)
        for factor in (0.5, 3.0):
            for sf in (sfa, by_row[1], flat[1]):
                sf.mul_(factor)
            graph.replay()
            torch.cuda.synchronize()
            for one, right in zip(found, products(True), strict=True):
                assert torch.equal(one, right)
    finally:
        deep_gemm.set_pdl(False)
