"""BF16 products in the simulator: majors, edges, outputs, clusters, slices of k, schedules; and a row's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_gemm.gemm.config.bf16 import Bf16Config, bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim import bf16 as sim
from lab.sim import product as simulated
from lab.sim.bf16 import Bf16Trial

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


TILES = {
    "one warpgroup": (bf16_config(64, 32, BF16), (70, 72, 328)),
    "two units": (bf16_config(256, 128, BF16, NN), (264, 136, 136)),
    "three warpgroups": (bf16_config(192, 96, BF16), (200, 104, 136)),
    "the widest": (bf16_config(128, 256, FP32, TN), (136, 264, 136)),
    "sharing B": (bf16_config(128, 256, BF16, cluster_m=2), (264, 264, 264)),
    "sharing B, MN-major": (
        bf16_config(128, 128, Output(is_fp32=True, adds_to_d=True), TN, cluster_m=2),
        (264, 136, 264),
    ),
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
    """With the tensor cores' own arithmetic, of which the simulator's is a model that an H200 confirmed."""
    first = SAME[1]
    p = sim.random_problem(first, 200, 104, 64 * 9 + 8, seed=3)
    right = simulated.run(simulated.compile_config(first), first, p, truncate=True).d
    for rows in (1, 70, 200):
        few = p._replace(a=p.a[:rows], d=torch.full_like(p.d[:rows], float("nan")))
        got = simulated.run(simulated.compile_config(config), config, few, seed=rows, truncate=True).d
        assert torch.equal(got, right[:rows])
