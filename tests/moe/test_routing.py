"""Rows of experts: the row of each route, gathering tokens into rows, and summing rows up again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import captured, framed, int32, same_bits, some
from helpers import numbers as random_rows
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import assert_mistake, random_routes, same_pairs, without_values
from torch import Tensor

import deep_gemm
from deep_gemm import ExpertRows, expert_rows, gather_cast_to_fp8, gather_weighted, per_token_cast_to_fp8
from deep_gemm.core.kernel import Kernel
from deep_gemm.moe import route_rows
from deep_gemm.moe.routing import stack_routes, weighted_sum

TOKENS, TOPK, EXPERTS = 6, 3, 4


def rows_one_by_one(topk_ids: Tensor, num_experts: int) -> ExpertRows:
    """Compute the right result of `expert_rows` by plain loops."""
    routes = [(e, t, j) for t, of_token in enumerate(topk_ids.tolist()) for j, e in enumerate(of_token)]
    stacked = sorted(route for route in routes if 0 <= route[0] < num_experts)
    counts = [sum(e == expert for e, _, _ in stacked) for expert in range(num_experts)]
    ends = [sum(counts[: expert + 1]) for expert in range(num_experts)]
    row_of = torch.full(topk_ids.shape, -1, dtype=torch.int32)
    for row, (_, t, j) in enumerate(stacked):
        row_of[t, j] = row
    none = [-1] * (len(routes) - len(stacked))
    token_of, ids = [t for _, t, _ in stacked] + none, [e for e, _, _ in stacked] + none
    return ExpertRows(int32(*counts), int32(*ends), row_of, int32(*token_of), int32(*ids))


def sum_one_by_one(y: Tensor, rows: ExpertRows, weights: Tensor) -> Tensor:
    """Compute the right `gather_weighted`: one product and one addition after the other, each rounded to FP32."""
    tokens, topk = rows.row_of.shape
    total = torch.zeros(tokens, y.shape[1])
    for t in range(tokens):
        for j in range(topk):
            row = int(rows.row_of[t, j])
            if row >= 0:
                term = (y[row].double() * weights[t, j].double()).float()  # exact in FP64, then rounded
                total[t] = (total[t].double() + term.double()).float()
    return total.to(torch.bfloat16)


# Rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 1, 1), (6, 3, 4), (40, 8, 64), (100, 2, 3)])
def test_rows_are_those_of_plain_loops(tokens: int, topk: int, experts: int, dtype: torch.dtype) -> None:
    topk_ids = random_routes(tokens, topk, experts, dtype=dtype)
    before = topk_ids.clone()
    rows = expert_rows(topk_ids, experts)
    assert all(same_bits(x, y) for x, y in zip(rows, rows_one_by_one(topk_ids, experts), strict=True))
    assert torch.equal(topk_ids, before)


@given(
    tokens=st.integers(0, 12),
    topk=st.integers(0, 5),
    experts=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_each_route_has_a_row_and_rows_are_sorted(tokens: int, topk: int, experts: int, seed: int, dtype: Any) -> None:
    topk_ids = random_routes(tokens, topk, experts, seed, dtype)
    rows = expert_rows(topk_ids, experts)
    assert all(x.dtype == torch.int32 for x in rows)
    routed = topk_ids >= 0
    used = int(routed.sum())
    assert sorted(rows.row_of[routed].tolist()) == list(range(used))
    assert bool((rows.row_of[~routed] == -1).all())
    assert torch.equal(rows.ends, rows.counts.cumsum(0).to(torch.int32))
    assert int(rows.counts.sum()) == used
    assert torch.equal(rows.ids[:used], rows.ids[:used].sort().values)
    assert bool((rows.ids[used:] == -1).all())
    assert bool((rows.token_of[used:] == -1).all())
    for token, column in routed.nonzero().tolist():
        row = int(rows.row_of[token, column])
        assert int(rows.ids[row]) == int(topk_ids[token, column])
        assert int(rows.token_of[row]) == token
    places = [(int(rows.ids[r]), t, j) for t, j in routed.nonzero().tolist() for r in (rows.row_of[t, j],)]
    in_order = [place for _, place in sorted(zip(rows.row_of[routed].tolist(), places, strict=True))]
    assert in_order == sorted(places), "by expert, then by token, then by column"


def test_strides_of_ids_change_nothing() -> None:
    topk_ids = random_routes(7, 4, 5)
    for same in (topk_ids.t().contiguous().t(), torch.cat([topk_ids, topk_ids], 1)[:, :4]):
        rows = zip(expert_rows(same, 5), expert_rows(topk_ids, 5), strict=True)
        assert all(same_bits(x, y) for x, y in rows)


def test_ids_that_no_expert_has_count_as_none_where_the_host_reads_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_gemm.core.check.checks.in_range", lambda *_: None)
    topk_ids = torch.tensor([[7, 0], [-5, 2], [1, 2**40]])
    rows = expert_rows(topk_ids, 2)
    assert rows.row_of.tolist() == [[-1, 0], [-1, -1], [1, -1]]
    assert rows.ends.tolist() == [1, 2]
    assert rows.ids.tolist() == [0, 1, -1, -1, -1, -1]


# Gathering


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_each_row_is_the_cast_of_its_token(dtype: torch.dtype, use_ue8m0: bool) -> None:
    x, rows = random_rows(9, 200, dtype=dtype), expert_rows(random_routes(9, 3, 4), 4)
    values, scales = gather_cast_to_fp8(x, rows, use_ue8m0=use_ue8m0, min_amax=1.0)
    used = rows.token_of >= 0
    expected = per_token_cast_to_fp8(x[rows.token_of[used]], use_ue8m0, min_amax=1.0)
    assert same_pairs((values[used], scales[used]), expected)
    assert not values[~used].view(torch.uint8).any()
    assert bool((scales[~used] == 1).all())
    assert bool((~used).any())
    assert values.shape == (27, 200)
    assert scales.shape == (27, 2)
    assert values.is_contiguous()
    assert scales.is_contiguous()


def test_a_token_without_a_route_may_hold_anything() -> None:
    x, topk_ids = random_rows(5, 128), random_routes(5, 2, 3)
    topk_ids[2] = -1
    rows = expert_rows(topk_ids, 3)
    expected = gather_cast_to_fp8(x, rows)
    x[2] = torch.nan
    assert same_pairs(gather_cast_to_fp8(x, rows), expected)


def test_strides_of_tokens_change_nothing() -> None:
    x, rows = random_rows(6, 160), expert_rows(random_routes(6, 2, 3), 3)
    expected = gather_cast_to_fp8(x, rows)
    for same in (x.t().contiguous().t(), torch.cat([x, x], 1)[:, :160], x.repeat_interleave(2, 0)[::2]):
        assert same_pairs(gather_cast_to_fp8(same, rows), expected)


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(0, 2, 3), (3, 0, 3), (3, 2, 0), (0, 0, 0)])
def test_empty_sizes_work(tokens: int, topk: int, experts: int) -> None:
    rows = expert_rows(random_routes(tokens, topk, experts), experts)
    of_experts, of_rows = [(experts,)] * 2, [(tokens * topk,)] * 2
    assert [tuple(x.shape) for x in rows] == [*of_experts, (tokens, topk), *of_rows]
    values, scales = gather_cast_to_fp8(random_rows(tokens, 128), rows)
    assert values.shape == (tokens * topk, 128)
    assert scales.shape == (tokens * topk, 1)
    out = gather_weighted(torch.full((tokens * topk, 16), torch.nan), rows, torch.ones(tokens, topk))
    assert same_bits(out, torch.zeros(tokens, 16, dtype=torch.bfloat16))


# Summing up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_plain_loops_to_the_bit(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    rows = expert_rows(random_routes(20, 4, 5), 5)
    y, weights = random_rows(80, 24, dtype=dtype), random_rows(20, 4, dtype=weight_dtype, seed=1)
    assert same_bits(gather_weighted(y, rows, weights), sum_one_by_one(y, rows, weights))


def test_products_are_rounded_before_they_are_added() -> None:
    rows = expert_rows(torch.tensor([[0, 1]]), 2)
    almost = 1 + 2.0**-12
    square = almost**2 - 2.0**-24  # rounded to FP32; a fused multiply-add would leave 2^-24
    y = torch.tensor([-square, almost])[:, None].repeat(1, 8)
    assert not some(gather_weighted(y, rows, torch.tensor([[1.0, almost]]))).any()


@pytest.mark.parametrize(("terms", "total"), [((2.0**30, -(2.0**30), 1.0), 1), ((1.0, 2.0**30, -(2.0**30)), 0)])
def test_sums_are_taken_in_order_of_columns(terms: tuple[float, ...], total: float) -> None:
    for ids in ([0, 1, 2], [2, 0, 1]):
        rows = expert_rows(torch.tensor([ids]), 3)
        y = torch.empty(3, 8)
        y[rows.row_of[0].long()] = torch.tensor(terms)[:, None]
        assert bool((some(gather_weighted(y, rows, torch.ones(1, 3))) == total).all())


def test_rows_and_weights_without_a_route_may_hold_anything() -> None:
    topk_ids = random_routes(10, 3, 4)
    topk_ids[0, 0], topk_ids[3] = -1, -1
    rows, y, weights = expert_rows(topk_ids, 4), random_rows(30, 16), random_rows(10, 3, dtype=torch.float32)
    expected = gather_weighted(y, rows, weights)
    for poison in (torch.nan, torch.inf):
        y[int(rows.ends[-1]) :] = poison
        out = some(gather_weighted(y, rows, weights.masked_fill(topk_ids < 0, poison)))
        assert same_bits(out, some(expected))
        assert not out[3].any()
    y[0] = torch.nan  # the row that routes without one must not read
    only = expert_rows(torch.tensor([[0], [-1]]), 1)
    out = some(gather_weighted(y[:2], only, torch.ones(2, 1)))
    assert not out[1].any()
    assert out[0].isnan().all()


def test_out_is_written_and_nothing_around_it() -> None:
    rows, y, p = expert_rows(random_routes(6, 2, 3), 3), random_rows(12, 24), random_rows(6, 2, dtype=torch.float32)
    for n in (24, 16):
        frame = framed((6, n), torch.bfloat16)
        assert gather_weighted(y[:, :n], rows, p, out=frame.view) is None
        assert same_bits(gather_weighted(y[:, :n], rows, p), frame.view)
        frame.assert_untouched_outside()


def test_strides_of_rows_and_weights_change_nothing() -> None:
    rows, y, p = expert_rows(random_routes(6, 2, 3), 3), random_rows(12, 24), random_rows(6, 2, dtype=torch.float32)
    out = some(gather_weighted(y.t().contiguous().t(), rows, torch.cat([p, p], 1)[:, 2:]))
    assert same_bits(gather_weighted(y, rows, p), out)


def test_no_gradient_is_carried() -> None:
    rows = expert_rows(random_routes(6, 2, 3), 3)
    x, y = random_rows(6, 128).requires_grad_(), random_rows(12, 24).requires_grad_()
    assert not any(result.requires_grad for result in gather_cast_to_fp8(x, rows))
    assert not some(gather_weighted(y, rows, torch.ones(6, 2).requires_grad_())).requires_grad


# On a GPU


def test_the_host_reads_no_value_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_values(monkeypatch):
        for dtype in (torch.int32, torch.int64):
            rows = expert_rows(torch.empty(6, 3, dtype=dtype, device="meta"), 4)
            values, scales = gather_cast_to_fp8(torch.empty(6, 256, device="meta"), rows, min_amax=1.0)
            y, weights = torch.empty(18, 24, device="meta"), torch.empty(6, 3, device="meta")
            out = some(gather_weighted(y, rows, weights))
            assert {x.device.type for x in (*rows, values, scales, out)} == {"meta"}
            gather_weighted(y, rows, weights, out=torch.empty_like(out))


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_the_cpu_and_a_graph_captures_it() -> None:
    x, weights = random_rows(50, 300), random_rows(50, 4, dtype=torch.float32, seed=1)
    on_gpu, weights_on_gpu, ids = x.cuda(), weights.cuda(), torch.full((50, 4), -1, device="cuda")

    def call() -> tuple[Tensor, ...]:
        rows = expert_rows(ids, 7)
        values, scales = gather_cast_to_fp8(on_gpu, rows)
        y = on_gpu[:, :296].repeat(4, 1)
        out = some(gather_weighted(y, rows, weights_on_gpu))
        return *rows, values, scales, out

    call()
    graph, got = captured(call)
    for seed in range(3):
        topk_ids = random_routes(50, 4, 7, seed)
        ids.copy_(topk_ids)
        graph.replay()
        rows = expert_rows(topk_ids, 7)
        out = some(gather_weighted(x[:, :296].repeat(4, 1), rows, weights))
        used = int(rows.ends[-1])
        for mine, its in zip(got, (*rows, *gather_cast_to_fp8(x, rows), out), strict=True):
            n = used if its.shape[0] == 200 else its.shape[0]
            assert same_bits(mine.cpu()[:n], its[:n])


@pytest.mark.gpu
def test_ids_that_no_expert_has_count_as_none_on_a_gpu() -> None:
    rows = expert_rows(torch.tensor([[7, 0], [-5, 2], [1, 2**40]], device="cuda"), 2)
    assert rows.row_of.tolist() == [[-1, 0], [-1, -1], [1, -1]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "experts"), [(1024, 7), (1025, 128), (6200, 300), (20000, 1024)])
def test_many_routes_have_the_cpus_rows_and_a_graph_counts_them_anew(tokens: int, experts: int, dtype: Any) -> None:
    ids = torch.full((tokens, 8), -1, dtype=dtype, device="cuda")
    expert_rows(ids, experts)
    graph, got = captured(expert_rows, ids, experts)
    for seed in range(3):
        topk_ids = random_routes(tokens, 8, experts, seed, dtype)
        ids.copy_(topk_ids)
        graph.replay()
        for mine, its in zip(got, expert_rows(topk_ids, experts), strict=True):
            assert same_bits(mine.cpu(), its)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "topk", "n"), [(1, 6, 4096), (700, 6, 7168), (1100, 40, 512), (3000, 3, 5000)])
def test_few_and_many_tokens_are_summed_to_the_bits_of_the_cpu(tokens: int, topk: int, n: int, dtype: Any) -> None:
    rows = expert_rows(random_routes(tokens, topk, 16), 16)
    y, weights = random_rows(tokens * topk, n), random_rows(tokens, topk, dtype=dtype, seed=1)
    out = some(gather_weighted(y.cuda(), ExpertRows(*(each.cuda() for each in rows)), weights.cuda()))
    assert torch.equal(out.cpu(), weighted_sum(y, rows.row_of, weights).bfloat16())


@pytest.mark.parametrize(("tokens", "kernels"), [(1024, ["route_rows"]), (1025, ["count_routes", "route_rows"])])
def test_only_many_routes_take_a_launch_more(tokens: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, bool]] = []

    def run(kernel: Any, config: Any, values: Any, grid: int, device: int, *, is_dependent: bool = False) -> None:
        assert grid == -(-tokens * 8 // 1024)
        launched.append((kernel.name, is_dependent))

    monkeypatch.setattr(Kernel, "run", run)
    route_rows.run(route_rows.RouteProblem(random_routes(tokens, 8, 16), 16))
    assert launched == [(name, name == "route_rows" and len(kernels) == 2) for name in kernels]


# Mistakes


def rows_of_six(**changes: Any) -> ExpertRows:
    return expert_rows(random_routes(TOKENS, TOPK, EXPERTS), EXPERTS)._replace(**changes)


Mistakes = list[tuple[dict[str, Any], str]]
OF_IDS: Mistakes = [
    ({"topk_ids": [[0]]}, "TypeError: topk_ids: expected a tensor, got a list of 1"),
    ({"topk_ids": torch.zeros(2, 2)}, "topk_ids: expected dtype torch.int32 or torch.int64, got torch.float32"),
    ({"topk_ids": torch.zeros(2, dtype=torch.int64)}, "topk_ids: expected shape (tokens, topk), got (2,)"),
    ({"topk_ids": torch.tensor([[0, 4]])}, "topk_ids: expected values in -1..3, got 4 at index (0, 1)"),
    ({"topk_ids": torch.tensor([[0], [-2]])}, "topk_ids: expected values in -1..3, got -2 at index (1, 0)"),
    ({"num_experts": -1}, "num_experts: expected an integer in 0..2147483647, got -1"),
    ({"num_experts": 2.0}, "num_experts: expected an integer in 0..2147483647, got 2.0"),
    ({"num_experts": torch.tensor(4)}, "num_experts: expected an integer in 0..2147483647, got tensor(4)"),
]
ZEROS = partial(torch.zeros, dtype=torch.int32)
OF_ROWS: Mistakes = [
    ({"rows": None}, "TypeError: rows: expected ExpertRows, got NoneType"),
    ({"rows": rows_of_six(ids=3)}, "TypeError: rows.ids: expected a tensor, got int"),
    ({"rows": rows_of_six(ids=ZEROS(17))}, "rows.ids: expected shape (rows) = (18), got (17,)"),
    ({"rows": rows_of_six(row_of=torch.zeros(6, 3))}, "rows.row_of: expected dtype torch.int32, got torch.float32"),
    ({"rows": rows_of_six(row_of=ZEROS(6))}, "rows.row_of: expected shape (tokens, topk), got (6,)"),
    ({"rows": rows_of_six(ends=ZEROS(4, device="meta"))}, "rows.ends: expected device cpu, where "),
]
OF_TOKENS: Mistakes = [
    ({"x": 1.0}, "TypeError: x: expected a tensor, got float"),
    ({"x": torch.ones(5, 128)}, "x: expected shape (tokens, k) = (6, k), got (5, 128)"),
    ({"x": torch.ones(6, 128, dtype=torch.float64)}, "x: expected dtype torch.bfloat16 or torch.float16 or"),
    ({"x": torch.ones(6, 128, device="meta")}, "rows.counts: expected device meta, where x is, got cpu"),
    ({"rows": rows_of_six(token_of=ZEROS(18) + 6)}, "rows.token_of: expected val"),
    ({"min_amax": -1}, "min_amax: expected a finite FP32 number that is not negative, got -1"),
]
SHARED = torch.zeros(19, 16, dtype=torch.bfloat16)
OF_SUMS: Mistakes = [
    ({"y": [1.0]}, "TypeError: y: expected a tensor, got a list of 1"),
    ({"y": torch.ones(17, 16)}, "y: expected shape (rows, n) = (18, n), got (17, 16)"),
    ({"y": torch.ones(18, 12)}, "n: expected a multiple of 8 for torch.bfloat16 output, got 12"),
    ({"y": torch.ones(18, 16, dtype=torch.int32)}, "y: expected dtype torch.bfloat16 or torch.float16 or"),
    ({"y": torch.ones(18, 16, device="meta")}, "rows.counts: expected device meta, where y is, got cpu"),
    ({"topk_weights": None}, "TypeError: topk_weights: expected a tensor, got NoneType"),
    ({"topk_weights": torch.ones(6, 2)}, "topk_weights: expected shape (tokens, topk) = (6, 3), got (6, 2)"),
    ({"topk_weights": torch.ones(6, 3).double()}, "topk_weights: expected dtype torch.float32 or"),
    ({"topk_weights": torch.ones(6, 3).to("meta")}, "topk_weights: expected device cpu, where y is, got meta"),
    ({"rows": rows_of_six(row_of=ZEROS(6, 3) + 18)}, "rows.row_of: expected values"),
    ({"out": 1}, "TypeError: out: expected a tensor, got int"),
    ({"out": torch.zeros(6, 16)}, "out: expected dtype torch.bfloat16, got torch.float32"),
    ({"out": SHARED[:5]}, "out: expected shape (tokens, n) = (6, 16), got (5, 16)"),
    ({"out": SHARED[:6].to("meta")}, "out: expected device cpu, where y is, got meta"),
    ({"out": SHARED[0].expand(6, 16)}, "out: expected rows that do not overlap, got strides (0, 1)"),
    ({"out": SHARED[1:7], "y": SHARED[:18]}, "out: expected memory that does not overlap y"),
    ({"out": torch.zeros(16, 6).bfloat16().t()}, "out: expected values contiguous along n, got strides (1, 6)"),
]
SIX, Y, P = random_routes(TOKENS, TOPK, EXPERTS), torch.ones(18, 16), torch.ones(6, 3)
CALLS: list[tuple[Any, dict[str, Any], Mistakes]] = [
    (expert_rows, {"topk_ids": SIX, "num_experts": EXPERTS}, OF_IDS),
    (gather_cast_to_fp8, {"x": torch.ones(6, 128), "rows": rows_of_six()}, OF_ROWS + OF_TOKENS),
    (gather_weighted, {"y": Y, "rows": rows_of_six(), "topk_weights": P}, OF_ROWS + OF_SUMS),
]


@pytest.mark.parametrize(
    ("function", "call", "message"), [(f, right | wrong, said) for f, right, of in CALLS for wrong, said in of]
)
def test_a_mistake_is_refused_in_words(function: Any, call: dict[str, Any], message: str) -> None:
    assert_mistake(function, call, message)


def test_rows_are_a_public_type() -> None:
    assert isinstance(rows_of_six(), deep_gemm.ExpertRows)
    assert ExpertRows._fields == ("counts", "ends", "row_of", "token_of", "ids")


def test_own_experts_are_numbered_from_the_first_one() -> None:
    ids = torch.tensor([[5, 2, 9, 1], [3, -1, 2, 4]])[:, 1:]
    right = expert_rows(torch.tensor([[0, -1, -1], [-1, 0, 2]]), 3)
    for found, expected in zip(stack_routes(ids, 3, first=2), right, strict=True):
        assert torch.equal(found, expected)
    used = stack_routes(ids, 3, first=2, used=3)
    assert (used.ids.tolist(), used.token_of.tolist()) == ([0, 0, 2], [0, 1, 1])
