"""Products whose scales do not change along k: results show where sums were promoted, as tensor cores keep few bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_gemm.core.check.checks import Operand
from deep_gemm.gemm.config.tall import BLOCK_K

from .dense import DenseTrial
from .fp8_gemm_decode import DecodeTrial
from .library import HostKernel
from .trial import same

LARGE, SMALL = 448.0, 0.25
"""Numbers whose squares differ by more than the bits that tensor cores keep; small numbers add up exactly."""


class _Promoted(DenseTrial):
    """A large number at the beginning of k, followed by small ones; use it with `truncate`.

    The first k-block loses its small numbers. D must contain the small numbers of all other k-blocks exactly.
    """

    def operands(self, generator: torch.Generator) -> tuple[Operand, Operand]:
        """Make all rows equal, with scales of 1."""
        row = torch.full((self.k,), SMALL, dtype=torch.float32)
        row[0] = LARGE
        row = row.to(torch.float8_e4m3fn)
        a, b = (row.expand(rows, -1).contiguous() for rows in (self.m, self.n))
        return (a, torch.ones(self.m, 1, dtype=torch.float32)), (b, torch.ones(self.n, 1, dtype=torch.float32))

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare D with the sums of the k-blocks."""
        d = self.outcome(kernel).d
        same("d", d, torch.full_like(d, LARGE**2 + (self.k - BLOCK_K) * SMALL**2))
        return 0.0


@dataclass(frozen=True)
class PromotedTrial(_Promoted):
    """One product."""


@dataclass(frozen=True)
class PromotedFewTrial(_Promoted, DecodeTrial):
    """One product with few rows."""
