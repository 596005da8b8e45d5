"""Convert a model to FP8 and train it with FSDP2, its parameters spread over processes:

    torchrun --nproc-per-node 2 examples/train_fsdp2.py

Prints the loss of every tenth step in BF16 and in FP8, from the same weights on the same data, and how far the last
ones are apart, in 15 seconds on two cores. Each process takes a GPU if there are enough; otherwise Gloo carries tensors
of the CPU.
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import deep_gemm

HIDDEN, BLOCKS, TOKENS, STEPS = 128, 2, 64, 40
TOLERANCE = 0.02
"""How far the last losses may lie apart, as a part of what BF16 has learned."""


class Block(nn.Module):
    """Two layers around an activation, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Compute `[tokens, hidden]`."""
        return x + self.down(F.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def to_fp8(model: nn.Module) -> None:
    """Put a layer of this package in the place of each linear layer, with the same parameters."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            layer = deep_gemm.nn.Linear(child.in_features, child.out_features, device="meta")
            layer.weight, layer.bias = child.weight, child.bias
            setattr(model, name, layer)
        else:
            to_fp8(child)


def train(model: nn.Module, right: nn.Module, device: torch.device, rank: int) -> list[float]:
    """Shard a model, teach it what `right` computes, and give the losses, each the mean of all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1 + rank), []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device)
        with torch.no_grad():
            wanted = right(x) - x
        loss = F.mse_loss(model(x.bfloat16()).float() - x, wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main() -> int:
    """Train twice, and compare the curves."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"expected to be started by torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= here
    if on_gpus:
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    right, plain = (nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device) for _ in range(2))
    in_fp8 = copy.deepcopy(plain)
    to_fp8(in_fp8)
    curves = [train(model, right, device, dist.get_rank()) for model in (plain, in_fp8)]
    apart = abs(curves[0][-1] - curves[1][-1]) / (curves[0][0] - curves[0][-1])
    if dist.get_rank() == 0:
        print("step    BF16     FP8")
        for step in range(9, STEPS, 10):
            print(f"{step + 1:4} {curves[0][step]:7.4f} {curves[1][step]:7.4f}")
        print(f"apart by {apart:.2%} of what was learned", flush=True)
    dist.destroy_process_group()
    return int(not apart <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
