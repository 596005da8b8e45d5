"""Sums of BF16 products in the simulator: both kernels, with the source, maps and parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import Unpack

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm import sum_slices
from deep_gemm.gemm.config.bf16 import BLOCK_K, Bf16Config
from deep_gemm.gemm.kernel import BF16_GEMM
from deep_gemm.gemm.kinds.works import SUM
from deep_gemm.gemm.problem import Problem
from deep_gemm.gemm.sum_slices import SlicesConfig

from .bf16 import operand
from .launcher import How, Stage
from .library import HostKernel
from .product import Outcome, ProductTrial, draws, near_edge, outcome, sides, stage_of, units_of_step
from .rounding import FP32_UNIT, within_units
from .trial import Trial

PLAIN = SlicesConfig(False)


def type_of(config: SlicesConfig) -> torch.dtype:
    """Return the type of D."""
    return torch.float32 if config.output_is_fp32 else torch.bfloat16


def run(
    kernel: HostKernel | None, adder: HostKernel | None, config: Bf16Config, slices: int, p: Problem, **how: Unpack[How]
) -> Outcome:
    """Compute on simulated SMs and in FP64. The part of the workspace that the first kernel does not write is NaN."""
    a, b = p.a.double(), p.b.double()
    exact, magnitudes = (a @ b.mT).sum(0), (a.abs() @ b.abs().mT).sum(0)
    if p.c is not None:
        exact, magnitudes = exact + p.c.double(), magnitudes + p.c.double().abs()
    steps = ceil_div(len(a) * a.shape[-1] // BLOCK_K, slices) * BLOCK_K // 16
    roundings = steps * units_of_step(how) + slices + 2
    right = exact.to(p.d.dtype)
    workspace = torch.full((slices, *p.d.shape), float("nan"), dtype=torch.float32)
    stage = stage_of(config, p, is_dependent=True, more={"workspace": workspace}, **how)
    placed, between = stage.placed(p), stage.at["workspace"]
    with stage.launches({BF16_GEMM: kernel, sum_slices.KERNEL: adder}, {"d"}):
        sum_slices.launch(placed, between, config, stage.num_sms)
    return outcome(stage.result(), right, within_units(right, magnitudes * (roundings * FP32_UNIT)), (64, 64))


@dataclass(frozen=True)
class SumTrial(ProductTrial):
    """One sum of products, in slices that a kernel without mutations adds up."""

    kernel = BF16_GEMM
    works = (SUM,)
    config: Bf16Config
    slices: int = 4
    products: int = 5
    m: int = 70
    n: int = 72
    k: int = 192
    seed: int = 0
    schedule: str | None = None
    output: SlicesConfig = PLAIN

    @classmethod
    def drawn(cls, config: Bf16Config, seed: int) -> SumTrial:
        """Draw the number of products, slices that cross several products, and sizes around a tile's edges."""
        draw = draws(config, seed)
        products, blocks = draw.randint(1, 4), draw.randint(1, 2)
        return cls(
            config,
            draw.randint(1, products * blocks),
            products,
            *sides(draw, config, of_m=8, of_n=8),
            blocks * BLOCK_K,
            seed,
            output=draw.choice([*sum_slices.KERNEL.configs()]),
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def problem(self) -> Problem:
        """Draw random matrices. Each row is followed by 8 NaNs. D is NaN, unless it is C."""
        generator, majors = torch.Generator().manual_seed(self.seed), self.config.majors
        a = operand((self.products, self.m, self.k), majors.a_is_mn, 8, generator)
        b = operand((self.products, self.n, self.k), majors.b_is_mn, 8, generator)
        d = torch.full((self.m, self.n), float("nan"), dtype=type_of(self.output))
        c = d.normal_(generator=generator) if self.output.adds_to_d else None
        return Problem(a, None, b, None, d, c, SUM, None, None)

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply, and add up slices."""
        return run(kernel, None, self.config, self.slices, self.problem(), **self.how)


@dataclass(frozen=True)
class SlicesTrial(Trial):
    """One workspace of random slices."""

    kernel = sum_slices.KERNEL
    config: SlicesConfig
    slices: int = 4
    m: int = 70
    n: int = 72
    seed: int = 0
    schedule: str | None = None

    @classmethod
    def drawn(cls, config: SlicesConfig, seed: int) -> SlicesTrial:
        """Draw fewer or more slices than a CTA has warps, and columns around a CTA's number of columns."""
        draw = draws(config, seed)
        n = near_edge(draw, sum_slices.COLUMNS, 4 if config.output_is_fp32 else 8)
        return cls(config, draw.randint(1, 90), draw.randint(1, 20), n, seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Add up slices into a D with a gap after each row."""
        generator, (m, n) = torch.Generator().manual_seed(self.seed), (self.m, self.n)
        workspace = torch.randn(self.slices, m, n, generator=generator, dtype=torch.float32)
        dtype = type_of(self.config)
        d = torch.full((m, n + 8), float("nan"), dtype=dtype)[:, :n]
        exact, magnitudes = workspace.double().sum(0), workspace.double().abs().sum(0)
        if self.config.adds_to_d:
            d.normal_(generator=generator)
            exact, magnitudes = exact + d.double(), magnitudes + d.double().abs()
        written = {"workspace": workspace, "d": d}
        stage = Stage(self.config, {}, written, dict.fromkeys(written, 16), **self.how)
        between, of_d = stage.at["workspace"], stage.at["d"]
        with stage.launches({sum_slices.KERNEL: kernel}):
            values, ctas = sum_slices.values_of(between, of_d), sum_slices.grid(self.m, self.n)
            sum_slices.KERNEL.run(self.config, values, ctas, stage.device)
        right = exact.to(dtype)
        allowed = within_units(right, magnitudes * ((self.slices + 2) * FP32_UNIT))
        return outcome(stage.result(), right, allowed).checked().worst
