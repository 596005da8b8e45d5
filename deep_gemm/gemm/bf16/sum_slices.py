"""The kernel of gemm/sum_slices.cuh: how it is compiled, and launched behind the kernel that gives the slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ...core.check.layout import ceil_div
from ...core.kernel import OrdinaryKernel
from ...core.params import Field, Kind, Params

PARAMS = Params(
    "SlicesParams",
    Field("slices", Kind.POINTER),
    Field("d", Kind.POINTER),
    Field("d_pitch", Kind.UINT64),
    Field("count", Kind.UINT32),
    Field("m", Kind.UINT32),
    Field("n", Kind.UINT32),
)
"""`SlicesParams` of gemm/sum_slices.cuh."""
COLUMNS = 128
"""Columns of a CTA."""


@dataclass(frozen=True)
class SlicesConfig:
    """One configuration."""

    output_is_fp32: bool
    adds_to_d: bool = False
    num_threads: int = 256
    ctas_per_sm: ClassVar[int] = 4

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{'fp32' if self.output_is_fp32 else 'bf16'}{'+d' if self.adds_to_d else ''}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: four sums of each thread."""
        return self.num_threads * 16

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return "needs FP32 where it adds to D" if self.adds_to_d and not self.output_is_fp32 else None

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        return "\n".join(
            [
                "#pragma once",
                '#include "types.cuh"',
                f"constexpr uint32_t kOutputBytes = {4 if self.output_is_fp32 else 2};",
                f"constexpr bool kAddsToD = {str(self.adds_to_d).lower()};",
                f"constexpr uint32_t kNumThreads = {self.num_threads};",
                f"constexpr uint32_t kSharedBytes = {self.shared_bytes};",
                "",
            ]
        )


KERNEL: Any = OrdinaryKernel("sum_slices", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan


def reachable_slices() -> list[SlicesConfig]:
    """Every configuration that sums over products can take."""
    return [SlicesConfig(False), SlicesConfig(True), SlicesConfig(True, adds_to_d=True)]


def grid(m: int, n: int) -> int:
    """Count CTAs: as many for each row as its columns need."""
    return m * ceil_div(n, COLUMNS)


def params_of(slices: Tensor, d: int, pitch: int) -> bytes:
    """Give the kernel's parameters, for a D at this address whose rows are so many elements apart."""
    count, m, n = slices.shape
    return PARAMS.pack({"slices": slices.data_ptr(), "d": d, "d_pitch": pitch, "count": count, "m": m, "n": n})
