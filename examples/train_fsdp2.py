"""Convert a model to FP8 and train it sharded by FSDP2:  torchrun --nproc-per-node 2 examples/train_fsdp2.py

Each rank takes a GPU; without GPUs ranks share the CPU, where it takes half a minute. Master weights and sums of
gradients are FP32. What is gathered for a block is BF16, and is cast to FP8 for the products.

It prints what was converted, the loss at the beginning and at the end, and that of a BF16 model, not converted, which
loads the weights by their names.
"""

from __future__ import annotations

import os
import time

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
    """A gated MLP beside a residual, as models have it."""

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
    """What follows two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN // 2)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits `[batch, vocabulary]` of tokens `[batch, 2]`."""
        return self.lm_head(self.blocks(self.embed(tokens).flatten(1)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the loss of what follows: the larger of the two tokens."""
    return F.cross_entropy(model(tokens).float(), tokens.amax(1))


def main() -> None:
    """Convert, shard, train, and give the weights back to a model in BF16."""
    rank, has_gpus = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    torch.manual_seed(0)
    model = Model().to(device)

    done = deep_gemm.convert.to_fp8_training(model, filter=lambda name, _: name != "lm_head")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1 + rank)  # other tokens on each rank
    losses, begin = [], time.perf_counter()
    for _ in range(STEPS):
        loss = loss_of(model, torch.randint(VOCABULARY, (BATCH, 2), generator=data).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        plain = Model().bfloat16()
        plain.load_state_dict(weights)
        with torch.no_grad():
            after = loss_of(plain, torch.randint(VOCABULARY, (1024, 2), generator=data))
        print(done)
        print(f"loss: {losses[0]:.2f} at first, {sum(losses[-5:]) / 5:.2f} after {STEPS} steps and {seconds:.0f} s")
        print(f"loss of the weights in a BF16 model: {after:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
