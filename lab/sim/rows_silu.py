"""The `fp8_gemm` kernel that activates grouped rows, in the simulator, with a GPU's source and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Unpack

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import Quantized, empty_scales
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.gemm import launch
from deep_gemm.gemm.ask.silu import SILU_COLUMNS, silu_rows_problem
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.problem import Problem

from ..silu import checked
from .launcher import How, Stage
from .library import HostKernel
from .product import depth, draws, sizes
from .simulate import Result
from .trial import Trial

POISON = 0xA5
CANARY = 42.0
"""Contents of values and scales before a launch: a row that must not be written keeps them."""
INPUTS, OUTPUTS = ("a", "sfa", "b", "sfb", "c", "row_weights"), ("d", "scales")


def random_problem(
    sizes: Sequence[int],
    n: int,
    k: int,
    seed: int = 0,
    *,
    behind: int = 9,
    limit: float | None = None,
    has_weights: bool = True,
    size: float = 1.0,
    gates_apart: bool = False,
) -> Problem:
    """Make a problem with random data. Rows `behind` the groups are NaN: values, scales and weights.

    Gates and ups have magnitudes of about `size`.
    """
    generator = torch.Generator().manual_seed(seed)
    m, groups, ends = sum(sizes) + behind, len(sizes), torch.tensor(sizes, dtype=torch.int64).cumsum(0).int()
    a, sfa = per_token_cast_to_fp8(torch.randn(m, k, generator=generator, dtype=torch.float32) * size)
    b = random_weight(groups, n, k, generator)
    row_weights = torch.rand(m, generator=generator, dtype=torch.float32) * 2 - 0.5 if has_weights else None
    a.view(torch.uint8)[sum(sizes) :] = 0x7F
    for x in (sfa, row_weights):
        if x is not None:
            x[sum(sizes) :] = float("nan")
    return silu_rows_problem((a, sfa), b, room(m, n, gates_apart), ends, row_weights, limit, gates_apart)


def random_weight(groups: int, n: int, k: int, generator: torch.Generator) -> Quantized:
    """Draw weights. The scales of gate and of up differ by more than chance."""
    b = per_block_cast_to_fp8(torch.randn(groups, n, k, generator=generator, dtype=torch.float32) / k**0.5)
    b[1].mul_(torch.rand(b[1].shape, generator=generator, dtype=torch.float32) + 0.5)
    return b


def room(m: int, n: int, gates_apart: bool) -> Quantized:
    """Make values and scales of m rows with the contents from before a launch."""
    values = torch.full((m, n // 2), POISON, dtype=torch.uint8).view(torch.float8_e4m3fn)
    columns = SCALE_BLOCK if gates_apart else SILU_COLUMNS
    return values, empty_scales((m,), n // 2, values, mn_major=True, gran_k=columns).fill_(CANARY)


def run(kernel: HostKernel | None, config: GemmConfig, p: Problem, **how: Unpack[How]) -> tuple[Quantized, Result]:
    """Compute a product on simulated SMs; return the values and scales after the launch."""
    p = launch.prepared(p, config)
    read, written = ({name: getattr(p, name) for name in names} for names in (INPUTS, OUTPUTS))
    aligned = dict.fromkeys(("a", "sfa", "b", *OUTPUTS), 16)
    stage = Stage(config, read, written, aligned, ready=(*INPUTS, *OUTPUTS), **how)
    with stage.launches({FP8_GEMM: kernel}):
        launch.start(stage.placed(p), config, stage.num_sms)
    result = stage.result()
    return (result.buffers["d"], result.buffers["scales"]), result


@dataclass(frozen=True)
class SiluTrial(Trial):
    """One layout of rows that are activated."""

    kernel = FP8_GEMM
    config: GemmConfig
    sizes: tuple[int, ...] = (2, 1)
    seed: int = 0
    schedule: str | None = None
    n: int = 512
    k: int = 256
    limit: float | None = None
    has_weights: bool = True
    size: float = 1.0
    factors: tuple[float, ...] = ()
    """Factors for the scales of A, for one row after the other, so that sums are far from 1."""

    @classmethod
    def takes(cls, config: GemmConfig) -> bool:
        """Accept products that activate rows, and store each row at the row's own place."""
        return config.epilogue.activates and not config.work.is_twice

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> SiluTrial:
        """Draw groups, a limit, and weights or none."""
        draw = draws(config, seed)
        return cls(
            config,
            tuple(sizes(draw, draw.randint(1, 4), config.block_m + 70)),
            seed,
            n=256 * draw.randint(1, 2),
            k=depth(draw, config),
            limit=draw.choice((None, 0.5)),
            has_weights=draw.random() < 0.5,
            size=draw.choice((1.0, 2.0)),
            num_sms=draw.randint(1, 5),
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare values and scales with the CPU's."""
        p = random_problem(
            self.sizes,
            self.n,
            self.k,
            self.seed,
            limit=self.limit,
            has_weights=self.has_weights,
            size=self.size,
            gates_apart=self.config.epilogue.gates_apart,
        )
        for i, factor in enumerate(self.factors):
            p.sfa[i :: len(self.factors)] *= factor
        got, _ = run(kernel, self.config, p, **self.how)
        return checked(p, got, self.device)
