"""A row's bits follow from the row and its weight alone, in every form of groups: by the tensor cores' own arithmetic.

The simulator models that arithmetic, and an H200 gave the same bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deep_gemm.gemm.config.bf16 import Bf16Config, bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.problem import Problem
from lab.sim import bf16 as sim
from lab.sim import bf16_depths, bf16_rows
from lab.sim import product as simulated

pytestmark = pytest.mark.host_compiler
N, K, ROWS = 72, 200, 100
OWN = 1
"""The group whose rows are looked at."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def products(config: Bf16Config, a: Tensor, b: Tensor, layout: list[int]) -> Tensor:
    """D of grouped rows."""
    d = torch.full((*a.shape[:-1], b.shape[1]), bf16_rows.CANARY)
    numbers = torch.tensor(layout, dtype=torch.int32)
    p = Problem(a, None, b, None, d, numbers, config.work, None, None, expected_m=1.0, alignment=1)
    return simulated.run(simulated.compile_config(config), config, p, num_sms=3, truncate=True).checked().d


def grouped(block_m: int, block_n: int, groups: works.Work) -> Bf16Config:
    return bf16_config(block_m, block_n, Output(is_fp32=True, work=groups))


def test_a_grouped_rows_bits_depend_on_it_and_its_weight_alone() -> None:
    """Not on the tile, the form of the layout, its place, how many rows its group has, or how many groups there are."""
    x, w = numbers(ROWS, K), numbers(3, N, K, seed=1)
    right = products(grouped(64, 64, works.ENDS), x, w[OWN : OWN + 1], [ROWS])
    assert not torch.equal(right, x.float() @ w[OWN].float().t())  # the arithmetic is not the exact one
    for rows in (1, 65, ROWS):
        for block_m, block_n in ((64, 64), (128, 128), (256, 64)):
            ahead = 3 + rows % 7
            stacked = torch.cat([numbers(ahead, K, seed=2), x[:rows], numbers(70, K, seed=3)])
            ends = products(grouped(block_m, block_n, works.ENDS), stacked, w, [ahead, ahead + rows, ahead + rows + 70])
            assert torch.equal(ends[ahead : ahead + rows], right[:rows])
            ids = [-1] * ahead + [OWN] * rows + [0] * 70
            by_ids = products(grouped(block_m, block_n, works.IDS), stacked, w, ids)
            assert torch.equal(by_ids[ahead : ahead + rows], right[:rows])
            planes = numbers(3, rows + 5, K, seed=4)
            planes[OWN, :rows] = x[:rows]
            counted = products(grouped(block_m, block_n, works.COUNTS), planes, w, [2, rows, 0])
            assert torch.equal(counted[OWN, :rows], right[:rows])


@pytest.mark.parametrize("tile", [(64, 64), (128, 96), (192, 64)])
def test_bits_of_a_heads_row_depend_on_it_and_its_weight_alone(tile: tuple[int, int]) -> None:
    output = Output(is_fp32=True, work=works.HEADS)
    first, config = bf16_config(64, 64, output), bf16_config(*tile, output)
    p = sim.random_problem(first, ROWS, N, K, seed=5, planes=3)
    right = simulated.run(simulated.compile_config(first), first, p, truncate=True).d
    for rows, heads in ((1, 3), (65, 1), (ROWS, 2)):
        last = slice(3 - heads, None)
        few = p._replace(a=p.a[last, :rows], b=p.b[last], d=torch.full((heads, rows, N), float("nan")))
        got = simulated.run(simulated.compile_config(config), config, few, truncate=True, seed=rows).d
        assert torch.equal(got, right[last, :rows])


def test_groups_along_k_have_the_same_bits_whoever_knows_their_depths() -> None:
    """A group begins its sums with its own first row, and the zeros behind its last one add nothing."""
    turned, ks = Majors(True, True), (64, 0, 192)
    by_host, by_gpu = (
        bf16_config(64, 64, Output(is_fp32=True, work=groups), turned) for groups in (works.PARTS, works.COUNTED)
    )
    p = bf16_depths.random_problem(by_host, ks, 72, N, seed=6)
    right = bf16_depths.run(simulated.compile_config(by_host), by_host, p, truncate=True).d
    for more in (0, 30):
        ahead = [numbers(more, x.shape[0], seed=7).mT for x in (p.a, p.b)]
        a, b = (torch.cat([x, y], 1).mT.contiguous().mT for x, y in zip(ahead, (p.a, p.b), strict=True))
        counts = torch.tensor((more, *ks), dtype=torch.int32)
        d = torch.full((4, 72, N), float("nan"))
        counted = Problem(a, counts, b, None, d, None, works.COUNTED, None, None)
        depths = counts.tolist()
        outcome = bf16_depths.run(simulated.compile_config(by_gpu), by_gpu, counted, ks=depths, truncate=True).checked()
        assert torch.equal(outcome.d[1:], right)
