"""Products whose scales do not change along k: where sums are promoted shows in the tensor cores' few bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.recipes import RUN_COLUMNS, WHOLE
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import BLOCK_K
from deep_gemm.gemm.kinds.output import Output
from lab.casts import cast_by_torch

from ..bench.numerics import OPERANDS
from .dense import DenseTrial
from .fp8_gemm_decode import DecodeTrial
from .library import HostKernel
from .product import run
from .trial import same

LARGE, SMALL = 448.0, 0.25
"""Numbers whose squares are further apart than the bits that tensor cores keep; one run adds up small ones exactly."""


class _Promoted(DenseTrial):
    """A large number at the beginning of k, small ones behind; `truncate` is for them.

    The first run loses its small numbers. All others' must be in D, to the bit.
    """

    def operands(self, generator: torch.Generator) -> tuple[Operand, Operand]:
        """Give all rows the same numbers, by scales of 1."""
        row = torch.full((self.k,), SMALL, dtype=torch.float32)
        row[0] = LARGE
        row = row.to(torch.float8_e4m3fn)
        a, b = (row.expand(rows, -1).contiguous() for rows in (self.m, self.n))
        return (a, torch.ones(self.m, 1, dtype=torch.float32)), (b, torch.ones(self.n, 1, dtype=torch.float32))

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare D with the sum of the runs."""
        d = self.outcome(kernel).d
        same("d", d, torch.full_like(d, LARGE**2 + (self.k - RUN_COLUMNS) * SMALL**2))
        return 0.0


@dataclass(frozen=True)
class PromotedTrial(_Promoted):
    """One product."""


@dataclass(frozen=True)
class PromotedFewTrial(_Promoted, DecodeTrial):
    """One product of few rows."""


def error_by_interval(numbers: str, k: int, interval: int) -> tuple[float, float]:
    """Give a product's relative error and bias beside FP64, its sums promoted every `interval` columns of k."""
    output = Output(is_fp32=True, sfa=WHOLE, sfb=WHOLE)
    config = replace(tile_config(64, 64, output), run_k_blocks=interval // BLOCK_K, has_tail=interval > BLOCK_K)
    torch.manual_seed(0)
    (a, sfa), (b, sfb) = (cast_by_torch(x.float(), 1, k) for x in OPERANDS[numbers](64, 64, k))
    d = torch.empty(64, 64, dtype=torch.float32)
    p = dense_problem((a, sfa), (b, sfb), d, None, recipes=(None, WHOLE, WHOLE))
    got = run(None, config, p, truncate=True, num_sms=1).d.double()
    right = (a.double() * sfa.double()) @ (b.double() * sfb.double()).mT
    return float((got - right).norm() / right.norm()), float((got - right).mean() / right.abs().mean())


if __name__ == "__main__":
    for numbers in OPERANDS:
        for k in (1024, 4096):
            found = [error_by_interval(numbers, k, min(interval, k)) for interval in (128, RUN_COLUMNS, 2048, k)]
            print(f"| {numbers} | {k} |", " | ".join(f"{error:.1e}" for error, _ in found), f"| {found[1][1]:.1e} |")
