"""BF16 kernels as NVRTC 12.8 compiles them, in the simulator: each tile is stored before the next one is looked for."""

from __future__ import annotations

from functools import cache

import pytest
from thorough import ends

from deep_gemm.gemm.bf16.choose import SUM_OUTPUT
from deep_gemm.gemm.bf16.config import Bf16Config, Majors, bf16_config
from deep_gemm.gemm.bf16.kernel import KERNEL as BF16_GEMM
from deep_gemm.gemm.bf16.sum_slices import SlicesConfig
from deep_gemm.gemm.output import Groups, Output
from lab.sim import HostKernel, bf16_counted, bf16_depths, bf16_rows, bf16_sums
from lab.sim import bf16 as sim

pytestmark = pytest.mark.host_compiler
TN = Majors(True, True)
FILE, CHOICE = "tile.cuh", "!kHasScales && kCudaRelease < 1209"


@cache
def compiled(config: Bf16Config) -> HostKernel:
    text = BF16_GEMM.headers(config)[FILE]
    assert text.count(CHOICE) == 1
    return sim.compile_config(config, {FILE: text.replace(CHOICE, "true")})


PRODUCTS = {
    "dense": bf16_config(128, 64, Output(with_c=True)),
    "several units": bf16_config(256, 128, Output(is_fp32=True)),
    "a cluster that shares B": bf16_config(128, 128, Output(), TN, cluster_m=2),
    "slices in turn": bf16_config(64, 64, Output(), slices=3),
    "a CTA for each slice": bf16_config(64, 32, Output(), cluster_k=3, slices=3),
    "heads": bf16_config(64, 64, Output(is_fp32=True, adds_to_d=True, groups=Groups.HEADS)),
}


@pytest.mark.parametrize("name", ends(list(PRODUCTS)))
@pytest.mark.parametrize("schedule", [None, "slow_math", "late_loads"])
def test_products(name: str, schedule: str | None) -> None:
    config = PRODUCTS[name]
    p = sim.random_problem(config, 264, 136, 456, seed=1)
    outcome = sim.run(compiled(config), config, p, num_sms=2 * config.cluster_size, schedule=schedule)
    assert outcome.mistakes is None, outcome.mistakes


@pytest.mark.parametrize("tile", [(64, 64), (256, 128)])
@pytest.mark.parametrize(
    ("groups", "layout"),
    [(Groups.IDS, [-1, *[0] * 300, *[1] * 5]), (Groups.COUNTS, [70, 0, 200])],
    ids=["ids", "counts"],
)
def test_rows_of_groups(tile: tuple[int, int], groups: Groups, layout: list[int]) -> None:
    config = bf16_config(*tile, Output(groups=groups))
    p = bf16_rows.random_problem(config, layout, 136, 200, seed=2)
    outcome = bf16_rows.run(compiled(config), config, p, seed=2)
    assert outcome.mistakes is None, outcome.mistakes


def test_groups_along_k() -> None:
    config = bf16_config(64, 64, Output(is_fp32=True, with_c=True, groups=Groups.DEPTHS), TN)
    outcome = bf16_depths.run(compiled(config), config, bf16_depths.random_problem(config, (64, 0, 192), 136, 72))
    assert outcome.mistakes is None, outcome.mistakes
    config = bf16_config(64, 64, Output(is_fp32=True, groups=Groups.COUNTED_DEPTHS), TN)
    outcome = bf16_counted.run(compiled(config), config, bf16_counted.random_problem(config, (3, 0, 100), 136, 72))
    assert outcome.mistakes is None, outcome.mistakes


def test_a_sum_over_products() -> None:
    config, output = bf16_config(64, 64, SUM_OUTPUT), SlicesConfig(False)
    p = bf16_sums.random_problem(config, 5, 72, 136, 192, output)
    outcome = bf16_sums.run(compiled(config), bf16_sums.compile_slices(output), config, 4, p)
    assert outcome.mistakes is None, outcome.mistakes
