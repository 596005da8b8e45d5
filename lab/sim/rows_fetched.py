"""The first product of experts across GPUs in the simulator: rows lie in rooms of several ranks, and one multiplies.

All ranks have met before, so only this one's kernel runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.across import rows_fetched as kernels
from deep_gemm.across.rows_fetched import FetchedRowsProblem
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.casts.rules import empty_scales
from deep_gemm.core.meeting import STATE_WORDS, Node, Room
from deep_gemm.gemm.ask.silu import activated
from deep_gemm.gemm.config.tall import BLOCK_K, GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.kinds.works import FETCHED, ROWS_OF_PART
from deep_gemm.gemm.problem import Problem
from deep_gemm.moe.check import ExpertRows
from deep_gemm.moe.route_rows import num_arrivals
from deep_gemm.moe.routing import expert_rows

from ..silu import checked
from .launcher import How, Stage
from .library import HostKernel
from .rows_silu import POISON, random_weight
from .rows_silu import room as room_of_d
from .trial import Trial

NAN_BYTE = 0x7F
LIMIT = 1 << 40


class Asked(NamedTuple):
    """The request to the rank that multiplies."""

    room: Room
    rank: int
    rooms: list[Tensor]
    """The memory of each rank, with rows of its tokens and nothing else that counts."""
    rows: ExpertRows
    silu: Problem
    """The problem as it must be when the rows have come."""
    addresses: Tensor
    """A rank and a byte of its room for each row, as the rank times 2^32 plus the byte."""
    has_missed: bool = False
    """A rank did not come, so rows are of no use."""

    @property
    def experts(self) -> int:
        """Say how many are here."""
        return len(self.rows.counts)


def run(kernel: HostKernel | None, config: GemmConfig, asked: Asked, **how: Unpack[How]) -> dict[str, Tensor]:
    """Fetch and multiply on simulated SMs: what the kernel wrote, by name; addresses as `Asked` has them."""
    silu, rows, room = asked.silu, asked.rows, asked.room
    state = torch.zeros(STATE_WORDS, dtype=torch.int32)
    state[-1] = int(asked.has_missed)
    written = {
        "a": torch.full(silu.a.shape, POISON, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "sfa": empty_scales(silu.sfa.shape[:1], room.hidden, silu.d, mn_major=True).fill_(torch.nan),
        "row_weights": torch.full((len(rows.ids),), torch.nan, dtype=torch.float32),
        "d": silu.d.clone(),
        "scales": torch.empty_strided(silu.scales.shape, silu.scales.stride(), dtype=torch.float32).copy_(silu.scales),
        "addresses": torch.full((len(rows.ids),), -1, dtype=torch.int64),
        "arrivals": torch.zeros(num_arrivals(len(rows.ids)), dtype=torch.int32),
        "report": torch.zeros(1, dtype=torch.int32),
    }
    rooms_of = {f"room {rank}": memory for rank, memory in enumerate(asked.rooms)}
    read = {
        "b": silu.b,
        "sfb": silu.sfb,
        "ends": rows.ends + asked.has_missed,  # of routes that were told while they were counted
        "token_of": rows.token_of,
        "row_of": rows.row_of.contiguous(),
        "state": state,
        **rooms_of,
    }
    aligned = dict.fromkeys(("a", "sfa", "d", "scales", "b", *rooms_of), 16)
    stage = Stage(config, read, written, aligned, **how)
    at = stage.at
    rooms = tuple(at[name].data_ptr() for name in rooms_of)
    if asked.has_missed:  # its room may be gone
        rooms = tuple(start if rank == asked.rank else 0 for rank, start in enumerate(rooms))
    of_node = at["state"], asked.experts, at["arrivals"], at["report"], LIMIT
    node = Node(room, rooms, asked.rank, *of_node)
    operands = {name: at[name] for name in ("a", "sfa", "b", "sfb", "d", "scales", "row_weights")}
    of_rows = rows._replace(**{name: at[name] for name in ("token_of", "row_of", "ends")})
    problem = FetchedRowsProblem(silu._replace(**operands, c=at["ends"]), of_rows, at["addresses"], node)
    plan = kernels.plan_of(problem, config, stage.num_sms, stage.launcher(FP8_GEMM, kernel, config))
    plan.launch(kernels.addresses(problem))
    stage.copy_back()
    if not asked.has_missed:
        written["addresses"] = in_rooms(written["addresses"], rooms, room)
    return written


def in_rooms(addresses: Tensor, rooms: Sequence[int], room: Room) -> Tensor:
    """Give addresses as ranks and bytes; others stay as they are."""
    found = addresses.clone()
    for rank, start in enumerate(rooms):
        is_there = (addresses >= start) & (addresses < start + room.num_bytes)
        found[is_there] = rank * 2**32 + addresses[is_there] - start
    return found


def ask(
    tokens: Sequence[int],
    topk: int,
    experts: int,
    n: int,
    k: int,
    seed: int = 0,
    *,
    rank: int = 0,
    max_tokens: int | None = None,
    elsewhere: float = 0.3,
    limit: float | None = None,
    gates_apart: bool = False,
    has_missed: bool = False,
) -> Asked:
    """Make a problem with random tokens of each rank; `elsewhere` of all routes have no expert here."""
    g = torch.Generator().manual_seed(seed)
    room = Room(len(tokens), max(*tokens, 1) if max_tokens is None else max_tokens, k, topk)
    ids = torch.full((room.slots, topk), -1, dtype=torch.int32)
    slots = torch.zeros(room.slots, room.row_bytes, dtype=torch.uint8)
    rooms = []
    for each, count in enumerate(tokens):
        memory = torch.full((room.num_bytes,), NAN_BYTE, dtype=torch.uint8)
        values, scales = per_token_cast_to_fp8(torch.randn(count, k, generator=g, dtype=torch.float32))
        weights = torch.rand(count, topk, generator=g, dtype=torch.float32) * 2 - 0.5
        parts = [_bits(x) for x in (values, scales, weights)]
        rows = memory[: room.ids].view(max(room.max_tokens, 1), room.row_bytes)
        rows[:count, : sum(part.shape[1] for part in parts)] = torch.cat(parts, dim=1)
        first = each * room.max_tokens
        slots[first : first + room.max_tokens] = rows
        of_rank = torch.randint(0, experts, (count, topk), generator=g, dtype=torch.int32)
        is_here = torch.rand(count, topk, generator=g, dtype=torch.float32) >= elsewhere
        ids[first : first + count] = torch.where(is_here, of_rank, -1)
        rooms.append(memory)
    stacked = expert_rows(ids, experts)
    return Asked(room, rank, rooms, stacked, *_of_rows(slots, stacked, room, n, g, limit, gates_apart), has_missed)


def _of_rows(
    slots: Tensor, rows: ExpertRows, room: Room, n: int, g: torch.Generator, limit: float | None, gates_apart: bool
) -> tuple[Problem, Tensor]:
    """Make the product of rows that have come, and where their results go."""
    count, k = len(rows.ids), room.hidden
    slot = rows.token_of.clamp_min(0).long()
    came = slots[slot]
    came[rows.token_of < 0] = POISON
    sfa = empty_scales((count,), k, came, mn_major=True)
    sfa.copy_(came[:, room.scales : room.weights].contiguous().view(torch.float32))
    # The route of each row: columns of row_of that name it.
    route = torch.zeros(count, dtype=torch.int64)
    at_slot, at_route = (rows.row_of >= 0).nonzero(as_tuple=True)
    route[rows.row_of[at_slot, at_route].long()] = at_route
    weights = came[:, room.weights : room.weights + 4 * room.topk].contiguous().view(torch.float32)
    b, d = random_weight(len(rows.counts), n, k, g), room_of_d(count, n, gates_apart)
    row_weights = weights.gather(1, route[:, None])[:, 0].contiguous()
    a = came[:, :k].contiguous().view(torch.float8_e4m3fn), sfa
    silu = activated(a, b, d, rows.ends, row_weights, limit, gates_apart, FETCHED)
    rank, token = slot // room.max_tokens, slot % room.max_tokens
    addresses = rank * 2**32 + room.results + (token * room.topk + route) * k * 2
    return silu, torch.where(rows.token_of < 0, -1, addresses)


def mistake(asked: Asked, got: Mapping[str, Tensor]) -> str | None:
    """Say what of the rows that came is not as it must be, by bits; None if all is. Products are another question."""
    silu, used = asked.silu, int(asked.rows.counts.sum())
    assert silu.row_weights is not None
    expected_of = {"a": silu.a, "sfa": silu.sfa, "row_weights": silu.row_weights, "addresses": asked.addresses}
    for name, expected in expected_of.items():
        wrong = _bits(got[name][:used]) != _bits(expected[:used])
        if bool(wrong.any()):
            return f"{name}: wrong first at {wrong.nonzero()[0].tolist()}"
    before = {"a": POISON, "addresses": 0xFF}
    for name, byte in before.items():
        if bool((got[name][used:].contiguous().view(torch.uint8) != byte).any()):
            return f"{name}: expected rows without a token to stay as they are"
    if not bool(got["sfa"][used:].isnan().all()):
        return "sfa: expected scales of rows without a token to stay as they are"
    came = [min(max(used - first, 0), ROWS_OF_PART) for first in range(0, len(silu.a), ROWS_OF_PART)]
    if got["arrivals"][1:].tolist() != came:
        return f"arrivals: expected {came}, got {got['arrivals'][1:].tolist()}"
    return None


def _bits(x: Tensor) -> Tensor:
    return (
        x.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(len(x), -1)
        if len(x)
        else x.new_empty(0, x.shape[1:].numel() * x.element_size(), dtype=torch.uint8)
    )


@dataclass(frozen=True)
class FetchTrial(Trial):
    """The product of one rank, whose rows lie in rooms of `tokens[rank]` tokens."""

    kernel = FP8_GEMM
    config: GemmConfig
    tokens: tuple[int, ...]
    topk: int
    experts: int
    seed: int = 0
    schedule: str | None = None
    n: int = 256
    k: int = 256
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `ask`."""

    @classmethod
    def takes(cls, config: GemmConfig) -> bool:
        """Take rows that are fetched."""
        return config.work.fetches

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> FetchTrial:
        """Draw the tokens of ranks, and k."""
        draw = random.Random(seed)
        tokens = tuple(draw.randint(0, 20) for _ in range(draw.randint(1, 3)))
        run = config.run_k_blocks
        blocks = draw.randint(1, 3) if config.has_tail or run == 1 else run
        sizes = draw.randint(1, 6), draw.randint(1, 4)
        more = {"rank": draw.randrange(len(tokens)), "elsewhere": draw.choice((0.0, 0.3, 0.6))}
        return cls(config, tokens, *sizes, seed, k=blocks * BLOCK_K, more=more)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare rows that came, to the bit, and their product with the reference's."""
        asked = ask(
            self.tokens,
            self.topk,
            self.experts,
            self.n,
            self.k,
            self.seed,
            gates_apart=self.config.epilogue.gates_apart,
            **self.more,
        )
        got = run(kernel, self.config, asked, **self.how)
        if asked.has_missed:  # it ends, and writes to no room
            if bool((got["addresses"] != 0).any()):
                raise ValueError("addresses: expected none from a rank that missed another")
            return 0.0
        if (found := mistake(asked, got)) is not None:
            raise ValueError(found)
        return checked(asked.silu, (got["d"], got["scales"]), self.device)
