"""Sums over BF16 products in the simulator: majors, edges, clusters, slices that cross products, and a sum's bits."""

from __future__ import annotations

import pytest

from deep_gemm.gemm.choose.bf16 import SUM_OUTPUT, select_bf16_sum
from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.sum_slices import reachable_slices
from lab.sim.bf16_sums import SumTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
BF16, FP32, ADDED = reachable_slices()


CASES = {
    "one product": (bf16_config(64, 64, SUM_OUTPUT), 1, (1, 70, 72, 64), BF16),
    "slices across products": (bf16_config(64, 64, SUM_OUTPUT), 4, (5, 70, 72, 192), FP32),
    "more slices than warps": (bf16_config(64, 64, SUM_OUTPUT), 21, (23, 3, 136, 64), ADDED),
    "turned": (bf16_config(64, 64, SUM_OUTPUT, Majors(True, True)), 3, (3, 72, 72, 128), BF16),
    "sharing A": (bf16_config(128, 64, SUM_OUTPUT, cluster_n=2), 3, (3, 128, 256, 128), BF16),
    "sharing B": (bf16_config(64, 128, SUM_OUTPUT, Majors(b_is_mn=True), cluster_m=2), 2, (3, 200, 136, 128), FP32),
}


@pytest.mark.parametrize("schedule", [None, "slow_cta", "late_stores"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_right(case: str, schedule: str | None) -> None:
    config, slices, shape, output = CASES[case]
    SumTrial(config, slices, *shape, len(case), schedule, output).run()


def test_slices_follow_from_sizes() -> None:
    """As many as give every SM one tile; fewer where they would be shallow, since each costs a D in FP32."""
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
