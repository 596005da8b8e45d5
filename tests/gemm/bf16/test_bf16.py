"""BF16 products on the CPU: arguments, refused arguments, gradients, and how a record serves a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import int32, some
from torch import Tensor

import deep_gemm
from deep_gemm import calc_diff, set_mk_alignment_for_contiguous_layout
from deep_gemm.gemm import bf16_depths
from deep_gemm.gemm.api.bf16_dense import DENSE
from deep_gemm.gemm.ask.bf16 import EXPRESSIONS, bf16_problem, laid_out
from deep_gemm.gemm.kinds.works import COUNTED, MOST_INLINE_COUNTS, PARTS
from deep_gemm.gemm.problem import Problem

M, N, K, GROUPS = 5, 24, 16, 3
IDS = [0, 2, 2, -1, 1]
NEAR = 1e-5


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def whole(*shape: int) -> Tensor:
    """Draw whole numbers. Sums of their products are exact, in whatever order the host's library adds."""
    return numbers(*shape).mul(4).round()


def given(x: Tensor, transposed: bool, mn_major: bool) -> Tensor:
    """Return x `[m, k]`, or `[k, m]` if transposed, in either major, in lines whose pitch is a multiple of 16 bytes."""
    rows, columns = x.shape
    room = x.new_zeros((columns, rows + -rows % 8) if mn_major else (rows, columns))
    lying = room[:, :rows].t() if mn_major else room
    lying.copy_(x)
    return lying.t() if transposed else lying


@pytest.mark.parametrize("major", DENSE)
@pytest.mark.parametrize(("a_is_mn", "b_is_mn"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_products_take_either_major(major: str, a_is_mn: bool, b_is_mn: bool, dtype: torch.dtype) -> None:
    x, w, d = whole(M, K), whole(N, K), torch.full((M, N), 3.0, dtype=dtype)
    a, b = given(x, major[0] == "t", a_is_mn), given(w, major[1] == "n", b_is_mn)
    function, right = getattr(deep_gemm, f"bf16_gemm_{major}"), x.float() @ w.float().t()
    assert torch.equal(function(a, b), right.bfloat16())
    assert function(a, b, d, d) is None
    assert torch.equal(d, (right + 3).to(dtype))
    out = torch.empty_like(d)
    function(a, b, out, c=d, compiled_dims="mnk", alpha=None)
    assert torch.equal(out, (right + d.float()).to(dtype))


def test_rows_of_the_reference_have_one_order_of_sums_in_the_batch_invariant_mode() -> None:
    """Check dense, stacked and counted rows. Without the mode, 116 of one row's 144 sums differed (torch 2.13, x86)."""
    deep_gemm.set_batch_invariant(True)
    a, b = (torch.randn(rows, 1040, generator=torch.Generator().manual_seed(rows)).bfloat16() for rows in (300, 144))
    right = torch.empty(300, 144)
    deep_gemm.bf16_gemm_nt(a, b, right)
    for begin, end in ((0, 1), (1, 3), (3, 20), (0, 299)):
        d, count = torch.empty(end - begin, 144), int32(end - begin)
        deep_gemm.bf16_gemm_nt(a[begin:end], b, d)
        stacked, counted = torch.empty_like(d), torch.empty_like(d)[None]
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a[begin:end], b[None], stacked, torch.zeros(len(d)).int())
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a[None, begin:end], b[None], counted, count, end - begin)
        assert all(torch.equal(made, right[begin:end]) for made in (d, stacked, counted[0]))


def test_one_row_one_column_nothing() -> None:
    for m, k in ((1, K), (M, 1), (1, 1), (0, K), (M, 0)):
        a, b = numbers(k, m).t(), numbers(k, N).t()
        a = a if k != K else a.contiguous()
        p = bf16_problem(a, b, None, None, "nt")
        assert p.a.shape == (m, k)
        assert sorted(p.a.stride())[0] == 1
        made = some(deep_gemm.bf16_gemm_nt(a, b, c=torch.ones(m, N)))
        assert torch.equal(made, a.float() @ b.float().t() + 1)
    assert laid_out("a", numbers(64, 8).t()[:, :1], "m").stride() == (1, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": numbers(M, K).float()}, "a: expected dtype torch.bfloat16, got torch.float32"),
        ({"a": numbers(M, 8)}, r"b: expected shape \(n, k\) = \(n, 8\), got \(24, 16\)"),
        ({"a": numbers(M, 2 * K)[:, ::2]}, "a: expected values contiguous along m or k"),
        ({"a": numbers(M, K + 4)[:, :K]}, "a: expected a stride that is a multiple of 8 elements"),
        ({"a": numbers(M, 4), "b": numbers(N, 8)[:, :4]}, "a: expected a stride"),
        ({"a": numbers(M, 8)[:, :4], "b": numbers(N, 8)[:, :4]}, "k: expected a multiple of 8"),
        ({"a": numbers(M * K + 1)[1:].view(M, K)}, "a: expected an address"),
        ({"d": torch.empty(M, N).half()}, "d: expected dtype"),
        ({"d": torch.empty(M, N), "c": numbers(M, N)}, "c: expected dtype"),
        ({"b": numbers(20, K)}, "n: expected a multiple of 8"),
        ({"a": numbers(M, K).requires_grad_()}, "a: expected a tensor without a gradient"),
        ({"alpha": 2.0}, "alpha: expected None, got 2.0"),
    ],
)
def test_what_dense_products_refuse(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=f"^{message}"):
        deep_gemm.bf16_gemm_nt(**{"a": numbers(M, K), "b": numbers(N, K), **change})


HALVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "dense": lambda a, b: deep_gemm.bf16_gemm_nt(a[0], b[0]),
    "transposed": lambda a, b: deep_gemm.bf16_gemm_tt(a[0].t(), b[0]),
    "stacked": lambda a, b: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a[0], b, grouped_layout=int32(*[0] * M)),
    "counted": lambda a, b: deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, masked_m=int32(1, 1, 1)),
    "along k": lambda a, b: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a[0], b[0], ks_cpu=[1]),
    "heads": lambda a, b: deep_gemm.einsum("bhr,hdr->bhd", a.transpose(0, 1), b),
    "sum": lambda a, b: deep_gemm.einsum("bmk,bnk->mn", a, b),
}


@pytest.mark.parametrize("name", HALVES)
def test_fp16_is_refused_as_the_documentation_says(name: str) -> None:
    told = "expected dtype torch.bfloat16, got torch.float16"
    assert told in (Path(__file__).parents[3] / "docs" / "bf16.md").read_text()
    a, b = numbers(GROUPS, M, K), numbers(GROUPS, N, K)
    for which, operands in (("a", (a.half(), b.half())), ("a", (a.half(), b)), ("b", (a, b.half()))):
        with pytest.raises(ValueError, match=f"^{which}: {told}"):
            HALVES[name](*operands)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_stacked_rows_and_their_gradients(turned: bool, ends: bool) -> None:
    function = deep_gemm.m_grouped_bf16_gemm_nn_contiguous if turned else deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    set_mk_alignment_for_contiguous_layout(2)
    ids = [0, -1, 2, 2, 2] if ends else IDS
    layout = int32(1, 1, 5) if ends else int32(*IDS)
    a, w = numbers(M, K).requires_grad_(), numbers(GROUPS, N, K)
    b = (w.mT.contiguous() if turned else w.clone()).requires_grad_()
    out = some(function(a, b, None, layout, use_psum_layout=ends))
    out.float().square().sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        d = torch.full((M, N), 7.0, dtype=torch.bfloat16)
        function(a, b, d, layout, "nk", ends, ensure_zero_padding=not ends)
    x, y = a.detach().float().requires_grad_(), w.float().requires_grad_()
    right = torch.stack([x[i] @ y[max(g, 0)].t() * (g >= 0) for i, g in enumerate(ids)])
    right.square().sum().backward()  # type: ignore[no-untyped-call]
    of_y = some(y.grad)
    assert calc_diff(out, right) < NEAR
    assert calc_diff(some(a.grad), some(x.grad)) < NEAR
    assert calc_diff(some(b.grad), of_y.mT if turned else of_y) < NEAR
    none = torch.tensor(ids) < 0
    assert torch.equal(d[~none], out[~none])
    assert (d[none] == (7 if ends else 0)).all()


@pytest.mark.parametrize("zero_padding", [True, False])
def test_rows_without_a_group_are_zeros_beside_a_group_and_else_kept(zero_padding: bool) -> None:
    """A is NaN in rows without a group. With ids, `ensure_zero_padding` (which callers set to False) has no effect."""
    ids = torch.tensor([-1] * 130 + [0] * 3 + [-1] * 170 + [1] + [-1] * 100)
    a, b, d = numbers(len(ids), K), numbers(2, N, K), torch.full((len(ids), N), 7.0)
    a[ids < 0] = torch.nan
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids.int(), ensure_zero_padding=zero_padding)
    has_group = torch.tensor([bool((ids[row // 128 * 128 :][:128] >= 0).any()) for row in range(len(ids))])
    assert (d[~has_group] == 7).all()
    assert (d[has_group & (ids < 0)] == 0).all()
    assert torch.equal(d[ids == 0], a[ids == 0].float() @ b[0].float().t())
    assert torch.equal(d[ids == 1], a[ids == 1].float() @ b[1].float().t())


def test_counted_rows_and_their_gradients() -> None:
    a, b, counts = numbers(GROUPS, 4, K).requires_grad_(), numbers(GROUPS, N, K).requires_grad_(), int32(4, 0, 2)
    out = some(deep_gemm.bf16_m_grouped_gemm_nt_masked(a, b, masked_m=counts, expected_m=2))
    used = (torch.arange(4) < counts[:, None])[..., None]
    torch.where(used, out, 0).float().square().sum().backward()  # type: ignore[no-untyped-call]
    x, y = (t.detach().float().requires_grad_() for t in (a, b))
    right = torch.where(used, x @ y.mT, 0)
    right.square().sum().backward()  # type: ignore[no-untyped-call]
    assert calc_diff(torch.where(used, out, 0), right) < NEAR
    for mine, its in ((a.grad, x.grad), (b.grad, y.grad)):
        assert calc_diff(some(mine), some(its)) < NEAR


@pytest.mark.parametrize("said", ["host", "tensor", "ends", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_along_k(said: str, dtype: torch.dtype) -> None:
    ks = [3, 0, 9] if said != "ends" else [4, 0, 9]
    a, b, c = numbers(16, 8), numbers(16, N), torch.ones(3, 8, N, dtype=dtype)
    layout = None if said == "host" else int32(4, 4, 13) if said == "ends" else int32(*ks)
    on_host = ks if said in ("host", "both") else None
    set_mk_alignment_for_contiguous_layout(4)
    made = deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, None, on_host, layout, c, use_psum_layout=said == "ends")
    parts = zip(*(torch.split(x[: sum(ks)].float(), ks) for x in (a, b)), strict=True)
    assert torch.equal(some(made), torch.stack([x.t() @ y + 1 for x, y in parts]).to(dtype))


@pytest.mark.parametrize(
    ("ks", "layout", "message"),
    [
        (None, None, "ks_cpu: expected a list, or grouped_layout"),
        (int32(8, 8).to("meta"), None, "ks_cpu: expected a CPU or CUDA tensor, got device meta"),
        ([-1, 3], None, "ks_cpu: expected numbers of at least 0, got -1 at index 0"),
        ([16, 8], None, "ks_cpu: expected a sum of at most 16"),
        ([8, 8], int32(8, 7), "grouped_layout: expected the numbers of ks_cpu"),
    ],
)
def test_what_groups_along_k_refuse(ks: Any, layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(numbers(16, 8), numbers(16, N), None, ks, layout)


SIZES = {"b": 6, "h": 3, "m": 8, "n": 16, "k": 64, "r": 24, "d": 32}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_einsum(expr: str) -> None:
    operands, _, _ = expr.partition("->")
    # The weight is a part of a wider tensor, as in tests of callers.
    a, b = (numbers(*(SIZES[x] for x in axes[:-1]), SIZES[axes[-1]] + 8)[..., :-8] for axes in operands.split(","))
    right = torch.einsum(expr, a.float(), b.float())
    made = some(deep_gemm.einsum(expr.replace(",", ", "), a, b, use_cublaslt=True))
    assert made.is_contiguous()
    assert calc_diff(made, right) < NEAR
    for dtype in (torch.bfloat16, torch.float32):
        d = torch.ones(right.shape, dtype=dtype)
        assert deep_gemm.einsum(expr, a, b, d) is None
        assert calc_diff(d, right) < NEAR
        if dtype == torch.float32:
            d.fill_(1)
            deep_gemm.einsum(expr, a, b, d, d)
            assert calc_diff(d, right + 1) < NEAR


def test_what_einsum_refuses() -> None:
    a, b = numbers(3, 8, 64), numbers(3, 16, 64)
    with pytest.raises(NotImplementedError, match=r"^expr: expected bmk,bnk->mn, .*, got 'mk,nk->mn'"):
        deep_gemm.einsum("mk,nk->mn", a, b)
    with pytest.raises(ValueError, match=r"^c: expected None, or d itself in FP32, for bmk,bnk->mn"):
        deep_gemm.einsum("bmk,bnk->mn", a, b, numbers(8, 16), numbers(8, 16))
    with pytest.raises(ValueError, match=r"^k: expected a multiple of 64 for bmk,bnk->mn, got 56"):
        deep_gemm.einsum("bmk,bnk->mn", a[..., :56], b[..., :56])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batches_of_symmetric_products(dtype: torch.dtype) -> None:
    x, d = numbers(3, 24, 40), torch.full((3, 24, 24), torch.nan, dtype=dtype)
    deep_gemm.batched_syrk(x, d)
    assert calc_diff(d, x.float() @ x.float().mT) < NEAR
    gram, square = d.bfloat16().tril(), torch.full_like(d, torch.nan)
    gram = gram + gram.tril(-1).mT
    deep_gemm.batched_symm(gram, gram, square)
    assert calc_diff(square, gram.float() @ gram.float()) < NEAR


def test_what_symmetric_products_refuse() -> None:
    x, square = numbers(3, 24, 40), numbers(3, 24, 24)
    for given, message in (
        ((x, x, square), r"a: expected shape \(batch, n, n\), got \(3, 24, 40\)"),
        ((square, square, square), "a: expected symmetric matrices, got one that is not"),
        ((square + square.mT, square, square), "b: expected symmetric matrices, got one that is not"),
        ((square + square.mT, square + square.mT, x), r"d: expected shape .* got \(24, 3, 40\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            deep_gemm.batched_symm(*given)
    for matrices, message in ((x[0], "a: expected shape"), (square, "d: expected memory that does not overlap")):
        with pytest.raises(ValueError, match=f"^{message}"):
            deep_gemm.batched_syrk(matrices, square)


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_einsum_refuses_a_d_that_overlaps_an_operand_or_c_in_part(expr: str) -> None:
    of_a, of_b, of_d = ([SIZES[axis] for axis in axes] for axes in expr.replace("->", ",").split(","))
    a, b, room = numbers(*of_a), numbers(*of_b), torch.zeros(1 << 16)
    for name, shape in (("a", of_a), ("b", of_b)):
        given = {"a": a, "b": b, name: room.view(torch.bfloat16)[: prod(shape)].view(shape)}
        first = prod(shape) // 2 - 4  # D overlaps the last 16 bytes
        with pytest.raises(ValueError, match=rf"^d: expected memory that does not overlap {name}$"):
            deep_gemm.einsum(expr, given["a"], given["b"], room[first : first + prod(of_d)].view(of_d))
    d, c = (room[first : first + prod(of_d)].view(of_d) for first in (0, 4))
    with pytest.raises(ValueError, match=r"^c: expected (None, or d itself in FP32|d itself or memory that)"):
        deep_gemm.einsum(expr, a, b, d, c)
    assert not room.any()


# Problems for a GPU's kernels


class Unread(Tensor):
    """A tensor whose elements the host must not read, since reading them would wait for a GPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.to)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("ks", [(64, 0, 128), (3, 0, 70), (64, 64, 0)])
@pytest.mark.parametrize("said", ["host", "tensor", "both", "ends"])
def test_who_computes_groups_along_k(monkeypatch: pytest.MonkeyPatch, ks: tuple[int, ...], said: str) -> None:
    """If the host knows depths of whole k-blocks, they become parameters. Else the GPU counts; the host never waits."""
    problems: list[Any] = []
    monkeypatch.setattr(bf16_depths, "run_parts", problems.append)
    a, b, tensor = numbers(192, 8), numbers(192, N), int32(*ks).as_subclass(Unread)
    layout = {"host": None, "ends": tensor.cumsum(0).int()}.get(said, tensor)
    on_host = ks if said in ("host", "both") else None
    d = torch.empty(3, 8, N)
    counts = tensor if said == "ends" else layout
    p = Problem(a.mT, None, b.mT, None, d, None, PARTS, None, None, ks=on_host, ks_tensor=counts, layout=layout)
    bf16_depths.run(p)
    is_whole = on_host is not None and all(k % 64 == 0 for k in ks)
    (found,) = problems
    assert found.work is (PARTS if is_whole else COUNTED)
    if is_whole:
        assert found.a.shape[1] == found.b.shape[1] == sum(ks)
    assert found.ks == on_host
    assert is_whole or (found.sfa is None) == (on_host is not None)


def test_depths_that_do_not_fit_parameters_are_the_callers_tensor() -> None:
    ks = (1,) * (MOST_INLINE_COUNTS + 1)
    a, d, counts = numbers(len(ks), 8), torch.empty(len(ks), 8, 8), int32(*ks)
    p = Problem(a.mT, None, a.mT, None, d, None, PARTS, None, None, ks=ks, ks_tensor=counts)
    assert bf16_depths.of_any_depths(p._replace(ks=ks[1:])).sfa is None
    p = bf16_depths.of_any_depths(p)
    assert (p.sfa is counts, p.ks) == (True, None)
