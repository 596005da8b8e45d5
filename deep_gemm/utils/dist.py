"""Programs of this family start groups of processes, gather from them and print from them with these."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DEFAULT_PORT = 8361


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, dist.ProcessGroup]:
    """Join a group of processes, `num_local_ranks` on each host, and get this one's rank, their number and the group.

    `MASTER_ADDR` and `MASTER_PORT` say where they meet; `WORLD_SIZE` and `RANK` count hosts, not processes. With GPUs
    each process takes the one of its local rank and the backend is NCCL, without any it is Gloo.
    """
    num_hosts, host = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", str(DEFAULT_PORT)))
    if not 0 <= local_rank < num_local_ranks:
        raise ValueError(f"local_rank: expected an integer in 0..{num_local_ranks - 1}, got {local_rank}")
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend="nccl" if has_gpus else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
    )
    world = dist.group.WORLD
    assert world is not None
    return dist.get_rank(), dist.get_world_size(), world


def uneven_all_gather(tensor: Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Join the tensors of all processes along `dim`. Their sizes may differ along `dim` only."""
    # all_gather needs equal sizes, so every process sends its tensor padded to the longest.
    sizes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sizes, tensor.shape[dim], group=group)
    first = tensor.movedim(dim, 0)
    padded = first.new_zeros(max(sizes), *first.shape[1:])
    padded[: len(first)] = first
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    joined = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return joined.movedim(0, dim).contiguous()


def dist_print(*values: object, once_in_node: bool = False, **how: Any) -> None:
    """Print from each process in turn, or with `once_in_node` from the first of each host; without a group at once."""
    if not dist.is_initialized():
        print(*values, **how)
        return
    prints, host = True, os.uname().nodename
    if once_in_node:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, host)
        prints = hosts.index(host) == dist.get_rank()
    for rank in range(dist.get_world_size()):
        if prints and rank == dist.get_rank():
            print(*values, **{"flush": True, **how})
        dist.barrier()
