"""Products of one rank whose rows lie in the rooms of several, and what must come of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import empty_scales
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.core.meeting import Room
from deep_gemm.gemm.config_fetched import ROWS_OF_PART
from deep_gemm.gemm.rows.silu_check import SILU_COLUMNS, SiluRowsProblem
from deep_gemm.moe.check import ExpertRows
from deep_gemm.moe.routing import expert_rows
from lab.sim.rows_fetched import Asked
from lab.sim.rows_silu import CANARY, POISON

NAN_BYTE = 0x7F


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
    return Asked(room, rank, rooms, stacked, *_of_rows(slots, stacked, room, n, g, limit, gates_apart), has_missed)


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
