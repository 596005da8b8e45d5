"""Convert a model to FP8 and train it sharded by FSDP2, and the same model in BF16 for comparison:

    torchrun --nproc-per-node 2 examples/train_fsdp2.py

Master weights and sums of gradients are FP32. A block's weights are gathered in BF16, and cast to FP8 for products.

Prints the converted layers, the mean loss of every ten steps of both models, and the loss of a BF16 model that loads
the trained weights by name, in 15 seconds on two cores. Each rank takes a GPU if there are enough; otherwise all ranks
share the CPU.
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
from torch.distributed import device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import deep_gemm

VOCABULARY, HIDDEN, BLOCKS = 64, 128, 2
BATCH, STEPS = 128, 60


class Block(nn.Module):
    """A gated MLP with a residual connection, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.gate, self.up = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x + down(silu(gate) * up)."""
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A model that predicts a token from two others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN // 2)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits `[batch, vocabulary]` of tokens `[batch, 2]`."""
        return self.lm_head(self.blocks(self.embed(tokens).flatten(1)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the loss for the right next token: the larger of the two tokens."""
    return F.cross_entropy(model(tokens).float(), tokens.amax(1))


def train(model: Model, device: torch.device, rank: int) -> list[float]:
    """Shard a model, train it, and return the losses, each the mean of all ranks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data, losses = torch.Generator().manual_seed(1 + rank), []  # each rank draws other tokens
    for _ in range(STEPS):
        loss = loss_of(model, torch.randint(VOCABULARY, (BATCH, 2), generator=data).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main() -> None:
    """Convert a copy, train both models, and load the trained weights into a BF16 model."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"expected to be started by torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if has_gpus else "gloo", timeout=timedelta(minutes=2))
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Model().to(device)
    model = copy.deepcopy(plain)
    done = deep_gemm.convert.to_fp8_training(model, filter=lambda name, _: name != "lm_head")
    curves = [train(either, device, rank) for either in (plain, model)]
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(done)
        print("step  BF16   FP8")
        for end in range(10, STEPS + 1, 10):
            means = [sum(losses[end - 10 : end]) / 10 for losses in curves]
            print(f"{end:4} {means[0]:5.2f} {means[1]:5.2f}")
        in_bf16 = Model().bfloat16()
        in_bf16.load_state_dict(weights)
        with torch.no_grad():
            tokens = torch.randint(VOCABULARY, (1024, 2), generator=torch.Generator().manual_seed(0))
            print(f"loss of the weights in a BF16 model: {loss_of(in_bf16, tokens):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
