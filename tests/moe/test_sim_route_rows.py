"""The route_rows kernel's own source in the simulator, compared with a plain loop."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import random_ids
from torch import Tensor

from deep_gemm.moe.route_rows import KERNEL, MAX_EXPERTS, PART, PARTS_ALONE, RouteConfig, Totals, config_of, totals_for
from lab.sim import route_rows as sim

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


@cache
def compiled(config: RouteConfig) -> sim.Kernels:
    return sim.compile_config(config)


def check(topk_ids: Tensor, num_experts: int, seed: int = 0, first: int = 0) -> None:
    for totals in Totals:
        config = config_of(topk_ids.element_size(), num_experts, totals)
        sim.check(compiled(config), config, topk_ids, num_experts, first, seed=seed)


@pytest.mark.parametrize("max_experts", MAX_EXPERTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_configuration(max_experts: int, dtype: torch.dtype) -> None:
    for seed, (tokens, topk, fewer) in enumerate([(1, 1, 0), (37, 8, 5), (300, 8, 1)]):
        num_experts = max_experts - fewer
        check(random_ids(tokens, topk, num_experts, dtype, seed), num_experts, seed)


@pytest.mark.parametrize("num_experts", [1, 2, 31, 32, 33, 64])
def test_any_number_of_experts(num_experts: int) -> None:
    check(random_ids(50, 3, num_experts, torch.int32, num_experts), num_experts)


def test_all_routes_to_one_expert_and_none_to_any() -> None:
    check(torch.full((200, 8), 7), 64)
    check(torch.full((200, 8), -1), 64)
    check(torch.full((5, 2), 1 << 40), 64)
    check(torch.tensor([[0, (1 << 32) + 1], [-(1 << 32), 1]]), 4)


def test_a_cta_that_is_full_and_one_that_has_a_single_route() -> None:
    check(random_ids(1024, 1, 9, torch.int64, 1), 9)
    check(random_ids(1025, 1, 9, torch.int64, 2), 9)


def test_experts_are_numbered_from_the_first_one_and_ids_lie_in_wider_rows() -> None:
    wide = random_ids(70, 11, 60, torch.int32, 3)
    check(wide[:, 4:9], 20, first=20)
    check(wide[:, :5].long(), 30, first=30)
    check(wide[2:3, 1:], 64, first=0)


def test_more_parts_than_one_thread_sums_at_once() -> None:
    check(random_ids(4352, 4, 1000, torch.int32, 4), 1000)


def test_many_routes_are_counted_by_parts() -> None:
    alone = PART * PARTS_ALONE
    assert [totals_for(routes) for routes in (1, alone)] == [Totals.COUNTED] * 2
    assert [totals_for(routes) for routes in (alone + 1, 1 << 30)] == [Totals.OF_PARTS] * 2
    kinds = [(id_bytes, most, totals) for totals in Totals for id_bytes in (4, 8) for most in MAX_EXPERTS]
    assert [config_of(*kind) for kind in kinds] == KERNEL.configs()
