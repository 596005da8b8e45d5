"""Spread a mixture's experts over processes, and compare it with one process that has all of them:

torchrun --nproc-per-node 2 examples/experts_across_processes.py

Prints the error of each process's rows relative to one process's rows, in 10 seconds on two cores, for any number of
processes. Each process takes a GPU if there are enough, and NCCL sends the rows; otherwise Gloo sends CPU tensors.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import deep_gemm
from deep_gemm.distributed import Experts, owned_experts

EXPERTS_HERE, TOPK, HIDDEN, INTERMEDIATE = 4, 2, 256, 128
BF16_ROUNDING = 2.0**-8


def join_group() -> torch.device:
    """Join the group that torchrun started."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"expected to be started by torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= here
    if on_gpus:
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=60))
    return torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")


def of_rank(rank: int, num_experts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Make the tokens of a rank, with their routes; the number of tokens differs between ranks."""
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = 40 + 16 * rank
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float32).bfloat16()
    weights, ids = torch.randn(tokens, num_experts, generator=generator, dtype=torch.float32).softmax(-1).topk(TOPK)
    return x.to(device), ids.to(device), weights.to(device)


def difference(got: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> float:
    """Return the error relative to one process's results, in units of the allowed BF16 roundings of rows.

    Each rank's sum is rounded, by at most the rounding of its terms' magnitudes, and the final sum is rounded once.
    """
    w = deep_gemm.per_block_cast_to_fp8(w1), deep_gemm.per_block_cast_to_fp8(w2)
    right = deep_gemm.experts(x, ids, weights, *w)
    assert right is not None
    terms = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for column in range(TOPK):
        one = deep_gemm.experts(x, ids[:, column : column + 1], weights[:, column : column + 1], *w)
        assert one is not None
        terms += one.float().abs()
    allowed = BF16_ROUNDING * (1.01 * terms + right.float().abs() + got.float().abs())
    return ((got.float() - right.float()).abs() / allowed.clamp_min(1e-30)).max().item()


@torch.no_grad()
def main() -> int:
    """Compute in both forms, and compare."""
    device = join_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_experts = world_size * EXPERTS_HERE
    generator = torch.Generator().manual_seed(0)  # every process draws all weights, and keeps its own part
    w1 = (
        torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator, dtype=torch.float32).to(device)
        / HIDDEN**0.5
    )
    w2 = (
        torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=generator, dtype=torch.float32).to(device)
        / INTERMEDIATE**0.5
    )
    mine = owned_experts(num_experts)
    layer = Experts(
        num_experts,
        deep_gemm.per_block_cast_to_fp8(w1[mine]),
        deep_gemm.per_block_cast_to_fp8(w2[mine]),
        max_tokens=40 + 16 * (world_size - 1),
    )
    tokens = of_rank(rank, num_experts, device)
    prefill, decode = layer(*tokens), layer.decode(*tokens)
    assert decode is not None  # it is None only if `out` is passed
    worst = difference(prefill, *tokens, w1, w2)
    differs = torch.tensor([not (worst <= 1 and torch.equal(prefill, decode))], dtype=torch.int32, device=device)
    print(f"rank {rank} of {world_size}: {len(prefill)} tokens, {worst:.2f} of the difference allowed", flush=True)
    dist.all_reduce(differs)
    if rank == 0:
        print("they differ" if differs.item() else "all within one BF16 rounding for each rank", flush=True)
    dist.destroy_process_group()
    return int(differs.item() > 0)


if __name__ == "__main__":
    sys.exit(main())
