"""The plan_sends kernel's own source in the simulator, compared with torch's operations."""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids
from torch import Tensor

from deep_gemm.across.plan_sends import KERNEL, PlanSendsConfig, config_of
from lab.sim import plan_sends as sim
from lab.sim.library import compiled

pytestmark = pytest.mark.host_compiler


def check(topk_ids: Tensor, experts_here: int, ranks: int, seed: int = 0, schedule: str | None = None) -> None:
    config = config_of(topk_ids.element_size())
    sim.check(compiled(KERNEL, config), config, topk_ids, experts_here, ranks, seed=seed, schedule=schedule)


@pytest.mark.parametrize("config", KERNEL.configs(), ids=lambda config: config.name)
def test_rows_are_stacked_by_rank_and_counted(config: PlanSendsConfig) -> None:
    dtype = torch.int64 if config.id_bytes == 8 else torch.int32
    for seed, (tokens, topk, here, ranks) in enumerate([(1, 1, 1, 1), (37, 8, 3, 5), (200, 6, 2, 33), (70, 9, 1, 64)]):
        check(random_ids(tokens, topk, here * ranks, dtype, seed), here, ranks, seed)


def test_ctas_number_the_tokens_behind_those_before() -> None:
    for seed, tokens in enumerate((1024, 1025, 2100)):
        check(random_ids(tokens, 2, 9, torch.int64, seed), 3, 3, seed, ["slow_cta", None, "slow_warps"][seed])


def test_all_tokens_to_one_rank_none_to_any_and_no_tokens() -> None:
    check(torch.full((100, 4), 5), 2, 4)
    check(torch.full((100, 4), -1), 2, 4)
    check(torch.tensor([[0, (1 << 32) + 1], [-(1 << 32), 1]]), 1, 2)
    check(torch.empty(0, 4, dtype=torch.int64), 2, 4)
