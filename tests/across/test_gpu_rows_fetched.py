"""Products that fetch their rows, on a GPU that has the rooms of several ranks: rows by bits, products by torch."""

from __future__ import annotations

import random

import pytest
import torch
from fetched_cases import ask, mistake
from test_gpu_rows_silu import by_torch, on_gpu
from torch import Tensor

from deep_gemm.across import rows_fetched
from deep_gemm.across.rows_fetched import FetchedRowsProblem
from deep_gemm.core.meeting import STATE_WORDS, Node
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.rows.choose import reachable_silu
from deep_gemm.gemm.rows.silu_check import SiluRowsProblem
from deep_gemm.moe.route_rows import num_arrivals
from lab.bench.tune import compile_all
from lab.silu import mistakes
from lab.sim.rows_fetched import Asked, in_rooms
from lab.sim.rows_silu import POISON

pytestmark = pytest.mark.gpu
LIMIT_NS = 10**9
ALL = [config for config in reachable_silu() if config.fetches]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All that are needed, compiled on all processors at once."""
    compile_all(ALL, lambda _: None)


def fetch(asked: Asked, p: SiluRowsProblem, config: GemmConfig | None = None) -> dict[str, Tensor]:
    """What the kernel wrote besides the product, by name; addresses as `Asked` has them. `p` lies on the GPU."""
    room = asked.room
    memories = [memory.cuda() for memory in asked.rooms]
    starts = tuple(memory.data_ptr() for memory in memories)
    if asked.has_missed:  # the room of another may be gone
        starts = tuple(start if rank == asked.rank else 0 for rank, start in enumerate(starts))
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device="cuda")
    state[-1] = int(asked.has_missed)
    got = {
        "a": torch.full_like(p.a.view(torch.uint8), POISON).view(p.a.dtype),
        "sfa": torch.full_like(p.sfa, torch.nan),
        "row_weights": torch.full_like(p.row_weights, torch.nan),  # type: ignore[arg-type]
        "addresses": torch.full((len(p.a),), -1, dtype=torch.int64, device="cuda"),
        "arrivals": state.new_zeros(num_arrivals(len(p.a))),
    }
    report = torch.zeros(1, dtype=torch.int32).pin_memory()
    node = Node(room, starts, asked.rank, state, asked.experts, got["arrivals"], report, LIMIT_NS)
    rows = asked.rows._replace(**{name: x.cuda() for name, x in asked.rows._asdict().items()})
    placed = p._replace(a=got["a"], sfa=got["sfa"], row_weights=got["row_weights"], ids=rows.ends)
    rows_fetched.run(FetchedRowsProblem(placed, rows, got["addresses"], node), config)
    found = {name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for name, x in got.items()}
    if not asked.has_missed:
        found["addresses"] = in_rooms(found["addresses"], starts, room)
    return found


def check(asked: Asked, config: GemmConfig | None = None) -> None:
    p = on_gpu(asked.silu)
    wanted = by_torch(p)
    assert mistake(asked, fetch(asked, p, config)) is None
    assert mistakes(p, (p.d, p.scales), wanted) is None


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_every_configuration_that_can_be_chosen(config: GemmConfig) -> None:
    rng = random.Random(config.name)
    for experts in (1, 12):
        k = 128 * rng.choice([4, 12]) + 128 * config.has_tail
        tokens = [rng.randint(0, 300) for _ in range(4)]
        check(ask(tokens, 4, experts, 512, k, limit=rng.choice([None, 1.0]), gates_apart=config.gates_apart), config)


@pytest.mark.parametrize("seed", range(8))
def test_random_rooms_and_the_chosen_kernel(seed: int) -> None:
    rng = random.Random(seed)
    ranks, topk, experts = rng.choice([1, 2, 8]), rng.choice([1, 6, 32]), rng.choice([1, 2, 40])
    tokens = [rng.choice([0, 1, 33, rng.randint(0, 1500 // topk)]) for _ in range(ranks)]
    rank, room, is_apart = rng.randrange(ranks), max(tokens) + 50, rng.random() < 0.5
    k = rng.choice([128, 1024, 7168])
    check(ask(tokens, topk, experts, 256, k, seed, rank=rank, max_tokens=room, gates_apart=is_apart))


def test_a_rank_that_missed_another_ends_and_sends_nothing() -> None:
    asked = ask((40, 40), 3, 4, 512, 256, gates_apart=True, has_missed=True)
    assert not fetch(asked, on_gpu(asked.silu))["addresses"].any()
