"""Find the process of each expert, and so the processes that receive a token."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .check import count_of_each
from .collectives import place_in


def owned_experts(num_experts: int, group: dist.ProcessGroup | None = None) -> slice:
    """Return the experts of this process: equal parts, in order of ranks.

    `w1[owned_experts(256)]` are this process's part of all weights.
    """
    rank, ranks = place_in(group)
    count = count_of_each(num_experts, ranks)
    first = rank * count
    return slice(first, first + count)


def owners_of_routes(topk_ids: Tensor, count: int, world_size: int) -> Tensor:
    """Return for each route the rank of its expert; `world_size` for a route without an expert.

    >>> owners_of_routes(torch.tensor([[5, 0], [-1, 3]]), count=2, world_size=3).tolist()
    [[2, 0], [3, 1]]
    """
    has_none = (topk_ids < 0) | (topk_ids >= count * world_size)
    return topk_ids.div(count, rounding_mode="floor").masked_fill_(has_none, world_size)


def owners_of_tokens(owners: Tensor, world_size: int) -> Tensor:
    """Return the ranks that receive each token, in order and each once; then -1.

    >>> owners_of_tokens(torch.tensor([[2, 0, 2], [3, 1, 3]]), world_size=3).tolist()
    [[0, 2, -1], [1, -1, -1]]
    """
    ranks = owners.sort(dim=1).values
    is_again = ranks[:, 1:] == ranks[:, :-1]
    ranks[:, 1:].masked_fill_(is_again, world_size)
    ranks = ranks.sort(dim=1).values
    return ranks.masked_fill_(ranks == world_size, -1)


def tokens_of_rows(row_of: Tensor, count: int) -> Tensor:
    """Return the token of each of `count` rows, from `row_of`; 0 for rows without one. The host does not wait.

    >>> tokens_of_rows(torch.tensor([[1, -1], [0, 2]]), count=3).tolist()
    [1, 0, 1]
    """
    tokens, topk = row_of.shape
    places = row_of.masked_fill(row_of < 0, count).flatten().long()
    of_routes = torch.arange(tokens, device=row_of.device).repeat_interleave(topk)
    return torch.zeros(count + 1, dtype=torch.int64, device=row_of.device).scatter_(0, places, of_routes)[:count]


def count_routes(owners: Tensor, world_size: int) -> Tensor:
    """Count the routes to each rank, int64. The host does not wait."""
    counts = torch.zeros(world_size + 1, dtype=torch.int64, device=owners.device)
    return counts.scatter_add_(0, owners.flatten().long(), torch.ones_like(owners.flatten(), dtype=torch.int64))[:-1]
