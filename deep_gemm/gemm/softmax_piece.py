"""The kernel of gemm/softmax_piece.cuh, which reads a piece of logits once: sums forward, gradients backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.kernel import Config, Kernel

BLOCK = 128
"""Columns that are added first."""


@dataclass(frozen=True)
class SoftmaxConfig(Config):
    """One of both directions. A thread holds 16 logits of a chunk."""

    is_backward: bool
    num_threads: int = 128
    ctas_per_sm: int = 8
    block: int = BLOCK
    taken = "is_backward", "num_threads", "ctas_per_sm", "block", "chunk"

    @property
    def name(self) -> str:
        """Short, for people."""
        return "backward" if self.is_backward else "forward"

    @property
    def chunk(self) -> int:
        """Columns that a CTA loads at a time."""
        return self.num_threads * 16


FORWARD, BACKWARD = SoftmaxConfig(False), SoftmaxConfig(True)
KERNEL: Kernel[SoftmaxConfig] = Kernel("softmax_piece", "SoftmaxParams", lambda: [FORWARD, BACKWARD])


def sum_blocks(
    logits: Tensor, scale: float, sums: Tensor, tokens: Tensor | None, first: int, chosen: Tensor | None
) -> None:
    """Write log(sum(exp)) of each 128 columns, a multiple of 4 in all, and the logits of tokens that the piece has."""
    values = {"logits": logits, "tokens": tokens, "lse": None, "factors": None, "sums": sums, "chosen": chosen}
    sizes = {"sums_pitch": sums.stride(0), "columns": logits.shape[1], "first": first, "scale": scale}
    ctas = logits.shape[0] * ceil_div(logits.shape[1], FORWARD.chunk)
    KERNEL.run(FORWARD, values | sizes, ctas, logits.get_device(), is_dependent=True)


def to_gradient(logits: Tensor, scale: float, tokens: Tensor, first: int, lse: Tensor, factors: Tensor) -> Tensor:
    """Give the logits' gradient in BF16, in their own memory: its rows are as far apart as theirs."""
    values = {"logits": logits, "tokens": tokens, "lse": lse, "factors": factors, "sums": None, "chosen": None}
    sizes = {"sums_pitch": 0, "columns": logits.shape[1], "first": first, "scale": scale}
    KERNEL.run(BACKWARD, values | sizes, logits.shape[0], logits.get_device(), is_dependent=True)
    return logits.view(torch.bfloat16)[:, : logits.shape[1]]
