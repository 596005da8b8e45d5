"""Train a small mixture-of-experts policy on its own samples, with probability ratios that are exactly 1:

    python examples/exact_rl.py
    torchrun --nproc-per-node 2 examples/exact_rl.py

Serving layers sample token by token, with a cache of keys and values, in batches that shrink as sequences end.
Training layers compute whole sequences. Both give each sampled token the same probability, bit for bit. After each
step `refit_` casts the new weights into the serving layers.

Prints the reward of each step and the largest difference of a probability, with `set_batch_invariant` and without, in
ten seconds on two cores. Each rank has its own sequences, and a GPU if there are enough. Otherwise ranks share the
CPU, where both differences are 0: its reference has no tiles, so the CPU shows nothing about the mode.

This program has its own attention, norms and router: torch may sum in another order for more rows, so bits would
differ. Here a sum adds its two halves element by element, again and again, and each token reads its whole cache.
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deep_gemm

VOCABULARY, LENGTH, SEQUENCES, STEPS, STEPS_WITHOUT = 32, 16, 24, 8, 2
END, TOPK, EXPERTS, HEADS, BLOCKS = 0, 2, 4, 2, 2
HIDDEN = {"cuda": 2048, "cpu": 64}
"""On a GPU k is so deep that products of few rows split it, unless the mode forbids it."""
LEARNING_RATE = {"cuda": 3e-4, "cpu": 1e-2}


def total(x: Tensor, dim: int = -1) -> Tensor:
    """Add up a dimension, a power of two, by halves: the order of additions is the same in tensors of any size."""
    while x.shape[dim] > 1:
        left, right = x.chunk(2, dim)
        x = left + right
    return x.squeeze(dim)


class Norm(nn.Module):
    """An RMS norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Compute rows in FP32, and round them once."""
        rows = x.float()
        mean = total(rows.square())[..., None] / rows.shape[-1]
        return (rows * (mean + 1e-6).rsqrt() * self.weight).to(x.dtype)


class Block(nn.Module):
    """Attention, then two experts for each token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(hidden), Norm(hidden)
        self.qkv = deep_gemm.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = deep_gemm.nn.Linear(hidden, hidden, bias=False)
        self.router = nn.Parameter(torch.randn(EXPERTS, hidden, dtype=torch.float32) / hidden**0.5)
        self.experts = deep_gemm.nn.Experts(EXPERTS, hidden, hidden)

    def forward(self, x: Tensor, cache: Tensor, sequence: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Compute tokens `[n, hidden]` at these positions of sequences; return also the cache with these tokens."""
        q, *keys_and_values = self.qkv(self.norm1(x)).float().view(len(x), 3, HEADS, -1).unbind(1)
        cache = cache.index_put((sequence, place), torch.stack(keys_and_values, 1))
        keys, values = cache[sequence].unbind(2)  # [n, LENGTH, HEADS, hidden / HEADS]
        scores = total(q[:, None] * keys) / q.shape[-1] ** 0.5
        is_later = torch.arange(LENGTH, device=x.device)[None, :] > place[:, None]
        scores = scores.masked_fill(is_later[..., None], -torch.inf)
        shares = (scores - scores.amax(1, keepdim=True)).exp()
        shares = shares / total(shares, 1)[:, None]
        mixed = total(shares[..., None] * values, 1)
        x = x + self.out(mixed.flatten(1).to(x.dtype))
        tokens = self.norm2(x)
        affinity = total(tokens.float()[:, None] * self.router)
        weights = (affinity - affinity.amax(1, keepdim=True)).exp()
        weights, ids = (weights / total(weights)[:, None]).topk(TOPK)
        return x + self.experts(tokens, ids, weights), cache


class Policy(nn.Module):
    """A small language model with a BF16 head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden, dtype=torch.float32)
        self.position = nn.Embedding(LENGTH, hidden, dtype=torch.float32)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(BLOCKS))
        self.norm = Norm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, dtype=torch.float32)

    def caches(self, sequences: int) -> list[Tensor]:
        """Make an empty cache for each block: `[sequences, LENGTH, keys and values, HEADS, hidden / HEADS]`."""
        shape = sequences, LENGTH, 2, HEADS, self.head.in_features // HEADS
        return [self.head.weight.new_zeros(shape, dtype=torch.float32) for _ in self.blocks]

    def forward(
        self, tokens: Tensor, caches: list[Tensor], sequence: Tensor, place: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the hidden states of tokens; return also the caches with these tokens."""
        x = (self.embedding(tokens) + self.position(place)).bfloat16()
        kept = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, with_tokens = block(x, cache, sequence, place)
            kept.append(with_tokens)
        return self.norm(x), kept


@torch.no_grad()
def sampled(policy: Policy, first: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample a sequence after each first token; return `[sequences, LENGTH + 1]`, padded by END, and logprobs."""
    sequences, device = len(first), first.device
    tokens = torch.full((sequences, LENGTH + 1), END, dtype=torch.int64, device=device)
    logprobs = torch.zeros(sequences, LENGTH, dtype=torch.float32, device=device)
    tokens[:, 0], caches, head = first, policy.caches(sequences), policy.head.weight.bfloat16()
    running = torch.arange(sequences, device=device)
    for at in range(LENGTH):
        place = torch.full_like(running, at)
        hidden, caches = policy(tokens[running, at], caches, running, place)
        logits = hidden.float() @ head.float().mT
        uniform = torch.rand(sequences, VOCABULARY, generator=noise, dtype=torch.float32).to(device)[running]
        chosen = (logits - (-uniform.log()).log()).argmax(1)
        tokens[running, at + 1] = chosen
        logprobs[running, at] = deep_gemm.selected_logprobs(hidden, policy.head.weight, chosen)
        running = running[chosen != END]
        if not len(running):
            break
    return tokens, logprobs


def whole(policy: Policy, tokens: Tensor) -> Tensor:
    """Compute the logprobs of the same tokens at once, with gradients; 0 after the end."""
    sequences = len(tokens)
    is_read = torch.cat([torch.ones_like(tokens[:, :1], dtype=torch.bool), tokens[:, 1:-1] != END], 1)
    sequence, place = is_read.nonzero(as_tuple=True)
    hidden, _ = policy(tokens[sequence, place], policy.caches(sequences), sequence, place)
    found = deep_gemm.selected_logprobs(hidden, policy.head.weight, tokens[sequence, place + 1])
    return torch.zeros(is_read.shape, dtype=torch.float32, device=tokens.device).index_put((sequence, place), found)


def reward_of(tokens: Tensor) -> Tensor:
    """Count the tokens that are one more than the token before them."""
    return ((tokens[:, 1:] == tokens[:, :-1] + 1) & (tokens[:, 1:] != END)).sum(1).float()


def train(device: torch.device, steps: int, rank: int, ranks: int) -> list[float]:
    """Alternate sampling and training; return the largest difference of a probability in each step."""
    torch.manual_seed(0)
    policy = Policy(HIDDEN[device.type]).to(device)
    serving = copy.deepcopy(policy)
    deep_gemm.convert.to_fp8_inference(serving, filter=lambda name, _: name != "head")
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE[device.type])
    noise, differences = torch.Generator().manual_seed(1 + rank), []
    for step in range(steps):
        first = torch.randint(1, VOCABULARY - 1, (SEQUENCES,), generator=noise).to(device)
        tokens, before = sampled(serving, first, noise)
        now = whole(policy, tokens)
        reward = reward_of(tokens)
        loss = (-(reward - reward.mean())[:, None] * now).sum(1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        told = torch.stack([(now.exp() - before.exp()).abs().max().detach(), reward.mean()])
        if ranks > 1:
            for parameter in policy.parameters():
                dist.all_reduce(parameter.grad)
            of_all = [torch.empty_like(told) for _ in range(ranks)]
            dist.all_gather(of_all, told)
            told = torch.stack(of_all).amax(0)
        optimizer.step()
        optimizer.zero_grad()
        deep_gemm.refit_(serving, policy)
        differences.append(told[0].item())
        if rank == 0:
            mode = "on" if deep_gemm.get_batch_invariant() else "off"
            print(f"{mode:4} {step + 1:4} {told[1].item():7.2f} {differences[-1]:12.2e}", flush=True)
    return differences


def main() -> int:
    """Train with the mode, and a few steps without it."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=2))
    if rank == 0:
        print("mode step  reward  probs_diff")
    deep_gemm.set_batch_invariant(True)
    differences = [*train(device, STEPS, rank, ranks)]
    deep_gemm.set_batch_invariant(False)
    without = max(train(device, STEPS_WITHOUT, rank, ranks))
    if rank == 0:
        says = "" if on_gpu else ": the CPU shows nothing about the mode"
        print(f"probs_diff: {max(differences)} with the mode, {without:.2e} without{says}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()
    return int(any(each != 0 for each in differences))  # a NaN counts as a failure


if __name__ == "__main__":
    sys.exit(main())
