"""Grouped rows of BF16 in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.bf16 import rows as kernels
from deep_gemm.gemm.bf16.config import BLOCK_K, Bf16Config
from deep_gemm.gemm.bf16.kernel import KERNEL as BF16_GEMM
from deep_gemm.gemm.bf16.rows import RowsProblem
from deep_gemm.gemm.output import Groups

from .dense import Outcome, ProductTrial, outcome
from .launcher import How
from .library import HostKernel
from .product import draws, near_edge, run_plan, stage_of, units_of_step
from .rounding import FP32_UNIT, within_units
from .rows import drawn_layout

CANARY = 12345.0
"""Value of D beforehand: rows without a group keep it."""


def random_problem(
    config: Bf16Config,
    layout: Sequence[int],
    n: int,
    k: int,
    seed: int = 0,
    *,
    rows: int | None = None,
    alignment: int = 128,
    zero_padding: bool = False,
) -> RowsProblem:
    """Make a problem with random data for a layout of the configuration's kind; A is NaN in rows without a group."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(layout, dtype=torch.int32)
    groups = int(numbers.max()) + 1 if config.groups == Groups.IDS else len(layout)
    if config.groups == Groups.IDS:
        rows = len(layout)
    elif rows is None:
        rows = int(numbers.max())
    planes = groups if config.groups == Groups.COUNTS else 1
    a = torch.randn(planes, rows, k, generator=generator, dtype=torch.float32).to(torch.bfloat16)
    b = torch.randn(
        groups, *((k, n) if config.majors.b_is_mn else (n, k)), generator=generator, dtype=torch.float32
    ).to(torch.bfloat16)
    b = b.mT if config.majors.b_is_mn else b
    d = torch.full((planes, rows, n), CANARY, dtype=torch.float32 if config.is_fp32 else torch.bfloat16)
    p = RowsProblem(a, b, d, numbers, config.groups, rows / groups, alignment, zero_padding)
    a[ids_of(p) < 0] = float("nan")
    return p


def ids_of(p: RowsProblem) -> Tensor:
    """Group of each row of each plane, or -1 for none."""
    planes, rows, _ = p.a.shape
    at = torch.arange(rows)
    if p.groups == Groups.IDS:
        return p.c[None].long()
    if p.groups == Groups.COUNTS:
        return torch.where(at < p.c[:, None], torch.arange(planes)[:, None], -1)
    ids, begin = torch.full((1, rows), -1, dtype=torch.int64), 0
    for group, end in enumerate(p.c.tolist()):
        ids[0, begin:end] = group
        begin = ceil_div(end, p.alignment) * p.alignment
    return ids


def run(kernel: HostKernel | None, config: Bf16Config, problem: RowsProblem, **how: Unpack[How]) -> Outcome:
    """Compute on simulated SMs and in FP64."""
    p = kernels.prepared(problem)
    right, allowed = right_and_allowed(p, units_of_step(how))
    stage = stage_of(config, p, {"c": 16 if p.groups == Groups.IDS else 4}, **how)
    return outcome(run_plan(kernel, BF16_GEMM, config, p, kernels.plan_of, stage), right, allowed)


def right_and_allowed(p: RowsProblem, of_step: float = 1.0) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it: not at all if it is not part of a product."""
    right = p.d.clone()
    allowed = torch.full_like(right, torch.finfo(torch.float64).tiny, dtype=torch.float64)
    ids = ids_of(p)
    if p.zero_padding:
        right[(ids < 0) & _shares_block(ids, p.alignment)] = 0
    for group in range(p.b.shape[0]):
        rows = ids == group
        a, b = p.a[rows].double(), p.b[group].double()
        right[rows] = (a @ b.mT).to(right.dtype)
        bound = a.abs() @ b.mT.abs() * ((ceil_div(p.a.shape[-1], 16) * of_step + 2) * FP32_UNIT)
        allowed[rows] = within_units(right[rows], bound)
    return right, allowed


def _shares_block(ids: Tensor, alignment: int) -> Tensor:
    """Rows of an aligned block in which some row has a group."""
    padded = torch.nn.functional.pad(ids >= 0, (0, -ids.shape[1] % alignment))
    used = padded.view(ids.shape[0], -1, alignment).any(-1)
    return used.repeat_interleave(alignment, 1)[:, : ids.shape[1]]


@dataclass(frozen=True)
class Bf16RowsTrial(ProductTrial):
    """One layout of rows: ids, ends or counts."""

    kernel = BF16_GEMM
    config: Bf16Config
    layout: tuple[int, ...] = (0, 3, 70)
    n: int = 136
    k: int = 200
    seed: int = 0
    schedule: str | None = None
    rows: int | None = None
    alignment: int = 128
    zero_padding: bool = False

    @classmethod
    def takes(cls, config: Bf16Config) -> bool:
        """Take grouped rows."""
        return config.rows_are_grouped

    @classmethod
    def drawn(cls, config: Bf16Config, seed: int) -> Bf16RowsTrial:
        """Draw groups: empty, short and longer than a tile; and columns around a tile's edges."""
        draw = draws(config, seed)
        alignment = draw.choice((1, 16, 128))
        layout, rows = drawn_layout(draw, config, alignment)
        return cls(
            config,
            layout if config.groups != Groups.IDS else (*layout, 0),
            near_edge(draw, config.block_n, 8, blocks=1),
            BLOCK_K * draw.randint(1, 4) - draw.choice((0, 8 * draw.randrange(8))),
            seed,
            rows=rows,
            alignment=alignment,
            zero_padding=config.groups != Groups.COUNTS and draw.random() < 0.5,
            num_sms=draw.randint(1, 5),
        )

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices."""
        of_rows = {"rows": self.rows, "alignment": self.alignment, "zero_padding": self.zero_padding}
        p = random_problem(self.config, self.layout, self.n, self.k, self.seed, **of_rows)  # type: ignore[arg-type]
        return run(kernel, self.config, p, **self.how)
