"""BF16 products on a GPU: majors, edges and outputs; a row's bits for every m; the same bits each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import helpers
import pytest
import torch
from helpers import captured, host_never_waits, some
from torch import Tensor

import deep_gemm
from deep_gemm import calc_diff, set_mk_alignment_for_contiguous_layout
from deep_gemm.core.call import RECORDS
from deep_gemm.integrations.torch_mm import batch_invariant_mm
from deep_gemm.moe import api as layers

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-5
MS = (1, 2, 7, 8, 16, 17, 31, 64, 65, 100, 128, 129, 256, 300, 512, 1000, 2048, 4096, 8192)
WEIGHTS = [(576, 7168), (2112, 7168), (4096, 512), (7168, 2048)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def framed(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, helpers.Framed]:
    """Return an output full of NaN, and its frame."""
    frame = helpers.framed((m, n), dtype, "cuda")
    return frame.view.fill_(torch.nan), frame


@pytest.mark.parametrize(("a_is_mn", "b_is_mn"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_majors_edges_and_c(a_is_mn: bool, b_is_mn: bool, dtype: torch.dtype) -> None:
    for m, n, k in ((8, 8, 8), (72, 136, 200), (200, 584, 1096), (1000, 776, 4096), (4096, 2112, 72), (128, 24, 16384)):
        a = numbers(k, m).t() if a_is_mn else numbers(m, k)
        b = numbers(k, n, seed=1).t() if b_is_mn else numbers(n, k, seed=1)
        right = a.float() @ b.float().t()
        for c in (None, torch.full((m, n), 32.0, dtype=dtype, device="cuda")):
            d, frame = framed(m, n, dtype)
            deep_gemm.bf16_gemm_nt(a, b, d, c)
            assert calc_diff(d, right if c is None else right + 32) < TOLERANCE, (m, n, k)
            d.fill_(32)
            deep_gemm.bf16_gemm_nt(a, b, d, d)
            assert calc_diff(d, right + 32) < TOLERANCE, (m, n, k)
            frame.assert_untouched_outside()


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_rows_bits_do_not_depend_on_m(batch_invariant: bool, n: int, k: int) -> None:
    deep_gemm.set_batch_invariant(batch_invariant)
    a, b = numbers(max(MS), k), numbers(n, k, seed=1)
    every = some(deep_gemm.bf16_gemm_nt(a, b))
    for m in MS:
        for rows in (slice(m), slice(-m, None)):
            assert torch.equal(some(deep_gemm.bf16_gemm_nt(a[rows], b)), every[rows]), rows


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
        first = some(call())
        assert all(torch.equal(first, some(call())) for _ in range(20))


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
    graph, _ = captured(deep_gemm.bf16_gemm_nt, a, b, d)
    a.copy_(numbers(64, 512, seed=5))
    graph.replay()
    assert calc_diff(d, a.float() @ b.float().t()) < TOLERANCE


# Grouped BF16 products and einsum on a GPU, against references: layouts, majors, empty groups, gradients.


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
    function = deep_gemm.m_grouped_bf16_gemm_nn_contiguous if turned else deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    ids = torch.arange(len(rows), device="cuda").repeat_interleave(torch.tensor(rows, device="cuda")).int()
    layout = int32(rows).cumsum(0).int() if ends else ids.clone()
    right = torch.cat([x.float() @ y.float().t() for x, y in zip(torch.split(a, rows), w, strict=True)])
    d, frame = framed(m, n)
    set_mk_alignment_for_contiguous_layout(1 if ends else 128)
    function(a, b, d, layout, "nk", ends)
    assert calc_diff(d, right) < TOLERANCE
    frame.assert_untouched_outside()
    if not ends:
        layout[-1] = -1
        function(a, b, d, layout)
        assert calc_diff(d[:-1], right[:-1]) < TOLERANCE
        assert (d[-1] == 0).all() or int((layout >= 0).sum()) == 0


@pytest.mark.parametrize("limit", [None, 1.0])
def test_experts_have_the_same_bits_whoever_activates(monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    """Use sizes that no tile divides, and tokens with gaps between them."""
    x = numbers(1000, 336)[:, :328]
    w1, w2, p = numbers(9, 2 * 136, 328, seed=1), numbers(9, 328, 136, seed=2), numbers(1000, 3, seed=3)
    ids = torch.randint(-1, 9, (1000, 3), device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    of_turns = []
    for rows in (1 << 60, 1):
        monkeypatch.setattr(layers, "MANY_ROWS", rows)
        RECORDS.clear()
        of_turns.append(some(deep_gemm.experts(x, ids, p, w1, w2, limit=limit)))
    RECORDS.clear()
    assert torch.equal(*of_turns)


def test_rows_without_a_group_are_zeros_beside_a_group_and_else_kept() -> None:
    ids = torch.tensor([-1] * 130 + [0] * 3 + [-1] * 170 + [1] + [-1] * 100, device="cuda")
    a, b, d = numbers(len(ids), 328), numbers(2, 264, 328, seed=1), torch.full((len(ids), 264), 7.0, device="cuda")
    a[ids < 0] = torch.nan
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids.int())
    assert (d[:128] == 7).all()
    beside = (torch.arange(len(ids), device="cuda") >= 128) & (ids < 0)
    is_kept = (d == 7).all(1)
    assert is_kept.tolist() == [row < 128 or row >= 384 for row in range(len(ids))]
    assert (d[beside & ~is_kept] == 0).all()
    for group in (0, 1):
        assert calc_diff(d[ids == group], a[ids == group].float() @ b[group].float().t()) < TOLERANCE


@pytest.mark.parametrize(("n", "k"), [(576, 7168), (4096, 512), (2112, 2056)])
def test_a_grouped_rows_bits_depend_on_it_and_its_weight_alone(n: int, k: int) -> None:
    """A row's index, the number of rows in the group, the number of groups, the layout and the hint must not matter."""
    x, w = numbers(1100, k), numbers(5, n, k, seed=1)
    right = some(deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, w[2:3], None, int32([0] * 1100)))
    for rows in (1, 7, 64, 65, 129, 300, 1100):
        for ahead in (0, 3, 128):
            a = torch.cat([numbers(ahead, k, seed=2), x[:rows], numbers(70, k, seed=3)])
            ids = int32([-1] * ahead + [2] * rows + [4] * 70)
            stacked = some(deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, w, None, ids))
            assert torch.equal(stacked[ahead : ahead + rows], right[:rows]), (rows, ahead)
        planes = numbers(5, rows + 20, k, seed=4)
        planes[2, :rows] = x[:rows]
        for hint in (1, 4096):
            counted = some(deep_gemm.m_grouped_bf16_gemm_nt_masked(planes, w, None, int32([0, 9, rows, 1, 0]), hint))
            assert torch.equal(counted[2, :rows], right[:rows]), (rows, hint)


@pytest.mark.parametrize("expr", ["bhr,hdr->bhd", "bhd,hdr->bhr"])
@pytest.mark.parametrize(("h", "r", "d"), [(128, 512, 128), (8, 4096, 1024)])
def test_a_tokens_bits_do_not_depend_on_other_tokens_or_heads(expr: str, h: int, r: int, d: int) -> None:
    x, w = numbers(1000, h, r if expr.startswith("bhr") else d), numbers(h, d, r, seed=1)
    right = some(deep_gemm.einsum(expr, x, w))
    for tokens in (1, 4, 32, 65, 128, 300):
        assert torch.equal(some(deep_gemm.einsum(expr, x[-tokens:], w)), right[-tokens:]), tokens
    assert torch.equal(some(deep_gemm.einsum(expr, x[:, 3:5], w[3:5])), right[:, 3:5])


def test_groups_along_k_have_the_same_bits_whoever_knows_their_depths() -> None:
    ks = [128, 0, 320, 64]
    a, b = numbers(sum(ks), 136), numbers(sum(ks), 264, seed=1)
    product = deep_gemm.k_grouped_bf16_gemm_tn_contiguous
    by_host = some(product(a, b, ks_cpu=ks))
    assert torch.equal(some(product(a, b, grouped_layout=int32(ks))), by_host)
    ahead, of_b = (torch.cat([x[:3], x]) for x in (a, b))
    assert torch.equal(some(product(ahead, of_b, grouped_layout=int32([3, *ks])))[1:], by_host)


@pytest.mark.parametrize("counts", [[20, 0, 64, 7], [128, 128, 128, 128], [0, 0, 0, 0]])
@pytest.mark.parametrize("b_is_mn", [False, True])
def test_counted_rows(counts: list[int], b_is_mn: bool) -> None:
    a, w = numbers(4, 128, 328), numbers(4, 264, 328, seed=1)
    b = w.mT.contiguous().mT if b_is_mn else w
    d = torch.full((4, 128, 264), torch.nan, dtype=torch.bfloat16, device="cuda")
    deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, int32(counts), 32)
    for group, count in enumerate(counts):
        if count:
            assert calc_diff(d[group, :count], a[group, :count].float() @ w[group].float().t()) < TOLERANCE


@pytest.mark.parametrize("ks", [[128, 256, 64], [0, 512, 0], [3, 200, 129], [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("on_host", [True, False])
def test_groups_along_k(ks: list[int], dtype: torch.dtype, on_host: bool) -> None:
    a, b = numbers(sum(ks), 136), numbers(sum(ks), 264, seed=1)
    pairs = zip(torch.split(a, ks), torch.split(b, ks), strict=True)
    right = torch.stack([x.float().t() @ y.float() for x, y in pairs])
    for of_c in ("none", "another", "d"):
        d = torch.full_like(right, 32 if of_c == "d" else torch.nan, dtype=dtype)
        c = d if of_c == "d" else torch.full_like(right, 32, dtype=dtype) if of_c == "another" else None
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks if on_host else None, int32(ks), c)
        assert calc_diff(d, right if c is None else right + 32) < TOLERANCE


@pytest.mark.parametrize("ends", [False, True])
def test_a_graph_follows_depths_along_k_that_the_gpu_alone_knows(ends: bool) -> None:
    drawn = ([200, 3, 0, 129], [0, 0, 448, 63], [1, 1, 1, 1], [0, 0, 0, 0], [447, 0, 64, 0])
    a, b = numbers(512, 136), numbers(512, 264, seed=1)
    a[-1] = torch.nan  # the last row is in no group
    c, d = numbers(4, 136, 264, seed=2).float(), torch.empty(4, 136, 264, device="cuda")
    layouts = [int32(ks).cumsum(0).int() if ends else int32(ks) for ks in drawn]
    layout = layouts[0].clone()
    set_mk_alignment_for_contiguous_layout(1)
    with host_never_waits():
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, layout, c, use_psum_layout=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), host_never_waits():
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, layout, c, use_psum_layout=ends)
    found = []
    for other in layouts:
        layout.copy_(other)
        d.fill_(torch.nan)
        graph.replay()
        found.append(d.clone())
    for ks, of_ks in zip(drawn, found, strict=True):
        parts = zip(*(torch.split(x[: sum(ks)].float(), ks) for x in (a, b)), c, strict=True)
        assert calc_diff(of_ks, torch.stack([x.t() @ y + z for x, y, z in parts])) < TOLERANCE, ks


@pytest.mark.parametrize("expr", ["bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr", "bmk,bnk->mn"])
@pytest.mark.parametrize("b", [1, 4, 130, 1000])
def test_einsum(expr: str, b: int) -> None:
    sizes = {"b": b, "h": 8, "r": 512, "d": 136, "m": 64, "n": 136, "k": 128}
    operands = expr.partition("->")[0].split(",")
    x, y = (numbers(*(sizes[i] for i in axes[:-1]), sizes[axes[-1]] + 128)[..., :-128] for axes in operands)
    d = some(deep_gemm.einsum(expr, x, y))
    assert calc_diff(d, torch.einsum(expr, x.float(), y.float())) < TOLERANCE


@pytest.mark.parametrize(("batch", "n", "k"), [(1, 8, 8), (3, 136, 520), (2, 2048, 1024)])
def test_batches_of_symmetric_products(batch: int, n: int, k: int) -> None:
    x, d = numbers(batch, n, k), torch.full((batch, n, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    deep_gemm.batched_syrk(x, d)
    assert calc_diff(d, x.float() @ x.float().mT) < TOLERANCE
    gram, square = d.tril() + d.tril(-1).mT, torch.full_like(d, torch.nan)
    deep_gemm.batched_symm(gram, gram, square)
    assert calc_diff(square, gram.float() @ gram.float()) < TOLERANCE


def test_gradients_of_grouped_rows() -> None:
    rows = [100, 0, 37, 64]
    ids = torch.arange(4, device="cuda").repeat_interleave(torch.tensor(rows, device="cuda")).int()
    a, b = numbers(sum(rows), 136).requires_grad_(), numbers(4, 264, 136, seed=1).requires_grad_()
    out = some(deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, grouped_layout=ids))
    grad = numbers(*out.shape, seed=2)
    out.backward(grad)  # type: ignore[no-untyped-call]
    parts = (torch.split(t, rows) for t in (a.detach(), grad, some(a.grad)))
    for x, g, of_x, w, of_w in zip(*parts, b.detach(), some(b.grad), strict=True):
        if len(x):
            assert calc_diff(of_x, g.float() @ w.float()) < TOLERANCE
        assert calc_diff(of_w, g.float().t() @ x.float()) < TOLERANCE


# Sums over BF16 products on a GPU: shapes, strides and majors; the same bits each time; in a graph.


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
        d, frame = framed(m, n, dtype)
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
        frame.assert_untouched_outside()


@pytest.mark.parametrize("shape", [(129, 65, 72, 64), (300, 1, 8, 128), (70, 321, 264, 192), (3, 1000, 1000, 64)])
def test_any_m_and_n(shape: tuple[int, int, int, int]) -> None:
    products, m, n, k = shape
    a, b = numbers(products, m, k), numbers(products, n, k, seed=1)
    d, frame = framed(m, n)
    deep_gemm.einsum(SUM, a, b, d)
    assert calc_diff(d, right_of(a, b)) < TOLERANCE
    frame.assert_untouched_outside()


def test_strides_and_majors() -> None:
    a, b = numbers(129, 131, 192)[:, 1:-2, 32:-32], numbers(129, 387, 192, seed=1)[:, 1:-2, 32:-32]
    turned_a, turned_b = (x.mT.contiguous().mT for x in (a, b))
    inside_a, inside_b = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (a, b))
    for x, y in ((a, b), (turned_a, turned_b), (a, turned_b), (turned_a, b), (inside_a, inside_b)):
        assert calc_diff(some(deep_gemm.einsum(SUM, x, y)), right_of(a, b)) < TOLERANCE


def test_a_graph_computes_what_its_operands_then_are() -> None:
    a, b, d = numbers(129, 128, 128), numbers(129, 384, 128, seed=1), torch.zeros(128, 384, device="cuda")
    deep_gemm.einsum(SUM, a, b, d, d)
    graph, _ = captured(deep_gemm.einsum, SUM, a, b, d, d)
    a.copy_(numbers(129, 128, 128, seed=2))
    d.fill_(3)
    graph.replay()
    assert calc_diff(d, right_of(a, b) + 3) < TOLERANCE
