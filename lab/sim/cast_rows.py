"""The `cast_rows` kernel in the simulator, with the source and parameters of a GPU's launch.

A trial has unused rows, filled with NaN, and outputs in larger memory, filled with poison. After the launch, elements
outside of the outputs must be poison, and all others must equal the reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts import cast_rows
from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.cast_rows import PIECES, CastConfig, Groups, RowCast, num_ctas
from deep_gemm.casts.fp8 import cast_checked
from deep_gemm.casts.gating import Gating, activated
from deep_gemm.casts.rules import AMAX_OF_TENSOR, BF16, FP8, PER_TENSOR, Target
from deep_gemm.core.check.layout import UE8M0_PER_WORD, align, ceil_div, rows_of_counts
from deep_gemm.moe.routing import expert_rows

from ..casts import MOST_OTHERS, assert_near, assert_near_bf16, assert_same_bits, hard_quotients, wider, wild
from .launcher import How, Stage, flat_memory
from .library import HostKernel
from .trial import Trial

POISON = 0xA5
EXPERTS = 24
GATINGS = (Gating(), Gating(limit=1.5), Gating(alpha=1.702, beta=1.0, limit=7.0), Gating("situ", 4.0, 25.0))
OF_ACTIVATIONS = 2.0**-7
"""Allowed relative error of a BF16 activation: it may become the number next to the reference's."""
HARD_EXPONENTS = (-125, -117, -101, -97, -60, 0, 100)
"""Hard quotients are multiplied by these powers of two, so that scales of all sizes occur, even tiny ones."""


GIVEN = (0.37, 2.0**-100, 2.0**100, 1e-40, 0.0, -3.0, torch.inf, torch.nan)
"""Scales that a caller may pass."""


def hard(config: CastConfig) -> Tensor:
    """Return the hard quotients of a format, with scales of all sizes."""
    downs = (0, 10) if config.to.format == FP8 else range(-2, 3)
    quotients = hard_quotients(config.to.format.largest, config.to.columns or 128, downs)
    return torch.cat([quotients * 2.0**exponent for exponent in HARD_EXPONENTS])


def run_kernel(
    module: ModuleType,
    kernel: HostKernel | None,
    config: Any,
    p: Any,
    written: Sequence[str],
    aligned: Mapping[str, int],
    grid: Callable[[int], int],
    **how: Unpack[How],
) -> None:
    """Cast like a module's `run`, into the outputs of `p`, on simulated SMs; `grid` gets the number of SMs."""
    tensors = {name: each for name, each in p._asdict().items() if isinstance(each, Tensor)}
    read, to = ({name: tensors[name] for name in tensors if (name in written) == is_written} for is_written in (0, 1))
    stage = Stage(config, read, to, aligned, **how)
    stage.run(module.KERNEL, kernel, lambda _: module.values_of(stage.placed(p)), grid(stage.num_sms))


def run_cast(kernel: HostKernel | None, config: CastConfig, p: RowCast, **how: Unpack[How]) -> None:
    """Cast like `casts.cast_rows.run`."""
    aligned = dict.fromkeys(("x", "values"), 16) if config.vector > 1 else {}
    grid = partial(num_ctas, config, p.x.shape[0], p.k)
    run_kernel(cast_rows, kernel, config, p, ("values", "scales"), aligned, grid, **how)


@dataclass(frozen=True)
class RowTrial(Trial):
    """One configuration, the rows to cast, a seed and a schedule."""

    kernel = cast_rows.KERNEL
    config: CastConfig
    m: int
    k: int
    seed: int = 0
    schedule: str | None = None
    data: str = "wild"
    """`wild`: numbers of every kind; `ordinary`: numbers of one size; `mixed`: both; `hard`: `hard_quotients`;
    `largest`: the largest numbers, including infinities; `far`: gates far below zero, with the largest values of up."""
    is_m_major: bool = True
    min_amax: float = 0.0
    rounds_up: bool = False
    sizes: tuple[int, ...] = ()
    """Counts or ends of groups; m is the total number of rows."""
    alignment: int = 1
    topk: int = 3
    has_weights: bool = False
    gating: Gating = GATINGS[0]
    matrix: Tensor | None = None
    """The matrix x, instead of `data`."""
    padding: int = 16
    """Elements between two rows of values."""
    padding_of_x: int | None = None
    """The padding of x, if it differs from `padding`."""
    scale: float = GIVEN[0]
    """The scale that is passed to a configuration with a given scale."""

    @property
    def to(self) -> Target:
        """Return the cast of a row."""
        return replace(self.config.to, use_ue8m0=self.rounds_up, min_amax=self.min_amax)

    @classmethod
    def drawn(cls, config: CastConfig, seed: int) -> RowTrial:
        """Draw sizes, data, and the settings that a configuration leaves open."""
        draw = random.Random(seed)
        step = max(config.vector, config.to.format.per_byte)
        m, k = draw.randint(1, 60), draw.randint(1, 600 // step) * step
        if config.lanes > 32 and draw.random() < 0.5:  # a row may have more columns than the lanes hold at a time
            m, k = (
                draw.randint(1, 9),
                draw.randint(1, (PIECES + 1) * config.lanes * max(config.vector, 4) // step) * step,
            )
        data = draw.choice(("mixed", "ordinary") if config.activates else ("wild", "mixed", "ordinary"))
        is_m_major, rounds_up, sizes = draw.random() < 0.5, draw.random() < 0.5, tuple[int, ...]()
        rounds_up |= config.to.packs
        if config.groups == Groups.COUNTS:
            sizes = tuple(draw.randint(0, 12) for _ in range(draw.randint(1, 9)))
            m = 12 * len(sizes)
        elif config.groups != Groups.NONE:
            sizes = tuple(sorted(draw.randint(0, m) for _ in range(draw.randint(1, 9))))
        return cls(
            config,
            m,
            k,
            seed,
            data=data,
            is_m_major=is_m_major,
            rounds_up=rounds_up,
            sizes=sizes,
            alignment=draw.choice((1, 8)),
            topk=draw.randint(1, 20),
            has_weights=config.activates and draw.random() < 0.5,
            gating=draw.choice(GATINGS),
            padding=16 if config.vector > 1 else 3,
            scale=draw.choice(GIVEN),
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare values, scales and the memory around them bit for bit; activated values within a step of FP8.

        A GPU approximates exp and the reciprocal; the simulator rounds them correctly.
        """
        p = problem(self)
        run_cast(kernel, self.config, p, **self.how)
        part = verdict(self, p) / MOST_OTHERS
        if part > 1:
            raise ValueError(f"{part * MOST_OTHERS:.2%} of values are next to the right ones")
        return part


def verdict(trial: RowTrial, p: RowCast) -> float:
    """Check the results of a trial's problem. Return the fraction of values that differ from the reference's."""
    right, share = expected(trial), 0.0
    if p.scales is None or right.scales is None:
        assert_near_bf16(p.values, right.values, OF_ACTIVATIONS if trial.config.activates else 0.0)
    elif trial.config.activates:
        share = assert_near((p.values, p.scales), (right.values, right.scales))
    else:
        assert_same_bits((p.values, p.scales), (right.values, right.scales))
    # The memory between rows must be right too.
    for found, its in ((p.values, right.values), (p.scales, right.scales)):
        if found is None or its is None:
            continue
        found.copy_(its)
        same = torch.equal(flat_memory(found).view(torch.uint8), flat_memory(its).view(torch.uint8))
        assert same, "a write outside of the outputs"
    return share


def problem(trial: RowTrial) -> RowCast:
    """Return the kernel's problem, with outputs full of poison."""
    config, to = trial.config, trial.to
    rows = trial.m * trial.topk if config.to_routes else trial.m
    size = to.format.dtype.itemsize
    values = wider(poison(rows, trial.k // to.format.per_byte * size), trial.padding * size, POISON)
    blocks = ceil_div(trial.k, to.columns * (UE8M0_PER_WORD if to.packs else 1)) if to.columns else 1
    if to.rows == 0:
        ctas = num_ctas(config, trial.m, trial.k, 1)
        shape: tuple[int, ...] = (1, ctas * config.teams if config.to == AMAX_OF_TENSOR else 1)
        strides: tuple[int, ...] = (shape[1], 1)
    elif config.groups == Groups.COUNTS:
        most = trial.m // len(trial.sizes)
        shape = (len(trial.sizes), most, blocks)
        pitch = align(most, 4)
        # Groups are further apart than the size of a group's scales.
        strides = (blocks * pitch + 8, 1, pitch) if trial.is_m_major else (most * blocks, blocks, 1)
    else:
        shape, strides = (rows, blocks), (1, align(rows, 4) + 4) if trial.is_m_major else (blocks + 1, 1)
    sizes, scales = torch.tensor(trial.sizes, dtype=torch.int32), strided(shape, strides)
    if config.to == PER_TENSOR:
        scales.fill_(trial.scale)
    return RowCast(
        data(trial),
        values.view(to.format.dtype),
        None if to.format == BF16 else scales.view(torch.int32 if to.packs else torch.float32),
        to,
        gating=trial.gating if config.activates else None,
        row_weights=weights(trial),
        counts=sizes if config.groups == Groups.COUNTS else None,
        ends=sizes if config.groups in (Groups.ENDS, Groups.UNTIL) else None,
        alignment=trial.alignment,
        row_of=row_of(trial) if config.to_routes else None,
    )


def expected(trial: RowTrial) -> RowCast:
    """Return the problem with the right outputs, and poison where the kernel must not write."""
    p = problem(trial)
    y: Tensor = p.x
    if trial.config.activates:
        y = activated(y, trial.gating)
        y = y if p.row_weights is None else y * p.row_weights[:, None]
    if trial.config.to == AMAX_OF_TENSOR:
        assert p.scales is not None
        for part in range(p.scales.shape[1]):
            its = y[part :: p.scales.shape[1]].float()
            p.scales[0, part] = its.abs().masked_fill(~its.isfinite(), 0).amax() if its.numel() else 0.0
        return p
    given = None if trial.to.rows else p.scales
    if trial.to.format == BF16:
        values, scales = y.bfloat16(), None
    else:
        values, scales = cast_checked(y, trial.to) if given is None else cast_blocks(y, trial.to, given)
    row = from_row = is_cast(trial).nonzero().flatten()
    if p.row_of is not None:
        from_row, route = (p.row_of >= 0).nonzero(as_tuple=True)
        row = p.row_of[from_row, route].long()
    p.values.view(torch.uint8)[row] = values.view(torch.uint8)[from_row]
    if given is not None:
        return p
    most = trial.m // max(len(trial.sizes), 1)
    if p.scales is None or scales is None:
        return p
    p.scales[(row // most, row % most) if p.counts is not None else row] = scales[from_row]
    return p


def data(trial: RowTrial) -> Tensor:
    """Make rows of x; unused rows are NaN."""
    dtype, columns = trial.config.dtype, trial.k * (2 if trial.config.activates else 1)
    generator = torch.Generator().manual_seed(trial.seed)
    ordinary = (torch.randn(trial.m, columns, generator=generator, dtype=torch.float32) * 3).to(dtype)
    if trial.matrix is not None:
        x = trial.matrix.clone()
    elif trial.data == "wild":
        x = wild(trial.m, columns, dtype, trial.seed)
    elif trial.data == "hard":
        x = hard(trial.config)
    elif trial.data == "mixed":
        is_wild = torch.rand(trial.m, ceil_div(columns, 128), generator=generator, dtype=torch.float32) < 0.1
        is_wild = is_wild.repeat_interleave(128, 1)[:, :columns]
        x = torch.where(is_wild, wild(trial.m, columns, dtype, trial.seed), ordinary)
    elif trial.data == "largest":
        x = ordinary.sign() * torch.finfo(dtype).max
        x[ordinary < -6] = torch.inf
    elif trial.data == "far":
        x = torch.cat([ordinary[:, : trial.k] - 60, ordinary[:, trial.k :] * 2.0**124], dim=1)
    else:
        x = ordinary
    if trial.config.groups != Groups.NONE:
        x[~is_cast(trial)] = torch.nan
    return wider(x, trial.padding if trial.padding_of_x is None else trial.padding_of_x, 3.0)


def weights(trial: RowTrial) -> Tensor | None:
    """Make a factor for each row: NaN for unused rows."""
    if not trial.has_weights:
        return None
    weight = torch.randn(trial.m, generator=torch.Generator().manual_seed(trial.seed + 1), dtype=torch.float32)
    weight[~is_cast(trial)] = torch.nan
    return weight


def row_of(trial: RowTrial) -> Tensor:
    """Draw routes for each token: one in five has no expert, and the first token has no expert at all."""
    generator = torch.Generator().manual_seed(trial.seed)
    ids = torch.randint(0, EXPERTS, (trial.m, trial.topk), generator=generator)
    ids[torch.rand(ids.shape, generator=generator, dtype=torch.float32) < 0.2] = -1
    if trial.m > 1:
        ids[0] = -1
    return expert_rows(ids, EXPERTS).row_of


def is_cast(trial: RowTrial) -> Tensor:
    """Tell for each row whether a group has it; a group is limited to its own rows, even if sizes are too large."""
    found = torch.zeros(trial.m, dtype=torch.bool)
    if trial.config.groups == Groups.NONE:
        return ~found
    if trial.config.groups == Groups.COUNTS:
        counts = torch.tensor(trial.sizes, dtype=torch.int32)
        return rows_of_counts(counts, trial.m // len(trial.sizes)).flatten()
    if trial.config.groups == Groups.UNTIL:
        found[: max(trial.sizes[-1], 0)] = True
        return found
    before = 0
    for end in trial.sizes:
        found[align(before, trial.alignment) : max(end, 0)] = True
        before = max(end, 0)
    return found


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Allocate scales, filled with NaN."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.full((extent,), torch.nan, dtype=torch.float32).as_strided(shape, strides)


def poison(*shape: int) -> Tensor:
    """Allocate bytes of values, filled with poison."""
    return torch.full(shape, POISON, dtype=torch.uint8)
