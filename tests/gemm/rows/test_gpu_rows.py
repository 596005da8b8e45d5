"""Grouped rows on a GPU: chosen kernels, users' problems, graphs, layouts that change.

Before each product D is full of canaries. Rows of A without a group are NaN, both values and scales. All of D is
compared.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from helpers import assert_right_on_gpu, captured, checked_on_gpu, host_never_waits, some
from test_sim_rows import ends_of_sizes, ids_of_sizes
from torch import Tensor

import deep_gemm
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import empty_scales
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import PER_64
from deep_gemm.gemm import launch as grouped
from deep_gemm.gemm import reference
from deep_gemm.gemm.api.grouped import product_of_rows_by_64, product_of_stacked_rows
from deep_gemm.gemm.ask.rows import contiguous_problem, masked_problem
from deep_gemm.gemm.choose.tiles import tiles_for
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import FINE_OPERANDS, Output
from deep_gemm.gemm.problem import Problem
from deep_gemm.moe.activation import activated_product_of_rows
from deep_gemm.moe.api import activate_rows, activations_of_rows
from deep_gemm.moe.routing import expert_rows, gather_cast_to_fp8
from lab.bench.tune import compile_all
from lab.configs import reachable_grouped
from lab.silu import mistakes, placed, right_on_gpu
from lab.sim import product as simulated
from lab.sim import rows as sim
from lab.sim import rows_silu as activated

pytestmark = pytest.mark.gpu

KINDS = [works.IDS, works.ENDS, works.COUNTS]
BF16 = torch.bfloat16


def on_gpu(p: Problem) -> Problem:
    moved: Any = {name: x.cuda() for name, x in p._asdict().items() if isinstance(x, Tensor)}
    return p._replace(**moved)


def layout_of(kind: works.Work, sizes: list[int], rng: random.Random) -> list[int]:
    if kind == works.ENDS:
        return ends_of_sizes(sizes, 128)
    if kind == works.COUNTS:
        return sizes
    ids: list[int] = []
    for group in rng.sample(range(len(sizes)), len(sizes)):
        ids += [-1] * rng.choice([0, 1, 127, 300]) + [group] * sizes[group]
    return [*ids, *[-1] * rng.choice([0, 1, 3000])]


def random_sizes(rng: random.Random, groups: int) -> list[int]:
    return [rng.choice([0, 1, 2, 63, 64, 65, 127, 128, 129, rng.randint(0, 600)]) for _ in range(groups)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile most kernels that the tests need, on all processors at once."""
    compile_all([each for each in reachable_grouped() if each.operands not in FINE_OPERANDS], lambda _: None)


# ---- through the public functions


def operands(groups: int, rows: int, n: int, k: int, planes: int | None = None) -> tuple[Any, Any, Tensor]:
    """Make A, B and a D full of canaries on the GPU."""
    shape = (rows, k) if planes is None else (planes, rows, k)
    a = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    sfa = get_mn_major_tma_aligned_tensor(torch.rand(*shape[:-1], ceil_div(k, 128), device="cuda") + 0.5)
    b = torch.empty(groups, n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for group in range(groups):
        b[group] = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    sfb = torch.rand(groups, ceil_div(n, 128), ceil_div(k, 128), device="cuda") + 0.5
    return (a, sfa), (b, sfb), torch.full((*shape[:-1], n), sim.CANARY, device="cuda", dtype=BF16)


def numbers(layout: list[int]) -> Tensor:
    return torch.tensor(layout, dtype=torch.int32, device="cuda")


def assert_product(d: Tensor, a: Any, b: Any, rows: Any, group: int) -> None:
    right = reference.block_scaled_product(a[0][rows], a[1][rows], b[0][group], b[1][group])
    assert float((d[rows].double() - right.double()).norm() / right.double().norm()) < 3e-3


def multiply(kind: works.Work, a: Any, b: Any, d: Tensor, layout: Tensor) -> None:
    """Call the public function for this kind of layout."""
    if kind == works.COUNTS:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, layout, 64)
    else:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=kind == works.ENDS)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_may_share_one_weight_by_a_stride_of_0(kind: works.Work) -> None:
    a, (b, sfb), d = operands(1, 300, 1032, 1024, planes=4 if kind == works.COUNTS else None)
    shared = b.expand(4, -1, -1), sfb.expand(4, -1, -1)
    copied = tuple(x.contiguous() for x in shared)
    other, layout = d.clone(), [0] * 70 + [2] * 130 + [3] * 100
    layout = {works.COUNTS: [300, 0, 7, 129], works.ENDS: [128, 128, 300, 300]}.get(kind, layout)
    for weights, out in ((shared, d), (copied, other)):
        multiply(kind, a, weights, out, numbers(layout))
    assert not bool((d == sim.CANARY).all())
    assert torch.equal(d, other)


@pytest.mark.parametrize("max_m", [8, 16, 32, 96])
def test_masked_with_fewer_rows_than_a_tile(max_m: int) -> None:
    masked = Output(work=works.COUNTS)
    for tile in tiles_for(masked):
        config = tile.config(masked, 1024)
        p = sim.random_problem(config, [max_m, 0, 1, max_m - 1] * 8, 1032, 1024, rows=max_m)
        checked_on_gpu(grouped.run, on_gpu(p), config)


@pytest.mark.parametrize(("k", "n"), [(4096, 3072), (1536, 4096)])
def test_masked_with_skewed_counts_and_an_expectation_that_is_wrong(k: int, n: int) -> None:
    counts = [4001, 1425, 0, 0, 0, 0, 0, 571, 503, 0, 26, 12, 1232, 0, 0, 224]
    a, b, d = operands(16, 4096, n, k, planes=16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, numbers(counts), 114)
    for group, count in enumerate(counts):
        assert (d[group, count:] == sim.CANARY).all()
        if count:
            assert_product(d[group], (a[0][group], a[1][group]), b, slice(0, count), group)


@pytest.mark.parametrize("sizes", [[1, 1, 24576, 1536], [0, 0, 5000, 0], [4097, 3, 0, 129]])
def test_contiguous_with_sizes_that_are_no_multiples_of_anything(sizes: list[int]) -> None:
    a, b, d = operands(4, sum(sizes), 1536, 2048)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, numbers(ids_of_sizes(sizes)))
    for group, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        if size:
            assert_product(d, a, b, slice(end - size, end), group)


@pytest.mark.parametrize("place", ["end", "start", "between"])
def test_contiguous_with_thousands_of_rows_without_a_group(place: str) -> None:
    sizes = [700, 129, 3, 64]
    ids, skipped = ids_of_sizes(sizes), [-1] * 9001
    at = {"end": len(ids), "start": 0, "between": 700}[place]
    config = tile_config(128, 128, Output(work=works.IDS))
    checked_on_gpu(grouped.run, on_gpu(sim.random_problem(config, [*ids[:at], *skipped, *ids[at:]], 1032, 1024)))


def test_infinities_in_rows_that_must_not_matter() -> None:
    ids = ids_of_sizes([70, 5, 128, 200], 128)
    a, b, d = operands(4, len(ids), 576, 1024)
    without = numbers(ids) < 0
    clean = some(deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, numbers(ids)))
    a[1][without] = float("inf")
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, numbers(ids))
    assert torch.equal(d, clean)


def test_more_than_two_to_the_31_elements_of_b() -> None:
    sizes = [3] * 256
    a, b, d = operands(256, sum(sizes), 4096, 7168)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, numbers(ids_of_sizes(sizes)))
    for group in (0, 70, 72, 74, 128, 255):
        assert_product(d, a, b, slice(3 * group, 3 * group + 3), group)


def test_more_than_two_to_the_31_elements_of_d() -> None:
    sizes = [1, 50000, 20000 - 1]
    a, b, d = operands(3, sum(sizes), 32768, 128)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, numbers(ids_of_sizes(sizes)))
    for rows, group in ((slice(0, 1), 0), (slice(1, 4), 1), (slice(50000, 50001), 1), (slice(69997, 70000), 2)):
        assert_product(d, a, b, rows, group)


def test_more_than_two_to_the_31_elements_of_masked_operands() -> None:
    counts = [3, 4096] * 36
    a, b, d = operands(72, 4096, 8192, 7680, planes=72)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, numbers(counts), 2000)
    for group in (0, 1, 70, 71):
        rows = slice(max(counts[group] - 3, 0), counts[group])
        assert_product(d[group], (a[0][group], a[1][group]), b, rows, group)
        assert (d[group, counts[group] :] == sim.CANARY).all()


def test_the_transposed_form() -> None:
    a, b, d = operands(3, 300, 576, 1024)
    ids = numbers(ids_of_sizes([100, 7, 193]))
    right = deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, ids)
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, (b[0].mT, b[1].mT), d, ids)
    assert torch.equal(d, right)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_graph_replays_with_a_changed_layout(kind: works.Work) -> None:
    rng = random.Random(3)
    layouts = [layout_of(kind, random_sizes(rng, 9), rng) for _ in range(4)]
    rows = max(len(layout) if kind == works.IDS else max(layout) for layout in layouts)
    a, b, d = operands(9, rows, 576, 1024, 9 if kind == works.COUNTS else None)
    if kind == works.IDS:
        layouts = [[*layout, *[-1] * (rows - len(layout))] for layout in layouts]
    layout = numbers(layouts[0])
    multiply(kind, a, b, d, layout)
    graph, _ = captured(multiply, kind, a, b, d, layout)
    for changed in layouts[1:]:
        layout.copy_(numbers(changed))
        d.fill_(sim.CANARY)
        graph.replay()
        right = torch.full_like(d, sim.CANARY)
        multiply(kind, a, b, right, layout)
        assert torch.equal(d, right)
        p = grouped_problem_of(kind, a, b, layout, d)
        p.d.fill_(sim.CANARY)
        assert_right_on_gpu(p, right)


def grouped_problem_of(kind: works.Work, a: Any, b: Any, layout: Tensor, d: Tensor) -> Problem:
    if kind == works.COUNTS:
        return masked_problem(a, b, d, layout, None)
    return contiguous_problem(a, b, d, layout, use_psum_layout=kind == works.ENDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_never_waits(kind: works.Work) -> None:
    a, b, d = operands(4, 512, 576, 1024, 4 if kind == works.COUNTS else None)
    layout = numbers({works.IDS: [1] * 512, works.ENDS: [70, 200, 200, 400]}.get(kind, [1, 2, 0, 512]))
    with host_never_waits():
        for _ in range(2):
            multiply(kind, a, b, d, layout)


def test_the_same_call_gives_the_same_bits_on_any_number_of_sms() -> None:
    rng = random.Random(1)
    layout = layout_of(works.IDS, random_sizes(rng, 20), rng)
    a, b, d = operands(20, len(layout), 1032, 1040)
    ids = numbers(layout)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ids)
    for num_sms in [*[deep_gemm.get_num_sms()] * 30, 1, 7, 100]:
        deep_gemm.set_num_sms(num_sms)
        again = torch.full_like(d, sim.CANARY)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, again, ids)
        assert torch.equal(again, d)


@pytest.mark.parametrize("expected_m", [0, 1, 20, 4000])
def test_a_wrong_expectation_changes_no_bit(expected_m: int) -> None:
    a, b, d = operands(6, 512, 1032, 1024, planes=6)
    counts = numbers([512, 0, 1, 64, 65, 300])
    right = torch.full_like(d, sim.CANARY)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, right, counts, 200)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, counts, expected_m)
    assert torch.equal(d, right)


@pytest.mark.parametrize("groups_m_n_k", [(2, 0, 64, 128), (2, 64, 0, 128), (2, 130, 64, 0), (0, 64, 64, 128)])
def test_sizes_of_zero(groups_m_n_k: tuple[int, int, int, int]) -> None:
    groups, m, n, k = groups_m_n_k
    for kind in KINDS:
        a, b, d = operands(groups, m, n, k, groups if kind == works.COUNTS else None)
        layout = [min(g * 65 + 3, m) for g in range(groups)]
        if kind == works.IDS:
            layout = ([0] * 3 + [-1] * m)[:m] if groups else [-1] * m
        elif kind == works.ENDS:
            layout = [min(3, m), min(129, m)][:groups] if m > 128 else [min(3, m)] * groups
        p = grouped_problem_of(kind, a, b, numbers(layout), d)
        right, _ = simulated.right_and_allowed(p, {"device": "cuda"})
        grouped.run(p)
        assert torch.equal(d, right)


def test_operands_at_other_addresses_and_layouts_at_odd_ones() -> None:
    a, b, d = operands(4, 400, 576, 1024)
    ids = numbers(ids_of_sizes([100, 7, 193, 100]))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ids)
    moved = [tuple(x.clone(memory_format=torch.preserve_format) for x in pair) for pair in (a, b)]
    odd = torch.cat([ids[:1], ids])[1:]
    for _ in range(2):
        assert torch.equal(deep_gemm.m_grouped_fp8_gemm_nt_contiguous(moved[0], moved[1], None, odd), d)  # type: ignore[arg-type]


def test_a_d_that_lies_over_the_layout_is_refused() -> None:
    a, b, d = operands(1, 64, 64, 128)
    room = torch.zeros(64 * 64 * 2, dtype=torch.uint8, device="cuda")
    ids, over = room[:256].view(torch.int32), room.view(BF16).view(64, 64)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ids)
    with pytest.raises(ValueError, match="d: expected memory that does not overlap grouped_layout"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, over, ids)


def test_pdl_changes_nothing() -> None:
    a, b, d = operands(4, 400, 576, 1024)
    ids = numbers(ids_of_sizes([100, 7, 193, 100]))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ids)
    deep_gemm.set_pdl(True)
    for _ in range(20):
        layout = ids.clone()  # written by the kernel ahead
        assert torch.equal(deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, layout), d)  # type: ignore[arg-type]


# The two products of an expert on a GPU: rows that are activated and cast on their way out, and scales for 64 columns.


def check_activated(p: Problem) -> None:
    wanted = right_on_gpu(p)
    grouped.run(p)
    assert mistakes(p, (p.d, p.scales), wanted) is None


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("rows", [1, 37, 512, 3000])
def test_gate_and_up_that_lie_apart_give_the_bits_of_separate_kernels(rows: int, limit: float | None) -> None:
    hidden, intermediate, groups = 1040, 768, 9
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, hidden, device="cuda", generator=generator)
    w = deep_gemm.per_block_cast_to_fp8(torch.randn(groups, 2 * intermediate, hidden, device="cuda") / hidden**0.5)
    stacked = expert_rows(torch.randint(-1, groups, (rows, 3), device="cuda", generator=generator), groups)
    a = gather_cast_to_fp8(x, stacked, mn_major=True)
    count = int(stacked.ends[-1])
    values, scales = activations_of_rows(a, w, stacked, Gating(limit=limit))
    h = torch.empty(len(stacked.ids), 2 * intermediate, dtype=torch.bfloat16, device="cuda")
    product_of_stacked_rows(a, w, h, stacked.ids)
    wanted_values, wanted_scales = activate_rows(h, stacked, Gating(limit=limit))
    assert torch.equal(values.view(torch.uint8)[:count], wanted_values.view(torch.uint8)[:count])
    assert torch.equal(scales[:count], wanted_scales[:count])


def test_the_very_large_the_very_small_and_what_is_not_finite() -> None:
    p = activated.random_problem([640, 70], 512, 1024, 7)
    factors = torch.tensor([1, 1e18, 4e18, 1e25, 1e-13, 1e-18, 1e-30, 1])
    p.sfa.mul_(factors[torch.arange(len(p.sfa)) % 8, None])
    check_activated(placed(p, "cuda"))


def test_the_same_call_gives_the_same_bits_on_any_number_of_sms_where_rows_are_activated() -> None:
    p = placed(activated.random_problem(random_sizes(random.Random(1), 20), 1280, 1040, 1, behind=3000), "cuda")
    grouped.run(p)
    first = p.d.view(torch.uint8).clone(), p.scales.clone()
    for num_sms in [*[deep_gemm.get_num_sms()] * 20, 1, 7, 100]:
        deep_gemm.set_num_sms(num_sms)
        p.d.view(torch.uint8).fill_(activated.POISON)
        p.scales.fill_(activated.CANARY)
        grouped.run(p)
        assert torch.equal(p.d.view(torch.uint8), first[0])
        assert torch.equal(p.scales, first[1])


class Expert:
    """Weights and rows for both products of an expert, and memory for the results."""

    def __init__(self, sizes: list[int], hidden: int, middle: int) -> None:
        generator = torch.Generator("cuda").manual_seed(1)

        def fp8(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(torch.float8_e4m3fn)

        def scales(*shape: int) -> Tensor:
            return torch.rand(shape, device="cuda", generator=generator) + 0.5

        ids = ids_of_sizes(sizes)
        m, groups = len(ids), len(sizes)
        self.ids = torch.tensor(ids, dtype=torch.int32, device="cuda")
        self.ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
        self.x = fp8(m, hidden), scales(hidden // 128, m + -m % 4)[:, :m].t()
        self.w1 = fp8(groups, 2 * middle, hidden), scales(groups, middle // 64, hidden // 128) / hidden**0.5
        self.w2 = fp8(groups, hidden, middle), scales(groups, hidden // 128, middle // 128) / middle**0.5
        self.weights = torch.rand(m, device="cuda", generator=generator)
        d = torch.zeros(m, middle, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        self.middle = d, empty_scales((m,), middle, d, mn_major=True, gran_k=64)
        self.y = torch.zeros(m, hidden, dtype=torch.bfloat16, device="cuda")

    def run(self) -> None:
        activated_product_of_rows(self.x, self.w1, self.middle, self.ends, self.weights, limit=7.0)
        product_of_rows_by_64(self.middle, self.w2, self.y, self.ids)

    def error(self, rows: int) -> float:
        """Return the first rows' error: the CPU computes the second product from the GPU's first result."""
        found = []
        for i, group in enumerate(self.ids[:rows].tolist()):
            (a, sfa), (b, sfb) = (x[i, None] for x in self.middle), (x[group] for x in self.w2)
            found.append(reference.block_scaled_product(a, sfa, b, sfb, of_a=PER_64)[0])
        right = torch.stack(found).double()
        return float((self.y[:rows].double() - right).norm() / right.norm())


@pytest.fixture
def expert() -> Expert:
    return Expert([100, 7, 0, 193, 1], 1024, 768)


def test_an_expert_of_both_products(expert: Expert) -> None:
    expert.run()
    assert expert.error(301) < 3e-3
    x, w1 = ((values.cpu(), scales.cpu()) for values, scales in (expert.x, expert.w1))
    values, scales = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in expert.middle)
    activated_product_of_rows(x, w1, (values, scales), expert.ends.cpu(), expert.weights.cpu(), limit=7.0)
    here = expert.middle[0].cpu().double() * expert.middle[1].cpu().double().repeat_interleave(64, 1)
    there = values.double() * scales.double().repeat_interleave(64, 1)
    assert float((here - there).norm() / there.norm()) < 2e-2


@pytest.mark.parametrize(("hidden", "middle"), [(7168, 3072), (4096, 2048)])
def test_experts_of_models(hidden: int, middle: int) -> None:
    model = Expert([300, 0, 1, 64, 1000, 5, 129, 513], hidden, middle)
    model.run()
    assert model.error(20) < 3e-3


def test_pdl_changes_nothing_where_rows_are_activated(expert: Expert) -> None:
    expert.run()
    first = expert.y.clone()
    deep_gemm.set_pdl(True)
    for _ in range(20):
        expert.middle[0].view(torch.uint8).zero_()
        expert.y.zero_()
        expert.run()
        assert torch.equal(expert.y, first)


def test_the_host_never_waits_and_a_captured_graph_replays(expert: Expert) -> None:
    expert.run()
    first = expert.y.clone()
    with host_never_waits():
        expert.run()
    graph, _ = captured(expert.run)
    expert.y.zero_()
    graph.replay()
    assert torch.equal(expert.y, first)
