"""Calls of several ranks of a node, one after another: what the kernels that write to peers are given, and must give.

Each call of a rank is send_rows, a copy of all that came (sim_kernels/keep_room.cuh), return_sums, and the sum over
ranks. The products in between are made up: their rows are random, and known before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.distributed import message
from deep_gemm.distributed.owners import local_ids
from deep_gemm.kernels.meeting import Room
from deep_gemm.quantize import per_token_cast_to_fp8
from deep_gemm.routing import expert_rows, weighted_sum


@dataclass(frozen=True)
class Sizes:
    """Of a node. `tokens[call][rank]`."""

    tokens: tuple[tuple[int, ...], ...]
    max_tokens: int = 4
    hidden: int = 144
    topk: int = 3
    experts_here: int = 2
    dtype: torch.dtype = torch.bfloat16
    ids: torch.dtype = torch.int64

    @property
    def ranks(self) -> int:
        return len(self.tokens[0])

    @property
    def num_experts(self) -> int:
        return self.ranks * self.experts_here

    @property
    def room(self) -> Room:
        return Room(self.ranks, self.max_tokens, self.hidden, self.topk)


@dataclass(frozen=True)
class Call:
    """What a rank has in one call, and what must come of it. A row that does not come is None."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    goes_to: Tensor
    """What send_rows says of its own tokens."""
    came: list[Tensor | None]
    """Of each slot: the bytes of its row."""
    ids: Tensor
    """Of each slot: the experts here."""
    y: Tensor
    row_of: Tensor
    out: Tensor


def row_bytes_of(x: Tensor, weights: Tensor, num_bytes: int) -> Tensor:
    """Rows as they lie in a slot."""
    values, scales = per_token_cast_to_fp8(x)
    parts = [each.contiguous().view(torch.uint8) for each in (values, scales, weights)]
    rows = torch.cat(parts, dim=1)
    return torch.nn.functional.pad(rows, (0, num_bytes - rows.shape[1]))


def calls_of(sizes: Sizes, seed: int = 0) -> list[list[Call]]:
    """All calls, by rank. Routes have -1, numbers that no expert has, experts twice, and tokens without any."""
    g = torch.Generator().manual_seed(seed)
    room, ranks = sizes.room, sizes.ranks
    by_rank: list[list[Call]] = [[] for _ in range(ranks)]
    for counts in sizes.tokens:
        xs = [torch.randn(count, sizes.hidden, generator=g).to(sizes.dtype) for count in counts]
        given = [torch.randint(-1, sizes.num_experts + 1, (c, sizes.topk), generator=g) for c in counts]
        for each in given:
            each[each.shape[0] // 2 : each.shape[0] // 2 + 1] = -1
            if sizes.ids == torch.int64 and each.numel():
                each[-1, 0] = (1 << 32) + 1  # the lower half is an expert's
            elif each.numel():
                each[0, 0] = 32 * sizes.experts_here  # far past the last expert
        ps = [torch.randn(count, sizes.topk, generator=g) for count in counts]
        of_all = [torch.where(each < sizes.num_experts, each, -1) for each in given]
        # Slots of each rank: the tokens of all ranks.
        slots = torch.full((ranks, room.max_tokens, sizes.topk), -1)
        p_slots = torch.zeros(ranks, room.max_tokens, sizes.topk)
        rows: list[Tensor | None] = [None] * room.slots
        for source, (x, ids, p) in enumerate(zip(xs, of_all, ps, strict=True)):
            slots[source, : len(ids)] = ids
            p_slots[source, : len(ids)] = p
            for token, row in enumerate(row_bytes_of(x, p, room.row_bytes)):
                rows[source * room.max_tokens + token] = row
        sums = []
        for rank in range(ranks):
            here = local_ids(slots.flatten(0, 1).clone(), rank * sizes.experts_here, sizes.experts_here).int()
            stacked = expert_rows(here, sizes.experts_here)
            y = torch.randn(room.slots * sizes.topk, sizes.hidden, generator=g).bfloat16()
            y[int(stacked.ends[-1]) :] = torch.nan
            has_routes = (here >= 0).any(1)
            came = [row if has else None for row, has in zip(rows, has_routes.tolist(), strict=True)]
            sums.append(weighted_sum(y, stacked.row_of, p_slots.flatten(0, 1)).bfloat16())
            tokens, owners = len(xs[rank]), of_all[rank].div(sizes.experts_here, rounding_mode="floor")
            goes = torch.full((tokens, ranks), -1, dtype=torch.int32)
            for r in range(ranks):
                is_sent = ((owners == r) & (of_all[rank] >= 0)).any(1)
                goes[:, r] = torch.where(is_sent, r * room.max_tokens + torch.arange(tokens), -1)
            nothing = torch.empty(0)
            call = Call(
                xs[rank], given[rank].to(sizes.ids), ps[rank], goes, came, here, y, stacked.row_of.contiguous(), nothing
            )
            by_rank[rank].append(call)
        for rank in range(ranks):
            mine = slice(rank * room.max_tokens, rank * room.max_tokens + len(xs[rank]))
            total = torch.zeros(len(xs[rank]), sizes.hidden)
            for of in sums:
                total += of[mine].float()
            by_rank[rank][-1] = _with_out(by_rank[rank][-1], total.bfloat16())
    return by_rank


def _with_out(call: Call, out: Tensor) -> Call:
    return Call(**{**call.__dict__, "out": out})


def words_of(row: Tensor) -> Tensor:
    return row.contiguous().view(message.WORD)
