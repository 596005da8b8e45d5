"""The collectives of a call, called on the process group directly.

torch's own functions repeat checks of this package. These take as long as the collective, which slows small calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from ..core.check.layout import SCALE_BLOCK

# torch 2.13 has new names for both functions, and warns of the old names.
_all_gather: Any = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_all_to_all: Any = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base
_GATHERS, _EXCHANGES = AllgatherOptions(), AllToAllOptions()
_GATHERS.asyncOp = _EXCHANGES.asyncOp = False


def all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather the tensors that all ranks send, in order of ranks, into `received` on each rank."""
    _finish(_all_gather(_group(group), received, sent, _GATHERS))


def all_to_all(
    received: Tensor, sent: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Exchange rows with each rank r: send `sends[r]`, receive `receives[r]`; equal parts if both lists are empty."""
    _finish(_all_to_all(_group(group), received, sent, receives, sends, _EXCHANGES))


def all_agree(values: Mapping[str, int], device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Raise an error on every rank if a value differs between ranks. All ranks must call it; the host waits."""
    mine = torch.tensor(list(values.values()), dtype=torch.int64, device=device)
    of_all = mine.new_empty(dist.get_world_size(group) * len(values))
    all_gather(of_all, mine, group)
    check_agreed(values, of_all.view(-1, len(values)).tolist())


def agree_about_decode(
    max_tokens: int,
    hidden: int,
    topk: int,
    experts: int,
    peer_memory: bool,
    device: torch.device,
    group: dist.ProcessGroup | None,
    gran_k: int | None = SCALE_BLOCK,
) -> None:
    """Raise an error on every rank if the ranks' messages would differ. `gran_k` None: x is sent in BF16."""
    sizes = {"max_tokens": max_tokens, "hidden": hidden, "topk": topk, "number of experts of a rank": experts}
    of_x = {"number of bytes for a value of x": 2 if gran_k is None else 1, "gran_k of x": gran_k or 0}
    all_agree({**sizes, "peer_memory": int(peer_memory), **of_x}, device, group)


def check_agreed(names: Iterable[str], of_ranks: Iterable[Sequence[object]]) -> None:
    """Raise an error if a value differs between ranks. Each rank passes one value for each name."""
    for name, values in zip(names, zip(*of_ranks, strict=True), strict=True):
        if len(set(values)) > 1:
            by_rank = ", ".join(map(str, values))
            raise ValueError(f"experts across processes: expected one {name} on all ranks, got [{by_rank}] by rank")


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Check the group; return this process's rank (-1 outside of the group) and the number of ranks."""
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if not (group is None or group == outside or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group: expected a process group of torch.distributed or None, got {type(group).__name__}")
    return dist.get_rank(group), dist.get_world_size(group)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    assert group is not None  # a layer is always made in a group
    return group


def _finish(work: Any) -> None:
    if work is not None:  # a backend that does not order its work in the stream
        work.wait()
