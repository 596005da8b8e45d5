"""Products that fetch their rows, on a GPU that has the rooms of several ranks: larger ones than trials draw."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lab.configs import reachable_silu
from lab.sim.rows_fetched import FetchTrial

pytestmark = pytest.mark.gpu
ALL = [config for config in reachable_silu() if config.work.fetches]


def check(seed: int, tokens: tuple[int, ...], topk: int, experts: int, n: int, k: int, **more: Any) -> None:
    config = random.Random(seed).choice(ALL)
    FetchTrial(config, tokens, topk, experts, seed, n=n, k=k, more=more, device="cuda").run()


@pytest.mark.parametrize("seed", range(8))
def test_random_rooms(seed: int) -> None:
    rng = random.Random(seed)
    ranks, topk, experts = rng.choice([1, 2, 8]), rng.choice([1, 6, 32]), rng.choice([2, 40])
    tokens = tuple(rng.choice([0, 1, 33, rng.randint(0, 1500 // topk)]) for _ in range(ranks))
    rank, room = rng.randrange(ranks), max(tokens) + 50
    check(seed, tokens, topk, experts, 256, rng.choice([1024, 7168]), rank=rank, max_tokens=room)


def test_a_rank_that_missed_another_ends_and_sends_nothing() -> None:
    check(0, (40, 40), 3, 4, 512, 1024, has_missed=True)
