"""The `fp8_gemm` kernel for grouped rows in the simulator, with the source, maps and parameters of a GPU's launch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from deep_gemm.core.check.layout import align
from deep_gemm.core.check.recipes import E2M1, MX, PER_ROW
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.ask.rows import contiguous_problem, masked_problem
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.problem import Problem

from .dense import operands
from .product import ProductTrial, depth, drawn_words, draws, ids_of, near_edge, sizes, tile_of

CANARY = 42.0
"""D's content before a launch: a row that the kernel must not write keeps it."""
Config = GemmConfig | DecodeConfig


def random_problem(config: Config, layout: Sequence[int], n: int, k: int, seed: int = 0, **more: Any) -> Problem:
    """Return the problem of a trial with these arguments."""
    return RowsTrial(config, tuple(layout), seed, n=n, k=k, **more).problem()


@dataclass(frozen=True)
class RowsTrial(ProductTrial):
    """One layout of rows, by ids, ends or counts."""

    kernel: ClassVar[Kernel[Any]] = FP8_GEMM
    config: Any
    layout: tuple[int, ...] = (0, 3, 70)
    seed: int = 0
    schedule: str | None = None
    rows: int | None = None
    """Rows of A; with counts, rows of each group. With ids, A has a row for each id."""
    alignment: int = 128
    n: int = 136
    k: int = 400
    num_groups: int | None = None
    zero_padding: bool = True
    any_scales: bool = False
    """Scales of FP4 weights need not fold, and scales in words may be anything."""
    words: Words = Words.NONE
    """Operands whose scales are words, if either operand has fine scales."""
    is_dependent: bool = False
    weight_is_ready: bool = False

    @classmethod
    def takes(cls, config: Config) -> bool:
        """Accept grouped rows, unless they are activated or stored to addresses."""
        return config.work.groups_rows and not (config.epilogue.activates or config.epilogue.has_row_addresses)

    @classmethod
    def drawn(cls, config: Any, seed: int) -> Self:
        """Draw empty groups, short groups and groups longer than a tile; and columns around a tile's edges."""
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
            zero_padding=draw.random() < 0.5 and config.sfa == PER_ROW,
            any_scales=(config.b == E2M1 or words != Words.NONE) and draw.random() < 0.5,
            words=words,
        )

    @property
    def groups(self) -> int:
        """Count the groups."""
        return self.num_groups or (max(self.layout) + 1 if self.config.work.reads_ids else len(self.layout))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return all dimensions of A and D except the last."""
        by_ids, has_planes = self.config.work.reads_ids, self.config.work.has_planes
        rows = len(self.layout) if by_ids else max(self.layout) if self.rows is None else self.rows
        return (self.groups, rows) if has_planes else (rows,)

    def room(self) -> Tensor:
        """Return D in its state before the launch."""
        return torch.full((*self.shape, self.n), CANARY, dtype=torch.float32 if self.config.is_fp32 else torch.bfloat16)

    def problem(self) -> Problem:
        """Draw random matrices. Rows of A without a group are NaN, both values and scales."""
        generator = torch.Generator().manual_seed(self.seed)
        kinds: dict[str, Any] = {"any_scales": self.any_scales, "words": self.words}
        a, b = operands(self.config, generator, self.shape, self.n, self.k, (self.groups,), **kinds)
        numbers, recipes = torch.tensor(self.layout, dtype=torch.int32), (None, self.config.sfa, self.config.sfb)
        bias = drawn_bias(self.config, self.groups, self.n, generator)
        if self.config.work.has_planes:
            p = masked_problem(a, b, self.room(), numbers, None, recipes=recipes, bias=bias)
        else:
            p = contiguous_problem(
                a,
                b,
                self.room(),
                numbers,
                recipes=recipes,
                use_psum_layout=not self.config.work.reads_ids,
                ensure_zero_padding=self.zero_padding,
                alignment=self.alignment,
                bias=bias,
            )
        unused = ids_of(p) < 0
        a[0].view(torch.uint8)[unused] = 0x7F
        a[1][unused] = -1 if Words.A in self.words else float("nan")
        return p


@dataclass(frozen=True)
class DecodeRowsTrial(RowsTrial):
    """One layout with few rows in each group, for `fp8_gemm_decode`."""

    kernel = FP8_GEMM_DECODE

    @classmethod
    def drawn(cls, config: DecodeConfig, seed: int) -> Self:
        """Draw a problem, and the operands that the previous kernel may still write."""
        draw, found = draws(config, seed), super().drawn(config, seed)
        is_dependent = draw.random() < 0.5
        return replace(found, is_dependent=is_dependent, weight_is_ready=is_dependent and draw.random() < 0.5)


def drawn_bias(config: Any, groups: int, n: int, generator: torch.Generator) -> Tensor | None:
    """Draw biases for the groups, if the kernel adds any."""
    return torch.randn(groups, n, generator=generator, dtype=torch.float32) if config.with_c else None


def drawn_layout(draw: random.Random, config: Config, alignment: int) -> tuple[tuple[int, ...], int | None]:
    """Draw a layout of up to 4 groups for a configuration, and the number of A's rows; None: each row has an id."""
    of_groups = sizes(draw, draw.randint(1, 4), tile_of(config)[0] + 70)
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
