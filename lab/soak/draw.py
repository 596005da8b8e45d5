"""Draws for a trial from its seed: sizes, tensors with poison around them, and numbers whose sums are exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.core.check.layout import ceil_div, get_tma_aligned_size

CANARY = 0xA5
"""The value of each byte around an output."""
FP8_NAN = 0x7F
MARGIN_BYTES = 256
PITCHES = (0, 16, 48)
"""Numbers of elements between the rows of a matrix."""


@dataclass
class Output:
    """A tensor that a call writes, inside a buffer of canaries."""

    buffer: Tensor
    """The whole buffer, in bytes."""
    view: Tensor

    def inside(self, buffer: Tensor) -> Tensor:
        """View the tensor's bytes in another buffer of the same size."""
        x = buffer.view(self.view.dtype)
        return x.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


class Draw:
    """Random numbers for one trial. Sizes come from a host generator, contents from a generator on the device."""

    def __init__(self, seed: str, device: str) -> None:
        self.rng = random.Random(seed)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(self.rng.getrandbits(48))

    def flag(self, chance: float = 0.5) -> bool:
        """Draw True with this chance."""
        return self.rng.random() < chance

    def size(self, least: int, most: int, multiple: int = 1) -> int:
        """Draw a multiple of `multiple`: small or large numbers with equal chance; on the CPU only small numbers."""
        most = most if self.device == "cuda" else min(most, max(least, 160, 2 * multiple))
        low, high = ceil_div(least, multiple), most // multiple
        scale = self.rng.choice((8, 64, 512, 1 << 30))
        return self.rng.randint(low, max(low, min(high, low + scale))) * multiple

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw integers from low to high."""
        drawn = torch.randint(low, high + 1, tuple(shape), generator=self.generator, device=self.device)
        return drawn.to(dtype)

    def powers_of_two(self, shape: Sequence[int], low: int = -2, high: int = 2) -> Tensor:
        """Draw FP32 powers of two from 2^low to 2^high."""
        return torch.ldexp(
            torch.ones(tuple(shape), device=self.device, dtype=torch.float32),
            self.integers(shape, low, high, torch.int32),
        )

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw normal numbers; the numbers' magnitude differs between trials."""
        return torch.randn(tuple(shape), generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def matrix(self, shape: Sequence[int], dtype: torch.dtype, *, turned: bool = False) -> Tensor:
        """Allocate an operand, with NaN between its rows; `turned`: with its last two dimensions transposed."""
        *outer, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        pitch = 0 if outer else self.rng.choice(PITCHES)
        whole = torch.empty((*outer, rows, columns + pitch), dtype=dtype, device=self.device)
        whole.view(torch.uint8).fill_(FP8_NAN) if dtype == torch.float8_e4m3fn else whole.fill_(torch.nan)
        x = whole[..., :columns]
        return x.mT if turned else x

    def scales(self, shape: Sequence[int]) -> Tensor:
        """Allocate FP32 scales `[..., rows, blocks]`, row-major or in a product's layout."""
        *outer, rows, blocks = shape
        if self.flag():
            return torch.empty(tuple(shape), device=self.device, dtype=torch.float32)
        pitch = get_tma_aligned_size(rows, 4)
        strides = (blocks * pitch,) * len(outer) + (1, pitch)
        return torch.empty_strided(tuple(shape), strides, device=self.device, dtype=torch.float32)

    def output(self, shape: Sequence[int], dtype: torch.dtype, *, packed: bool = False) -> Output:
        """Allocate an output with canaries around it, and between its rows unless it is packed."""
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
