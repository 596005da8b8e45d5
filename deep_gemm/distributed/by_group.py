"""The way of rows between processes by collectives of `torch.distributed`: NCCL's on GPUs, Gloo's on the CPU.

`Plan` is the way there and back with exact sizes. `Everywhere` sends every token to every process, so that sizes are
fixed. In both a token's sums come back in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..problem import ExpertRows
from ..routing import expert_rows, gather_weighted
from .message import WORD
from .owners import count_routes, owners_of_routes, owners_of_tokens

UNLIMITED = 2**62
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 has a new name for it, and warns of the old one."""


class Facts(NamedTuple):
    """What all processes must agree about in one call."""

    num_experts: int
    hidden: int
    topk: int
    type_of_x: int
    gradients: int
    """A bit for each that is asked for: of x, of the weights of routes, of w1, of w2."""


class Plan(NamedTuple):
    """Which rows go where."""

    rows: ExpertRows
    """A row for each token and rank that it goes to, stacked by rank."""
    sends: list[int]
    """How many rows go to each rank."""
    receives: list[int]
    """How many come from each rank."""
    routes: int
    """How many routes of the rows that come have an expert here."""
    group: dist.ProcessGroup | None

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Send each token to its ranks, once to each; give what comes."""
        return self.forth(tokens.index_select(0, self.rows.token_of))

    def forth(self, sent: Tensor) -> Tensor:
        """Send rows that are stacked by rank."""
        return exchange(sent, self.sends, self.receives, self.group)

    def back(self, received: Tensor) -> Tensor:
        """Send a row back for each that came, and give them as this process stacked its own."""
        return exchange(received, self.receives, self.sends, self.group)

    def sum_up(self, y: Tensor) -> Tensor:
        """Add up the rows of each token in order of ranks, in FP32, rounded once to BF16."""
        tokens = len(self.rows.row_of)
        if not len(y):
            return y.new_zeros(tokens, y.shape[1], dtype=torch.bfloat16)
        out = gather_weighted(y, self.rows, ones(self.rows.row_of))
        assert out is not None
        return out


def ones(like: Tensor) -> Tensor:
    """Weights of rows that are weighted already."""
    return torch.ones(like.shape, dtype=torch.float32, device=like.device)


def exchange(sent: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send rows to all ranks, and give those that come, stacked by rank. They travel as words."""
    words = sent.contiguous().view(WORD)
    received = words.new_empty(sum(receives), words.shape[1])
    dist.all_to_all_single(received, words, list(receives), list(sends), group=group)
    return received.view(sent.dtype)


def make_plan(
    topk_ids: Tensor | None,
    mistake: Exception | None,
    facts: Facts,
    count: int,
    room: int | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Plan:
    """Tell all processes how many rows come, and make sure that each of them can go on.

    The host waits for the counts of all. A mistake of one process is an error on each, before anything else is sent.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if mistake is not None or topk_ids is None:
        topk_ids = torch.empty(0, max(facts.topk, 0), dtype=torch.int64, device=device)
    owners = owners_of_routes(topk_ids, count, world_size)
    rows = expert_rows(owners_of_tokens(owners, world_size), world_size)
    said = torch.tensor([mistake is not None, UNLIMITED if room is None else room, *facts], dtype=torch.int64)
    mine = torch.cat([said.to(device), rows.counts.long(), count_routes(owners, world_size)])
    of_all = mine.new_empty(world_size * len(mine))
    all_gather(of_all, mine, group=group)
    told = of_all.view(world_size, -1).tolist()  # the one wait of the host
    if mistake is not None:
        raise mistake
    check_told(told, facts)
    start = len(said)
    sends = told[rank][start : start + world_size]
    receives = [each[start + rank] for each in told]
    routes = sum(each[start + world_size + rank] for each in told)
    sent = sum(sends)
    return Plan(rows._replace(token_of=rows.token_of[:sent], ids=rows.ids[:sent]), sends, receives, routes, group)


def check_told(told: Sequence[Sequence[int]], facts: Facts) -> None:
    """Raise what keeps any process from going on, in the same words on each."""
    world_size = len(told)
    wrong = [rank for rank, each in enumerate(told) if each[0]]
    if wrong:
        raise ValueError(f"experts across processes: the arguments of rank {wrong[0]} were refused there")
    for index, name in enumerate(Facts._fields, start=2):
        values = [each[index] for each in told]
        if len(set(values)) > 1:
            raise ValueError(f"experts across processes: expected one {name} on all ranks, got {values} by rank")
    start = 2 + len(facts)
    for rank in range(world_size):
        comes, room = sum(each[start + rank] for each in told), told[rank][1]
        if comes > room:
            raise ValueError(f"room: expected at least {comes} rows on rank {rank}, which come there, got {room}")


class Everywhere:
    """Every token goes to every process: sizes are fixed, and the host reads nothing."""

    def __init__(self, max_tokens: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.max_tokens, self.group = max_tokens, group
        self.world_size = dist.get_world_size(group)
        # Made here, so that no graph captures it: the row of each token on each rank.
        ranks = torch.arange(self.world_size, device=device).expand(max_tokens, -1)
        self.rows = expert_rows(ranks, self.world_size)

    def dispatch(self, message: Tensor) -> Tensor:
        """Give the tokens of all ranks, as many from each; those that a rank lacks have no routes."""
        tokens, words = message.shape
        mine = message.new_full((self.max_tokens, words), -1)
        mine[:tokens] = message
        received = message.new_empty(self.world_size * self.max_tokens, words)
        all_gather(received, mine, group=self.group)
        return received

    def combine(self, y: Tensor, tokens: int, out: Tensor | None) -> Tensor | None:
        """Send each rank the sums of its tokens, and add up what comes in order of ranks."""
        back = torch.empty_like(y)
        dist.all_to_all_single(back.view(WORD), y.view(WORD), group=self.group)
        rows = self.rows._replace(row_of=self.rows.row_of[:tokens])
        return gather_weighted(back, rows, ones(rows.row_of), out)
