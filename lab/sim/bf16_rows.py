"""Grouped rows of BF16 in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.bf16 import rows as kernels
from deep_gemm.gemm.bf16.config import Bf16Config
from deep_gemm.gemm.bf16.rows import RowsProblem
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.output import Groups
from deep_gemm.gemm.plan import addresses_of

from .dense import Outcome, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel
from .rounding import FP32_UNIT, within_units
from .simulate import Buffer, Simulation

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
    a = torch.randn(planes, rows, k, generator=generator).to(torch.bfloat16)
    b = torch.randn(groups, *((k, n) if config.majors.b_is_mn else (n, k)), generator=generator).to(torch.bfloat16)
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
    ids, begin = torch.full((1, rows), -1), 0
    for group, end in enumerate(p.c.tolist()):
        ids[0, begin:end] = group
        begin = ceil_div(end, p.alignment) * p.alignment
    return ids


def run(
    kernel: HostKernel,
    config: Bf16Config,
    problem: RowsProblem,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
) -> Outcome:
    """Compute on simulated SMs and in FP64."""
    p = kernels.prepared(problem)
    buffers = {
        "a": Buffer(flat_memory(p.a)),
        "b": Buffer(flat_memory(p.b)),
        "d": Buffer(p.d, is_writable=True),
        "c": Buffer(p.c, alignment=16 if p.groups == Groups.IDS else 4),
    }
    right, allowed = right_and_allowed(p)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    placed = placed_in(simulation, p)
    launcher = Launcher(
        simulation,
        kernel,
        params_of(config),
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
    )
    plan = kernels.plan_of(placed, config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(addresses_of(placed))
    return outcome(simulation.result(), right, allowed)


def right_and_allowed(p: RowsProblem) -> tuple[Tensor, Tensor]:
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
        bound = a.abs() @ b.mT.abs() * ((ceil_div(p.a.shape[-1], 16) + 2) * FP32_UNIT)
        allowed[rows] = within_units(right[rows], bound)
    return right, allowed


def _shares_block(ids: Tensor, alignment: int) -> Tensor:
    """Rows of an aligned block in which some row has a group."""
    padded = torch.nn.functional.pad(ids >= 0, (0, -ids.shape[1] % alignment))
    used = padded.view(ids.shape[0], -1, alignment).any(-1)
    return used.repeat_interleave(alignment, 1)[:, : ids.shape[1]]
