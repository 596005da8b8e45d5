"""Draws of a trial from its seed: sizes, tensors with poison around them, and numbers whose sums are exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.core.check.layout import ceil_div, get_tma_aligned_size

CANARY = 0xA5
"""Each byte around an output."""
FP8_NAN = 0x7F
MARGIN_BYTES = 256
PITCHES = (0, 16, 48)
"""Elements between the rows of a matrix."""


@dataclass
class Output:
    """A tensor that a call writes, inside a buffer of canaries."""

    buffer: Tensor
    """Bytes."""
    view: Tensor

    def inside(self, buffer: Tensor) -> Tensor:
        """The tensor's place in another buffer of this size."""
        x = buffer.view(self.view.dtype)
        return x.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


class Draw:
    """Random numbers of one trial. Sizes come from the host's generator, contents from one where the tensors are."""

    def __init__(self, seed: str, device: str) -> None:
        self.rng = random.Random(seed)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(self.rng.getrandbits(48))

    def flag(self, chance: float = 0.5) -> bool:
        """Draw True with this chance."""
        return self.rng.random() < chance

    def size(self, least: int, most: int, multiple: int = 1) -> int:
        """Draw a multiple, small ones as often as large ones; on the CPU only small ones."""
        most = most if self.device == "cuda" else min(most, max(least, 160, 2 * multiple))
        low, high = ceil_div(least, multiple), most // multiple
        scale = self.rng.choice((8, 64, 512, 1 << 30))
        return self.rng.randint(low, max(low, min(high, low + scale))) * multiple

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Whole numbers from low to high."""
        drawn = torch.randint(low, high + 1, tuple(shape), generator=self.generator, device=self.device)
        return drawn.to(dtype)

    def powers_of_two(self, shape: Sequence[int], low: int = -2, high: int = 2) -> Tensor:
        """FP32 numbers 2^low to 2^high."""
        return torch.ldexp(
            torch.ones(tuple(shape), device=self.device, dtype=torch.float32),
            self.integers(shape, low, high, torch.int32),
        )

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers, of a magnitude that differs by trial."""
        return torch.randn(tuple(shape), generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def matrix(self, shape: Sequence[int], dtype: torch.dtype, *, turned: bool = False) -> Tensor:
        """Room for an operand: NaN between its rows; `turned`, its last two dimensions lie the other way round."""
        *outer, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        pitch = 0 if outer else self.rng.choice(PITCHES)
        whole = torch.empty((*outer, rows, columns + pitch), dtype=dtype, device=self.device)
        whole.view(torch.uint8).fill_(FP8_NAN) if dtype == torch.float8_e4m3fn else whole.fill_(torch.nan)
        x = whole[..., :columns]
        return x.mT if turned else x

    def scales(self, shape: Sequence[int]) -> Tensor:
        """Room for FP32 scales `[..., rows, blocks]`, row-major or as a product loads them."""
        *outer, rows, blocks = shape
        if self.flag():
            return torch.empty(tuple(shape), device=self.device, dtype=torch.float32)
        pitch = get_tma_aligned_size(rows, 4)
        strides = (blocks * pitch,) * len(outer) + (1, pitch)
        return torch.empty_strided(tuple(shape), strides, device=self.device, dtype=torch.float32)

    def output(self, shape: Sequence[int], dtype: torch.dtype, *, packed: bool = False) -> Output:
        """Room for an output, with canaries around it, and between rows unless it is packed."""
        *outer, rows, columns = shape
        pitch = columns if packed or outer else columns + self.rng.choice(PITCHES)
        item, margin = dtype.itemsize, MARGIN_BYTES // dtype.itemsize
        elements = rows * pitch
        for size in outer:
            elements *= size
        buffer = torch.full(((elements + 2 * margin) * item,), CANARY, dtype=torch.uint8, device=self.device)
        strides, step = [pitch, 1], rows * pitch
        for size in reversed(outer):
            strides.insert(0, step)
            step *= size
        return Output(buffer, buffer.view(dtype).as_strided(tuple(shape), strides, margin))
