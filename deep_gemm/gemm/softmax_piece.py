"""The kernel of gemm/softmax_piece.cuh, which reads a piece of logits once, for sums or for gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.kernel import Config, Kernel

BLOCK, CHUNK = 128, 2048
"""Columns of a block, which is summed first, and of a chunk, which a CTA loads at a time: 16 for each thread."""


@dataclass(frozen=True)
class SoftmaxConfig(Config):
    """The configuration for one direction, forward or backward."""

    is_backward: bool
    num_threads: int = CHUNK // 16
    ctas_per_sm: int = 8
    block: int = BLOCK
    taken = "is_backward", "num_threads", "ctas_per_sm", "block"

    @property
    def name(self) -> str:
        """Short name for people."""
        return "backward" if self.is_backward else "forward"


FORWARD, BACKWARD = SoftmaxConfig(False), SoftmaxConfig(True)
KERNEL: Kernel[SoftmaxConfig] = Kernel("softmax_piece", "SoftmaxParams", lambda: [FORWARD, BACKWARD])


def add_blocks(logits: Tensor, scale: float, sums: Tensor, tokens: Tensor, start: int, chosen: Tensor) -> None:
    """Write log(sum(exp)) of each 128 scaled columns, and the logits of tokens among these columns.

    On the CPU a sum is the largest logit minus its `log_softmax`: torch computes it in one way for any number of rows.
    """
    if logits.is_cuda and len(logits):
        run(FORWARD, logits, scale, start, sums=sums, tokens=tokens, chosen=chosen)
        return
    logits.mul_(scale)
    at = tokens[:, None].long() - start
    is_here = (at >= 0) & (at < logits.shape[1])
    chosen.copy_(torch.where(is_here, logits.gather(1, at.clamp(0, logits.shape[1] - 1)), chosen))
    blocks = F.pad(logits, (0, -logits.shape[1] % BLOCK), value=-torch.inf).view(*sums.shape, BLOCK)
    sums.copy_(blocks.amax(-1) - torch.log_softmax(blocks, -1).amax(-1))


def run(config: SoftmaxConfig, logits: Tensor, scale: float, first: int, **pointers: Tensor | None) -> None:
    """Process logits, a multiple of 4 columns, on their GPU. `pointers`: the direction's other tensors, by member."""
    rows, columns = logits.shape
    tensors = dict.fromkeys(("tokens", "lse", "factors", "sums", "chosen")) | pointers | {"logits": logits}
    pitch = 0 if tensors["sums"] is None else tensors["sums"].stride(0)
    sizes = {"sums_pitch": pitch, "columns": columns, "first": first, "scale": scale}
    ctas = rows if config.is_backward else rows * ceil_div(columns, CHUNK)
    KERNEL.run(config, {**tensors, **sizes}, ctas, logits.get_device(), is_dependent=True)
