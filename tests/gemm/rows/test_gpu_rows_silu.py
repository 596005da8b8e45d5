"""The two products of an expert on a GPU: rows that are activated and cast on their way out, and scales for 64 columns.

The first is compared with the FP32 product of ordinary rows, whose tensor cores sum in the same way, activated and cast
by torch. What is left is the sigmoid, so values are right or, a few, the FP8 number beside it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from test_gpu_rows import random_sizes
from test_sim_rows import ids_of_sizes
from torch import Tensor

import deep_gemm
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import empty_scales
from deep_gemm.core.check.recipes import PER_64
from deep_gemm.gemm import reference, rows_silu
from deep_gemm.gemm.api.grouped import product_of_rows_by_64, product_of_stacked_rows
from deep_gemm.gemm.problem import Problem
from deep_gemm.moe.activation import activated_product_of_rows
from deep_gemm.moe.api import activate_rows, activations_of_rows
from deep_gemm.moe.routing import expert_rows, gather_cast_to_fp8
from lab.silu import mistakes, placed, right_on_gpu
from lab.sim import rows_silu as sim

pytestmark = pytest.mark.gpu


def check(p: Problem) -> None:
    wanted = right_on_gpu(p)
    rows_silu.run(p)
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
    p = sim.random_problem([640, 70], 512, 1024, 7)
    factors = torch.tensor([1, 1e18, 4e18, 1e25, 1e-13, 1e-18, 1e-30, 1])
    p.sfa.mul_(factors[torch.arange(len(p.sfa)) % 8, None])
    check(placed(p, "cuda"))


def test_the_same_call_gives_the_same_bits_on_any_number_of_sms() -> None:
    p = placed(sim.random_problem(random_sizes(random.Random(1), 20), 1280, 1040, 1, behind=3000), "cuda")
    rows_silu.run(p)
    first = p.d.view(torch.uint8).clone(), p.scales.clone()
    try:
        for num_sms in [*[deep_gemm.get_num_sms()] * 20, 1, 7, 100]:
            deep_gemm.set_num_sms(num_sms)
            p.d.view(torch.uint8).fill_(sim.POISON)
            p.scales.fill_(sim.CANARY)
            rows_silu.run(p)
            assert torch.equal(p.d.view(torch.uint8), first[0])
            assert torch.equal(p.scales, first[1])
    finally:
        deep_gemm.set_num_sms(torch.cuda.get_device_properties(0).multi_processor_count)


class Expert:
    """Weights and rows for both products, and room for what comes out."""

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
        """Of so many rows, from the CPU's definition of the second product and the first's own values."""
        right = torch.stack(
            [
                reference.block_scaled_product(
                    self.middle[0][i, None], self.middle[1][i, None], self.w2[0][group], self.w2[1][group], of_a=PER_64
                )[0]
                for i, group in enumerate(self.ids[:rows].tolist())
            ]
        )
        return float((self.y[:rows].double() - right.double()).norm() / right.double().norm())


@pytest.fixture
def expert() -> Iterator[Expert]:
    yield Expert([100, 7, 0, 193, 1], 1024, 768)
    deep_gemm.set_pdl(False)


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


def test_pdl_changes_nothing(expert: Expert) -> None:
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
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expert.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert.run()
    expert.y.zero_()
    graph.replay()
    assert torch.equal(expert.y, first)
