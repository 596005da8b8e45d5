"""Products that add up blocks of columns, in the simulator: each configuration, and bits that depend on no tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm import softmax_piece
from deep_gemm.gemm.kernel import BF16_GEMM, FP8_GEMM
from deep_gemm.gemm.kinds.epilogues import TO_D
from deep_gemm.gemm.softmax_piece import BLOCK, FORWARD
from lab.sim.block_sums import Bf16BlockSumsTrial, BlockSumsTrial
from lab.sim.launcher import Stage
from lab.sim.product import run
from lab.sim.softmax_piece import FIRST, SCALE
from lab.sim.trials import trial_of

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

CONFIGS: list[tuple[Kernel[Any], Any]] = [
    (kernel, config) for kernel in (BF16_GEMM, FP8_GEMM) for config in kernel.configs() if config.epilogue.sums_blocks
]


def kind(config: Any) -> str:
    return config.name[:7] if config.name.startswith("bf16") else "rows" if config.sfa == WHOLE else "blocks"


def of(kernel: Kernel[Any]) -> type[BlockSumsTrial]:
    return BlockSumsTrial if kernel is FP8_GEMM else Bf16BlockSumsTrial


@pytest.mark.parametrize("given", CONFIGS, ids=lambda given: given[1].name)
def test_each_configuration(given: tuple[Kernel[Any], Any]) -> None:
    kernel, config = given
    assert trial_of(kernel, config) is of(kernel)
    for seed, schedule in enumerate(("slow_warps", "slow_lanes")):
        replace(of(kernel).drawn(config, seed), schedule=schedule).run()


def by_a_pass(trial: BlockSumsTrial) -> tuple[Tensor, Tensor]:
    """Multiply into logits, then run softmax_piece over these logits."""
    p, m, n = trial.problem(), trial.m, trial.n
    plain = replace(trial.config, epilogue=TO_D, panels_per_store=1, num_stages=2)
    d = torch.full((m, n), torch.nan, dtype=torch.float32)
    logits = run(None, plain, p._replace(d=d, epilogue=TO_D, softmax=None)).d
    sums = torch.full((m, ceil_div(n, BLOCK)), torch.nan, dtype=torch.float32)
    assert p.softmax is not None
    written = {"sums": sums, "chosen": p.softmax["chosen"]}
    stage = Stage(FORWARD, {"tokens": p.softmax["tokens"], "logits": logits}, written, {"logits": 16})
    with stage.launches({softmax_piece.KERNEL: None}):
        softmax_piece.run(FORWARD, scale=SCALE, first=FIRST, **stage.at)
    found = stage.result().buffers
    return found["sums"], found["chosen"]


@pytest.mark.parametrize("name", ["bf16 nt", "bf16 nn", "blocks", "rows"])
def test_no_tile_shows_in_the_bits(name: str) -> None:
    trials = [of(kernel)(config, 150, 328, 512) for kernel, config in CONFIGS if kind(config) == name]
    whole = by_a_pass(trials[0])
    assert not whole[0].isnan().any() and len(trials) > 4
    for trial in trials:
        for got, right in zip(trial.results(), whole, strict=True):
            torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)
