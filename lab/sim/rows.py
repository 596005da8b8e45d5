"""The `fp8_gemm` kernel for grouped rows in the simulator, with the source, maps and parameters that a GPU gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from typing_extensions import Self

from deep_gemm.casts.by_torch import cast_by_torch
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.core.check.layout import align
from deep_gemm.core.check.recipes import E2M1, MX, PER_ROW, Scales
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.ask.rows import contiguous_problem, masked_problem
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.problem import Problem

from .dense import random_packed, varied
from .library import HostKernel
from .product import Outcome, ProductTrial, depth, drawn_words, draws, ids_of, near_edge, run, sizes

CANARY = 42.0
"""D's content before: a row that must not be written still has it afterwards."""
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
    groups = num_groups or (int(numbers.max()) + 1 if config.work.reads_ids else len(layout))
    if config.work.reads_ids:
        rows = len(layout)
    elif rows is None:
        rows = int(numbers.max())
    planes = [groups] if config.work.has_planes else []
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
    if config.work.has_planes:
        problem = masked_problem((a, sfa), b, d, numbers, None, recipes=recipes)
    else:
        problem = contiguous_problem(
            (a, sfa),
            b,
            d,
            numbers,
            recipes=recipes,
            use_psum_layout=not config.work.reads_ids,
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


@dataclass(frozen=True)
class RowsTrial(ProductTrial):
    """One layout of rows: ids, ends or counts."""

    kernel = FP8_GEMM
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
        return config.work.groups_rows and not (config.epilogue.activates or config.epilogue.has_row_addresses)

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
            num_groups=5 if config.work.reads_ids else None,
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

    kernel = FP8_GEMM_DECODE  # type: ignore[assignment]
    config: DecodeConfig  # type: ignore[assignment]

    @classmethod
    def takes(cls, config: DecodeConfig) -> bool:  # type: ignore[override]
        """Take grouped rows."""
        return config.work.groups_rows

    @classmethod
    def drawn(cls, config: DecodeConfig, seed: int) -> Self:  # type: ignore[override]
        """Draw what else the kernel ahead may still do."""
        draw, found = draws(config, seed), super().drawn(config, seed)  # type: ignore[arg-type]
        is_dependent = draw.random() < 0.5
        return replace(found, is_dependent=is_dependent, weight_is_ready=is_dependent and draw.random() < 0.5)


def drawn_layout(draw: random.Random, config: Config, alignment: int) -> tuple[tuple[int, ...], int | None]:
    """Draw a layout of up to 4 groups as a configuration wants it, and the rows that A has; None: each has an id."""
    of_groups = sizes(draw, draw.randint(1, 4), config.rows_of_tile + 70)
    if config.work.reads_ids:
        stretches = [(draw.randint(-1, 4), size) for size in of_groups]
        return tuple(group for group, size in stretches for _ in range(size)) or (-1,), None
    if config.work.has_planes:
        return tuple(of_groups), max(1, *of_groups) + draw.randint(0, 70)
    ends, end = [], 0
    for size in of_groups:
        end = align(end, alignment) + size if size else end
        ends.append(end)
    return tuple(ends), max(end, 1) + draw.randint(0, 200)
