"""One scale for all of k, and biases, in the simulator: whole results, bits, and where sums are promoted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import assert_same_bits_by, run_simulated
from mutations_whole import DECODE, TALL, whole
from thorough import one_in

from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.gemm.choose.tiles import tiles_for
from deep_gemm.gemm.config.decode import DecodeConfig, decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kernel import BF16_GEMM, FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import BF16, BF16_C32, FP32_C, OUTPUTS, Output
from lab.sim import dense as sim
from lab.sim.dense import DenseTrial
from lab.sim.fp8_gemm_decode import DecodeTrial
from lab.sim.rows import RowsTrial
from lab.sim.trials import trial_of
from lab.sim.whole import PromotedFewTrial, PromotedTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


@pytest.mark.parametrize("k", [16, 512, 656, 1296])
@pytest.mark.parametrize("tile", tiles_for(whole(BF16)), ids=lambda tile: tile.name)
def test_every_tile_and_depth(tile: Any, k: int) -> None:
    config = tile.config(whole(BF16), k)
    m = 100 if tile.is_decode else tile.block_m * tile.cluster_m + 5
    kind = DecodeTrial if tile.is_decode else DenseTrial
    kind(config, m, tile.block_n + 8, k, 1).run()


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
@pytest.mark.parametrize("split", [1, 3])
def test_every_output(output: Output, split: int) -> None:
    DenseTrial(tile_config(64, 64, whole(output), cluster_k=split, k=1808), 61, 72, 1808, 2).run()


@pytest.mark.parametrize("output", [BF16, FP32_C, BF16_C32], ids=lambda output: output.name)
@pytest.mark.parametrize("groups", [works.IDS, works.ENDS, works.COUNTS], ids=lambda work: work.name)
def test_rows_of_groups(groups: works.Work, output: Output) -> None:
    ids = (*[0] * 70, *[-1] * 3, *[2] * 66, *[1] * 130)
    layout = {works.IDS: ids, works.ENDS: (70, 70, 258), works.COUNTS: (70, 0, 130)}[groups]
    RowsTrial(tile_config(128, 128, whole(output, work=groups), k=656), layout, 3, n=200, k=656, num_sms=2).run()


@pytest.mark.parametrize("schedule", ["slow_producer", "slow_warps", "slow_math", "slow_warpgroup", "late_loads"])
def test_biased_schedules(schedule: str) -> None:
    DenseTrial(TALL, 137, 296, 1296, 4, schedule, num_sms=1).run()


@pytest.mark.parametrize("k", [1024, 1296, 4096])
def test_sums_are_promoted_every_128_columns(k: int) -> None:
    PromotedTrial(TALL, 45, 72, k, truncate=True).run()
    PromotedFewTrial(DECODE, 45, 72, k, truncate=True).run()


def test_tiles_that_do_not_split_k_and_few_rows_have_the_same_bits() -> None:
    """A token's bits are then the same in a batch of any size, if no split of k is allowed."""
    of = whole(BF16)
    tall = [tile_config(*tile, of, k=1296) for tile in ((64, 64), (128, 96), (192, 128))]
    few = [decode_config(tokens, 1, 1, 1, sfa=WHOLE, sfb=WHOLE) for tokens in (8, 64)]
    assert_same_bits_by([*tall, *few], sim.random_problem(tall[0], 45, 136, 1296, 5))


WITH_BIAS = [
    (kernel, config)
    for kernel in (FP8_GEMM, FP8_GEMM_DECODE, BF16_GEMM)
    for config in kernel.configs()
    if config.c_is_fp32 or (config.work.groups_rows and config.with_c)
]


@pytest.mark.parametrize(("kernel", "config"), one_in(24, WITH_BIAS), ids=lambda each: each.name)
def test_biases_beside_every_kind_of_operand(kernel: Any, config: Any) -> None:
    trial_of(kernel, config).drawn(config, 0).run()


def test_a_bias_in_bf16_takes_the_kernel_of_any_other_c() -> None:
    config = tile_config(64, 64, replace(BF16, with_c=True))
    p = sim.random_problem(config, 45, 72, 400, 6)
    bias = torch.randn(72, dtype=torch.float32).bfloat16()
    of_c = bias.expand(45, 72), bias.repeat(45, 1)
    shared, whole_c = (run_simulated(config, p._replace(d=p.d.clone(), c=c)).d for c in of_c)
    assert torch.equal(shared, whole_c)


def test_few_rows_with_a_bias() -> None:
    config = DecodeConfig(16, 3, 1, 2, with_c=True, c_is_fp32=True, sfa=WHOLE, sfb=WHOLE)
    DecodeTrial(config, 13, 72, 1296, 7).run()
