"""The `fp8_gemm` kernel for grouped rows in the simulator, with the source, maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import reference
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.output import Groups
from deep_gemm.gemm.plan import addresses_of
from deep_gemm.gemm.rows import launch as kernels
from deep_gemm.gemm.rows.check import ContiguousProblem, MaskedProblem, contiguous_problem, masked_problem
from deep_gemm.gemm.rows.launch import grouped_problem

from .dense import Outcome, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel
from .rounding import EXACT_STEPS, TENSOR_CORES, allowed_difference
from .simulate import Buffer, Simulation

CANARY = 42.0
"""D's content before: a row that must not be written still has it afterwards."""
Problem = ContiguousProblem | MaskedProblem


def random_problem(
    config: GemmConfig,
    layout: Sequence[int],
    n: int,
    k: int,
    seed: int = 0,
    *,
    rows: int | None = None,
    num_groups: int | None = None,
    alignment: int = 128,
    zero_padding: bool = True,
) -> Problem:
    """Make a problem with random data for a configuration.

    `layout` holds ids, ends or counts, depending on the configuration. `rows` is the number of rows that A has, for
    counts in each group. Rows of A without a group are NaN, both values and scales.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    numbers = torch.tensor(layout, dtype=torch.int32)
    groups = num_groups or (int(numbers.max()) + 1 if config.groups == Groups.IDS else len(layout))
    if config.groups == Groups.IDS:
        rows = len(layout)
    elif rows is None:
        rows = int(numbers.max())
    planes = [groups] if config.groups == Groups.COUNTS else []
    assert config.sfa is not None
    a, sfa = per_token_cast_to_fp8(torch.randn(*planes, rows, k, generator=generator), gran_k=config.sfa.columns)
    cast_b = per_token_cast_to_fp8 if config.sfb == PER_ROW else per_block_cast_to_fp8
    b = cast_b(torch.randn(groups, n, k, generator=generator))
    d = torch.full((*planes, rows, n), CANARY, dtype=dtype)
    recipes = ((1, 1, 128) if config.sfb == PER_ROW else None, None, None)
    problem: Problem
    if config.groups == Groups.COUNTS:
        problem = masked_problem((a, sfa), b, d, numbers, None, recipes=recipes)
    else:
        problem = contiguous_problem(
            (a, sfa),
            b,
            d,
            numbers,
            recipes=recipes,
            use_psum_layout=config.groups == Groups.ENDS,
            ensure_zero_padding=zero_padding,
            alignment=alignment,
            of_a=config.sfa,
        )
    unused = ids_of(problem) < 0
    a.view(torch.uint8)[unused] = 0x7F
    sfa[unused] = float("nan")
    return problem


def ids_of(p: Problem) -> Tensor:
    """Group of each row, or -1 for none; with counts the shape is `[groups, rows]`."""
    if isinstance(p, ContiguousProblem):
        return reference.group_ids(p)
    device = p.masked_m.device
    is_row = torch.arange(p.max_m, device=device) < p.masked_m[:, None]
    return torch.where(is_row, torch.arange(p.num_groups, device=device)[:, None], -1)


def run(
    kernel: HostKernel,
    config: GemmConfig,
    problem: Problem,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    layout: Tensor | None = None,
) -> Outcome:
    """Compute a product on simulated SMs and with the reference. `layout` replaces the problem's for the kernel."""
    p = kernels.prepared(grouped_problem(problem))
    buffers = {
        "a": Buffer(flat_memory(p.a)),
        "b": Buffer(flat_memory(p.b)),
        "sfa": Buffer(flat_memory(p.sfa)),
        "sfb": Buffer(flat_memory(p.sfb), alignment=16 if config.sfb == PER_ROW else 4),
        "d": Buffer(p.d, is_writable=True),
        "c": Buffer(p.c if layout is None else layout, alignment=16 if p.groups == Groups.IDS else 4),
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    placed = placed_in(simulation, p)
    launcher = Launcher(
        simulation,
        kernel,
        fp8_gemm.ROWS_SFB_PARAMS,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
    )
    plan = kernels.plan_of(placed, config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(addresses_of(placed))
    result = simulation.result()
    d = result.buffers["d"]
    assert isinstance(d, Tensor)
    result.buffers["d"] = d.view(problem.d.shape)
    return outcome(result, *right_and_allowed(problem, TENSOR_CORES if truncate else EXACT_STEPS))


def right_and_allowed(p: Problem, partial_sums: float) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it: not at all if it is not part of a product."""
    right = p.d.clone()
    if isinstance(p, MaskedProblem):
        reference.masked(p._replace(d=right))
    else:
        reference.contiguous(p._replace(d=right))
    allowed = torch.full_like(right, torch.finfo(torch.float64).tiny, dtype=torch.float64)
    ids = ids_of(p)
    for group in range(p.num_groups):
        rows = ids == group
        if bool(rows.any()):
            a, sfa, d = p.a[rows], p.sfa[rows], right[rows]
            part = DenseProblem(a, sfa, p.b[group], p.sfb[group], d, None, len(a), p.n, p.k, p.of_b)
            of_a = p.of_a if isinstance(p, ContiguousProblem) else PER_ROW
            allowed[rows] = allowed_difference(part, d, partial_sums, of_a)
    return right, allowed
