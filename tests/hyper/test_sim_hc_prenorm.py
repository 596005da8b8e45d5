"""The sources of both hc_prenorm kernels in the simulator: edges of shapes, splits, special values, schedules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from thorough import one_in

from deep_gemm.hyper.choose import Chosen, kernel_of
from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.hyper.kernel_few import HcFewConfig
from lab.sim import HostKernel
from lab.sim import hc_prenorm as sim
from lab.sim.hc_prenorm import compare, special_operands
from lab.sim.hc_prenorm import random_operands as operands
from lab.sim.library import SCHEDULES
from lab.sim.library import compiled as compiled_kernel

pytestmark = pytest.mark.host_compiler

SHORT, TALL = HcConfig(64, 24, 1, 2, max_stages=4), HcConfig(128, 24, 2, 2, max_stages=4)
FEW_ROWS, WIDE = HcConfig(64, 8, 3, 1, max_stages=2), HcConfig(64, 32, 4, 3)
FEW, FEW_ALONE = HcFewConfig(24, 3, 4, 2), HcFewConfig(24, 1, 8, 3)
LARGE, TEAMS = HcConfig(64, 16, 16, 2), HcConfig(64, 24, 2, 4, max_stages=8)


def compiled(config: Chosen) -> HostKernel:
    return compiled_kernel(kernel_of(config).KERNEL, config)


def check(config: Chosen, m: int, n: int, k: int, splits: int = 1, *, seed: int = 0, **how: Any) -> None:
    a, b = operands(m, n, k, seed)
    compare(a, b, *sim.run(compiled(config), config, a, b, splits, seed=seed, **how))


@pytest.mark.parametrize("k", [64, 128, 896])
@pytest.mark.parametrize("m", [1, 13, 63, 64, 65, 137])
def test_edges_of_shapes(m: int, k: int) -> None:
    check(SHORT, m, 24, k, seed=m)
    check(TALL, m, 24, k, seed=k)
    check(FEW_ROWS, m, 24, k, seed=m + k)
    check(FEW, m, 24, k, seed=m * k)
    check(FEW_ALONE, m, 24, k, seed=m - k)


def test_all_widths_and_large_clusters() -> None:
    check(WIDE, 70, 32, 640)
    check(LARGE, 13, 16, 1088)
    check(TEAMS, 137, 24, 1280, 2, num_sms=4)
    check(FEW_ROWS, 70, 8, 320)
    check(HcFewConfig(8, 16, 2, 4), 21, 16, 1088)
    check(HcFewConfig(32, 2, 3, 1), 21, 32, 640)


@pytest.mark.parametrize("splits", one_in(3, [2, 3, 5, 16]))
def test_splits_that_do_not_divide_the_blocks_and_more_splits_than_blocks(splits: int) -> None:
    configs: list[tuple[Chosen, int]] = [(SHORT, 24), (TALL, 24), (WIDE, 32), (FEW, 24), (FEW_ALONE, 24)]
    for config, n in one_in(3, configs):
        check(config, 70, n, 448, splits, seed=splits, num_sms=2 * config.cluster_size)


def test_few_sms_take_several_units_each() -> None:
    check(SHORT, 300, 24, 512, 3, num_sms=2)
    check(TALL, 600, 24, 512, 2, num_sms=2)
    check(FEW_ROWS, 137, 24, 448, 2, num_sms=3)
    check(FEW, 137, 24, 448, 2, num_sms=3)


@pytest.mark.parametrize("config", [SHORT, FEW_ROWS, FEW], ids=lambda config: config.name)
def test_zeros_infinities_and_nan(config: Chosen) -> None:
    a, b = special_operands(13, 24, 192)
    compare(a, b, *sim.run(compiled(config), config, a, b))


def test_rows_may_lie_apart() -> None:
    a, b = operands(70, 24, 256)
    a_apart, b_apart = torch.full((70, 264), torch.nan).bfloat16(), torch.full((24, 260), torch.nan)
    a_apart[:, :256], b_apart[:, :256] = a, b
    for config in (SHORT, FEW):
        compare(a, b, *sim.run(compiled(config), config, a_apart[:, :256], b_apart[:, :256]))


@pytest.mark.parametrize("config", [SHORT, TALL, FEW_ROWS, FEW], ids=lambda config: config.name)
def test_no_race_changes_a_bit(config: Chosen) -> None:
    """DeepGEMM's kernel has a race (its issues 448 and 449). Here the bits are equal under every schedule."""
    a, b = operands(137, 24, 448)
    run = partial(sim.run, compiled(config), config, a, b, 2, num_sms=3, truncate=True)
    found = [run(schedule=schedule) for schedule in one_in(3, SCHEDULES)]
    for d, sqr_sum in found:
        assert torch.equal(d, found[0][0])
        assert torch.equal(sqr_sum, found[0][1])


def test_bits_do_not_depend_on_the_rows_around_nor_on_the_number_of_sms() -> None:
    a, b = operands(137, 24, 448)
    whole, squares = sim.run(compiled(TALL), TALL, a, b, truncate=True, num_sms=2)
    some, of_some = sim.run(compiled(TALL), TALL, a[40:93], b, truncate=True, num_sms=4)
    assert torch.equal(whole[:, 40:93], some)
    assert torch.equal(squares[:, 40:93], of_some)
