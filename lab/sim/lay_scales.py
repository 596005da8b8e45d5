"""The `lay_scales` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts import lay_scales
from deep_gemm.casts.lay_scales import CONFIG, ScalesConfig
from deep_gemm.core.check.layout import empty_mn_major

from .launcher import How, Stage, flat_memory
from .library import HostKernel
from .trial import Trial, same

POISON = -0x5A5A5A5A


def run(kernel: HostKernel | None, sf: Tensor, out: Tensor, **how: Unpack[How]) -> None:
    """Copy scales as `casts.lay_scales.run` does, on simulated SMs. What the kernel leaves unwritten stays."""
    stage = Stage(CONFIG, {"sf": sf}, {"out": out}, **how)
    stage.run(
        lay_scales.KERNEL, kernel, lambda _, at: lay_scales.params_of(at["sf"], at["out"]), lay_scales.grid(CONFIG, sf)
    )


def check(kernel: HostKernel | None, sf: Tensor, **how: Unpack[How]) -> None:
    """Compare what is laid out, and what lies between, to the bit."""
    out = empty_mn_major(sf)
    memory = flat_memory(out).view(torch.int32).fill_(POISON)
    right = memory.clone()
    right.as_strided(out.shape, out.stride()).copy_(sf.view(torch.int32))
    run(kernel, sf, out, **how)
    same("words", memory, right)


@dataclass(frozen=True)
class ScalesTrial(Trial):
    """Scales in rows that lie apart; m-major ones where these are turned."""

    kernel = lay_scales.KERNEL
    groups: int
    m: int
    k_blocks: int
    is_m_major: bool
    seed: int = 0
    schedule: str | None = None
    config: ScalesConfig = CONFIG

    @classmethod
    def drawn(cls, config: ScalesConfig, seed: int) -> ScalesTrial:
        """Draw sizes and an order."""
        draw = random.Random(seed)
        return cls(draw.randint(1, 3), draw.randint(1, 150), draw.randint(1, 80), draw.random() < 0.5, seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare what is laid out, to the bit."""
        rows, columns = (self.k_blocks, self.m) if self.is_m_major else (self.m, self.k_blocks)
        numbers = torch.arange(self.groups * (rows + 1) * (columns + 3), dtype=torch.float32)
        sf = numbers.view(self.groups, rows + 1, columns + 3)[:, :rows, :columns]
        check(kernel, sf.mT if self.is_m_major else sf, **self.how)
        return 0.0
