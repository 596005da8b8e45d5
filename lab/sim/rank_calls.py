"""Calls of several ranks of a node, one after another: inputs and right results of kernels that use peers' memory.

Each call of a rank runs post_rows, a copy of its room (cuda/keep_room.cuh), gather_rows, stores of results
(cuda/store_results.cuh), meet_ranks, and the sums. The results are random numbers that are known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.core.meeting import Room
from deep_gemm.moe.check import ExpertRows
from deep_gemm.moe.routing import expert_rows, weighted_sum

from ..casts import wider


@dataclass(frozen=True)
class Sizes:
    """The sizes of a node and of its calls."""

    tokens: tuple[tuple[int, ...], ...]
    """Tokens by call, then by rank."""
    max_tokens: int = 4
    hidden: int = 144
    topk: int = 3
    experts_here: int = 2
    dtype: torch.dtype = torch.bfloat16
    ids: torch.dtype = torch.int64
    value_bytes: int = 1
    """Number of bytes of a value in a row: 2 for BF16 tokens, which are not cast."""

    @property
    def ranks(self) -> int:
        """Count the ranks."""
        return len(self.tokens[0])

    @property
    def num_experts(self) -> int:
        """Count the experts of all ranks."""
        return self.ranks * self.experts_here

    @property
    def room(self) -> Room:
        """Return the layout of a rank's room."""
        return Room(self.ranks, self.max_tokens, self.hidden, self.topk, 128 if self.value_bytes == 1 else None)


@dataclass(frozen=True)
class Call:
    """A rank's part of one call: its inputs, and its right results. A row that is not sent is None."""

    x: Tensor
    sf: Tensor | None
    """Scales of tokens that are FP8 from the start."""
    topk_ids: Tensor
    topk_weights: Tensor
    returns_to: Tensor
    """Address of each route's result, as written by post_rows."""
    posted: Tensor
    """The bytes of each token's row in this rank's room, up to the weights of its routes."""
    ids: Tensor
    """The experts of this rank for each slot."""
    y: Tensor
    rows: ExpertRows
    """The rows of this rank's experts."""
    gathered: Tensor
    """The gathered values, FP8 scales and route weights of `rows`, as adjacent bytes of each row."""
    places: list[tuple[int, int] | None]
    """The rank that receives each row's result, and the position there."""
    out: Tensor


def tokens_of(count: int, sizes: Sizes, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Make tokens of a rank, and scales if they are FP8: then both are parts of wider rows, full of NaN."""
    x = torch.randn(count, sizes.hidden, generator=g, dtype=torch.float32)
    if sizes.dtype != torch.float8_e4m3fn:
        return x.to(sizes.dtype), None
    values, scales = per_token_cast_to_fp8(x)
    return wider(values, 32, torch.nan), wider(scales, 1, torch.nan)


def row_bytes_of(x: Tensor, sf: Tensor | None, weights: Tensor, room: Room) -> Tensor:
    """Make rows in the layout of a room."""
    parts = [x] if room.gran_k is None else [*(per_token_cast_to_fp8(x) if sf is None else (x, sf))]
    # clone, because the scale of one token may have a stride of 0 and still count as contiguous.
    parts = [each.clone(memory_format=torch.contiguous_format) for each in (*parts, weights)]
    rows = torch.cat([each.view(torch.uint8) for each in parts], dim=1)
    return torch.nn.functional.pad(rows, (0, room.row_bytes - rows.shape[1]))


def calls_of(sizes: Sizes, seed: int = 0) -> list[list[Call]]:
    """Make all calls, by rank. Routes include -1, ids without an expert, repeated experts, tokens without an expert."""
    g = torch.Generator().manual_seed(seed)
    room, ranks = sizes.room, sizes.ranks
    by_rank: list[list[Call]] = [[] for _ in range(ranks)]
    for counts in sizes.tokens:
        tokens = [tokens_of(count, sizes, g) for count in counts]
        given = [torch.randint(-1, sizes.num_experts + 1, (c, sizes.topk), generator=g) for c in counts]
        for each in given:
            each[each.shape[0] // 2 : each.shape[0] // 2 + 1] = -1
            if sizes.ids == torch.int64 and each.numel():
                each[-1, 0] = (1 << 32) + 1  # only the lower half of this id is an expert's
            elif each.numel():
                each[0, 0] = 32 * sizes.experts_here  # an id far past the last expert
        ps = [torch.randn(count, sizes.topk, generator=g, dtype=torch.float32) for count in counts]
        of_all = [torch.where(each < sizes.num_experts, each, -1) for each in given]
        # The slots of each rank hold the tokens of all ranks.
        slots = torch.full((ranks, room.max_tokens, sizes.topk), -1, dtype=torch.int64)
        p_slots = torch.zeros(ranks, room.max_tokens, sizes.topk, dtype=torch.float32)
        rows: list[Tensor | None] = [None] * room.slots
        for source, ((x, sf), ids, p) in enumerate(zip(tokens, of_all, ps, strict=True)):
            slots[source, : len(ids)] = ids
            p_slots[source, : len(ids)] = p
            for token, row in enumerate(row_bytes_of(x, sf, p, room)):
                rows[source * room.max_tokens + token] = row
        results = torch.full(
            (ranks, room.max_tokens * sizes.topk, sizes.hidden), torch.nan, dtype=torch.float32
        ).bfloat16()
        for rank in range(ranks):
            ids = slots.flatten(0, 1) - rank * sizes.experts_here
            here = ids.masked_fill((ids < 0) | (ids >= sizes.experts_here), -1).int()
            stacked = expert_rows(here, sizes.experts_here)
            y = torch.randn(room.slots * sizes.topk, sizes.hidden, generator=g, dtype=torch.float32).bfloat16()
            gathered = torch.zeros(len(y), room.row_bytes, dtype=torch.uint8)
            places: list[tuple[int, int] | None] = [None] * len(y)
            for slot, route in (here >= 0).nonzero().tolist():
                row, came = int(stacked.row_of[slot, route]), rows[slot]
                assert came is not None
                source, token = divmod(slot, room.max_tokens)
                gathered[row, : room.weights] = came[: room.weights]
                gathered[row, room.weights : room.weights + 4] = came[room.weights + 4 * route :][:4]
                places[row] = source, token * sizes.topk + route
                results[source, token * sizes.topk + route] = y[row]
            posted = row_bytes_of(*tokens[rank], ps[rank], room)[:, : room.weights + 4 * sizes.topk]
            routes = torch.arange(of_all[rank].numel(), dtype=torch.int32).view(of_all[rank].shape)
            returns_to = torch.where(of_all[rank] >= 0, routes, -1)
            asked = *tokens[rank], given[rank].to(sizes.ids), ps[rank], returns_to, posted
            by_rank[rank].append(Call(*asked, here, y, stacked, gathered, places, torch.empty(0, dtype=torch.float32)))
        for rank in range(ranks):
            call = by_rank[rank][-1]
            out = weighted_sum(results[rank], call.returns_to, call.topk_weights).bfloat16()
            by_rank[rank][-1] = replace(call, out=out)
    return by_rank
