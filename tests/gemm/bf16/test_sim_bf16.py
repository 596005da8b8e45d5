"""BF16 products in the simulator: majors, edges, outputs, clusters, slices of k, schedules; and a row's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import numbers, run_simulated
from thorough import ends
from torch import Tensor

from deep_gemm.gemm import sum_slices
from deep_gemm.gemm.choose.bf16 import SUM_OUTPUT, select_bf16_sum
from deep_gemm.gemm.config.bf16 import Bf16Config, bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.problem import Problem
from lab.sim import bf16 as sim
from lab.sim import bf16_depths
from lab.sim import product as simulated
from lab.sim.bf16 import Bf16Trial
from lab.sim.bf16_counted import Bf16CountedTrial
from lab.sim.bf16_depths import Bf16DepthsTrial
from lab.sim.bf16_rows import Bf16RowsTrial
from lab.sim.bf16_sums import SumTrial
from lab.sim.product import ProductTrial
from lab.sim.rows import CANARY

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

NT, NN, TN, TT = Majors(), Majors(b_is_mn=True), Majors(True, True), Majors(a_is_mn=True)
MAJORS = (NT, NN, TN, TT)
BF16, FP32 = Output(), Output(is_fp32=True)
OUTPUTS = (BF16, Output(with_c=True), FP32, Output(is_fp32=True, with_c=True), Output(is_fp32=True, adds_to_d=True))


def check(config: Bf16Config, m: int, n: int, k: int, seed: int = 0, schedule: str | None = None, **how: Any) -> None:
    Bf16Trial(config, m, n, k, seed, schedule, **how).run()


@pytest.mark.parametrize("majors", MAJORS, ids=lambda majors: majors.name)
@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_every_output_and_major(output: Output, majors: Majors) -> None:
    check(bf16_config(64, 64, output, majors), 70, 72, 200)


@pytest.mark.parametrize("majors", MAJORS, ids=lambda majors: majors.name)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 72), (64, 64, 64), (65, 72, 128), (129, 136, 136)])
def test_any_edges(shape: tuple[int, int, int], majors: Majors) -> None:
    check(bf16_config(64, 64, BF16, majors), *shape)


ADDED_TO_D = Output(is_fp32=True, adds_to_d=True)
TILES = {
    "one warpgroup": (bf16_config(64, 32, BF16), (70, 72, 328)),
    "two units": (bf16_config(256, 128, BF16, NN), (264, 136, 136)),
    "three warpgroups": (bf16_config(192, 96, BF16), (200, 104, 136)),
    "the widest": (bf16_config(128, 256, FP32, TN), (136, 264, 136)),
    "sharing B": (bf16_config(128, 256, BF16, cluster_m=2), (264, 264, 264)),
    "sharing B, MN-major": (bf16_config(128, 128, ADDED_TO_D, TN, cluster_m=2), (264, 136, 264)),
    "sharing A": (bf16_config(256, 128, BF16, cluster_n=2), (264, 264, 136)),
    "sharing A, MN-major": (bf16_config(128, 64, Output(with_c=True), TT, cluster_n=2), (136, 136, 264)),
    "splitting k": (bf16_config(64, 32, Output(with_c=True), cluster_k=4, slices=4), (70, 72, 600)),
    "splitting k unevenly": (bf16_config(64, 32, Output(with_c=True), cluster_k=7, slices=7), (70, 40, 600)),
    "splitting k of few rows": (bf16_config(64, 64, FP32, NN, cluster_k=2, slices=2), (13, 72, 264)),
    "splitting k, two warpgroups": (bf16_config(128, 48, BF16, cluster_k=3, slices=3), (140, 56, 456)),
    "slices in turn": (bf16_config(128, 48, BF16, slices=3), (136, 56, 456)),
    "slices in turn, in the widest": (bf16_config(128, 256, BF16, cluster_m=2, slices=2), (264, 264, 264)),
    "heads": (bf16_config(64, 64, Output(work=works.HEADS), NN), (70, 72, 200)),
}


@pytest.mark.parametrize("schedule", [None, "slow_cta", "slow_warps", "late_loads", "slow_producer"])
@pytest.mark.parametrize("tile", TILES)
def test_every_kind_of_tile(tile: str, schedule: str | None) -> None:
    config, shape = TILES[tile]
    check(config, *shape, seed=len(tile), schedule=schedule)


def test_c_may_be_d() -> None:
    check(bf16_config(64, 64, Output(with_c=True)), 70, 72, 136, in_place=True)
    check(bf16_config(64, 32, Output(with_c=True), cluster_k=2, slices=2), 70, 72, 200, in_place=True)


@pytest.mark.parametrize("stages", [2, 3])
def test_rings_of_any_length(stages: int) -> None:
    for k_blocks in (1, stages, 3 * stages + 1):
        check(Bf16Config(64, 64, stages, 1), 136, 72, 64 * k_blocks)


def test_nothing_is_read_before_the_kernel_ahead_has_ended() -> None:
    for seed in range(3):
        check(bf16_config(64, 64, Output(with_c=True), TN), 70, 72, 136, seed, is_dependent=True)


SAME = (
    bf16_config(64, 32, BF16, cluster_k=4, slices=4),
    bf16_config(64, 64, BF16, slices=4),
    bf16_config(128, 96, BF16, slices=4),
    bf16_config(192, 48, BF16, slices=4),
    bf16_config(128, 256, BF16, cluster_m=2, slices=4),
)


@pytest.mark.parametrize("config", SAME, ids=lambda config: config.name)
def test_a_rows_bits_depend_on_neither_tile_nor_other_rows(config: Bf16Config) -> None:
    """The simulator truncates sums as tensor cores do. A test on an H200 has confirmed this model."""
    first = SAME[1]
    p = sim.random_problem(first, 200, 104, 64 * 9 + 8, seed=3)
    right = run_simulated(first, p, truncate=True).d
    for rows in (1, 70, 200):
        few = p._replace(a=p.a[:rows], d=torch.full_like(p.d[:rows], float("nan")))
        got = run_simulated(config, few, seed=rows, truncate=True).d
        assert torch.equal(got, right[:rows])


# A row's bits depend on the row and its weight alone, in every form of groups, with the tensor cores' arithmetic.


N, K, ROWS = 72, 200, 100
OWN = 1
"""The group whose rows the test compares."""


def products(config: Bf16Config, a: Tensor, b: Tensor, layout: list[int]) -> Tensor:
    """Return D of grouped rows."""
    d = torch.full((*a.shape[:-1], b.shape[1]), CANARY)
    numbers = torch.tensor(layout, dtype=torch.int32)
    p = Problem(a, None, b, None, d, numbers, config.work, None, None, expected_m=1.0, alignment=1)
    return run_simulated(config, p, num_sms=3, truncate=True).checked().d


def grouped(block_m: int, block_n: int, groups: works.Work) -> Bf16Config:
    return bf16_config(block_m, block_n, Output(is_fp32=True, work=groups))


def test_a_grouped_rows_bits_depend_on_it_and_its_weight_alone() -> None:
    """The tile, the layout, a row's index, the number of rows in the group and the number of groups must not matter."""
    x, w = numbers(ROWS, K), numbers(3, N, K, seed=1)
    right = products(grouped(64, 64, works.ENDS), x, w[OWN : OWN + 1], [ROWS])
    assert not torch.equal(right, x.float() @ w[OWN].float().t())  # proves that the simulator's sums are not exact
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
    right = run_simulated(first, p, truncate=True).d
    for rows, heads in ((1, 3), (65, 1), (ROWS, 2)):
        last = slice(3 - heads, None)
        few = p._replace(a=p.a[last, :rows], b=p.b[last], d=torch.full((heads, rows, N), float("nan")))
        got = run_simulated(config, few, truncate=True, seed=rows).d
        assert torch.equal(got, right[last, :rows])


def test_groups_along_k_have_the_same_bits_whoever_knows_their_depths() -> None:
    """A group's sums begin at the group's first row, and zeros behind the group's last row add nothing."""
    turned, ks = Majors(True, True), (64, 0, 192)
    outputs = [Output(is_fp32=True, work=groups) for groups in (works.PARTS, works.COUNTED)]
    by_host, by_gpu = (bf16_config(64, 64, output, turned) for output in outputs)
    p = bf16_depths.Bf16DepthsTrial(by_host, ks, 72, N, seed=6).problem()
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


# BF16 kernels in the form that NVRTC 12.8 compiles: each tile is stored before the next tile is claimed.


FILE, CHOICE = "tile.cuh", "!kHasScales && kCudaRelease < 1209"


def run(trial: ProductTrial) -> None:
    text = trial.headers()[FILE]
    assert text.count(CHOICE) == 1
    trial.run({FILE: text.replace(CHOICE, "true")})


PRODUCTS = {
    "dense": bf16_config(128, 64, Output(with_c=True)),
    "several units": bf16_config(256, 128, Output(is_fp32=True)),
    "a cluster that shares B": bf16_config(128, 128, Output(), TN, cluster_m=2),
    "slices in turn": bf16_config(64, 64, Output(), slices=3),
    "a CTA for each slice": bf16_config(64, 32, Output(), cluster_k=3, slices=3),
    "heads": bf16_config(64, 64, Output(is_fp32=True, adds_to_d=True, work=works.HEADS)),
}


@pytest.mark.parametrize("name", ends(list(PRODUCTS)))
@pytest.mark.parametrize("schedule", [None, "slow_math", "late_loads"])
def test_products(name: str, schedule: str | None) -> None:
    run(Bf16Trial(PRODUCTS[name], 264, 136, 456, 1, schedule))


@pytest.mark.parametrize("tile", [(64, 64), (256, 128)])
@pytest.mark.parametrize(
    ("groups", "layout"), [(works.IDS, (-1, *[0] * 300, *[1] * 5)), (works.COUNTS, (70, 0, 200))], ids=["ids", "counts"]
)
def test_rows_of_groups(tile: tuple[int, int], groups: works.Work, layout: tuple[int, ...]) -> None:
    run(Bf16RowsTrial(bf16_config(*tile, Output(work=groups)), layout, 2, n=136, k=200))


def test_groups_along_k() -> None:
    config = bf16_config(64, 64, Output(is_fp32=True, with_c=True, work=works.PARTS), TN)
    run(Bf16DepthsTrial(config, (64, 0, 192)))
    config = bf16_config(64, 64, Output(is_fp32=True, work=works.COUNTED), TN)
    run(Bf16CountedTrial(config, (3, 0, 100)))


def test_a_sum_over_products() -> None:
    run(SumTrial(bf16_config(64, 64, SUM_OUTPUT), 4, 5, 72, 136, 192))


# Sums over BF16 products in the simulator: majors, edges, clusters, slices that cross products, and a sum's bits.


BF16_OF_SUMS, FP32_OF_SUMS, ADDED = sum_slices.KERNEL.configs()

CASES = {
    "one product": (bf16_config(64, 64, SUM_OUTPUT), 1, (1, 70, 72, 64), BF16_OF_SUMS),
    "slices across products": (bf16_config(64, 64, SUM_OUTPUT), 4, (5, 70, 72, 192), FP32_OF_SUMS),
    "more slices than warps": (bf16_config(64, 64, SUM_OUTPUT), 21, (23, 3, 136, 64), ADDED),
    "turned": (bf16_config(64, 64, SUM_OUTPUT, TN), 3, (3, 72, 72, 128), BF16_OF_SUMS),
    "sharing A": (bf16_config(128, 64, SUM_OUTPUT, cluster_n=2), 3, (3, 128, 256, 128), BF16_OF_SUMS),
    "sharing B": (bf16_config(64, 128, SUM_OUTPUT, NN, cluster_m=2), 2, (3, 200, 136, 128), FP32_OF_SUMS),
}


@pytest.mark.parametrize("schedule", [None, "slow_cta", "late_stores"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_right(case: str, schedule: str | None) -> None:
    config, slices, shape, output = CASES[case]
    SumTrial(config, slices, *shape, len(case), schedule, output).run()


def test_slices_follow_from_sizes() -> None:
    """Slices give every SM one tile. Shallow products get fewer slices, since each slice costs a D in FP32."""
    sums = ((128, 384, 8192), (256, 256, 32768), (384, 128, 24576), (128, 384, 258), (64, 64, 64), (128, 384, 2))
    found = {
        (m, n, blocks): (config.block_m, config.block_n, config.cluster_size, slices)
        for m, n, blocks in sums
        for config, slices in [select_bf16_sum(m, n, blocks, Majors())]
    }
    assert found == {
        (128, 384, 8192): (128, 192, 2, 66),
        (256, 256, 32768): (128, 256, 2, 66),
        (384, 128, 24576): (192, 128, 2, 66),
        (128, 384, 258): (64, 128, 1, 22),
        (64, 64, 64): (64, 128, 1, 8),
        (128, 384, 2): (64, 128, 1, 1),
    }
