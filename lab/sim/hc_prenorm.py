"""Both kernels of hyper-connections in the simulator, with the source, tensor maps and parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.kernel import Kernel
from deep_gemm.hyper import kernel as kernel_ring
from deep_gemm.hyper import kernel_few
from deep_gemm.hyper.api import hc_prenorm as reference
from deep_gemm.hyper.api import to_tf32
from deep_gemm.hyper.check import BLOCK_K, COLUMNS, HcProblem
from deep_gemm.hyper.choose import Chosen, kernel_of
from deep_gemm.hyper.kernel import PRODUCT_K

from .launcher import How, Stage
from .library import HostKernel
from .product import units_of_step
from .rounding import FP32_UNIT, largest_part
from .trial import Trial

LEFT_OVER = 2.0**-133
"""The most that a value of B below 2^-123 loses when it is split into high and low parts."""


def run(
    kernel: HostKernel | None, config: Chosen, a: Tensor, b: Tensor, splits: int = 1, **how: Unpack[How]
) -> tuple[Tensor, Tensor]:
    """Compute D `[splits, m, n]` and sqr_sum `[splits, m]` on simulated SMs. Unwritten elements are NaN."""
    m, n = len(a), len(b)
    written = {
        "d": torch.full((splits, m, n), torch.nan, dtype=torch.float32),
        "sqr_sum": torch.full((splits, m), torch.nan, dtype=torch.float32),
    }
    stage = Stage(config, {"a": a, "b": b}, written, {"a": 16, "b": 16}, **how)
    module = kernel_of(config)
    stage.run(
        module.KERNEL,
        kernel,
        lambda at: module.values_of(config, HcProblem(**at)),
        module.grid(config, m, n, splits, stage.num_sms),
    )
    return written["d"], written["sqr_sum"]


def random_operands(m: int, n: int, k: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Make normally distributed operands. Half of B's values are midway between two TF32 numbers."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=g, dtype=torch.float32).bfloat16()
    b = torch.randn(n, k, generator=g, dtype=torch.float32)
    in_the_middle = ((b.view(torch.int32) & ~0x1FFF) | 0x1000).view(torch.float32)
    b = torch.where(torch.rand(n, k, generator=g, dtype=torch.float32) < 0.5, in_the_middle, b)
    return a.to(device), b.to(device)


def special_operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Put zeros of both signs, infinities, NaN, numbers that round to infinity and the smallest among integers."""
    a, b = random_operands(m, n, k)
    a, b = (a * 4).round(), (b * 4).round()
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-126
    b[0, :7] = torch.tensor([0.0, -0.0, 1.0, -2.0, largest / 2, smallest, -smallest * 2.0**-7], dtype=torch.float32)
    b[1, 5], b[2, 6], b[3, 7] = torch.inf, -torch.inf, torch.nan
    b[4, 8] = largest
    b[5, 9] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    a[0] = 0
    a[1, 2], a[2, 3] = torch.inf, -torch.inf
    a[3, 4] = torch.nan
    a[4, 0] = torch.inf  # this infinity is multiplied by 0
    a[5, 5:9] = torch.tensor([2.0**-120, 2.0**120, 0, 0], dtype=torch.float32)
    return a, b


def compare(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, of_step: float = 1.0) -> float:
    """Return the largest error of results `[splits, m, n]` and `[splits, m]`, relative to the allowed error.

    A product of depth 16, of high parts or of low parts, may have an error of `of_step` units of the magnitudes' sum.
    """
    right = HcProblem(a, b, torch.empty_like(d), torch.empty_like(sqr_sum))
    reference(right)
    wide, vectors = (x.double().nan_to_num(0, 0, 0).abs() for x in (a, to_tf32(b)))
    steps = ceil_div(a.shape[1] // BLOCK_K, len(d)) * (BLOCK_K // PRODUCT_K)
    allowed_d = (wide @ vectors.t()) * ((steps * of_step + 20) * FP32_UNIT) + wide.sum(1, keepdim=True) * LEFT_OVER
    allowed_sums = wide.square().sum(1) * ((steps + 20) * FP32_UNIT)
    return max(largest_part("d", d, right.d, allowed_d), largest_part("sqr_sum", sqr_sum, right.sqr_sum, allowed_sums))


@dataclass(frozen=True)
class HcTrial(Trial):
    """One configuration, shape, number of splits and of SMs, seed and schedule."""

    kernel: ClassVar[Kernel[Any]] = kernel_ring.KERNEL
    config: Chosen
    m: int
    n: int
    k: int
    splits: int = 1
    seed: int = 0
    schedule: str | None = None
    is_special: bool = False

    @classmethod
    def drawn(cls, config: Chosen, seed: int) -> HcTrial:
        """Draw a shape, and the number of splits."""
        draw = random.Random(seed)
        n = config.block_n if config.block_n > 8 else draw.choice(COLUMNS)
        return cls(config, draw.randint(1, 150), n, BLOCK_K * draw.randint(1, 12), draw.randint(1, 4), seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare the product and the sums of squares with the reference's, within the error of rounding."""
        size = self.m, self.n, self.k
        a, b = special_operands(*size) if self.is_special else random_operands(*size, self.seed)
        found = run(kernel, self.config, a, b, self.splits, **self.how)
        return compare(a, b, *found, units_of_step(self.how))


@dataclass(frozen=True)
class HcFewTrial(HcTrial):
    """A trial like `HcTrial`, for the kernel for few rows."""

    kernel = kernel_few.KERNEL
