"""Train a small transformer with experts twice, in FP8 and in BF16, and compare the curves.

    python examples/train_small.py                          # a minute on one core
    python examples/train_small.py --plot curves.png
    python examples/train_small.py --size large --device cuda

Prints the time of a step, the mean loss of every 30 steps in FP8 and in BF16, the best possible loss, and the final
difference. Both models start from the same weights and see the same data: a chain in which the next token depends on
the two before it. So attention must find these two, and the experts must learn the tokens that follow each pair. The
best possible loss is known.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deep_gemm


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch."""

    hidden: int
    heads: int
    layers: int
    experts: int
    intermediate: int
    vocabulary: int
    batch: int
    length: int
    learning_rate: float


SIZES = {
    "small": Size(64, 4, 1, 4, 64, 16, 16, 24, 8e-3),
    "large": Size(1024, 16, 4, 16, 1024, 16, 64, 256, 7e-4),
}
STEPS = 300
WARM_UPS = 10
LAST = 30
"""The number of last steps whose mean loss is compared."""
TOLERANCE = 0.01
"""Allowed difference of the final losses, relative to BF16's progress: from a guess's loss to its final loss."""


class Bf16Experts(nn.Module):
    """The layer of `deep_gemm.nn.Experts` in BF16 by torch, with the same parameters."""

    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        like = deep_gemm.nn.Experts(num_experts, hidden, intermediate)
        self.w1, self.w2 = like.w1, like.w2

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Sort routes by expert, compute the rows of all experts, and add up each token's rows."""
        x, w1, w2 = (each.to(torch.bfloat16) for each in (x, self.w1, self.w2))
        expert, route = topk_ids.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(len(w1), device=x.device), right=True).int()
        gate, up = grouped(x.index_select(0, route // topk_ids.shape[1]), w1, ends).chunk(2, dim=-1)
        y = grouped(F.silu(gate) * up, w2, ends)
        rows = y.index_select(0, route.argsort()).view(*topk_ids.shape, -1)
        return (rows * topk_weights.to(x.dtype)[..., None]).sum(1)


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows, up to its end in `ends`, by its weight: one product on a GPU, else a loop."""
    if rows.is_cuda and hasattr(F, "grouped_mm"):
        return F.grouped_mm(rows, weights.mT, offs=ends)
    parts = torch.split(rows, ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


class Block(nn.Module):
    """Attention, then two experts for each token."""

    def __init__(self, size: Size, linear: Callable[..., nn.Module], experts: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.qkv = linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = linear(size.hidden, size.hidden)
        self.router = nn.Linear(size.hidden, size.experts, bias=False)
        self.experts = experts(size.experts, size.hidden, size.intermediate)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for x `[batch, length, hidden]`."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        weights, ids = self.router(tokens).float().softmax(-1).topk(2)
        mixture: Tensor = self.experts(tokens, ids, weights)
        return x + mixture.view_as(x)


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, size: Size, linear: Callable[..., nn.Module], experts: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.position = nn.Embedding(size.length, size.hidden)
        self.blocks = nn.ModuleList(Block(size, linear, experts) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the logits of each next token."""
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def chain(size: Size, seed: int) -> Tensor:
    """Draw probabilities `[before last, last, next]`: each pair has four possible next tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size.vocabulary, size.vocabulary, size.vocabulary, generator=generator, dtype=torch.float32)
    least = logits.topk(4, dim=-1).values[..., -1:]
    return logits.mul(2).masked_fill(logits < least, -math.inf).softmax(-1)


@cache
def batches(size: Size, steps: int, seed: int) -> list[Tensor]:
    """Draw `[batch, length + 1]` tokens for each step, the same for all models."""
    generator = torch.Generator().manual_seed(seed + 1)
    follows, drawn = chain(size, seed), []
    for _ in range(steps):
        tokens = [torch.randint(size.vocabulary, (size.batch,), generator=generator) for _ in range(2)]
        while len(tokens) < size.length + 1:
            tokens.append(torch.multinomial(follows[tokens[-2], tokens[-1]], 1, generator=generator)[:, 0])
        drawn.append(torch.stack(tokens, dim=1))
    return drawn


def train(
    linear: Callable[..., nn.Module],
    experts: Callable[..., nn.Module],
    size: Size,
    *,
    steps: int = STEPS,
    device: str = "cpu",
    seed: int = 0,
    change: Callable[[Transformer], object] = lambda model: None,
    hear_ms: Callable[[float], object] = lambda ms: None,
) -> list[float]:
    """Train, and return the loss of each step. `change` may alter the model before the first step.

    `hear_ms` receives the mean time of a step, without the first steps, which compile kernels.
    """
    torch.manual_seed(seed)
    model = Transformer(size, linear, experts).to(device)
    change(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step, tokens in enumerate(batches(size, steps, seed)):
        if step == WARM_UPS:
            begin = seconds(device)
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        ids = tokens.to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(ids[:, :-1])
        # The second token is the first one with two tokens before it.
        loss = F.cross_entropy(logits[:, 1:].flatten(0, 1).float(), ids[:, 2:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.detach())
    if steps > WARM_UPS:
        hear_ms((seconds(device) - begin) / (steps - WARM_UPS) * 1e3)
    return [float(loss) for loss in losses]


def seconds(device: str) -> float:
    """Read the clock once a device has finished all its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train_fp8(size: Size, **how: object) -> list[float]:
    """Train with the layers of `deep_gemm.nn`."""
    return train(deep_gemm.nn.Linear, deep_gemm.nn.Experts, size, **how)  # type: ignore[arg-type]


def train_bf16(size: Size, **how: object) -> list[float]:
    """Train with torch's own layers."""
    return train(nn.Linear, Bf16Experts, size, **how)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Comparison:
    """Two curves of losses, and their comparison."""

    size: Size
    bf16: list[float]
    fp8: list[float]
    best: float
    """The loss of a model that knows the chain."""

    @property
    def finals(self) -> tuple[float, float]:
        """Return the mean losses of the last steps, in BF16 and in FP8."""
        return sum(self.bf16[-LAST:]) / LAST, sum(self.fp8[-LAST:]) / LAST

    @property
    def apart(self) -> float:
        """Return the difference of the final losses, relative to the fall from a guess's loss to BF16's final loss."""
        bf16, fp8 = self.finals
        return abs(fp8 - bf16) / (math.log(self.size.vocabulary) - bf16)

    def why_not(self) -> str | None:
        """Return the reason if the curves are wrong, else None."""
        guess, (bf16, fp8) = math.log(self.size.vocabulary), self.finals
        if not bf16 - self.best < (guess - self.best) / 4:
            return f"BF16 learned too little to compare with: {bf16:.3f}, a guess has {guess:.3f}, best {self.best:.3f}"
        if not self.apart <= TOLERANCE:
            return f"FP8 ends at {fp8:.3f}, BF16 at {bf16:.3f}: {self.apart:.1%} of what was learned, > {TOLERANCE:.0%}"
        return None


def best_loss(size: Size, seed: int = 0) -> float:
    """Return the entropy of the next token, given two, if all pairs are equally frequent."""
    follows = chain(size, seed)
    return -follows.mul(follows.clamp_min(1e-30).log()).sum(-1).mean().item()


def draw(found: Comparison, path: Path) -> None:
    """Draw both curves. Only this function needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "deep_gemm"  # makes equal files each time
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, losses, colour, width in (("BF16", found.bf16, "#9aa5b1", 4.5), ("FP8", found.fp8, "#c0392b", 1.4)):
        axes.plot(range(1, len(losses) + 1), losses, color=colour, linewidth=width, label=name)
    axes.axhline(found.best, color="#3b3b3b", linestyle=":", linewidth=1, label="best possible")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Train twice, print both curves, and fail if they do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="file to draw the curves into, such as curves.svg")
    parser.add_argument("--save", type=Path, help="file to write the losses into, as JSON")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)  # products are so small that more threads would only wait for each other
    size, curves = SIZES[args.size], []
    ms: list[float] = []
    for name, run in (("BF16", train_bf16), ("FP8", train_fp8)):
        curves.append(run(size, steps=args.steps, device=args.device, seed=args.seed, hear_ms=ms.append))
        print(f"{name}: {ms[-1]:.1f} ms a step" if ms else f"{name}: too few steps to time")
    found = Comparison(size, curves[0], curves[1], best_loss(size, args.seed))
    print(" step    BF16     FP8")
    for step in range(0, args.steps - LAST + 1, LAST):
        bf16, fp8 = (sum(curve[step : step + LAST]) / LAST for curve in curves)
        print(f"{step + LAST:5} {bf16:7.4f} {fp8:7.4f}")
    print(f"the best possible: {found.best:.4f}")
    if args.plot is not None:
        draw(found, args.plot)
    if args.save is not None:
        saved = {"bf16": found.bf16, "fp8": found.fp8, "best": found.best, "ms of a step in BF16 and FP8": ms}
        args.save.write_text(json.dumps(saved) + "\n")
    reason = found.why_not()
    if reason is not None:
        raise SystemExit(reason)
    print(f"apart by {found.apart:.2%} of what was learned")


if __name__ == "__main__":
    main()
