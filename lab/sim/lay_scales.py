"""The `lay_scales` kernel in the simulator, with the source and parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts import lay_scales
from deep_gemm.casts.lay_scales import CONFIG, ScalesConfig
from deep_gemm.core.check.layout import UE8M0_PER_WORD, ceil_div, empty_mn_major
from deep_gemm.core.check.ue8m0 import NO_NUMBER, numbers_of

from .launcher import How, Stage, flat_memory
from .library import HostKernel
from .trial import Trial, same

POISON = -0x5A5A5A5A


def run(kernel: HostKernel | None, sf: Tensor, out: Tensor, **how: Unpack[How]) -> None:
    """Copy scales like `casts.lay_scales.run`, on simulated SMs. Elements that the kernel does not write stay as is."""
    stage = Stage(CONFIG, {"sf": sf}, {"out": out}, **how)
    stage.run(
        lay_scales.KERNEL, kernel, lambda at: lay_scales.values_of(at["sf"], at["out"]), lay_scales.grid(CONFIG, out)
    )


def check(kernel: HostKernel | None, sf: Tensor, k_blocks: int | None = None, **how: Unpack[How]) -> None:
    """Compare the resulting scales, and the memory between them, bit for bit. `k_blocks` is given for words."""
    out = empty_mn_major(sf, k_blocks)
    memory = flat_memory(out).view(torch.int32).fill_(POISON)
    right = memory.clone()
    numbers = sf if k_blocks is None else numbers_of(sf, k_blocks)
    right.as_strided(out.shape, out.stride()).copy_(numbers.view(torch.int32))
    run(kernel, sf, out, **how)
    if k_blocks is not None:  # any NaN is right, whatever its bits
        for words in (memory, right):
            words.masked_fill_(words.view(torch.float32).isnan(), 0)
    same("words", memory, right)


@dataclass(frozen=True)
class ScalesTrial(Trial):
    """Scales in rows with gaps, or m-major scales: the transpose of such rows."""

    kernel = lay_scales.KERNEL
    groups: int
    m: int
    k_blocks: int
    is_m_major: bool
    seed: int = 0
    schedule: str | None = None
    are_words: bool = False
    config: ScalesConfig = CONFIG

    @classmethod
    def drawn(cls, config: ScalesConfig, seed: int) -> ScalesTrial:
        """Draw sizes and an order."""
        draw = random.Random(seed)
        sizes = draw.randint(1, 3), draw.randint(1, 150), draw.randint(1, 80)
        return cls(*sizes, draw.random() < 0.5, seed, are_words=draw.random() < 0.5)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare the resulting scales, from FP32 or from words, bit for bit."""
        of_row = ceil_div(self.k_blocks, UE8M0_PER_WORD) if self.are_words else self.k_blocks
        rows, columns = (of_row, self.m) if self.is_m_major else (self.m, of_row)
        shape = self.groups, rows + 1, columns + 3
        if self.are_words:
            generator = torch.Generator().manual_seed(self.seed)
            memory = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
            memory.view(torch.uint8).view(-1)[::7], memory.view(torch.uint8).view(-1)[::11] = 0, NO_NUMBER
        else:
            memory = torch.arange(prod(shape), dtype=torch.float32).view(shape)
        sf = memory[:, :rows, :columns]
        check(kernel, sf.mT if self.is_m_major else sf, self.k_blocks if self.are_words else None, **self.how)
        return 0.0
