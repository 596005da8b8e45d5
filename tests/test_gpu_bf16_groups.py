"""Grouped products of BF16 and einsum on a GPU, against references: layouts, majors, empty groups, gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_gpu_bf16 import TOLERANCE, assert_frame, framed, numbers
from torch import Tensor

from deep_gemm import bf16, calc_diff, set_mk_alignment_for_contiguous_layout

pytestmark = pytest.mark.gpu
ROWS = [[300, 0, 5, 128], [1, 1, 1, 1], [0, 0, 700, 0], [64, 129, 255, 33]]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_stacked_rows(rows: list[int], turned: bool, ends: bool) -> None:
    m, n, k = sum(rows), 264, 328
    a, w = numbers(m, k), numbers(len(rows), n, k, seed=1)
    b = w.mT.contiguous() if turned else w
    function = bf16.m_grouped_bf16_gemm_nn_contiguous if turned else bf16.m_grouped_bf16_gemm_nt_contiguous
    ids = torch.arange(len(rows), device="cuda").repeat_interleave(torch.tensor(rows, device="cuda")).int()
    layout = int32(rows).cumsum(0).int() if ends else ids.clone()
    right = torch.cat([x.float() @ y.float().t() for x, y in zip(torch.split(a, rows), w, strict=True)])
    d, whole = framed(m, n)
    set_mk_alignment_for_contiguous_layout(1 if ends else 128)
    try:
        function(a, b, d, layout, "nk", ends)
        assert calc_diff(d, right) < TOLERANCE
        assert_frame(d, whole)
        if not ends:
            layout[-1] = -1
            function(a, b, d, layout)
            assert calc_diff(d[:-1], right[:-1]) < TOLERANCE
            assert (d[-1] == 0).all() or int((layout >= 0).sum()) == 0
    finally:
        set_mk_alignment_for_contiguous_layout(128)


@pytest.mark.parametrize("counts", [[20, 0, 64, 7], [128, 128, 128, 128], [0, 0, 0, 0]])
@pytest.mark.parametrize("b_is_mn", [False, True])
def test_counted_rows(counts: list[int], b_is_mn: bool) -> None:
    a, w = numbers(4, 128, 328), numbers(4, 264, 328, seed=1)
    b = w.mT.contiguous().mT if b_is_mn else w
    d = torch.full((4, 128, 264), torch.nan, dtype=torch.bfloat16, device="cuda")
    bf16.m_grouped_bf16_gemm_nt_masked(a, b, d, int32(counts), 32)
    for group, count in enumerate(counts):
        if count:
            assert calc_diff(d[group, :count], a[group, :count].float() @ w[group].float().t()) < TOLERANCE


@pytest.mark.parametrize("ks", [[128, 256, 64], [0, 512, 0], [3, 200, 129], [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("on_host", [True, False])
def test_groups_along_k(ks: list[int], dtype: torch.dtype, on_host: bool) -> None:
    a, b = numbers(sum(ks), 136), numbers(sum(ks), 264, seed=1)
    right = torch.stack(
        [x.float().t() @ y.float() for x, y in zip(torch.split(a, ks), torch.split(b, ks), strict=True)]
    )
    for of_c in ("none", "another", "d"):
        d = torch.full_like(right, 32 if of_c == "d" else torch.nan, dtype=dtype)
        c = d if of_c == "d" else torch.full_like(right, 32, dtype=dtype) if of_c == "another" else None
        bf16.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks if on_host else None, int32(ks), c)
        assert calc_diff(d, right if c is None else right + 32) < TOLERANCE


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """The host must not wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.usefixtures("no_waiting")
def test_a_graph_follows_depths_along_k_that_the_gpu_alone_knows(ends: bool) -> None:
    drawn = ([200, 3, 0, 129], [0, 0, 448, 63], [1, 1, 1, 1], [0, 0, 0, 0], [447, 0, 64, 0])
    a, b = numbers(512, 136), numbers(512, 264, seed=1)
    a[-1] = torch.nan  # no group has the last row
    c, d = numbers(4, 136, 264, seed=2).float(), torch.empty(4, 136, 264, device="cuda")
    layouts = [int32(ks).cumsum(0).int() if ends else int32(ks) for ks in drawn]
    layout = layouts[0].clone()
    set_mk_alignment_for_contiguous_layout(1)
    try:
        bf16.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, layout, c, use_psum_layout=ends)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bf16.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, layout, c, use_psum_layout=ends)
        found = []
        for other in layouts:
            layout.copy_(other)
            d.fill_(torch.nan)
            graph.replay()
            found.append(d.clone())
    finally:
        set_mk_alignment_for_contiguous_layout(128)
    torch.cuda.set_sync_debug_mode("default")
    for ks, of_ks in zip(drawn, found, strict=True):
        parts = zip(*(torch.split(x[: sum(ks)].float(), ks) for x in (a, b)), c, strict=True)
        assert calc_diff(of_ks, torch.stack([x.t() @ y + z for x, y, z in parts])) < TOLERANCE, ks


@pytest.mark.parametrize("expr", ["bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr", "bmk,bnk->mn"])
@pytest.mark.parametrize("b", [1, 4, 130, 1000])
def test_einsum(expr: str, b: int) -> None:
    sizes = {"b": b, "h": 8, "r": 512, "d": 136, "m": 64, "n": 136, "k": 128}
    operands = expr.partition("->")[0].split(",")
    x, y = (numbers(*(sizes[i] for i in axes[:-1]), sizes[axes[-1]] + 128)[..., :-128] for axes in operands)
    d = bf16.einsum(expr, x, y)
    assert d is not None
    assert calc_diff(d, torch.einsum(expr, x.float(), y.float())) < TOLERANCE


def test_gradients_of_grouped_rows() -> None:
    rows = [100, 0, 37, 64]
    ids = torch.arange(4, device="cuda").repeat_interleave(torch.tensor(rows, device="cuda")).int()
    a, b = numbers(sum(rows), 136).requires_grad_(), numbers(4, 264, 136, seed=1).requires_grad_()
    out = bf16.m_grouped_bf16_gemm_nt_contiguous(a, b, grouped_layout=ids)
    assert out is not None
    grad = numbers(*out.shape, seed=2)
    out.backward(grad)  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert b.grad is not None
    for x, g, w, of_x, of_w in zip(
        *(torch.split(t, rows) for t in (a.detach(), grad)), b.detach(), torch.split(a.grad, rows), b.grad, strict=True
    ):
        if len(x):
            assert calc_diff(of_x, g.float() @ w.float()) < TOLERANCE
        assert calc_diff(of_w, g.float().t() @ x.float()) < TOLERANCE
