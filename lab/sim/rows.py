"""The `fp8_gemm` kernel for grouped rows in the simulator, with the source, maps and parameters that a GPU gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from deep_gemm.casts.by_torch import cast_by_torch
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.core.check.layout import align
from deep_gemm.core.check.recipes import E2M1, MX, PER_ROW, Scales
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm import reference
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.output import Groups
from deep_gemm.gemm.rows import launch as kernels
from deep_gemm.gemm.rows.check import ContiguousProblem, MaskedProblem, contiguous_problem, masked_problem
from deep_gemm.gemm.rows.launch import grouped_problem

from .dense import Outcome, ProductTrial, outcome, random_packed, varied
from .launcher import How
from .library import HostKernel
from .product import depth, drawn_words, draws, near_edge, partial_sums, run_plan, sizes, stage_of
from .rounding import allowed_difference

CANARY = 42.0
"""D's content before: a row that must not be written still has it afterwards."""
Problem = ContiguousProblem | MaskedProblem
Config = GemmConfig | DecodeConfig


def random_problem(
    config: Config,
    layout: Sequence[int],
    n: int,
    k: int,
    seed: int = 0,
    *,
    rows: int | None = None,
    num_groups: int | None = None,
    alignment: int = 128,
    zero_padding: bool = True,
    any_scales: bool = False,
    words: Words = Words.NONE,
) -> Problem:
    """Make a problem with random data for a configuration. `any_scales`, `words`: as in `dense.random_problem`.

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
    of_a = scales_of_a(config)
    a, sfa = per_token_cast_to_fp8(
        torch.randn(*planes, rows, k, generator=generator, dtype=torch.float32), gran_k=of_a.columns
    )
    sfa = varied(sfa, of_a, generator, Words.A in words, any_scales)
    if config.b == E2M1:
        weights = [random_packed(n, k, generator, any_scales) for _ in range(groups)]
        b = torch.stack([values for values, _ in weights]), torch.stack([scales for _, scales in weights])
    else:
        assert config.sfb is not None
        values, sfb = cast_by_torch(torch.randn(groups, n, k, generator=generator, dtype=torch.float32), *config.sfb)
        b = values, varied(sfb, config.sfb, generator, Words.B in words, any_scales)
    d = torch.full((*planes, rows, n), CANARY, dtype=dtype)
    recipes = (None, config.sfa, None if config.b == E2M1 else config.sfb)
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
        )
    unused = ids_of(problem) < 0
    a.view(torch.uint8)[unused] = 0x7F
    sfa[unused] = -1 if Words.A in words else float("nan")
    return problem


def scales_of_a(config: Config) -> Scales:
    """Say how A is scaled."""
    of_a = PER_ROW if isinstance(config, DecodeConfig) else config.sfa
    assert of_a is not None
    return of_a


def block_m_of(config: Config) -> int:
    """Rows of a tile."""
    return config.block_tokens if isinstance(config, DecodeConfig) else config.block_m


def ids_of(p: Problem) -> Tensor:
    """Group of each row, or -1 for none; with counts the shape is `[groups, rows]`."""
    if isinstance(p, ContiguousProblem):
        return reference.group_ids(p)
    device = p.masked_m.device
    is_row = torch.arange(p.max_m, device=device) < p.masked_m[:, None]
    return torch.where(is_row, torch.arange(p.num_groups, device=device)[:, None], -1)


def run(
    kernel: HostKernel | None,
    config: Config,
    problem: Problem,
    *,
    layout: Tensor | None = None,
    is_dependent: bool = False,
    weight_is_ready: bool = False,
    **how: Unpack[How],
) -> Outcome:
    """Compute a product on simulated SMs and with the reference. `layout` replaces the problem's for the kernel.

    `is_dependent`: the kernel ahead may still run. `weight_is_ready`: it writes neither B nor the layout.
    """
    p = kernels.prepared(grouped_problem(problem), config)
    loads_sfb = isinstance(config, GemmConfig) and config.loads_sfb
    alignments = {"sfb": 16 if loads_sfb else 4, "c": 16 if p.groups == Groups.IDS else 4}
    read, ready = None if layout is None else {"c": layout}, ("b", "c") if weight_is_ready else ()
    stage = stage_of(config, p, alignments, read=read, is_dependent=is_dependent, ready=ready, **how)
    plan_of = partial(kernels.plan_of, weight_is_ready=weight_is_ready)
    result = run_plan(kernel, fp8_gemm_decode.kernel_of(config), config, p, plan_of, stage)
    result.buffers["d"] = result.buffers["d"].reshape(problem.d.shape)
    return outcome(result, *right_and_allowed(problem, partial_sums(how)))


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
            part = DenseProblem(a, sfa, p.b[group], p.sfb[group], d, None, len(a), p.n, p.k, p.of_b, p.of_a)
            allowed[rows] = allowed_difference(part, d, partial_sums)
    return right, allowed


@dataclass(frozen=True)
class RowsTrial(ProductTrial):
    """One layout of rows: ids, ends or counts."""

    kernel = fp8_gemm.KERNEL
    config: GemmConfig
    layout: tuple[int, ...] = (0, 3, 70)
    seed: int = 0
    schedule: str | None = None
    rows: int | None = None
    alignment: int = 128
    n: int = 136
    k: int = 400
    num_groups: int | None = None
    zero_padding: bool = True
    any_scales: bool = False
    """Scales of FP4 weights that do not always fold, or of words that are anything."""
    words: Words = Words.NONE
    """Sides that have fine scales, or are beside them, in words."""
    is_dependent: bool = False
    """The kernel ahead may still run."""
    weight_is_ready: bool = False

    @classmethod
    def takes(cls, config: GemmConfig) -> bool:
        """Take rows that are neither activated nor go to addresses."""
        return config.rows_are_grouped and not (config.activates or config.to_addresses)

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> Self:
        """Draw groups: empty, short and longer than a tile; and columns around a tile's edges."""
        draw = draws(config, seed)
        alignment = draw.choice((1, 16, 128))
        layout, rows = drawn_layout(draw, config, alignment)
        words = Words.NONE if isinstance(config, DecodeConfig) else drawn_words(draw, config)
        n, k = near_edge(draw, config.block_n, 4 if config.is_fp32 else 8, blocks=1), depth(draw, config)
        return cls(
            config,
            layout,
            seed,
            rows=rows,
            alignment=alignment,
            n=n,
            k=align(k, MX.columns) if config.b == E2M1 else k,
            num_sms=draw.randint(1, 5),
            num_groups=5 if config.groups == Groups.IDS else None,
            zero_padding=draw.random() < 0.5 and scales_of_a(config) == PER_ROW,
            any_scales=(config.b == E2M1 or words != Words.NONE) and draw.random() < 0.5,
            words=words,
        )

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices."""
        p = random_problem(
            self.config,
            self.layout,
            self.n,
            self.k,
            self.seed,
            rows=self.rows,
            num_groups=self.num_groups,
            alignment=self.alignment,
            zero_padding=self.zero_padding,
            any_scales=self.any_scales,
            words=self.words,
        )
        ready = self.weight_is_ready
        return run(kernel, self.config, p, is_dependent=self.is_dependent, weight_is_ready=ready, **self.how)


@dataclass(frozen=True)
class DecodeRowsTrial(RowsTrial):
    """One layout of few rows a group, for the kernel of few rows."""

    kernel = fp8_gemm_decode.KERNEL  # type: ignore[assignment]
    config: DecodeConfig  # type: ignore[assignment]

    @classmethod
    def takes(cls, config: DecodeConfig) -> bool:  # type: ignore[override]
        """Take grouped rows."""
        return config.rows_are_grouped

    @classmethod
    def drawn(cls, config: DecodeConfig, seed: int) -> Self:  # type: ignore[override]
        """Draw what else the kernel ahead may still do."""
        draw, found = draws(config, seed), super().drawn(config, seed)  # type: ignore[arg-type]
        is_dependent = draw.random() < 0.5
        return replace(found, is_dependent=is_dependent, weight_is_ready=is_dependent and draw.random() < 0.5)


def drawn_layout(draw: random.Random, config: Config, alignment: int) -> tuple[tuple[int, ...], int | None]:
    """Draw a layout of up to 4 groups as a configuration wants it, and the rows that A has; None: each has an id."""
    of_groups = sizes(draw, draw.randint(1, 4), block_m_of(config) + 70)
    if config.groups == Groups.IDS:
        stretches = [(draw.randint(-1, 4), size) for size in of_groups]
        return tuple(group for group, size in stretches for _ in range(size)) or (-1,), None
    if config.groups == Groups.COUNTS:
        return tuple(of_groups), max(1, *of_groups) + draw.randint(0, 70)
    ends, end = [], 0
    for size in of_groups:
        end = align(end, alignment) + size if size else end
        ends.append(end)
    return tuple(ends), max(end, 1) + draw.randint(0, 200)
