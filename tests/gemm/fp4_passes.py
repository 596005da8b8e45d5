"""Predict from the scales of an FP4 weight how many passes fp8_gemm needs for its tiles; see gemm/convert/e2m1.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

FOLDING = 12
"""Scales fold if the largest is less than 2^12 times the smallest."""
ROWS = 64


def passes_of(scales: Tensor, block_n: int) -> list[int]:
    """Return the number of passes of each tile of `block_n` rows; `scales` are bytes `[n, k / 32]`."""
    found = []
    for tile in torch.split(scales, block_n):
        sets = [part for rows in torch.split(tile, ROWS) for part in torch.split(rows, 4, 1)]
        found.append(max(1, *(_levels(part) for part in sets)))
    return found


def _levels(scales: Tensor) -> int:
    left, levels = sorted(set(scales.flatten().tolist()) - {255}), 0
    while left:
        left, levels = [scale for scale in left if scale <= left[-1] - FOLDING], levels + 1
    return levels


def bytes_of(words: Tensor, k: int) -> Tensor:
    """View scales `[..., n, words]` as bytes, without the bytes of the last words behind k."""
    return words.contiguous().view(torch.uint8)[..., : k // 32]
