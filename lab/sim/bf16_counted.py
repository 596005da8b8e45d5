"""BF16 groups along k in the simulator whose depths only the GPU knows, with the parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_gemm.gemm.config.bf16 import Bf16Config
from deep_gemm.gemm.kinds.works import COUNTED
from deep_gemm.gemm.problem import Problem

from .bf16_depths import Bf16DepthsTrial, run
from .library import HostKernel
from .product import Outcome, draws, random_d_and_c, sides, sizes


@dataclass(frozen=True)
class Bf16CountedTrial(Bf16DepthsTrial):
    """One list of depths."""

    works = (COUNTED,)
    ks: tuple[int, ...] = (70, 0, 129)
    on_gpu_alone: bool = True
    """True: the host cannot read the counts."""
    told: tuple[int, ...] = ()
    """Wrong depths that the GPU reads instead of `ks`, if any; then `more_rows` does not apply."""
    more_rows: int = 70

    @classmethod
    def drawn(cls, config: Bf16Config, seed: int) -> Bf16CountedTrial:
        """Draw depths, some of them zero, and sizes around a tile's edges."""
        draw = draws(config, seed)
        return cls(
            config,
            (*sizes(draw, draw.randint(0, 4), 200), draw.randint(1, 70)),
            *sides(draw, config, of_m=8, of_n=8),
            seed,
            on_gpu_alone=draw.random() < 0.5,
            more_rows=draw.choice((0, 70)),
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def problem(self) -> Problem:
        """Draw random matrices. D is NaN, unless it is also C.

        Rows without a group are NaN, and so are 8 values after each row.
        """
        generator, rows = torch.Generator().manual_seed(self.seed), sum(self.ks)
        depth = rows + (0 if self.told else self.more_rows)
        a, b = (
            torch.full((depth, size + 8), float("nan"), dtype=torch.bfloat16)[:, :size] for size in (self.m, self.n)
        )
        for x in (a, b):
            x[:rows] = torch.randn(rows, x.shape[1], generator=generator, dtype=torch.float32)
        d, c = random_d_and_c(self.config, (len(self.ks), self.m, self.n), generator)
        counts = torch.tensor(self.told or self.ks, dtype=torch.int32) if self.told or self.on_gpu_alone else None
        known = None if self.on_gpu_alone else self.ks
        return Problem(a.mT, counts, b.mT, None, d, c, COUNTED, None, None, ks=known)

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply, and compare with the product of these depths, whichever depths the GPU reads."""
        return run(kernel, self.config, self.problem(), ks=self.ks, **self.how)
