"""The first product of experts across GPUs in the simulator: rows lie in rooms of several ranks, and one multiplies.

All ranks have met before, so only this one's kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..choose.config import GemmConfig
from ..kernels import rows_fetched as kernels
from ..kernels.fp8_gemm import ROWS_FETCHED_PARAMS
from ..kernels.meeting import STATE_WORDS, Node, Room
from ..kernels.rows_fetched import FetchedRowsProblem
from ..problem import ExpertRows, SiluRowsProblem
from ..problem.layout import SCALE_BLOCK
from ..problem.rows_silu import SILU_COLUMNS
from ..quantize import empty_scales, per_block_cast_to_fp8, per_token_cast_to_fp8
from ..routing import expert_rows
from .launcher import Launcher, flat_memory
from .library import HostKernel
from .rows_silu import CANARY, POISON
from .simulate import Buffer, Simulation

NAN_BYTE = 0x7F
LIMIT = 1 << 40


class Asked(NamedTuple):
    """What the rank that multiplies is asked for."""

    room: Room
    rank: int
    rooms: list[Tensor]
    """The memory of each rank, with rows of its tokens and nothing else that counts."""
    ids: Tensor
    """int32 `[slots, topk]`: experts here."""
    rows: ExpertRows
    silu: SiluRowsProblem
    """As it must be when the rows have come."""
    addresses: Tensor
    """A rank and a byte of its room for each row, as the rank times 2^32 plus the byte."""
    has_missed: bool = False
    """A rank did not come, so rows are of no use."""

    @property
    def experts(self) -> int:
        """How many are here."""
        return len(self.rows.counts)


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
        values, scales = per_token_cast_to_fp8(torch.randn(count, k, generator=g))
        weights = torch.rand(count, topk, generator=g) * 2 - 0.5
        parts = [_bits(x) for x in (values, scales, weights)]
        rows = memory[: room.ids].view(max(room.max_tokens, 1), room.row_bytes)
        rows[:count, : sum(part.shape[1] for part in parts)] = torch.cat(parts, dim=1)
        first = each * room.max_tokens
        slots[first : first + room.max_tokens] = rows
        of_rank = torch.randint(0, experts, (count, topk), generator=g, dtype=torch.int32)
        is_here = torch.rand(count, topk, generator=g) >= elsewhere
        ids[first : first + count] = torch.where(is_here, of_rank, -1)
        rooms.append(memory)
    stacked = expert_rows(ids, experts)
    return Asked(
        room,
        rank,
        rooms,
        ids,
        stacked,
        *_of_rows(slots, stacked, room, n, g, limit, gates_apart),
        has_missed=has_missed,
    )


def _of_rows(
    slots: Tensor, rows: ExpertRows, room: Room, n: int, g: torch.Generator, limit: float | None, gates_apart: bool
) -> tuple[SiluRowsProblem, Tensor]:
    """The product of rows that have come, and where their results go."""
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
    b = per_block_cast_to_fp8(torch.randn(len(rows.counts), n, k, generator=g) / k**0.5)
    b[1].mul_(torch.rand(b[1].shape, generator=g) + 0.5)
    d = torch.full((count, n // 2), POISON, dtype=torch.uint8).view(torch.float8_e4m3fn)
    columns = SCALE_BLOCK if gates_apart else SILU_COLUMNS
    scales = empty_scales((count,), n // 2, d, mn_major=True, gran_k=columns).fill_(CANARY)
    row_weights = weights.gather(1, route[:, None])[:, 0].contiguous()
    silu = SiluRowsProblem(
        came[:, :k].contiguous().view(torch.float8_e4m3fn),
        sfa,
        *b,
        d,
        scales,
        rows.ids,
        row_weights,
        limit,
        gates_apart,
    )
    rank, token = slot // room.max_tokens, slot % room.max_tokens
    addresses = rank * 2**32 + room.results + (token * room.topk + route) * k * 2
    return silu, torch.where(rows.token_of < 0, -1, addresses)


def run(
    kernel: HostKernel,
    config: GemmConfig,
    asked: Asked,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    max_steps: int = 20_000_000,
) -> dict[str, Tensor]:
    """Fetch and multiply on simulated SMs: what the kernel wrote, by name; addresses as `Asked` has them."""
    silu, rows, room = asked.silu, asked.rows, asked.room
    sfa = empty_scales(silu.sfa.shape[:1], room.hidden, silu.d, mn_major=True).fill_(torch.nan)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32)
    state[-1] = int(asked.has_missed)
    written = {
        "a": torch.full(silu.a.shape, POISON, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "sfa": sfa,
        "row_weights": torch.full_like(silu.row_weights, torch.nan),  # type: ignore[arg-type]
        "d": silu.d,
        "scales": silu.scales,
        "addresses": torch.full((len(rows.ids),), -1, dtype=torch.int64),
        "arrivals": torch.zeros(asked.experts + 1, dtype=torch.int32),
    }
    read = {
        "b": silu.b,
        "sfb": silu.sfb,
        "ends": rows.ends,
        "token_of": rows.token_of,
        "row_of": rows.row_of.contiguous(),
        "counts": rows.counts + asked.has_missed,  # of routes that were told while they were counted
        "ids": asked.ids,
        "state": state,
        **{f"room {rank}": memory for rank, memory in enumerate(asked.rooms)},
    }
    alignments = {"a": 16, "sfa": 16, "d": 16, "scales": 16, "b": 16, "addresses": 8}
    alignments |= {f"room {rank}": 16 for rank in range(room.ranks)}
    buffers = {
        name: Buffer(flat_memory(x), is_writable=name in written, alignment=alignments.get(name, 4))
        for name, x in (written | read).items()
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, max_steps=max_steps)
    at = {name: simulation.tensor(name, x) for name, x in (written | read).items()}
    rooms = tuple(simulation.address(f"room {rank}") for rank in range(room.ranks))
    if asked.has_missed:  # its room may be gone
        rooms = tuple(start if rank == asked.rank else 0 for rank, start in enumerate(rooms))
    node = Node(room, rooms, asked.rank, at["state"], at["arrivals"], torch.zeros(1, dtype=torch.int32), LIMIT)
    operands: Any = {name: at[name] for name in ("a", "sfa", "b", "sfb", "d", "scales", "row_weights")}
    placed = silu._replace(**operands, ids=at["ends"])
    of_rows = rows._replace(token_of=at["token_of"], row_of=at["row_of"], counts=at["counts"], ends=at["ends"])
    problem = FetchedRowsProblem(placed, of_rows, at["ids"], at["addresses"], node)
    launcher = Launcher(
        simulation, kernel, ROWS_FETCHED_PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    plan = kernels.plan_of(problem, config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(kernels.addresses(problem))
    found = simulation.result().buffers
    got = {name: _as_before(x, found[name]) for name, x in written.items()}
    if not asked.has_missed:
        got["addresses"] = _in_rooms(got["addresses"], rooms, room)
    return got


def _as_before(like: Tensor, written: object) -> Tensor:
    """See what a kernel wrote as the tensor that it was made from."""
    assert isinstance(written, Tensor)
    return written.view(like.dtype).as_strided(like.shape, like.stride())


def _in_rooms(addresses: Tensor, rooms: Sequence[int], room: Room) -> Tensor:
    """Addresses as ranks and bytes; others stay as they are."""
    found = addresses.clone()
    for rank, start in enumerate(rooms):
        is_there = (addresses >= start) & (addresses < start + room.num_bytes)
        found[is_there] = rank * 2**32 + addresses[is_there] - start
    return found


def mistake(asked: Asked, got: Mapping[str, Tensor]) -> str | None:
    """Say what of the rows that came is not as it must be, by bits; None if all is. Products are another question."""
    silu, used = asked.silu, int(asked.rows.counts.sum())
    assert silu.row_weights is not None
    right = {"a": silu.a, "sfa": silu.sfa, "row_weights": silu.row_weights, "addresses": asked.addresses}
    for name, expected in right.items():
        wrong = _bits(got[name][:used]) != _bits(expected[:used])
        if bool(wrong.any()):
            return f"{name}: wrong first at {wrong.nonzero()[0].tolist()}"
    before = {"a": POISON, "addresses": 0xFF}
    for name, byte in before.items():
        if bool((got[name][used:].contiguous().view(torch.uint8) != byte).any()):
            return f"{name}: expected rows without a token to stay as they are"
    if not bool(got["sfa"][used:].isnan().all()):
        return "sfa: expected scales of rows without a token to stay as they are"
    if got["arrivals"][:-1].tolist() != asked.rows.counts.tolist():
        return f"arrivals: expected {asked.rows.counts.tolist()}, got {got['arrivals'][:-1].tolist()}"
    return None


def _bits(x: Tensor) -> Tensor:
    return (
        x.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(len(x), -1)
        if len(x)
        else x.new_empty(0, x.shape[1:].numel() * x.element_size(), dtype=torch.uint8)
    )
