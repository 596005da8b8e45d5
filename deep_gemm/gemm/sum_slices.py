"""The kernel of gemm/sum_slices.cuh: how it is compiled, and launched behind the kernel that gives the slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.kernel import Config, Kernel, constants_of

COLUMNS = 128
"""Columns of a CTA."""


@dataclass(frozen=True)
class SlicesConfig(Config):
    """One configuration."""

    output_is_fp32: bool
    adds_to_d: bool = False
    num_threads: int = 256
    ctas_per_sm: int = 4

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{'fp32' if self.output_is_fp32 else 'bf16'}{'+d' if self.adds_to_d else ''}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: four sums of each thread."""
        return self.num_threads * 16

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.output_is_fp32 or not self.adds_to_d, "FP32 where it adds to D"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes."""
        return {
            "kOutputBytes": 4 if self.output_is_fp32 else 2,
            **constants_of(self, "adds_to_d", "num_threads", "shared_bytes"),
        }


def grid(m: int, n: int) -> int:
    """Count CTAs: as many for each row as its columns need."""
    return m * ceil_div(n, COLUMNS)


def values_of(slices: Tensor, d: Tensor) -> dict[str, Any]:
    """Give the members of the kernel's parameters."""
    count, m, n = slices.shape
    return {"slices": slices, "d": d, "d_pitch": d.stride(0), "count": count, "m": m, "n": n}


KERNEL: Kernel[SlicesConfig] = Kernel(
    "sum_slices", "SlicesParams", lambda: [SlicesConfig(False), SlicesConfig(True), SlicesConfig(True, adds_to_d=True)]
)
