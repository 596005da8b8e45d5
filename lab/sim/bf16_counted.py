"""Groups along k of BF16 of depths that the GPU alone knows, in the simulator, as a GPU gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deep_gemm.gemm.config.bf16 import Bf16Config
from deep_gemm.gemm.kernel import BF16_GEMM
from deep_gemm.gemm.kinds.works import COUNTED
from deep_gemm.gemm.problem import Problem

from .bf16_depths import run
from .library import HostKernel
from .product import Outcome, ProductTrial, draws, random_d_and_c, sides, sizes


def random_problem(
    config: Bf16Config,
    ks: Sequence[int],
    m: int,
    n: int,
    seed: int = 0,
    *,
    on_gpu_alone: bool = True,
    more_rows: int = 0,
    gap: int = 0,
) -> Problem:
    """Make a problem with random data. D is NaN, unless it is also C.

    Rows that no group has are NaN, and so is what follows each row: `gap` values, a multiple of 8.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.full((sum(ks) + more_rows, rows + gap), float("nan"), dtype=torch.bfloat16) for rows in (m, n))
    for x, rows in ((a, m), (b, n)):
        x[: sum(ks), :rows] = torch.randn(sum(ks), rows, generator=generator, dtype=torch.float32)
    d, c = random_d_and_c(config, (len(ks), m, n), generator)
    counts = torch.tensor(ks, dtype=torch.int32) if on_gpu_alone else None
    a, b, known = a[:, :m].mT, b[:, :n].mT, None if on_gpu_alone else tuple(ks)
    return Problem(a, counts, b, None, d, c, COUNTED, None, None, ks=known)


@dataclass(frozen=True)
class Bf16CountedTrial(ProductTrial):
    """One list of depths."""

    kernel = BF16_GEMM
    config: Bf16Config
    ks: tuple[int, ...] = (70, 0, 129)
    m: int = 136
    n: int = 72
    seed: int = 0
    schedule: str | None = None
    on_gpu_alone: bool = True
    """Counts lie where the GPU alone knows them."""
    told: tuple[int, ...] = ()
    """Depths that the GPU finds, if they are wrong; there are no further rows then."""
    more_rows: int = 70

    @classmethod
    def takes(cls, config: Bf16Config) -> bool:
        """Take groups along k that the GPU counts."""
        return config.work is COUNTED

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

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices."""
        more = {"on_gpu_alone": self.on_gpu_alone, "more_rows": 0 if self.told else self.more_rows, "gap": 8}
        p = random_problem(self.config, self.ks, self.m, self.n, self.seed, **more)  # type: ignore[arg-type]
        if self.told:
            p = p._replace(sfa=torch.tensor(self.told, dtype=torch.int32))
        return run(kernel, self.config, p, ks=self.ks, **self.how)
