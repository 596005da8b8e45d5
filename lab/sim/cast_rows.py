"""The `cast_rows` kernel in the simulator, with the source and parameters that a GPU gets.

A trial has rows that must not matter, full of NaN, and outputs with room around them, full of poison: what is not to be
written must be poison afterwards, and everything else as the reference casts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts import cast_rows
from deep_gemm.casts.cast_rows import CastConfig, Format, Groups, RowCast, Stored, num_ctas
from deep_gemm.casts.fp4 import FP4_MAX, MXFP4_MAX, cast_by_torch
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.casts.gating import Gating, activated
from deep_gemm.casts.rules import FP8_MAX, Quantized
from deep_gemm.core.check.layout import UE8M0_PER_WORD, align, ceil_div
from deep_gemm.moe.routing import expert_rows

from ..casts import MOST_OTHERS, assert_near, assert_same_bits, hard_quotients, wider, wild
from .launcher import How, Stage, flat_memory
from .library import HostKernel
from .trial import Trial

POISON = 0xA5
OUTPUTS = ("values", "scales")
INPUTS = ("x", "row_weights", "counts", "ends", "row_of")
EXPERTS = 24
GATINGS = (Gating(), Gating(limit=1.5), Gating(alpha=1.702, beta=1.0, limit=7.0), Gating("situ", 4.0, 25.0))
HARD_EXPONENTS = (-125, -117, -101, -97, -60, 0, 100)
"""Powers of two by which the hard quotients are multiplied: scales of all sizes, the tiny ones too."""
LARGEST = {Format.FP8: FP8_MAX, Format.FP4: FP4_MAX, Format.MXFP4: MXFP4_MAX}
"""Largest magnitude of a block over its scale."""


def hard(config: CastConfig) -> Tensor:
    """Give the hard quotients of a format, each at scales of all sizes."""
    downs = (0, 10) if config.format == Format.FP8 else range(-2, 3)
    quotients = hard_quotients(LARGEST[config.format], config.block, downs)
    return torch.cat([quotients * 2.0**exponent for exponent in HARD_EXPONENTS])


def run_cast(kernel: HostKernel | None, config: CastConfig, p: RowCast, **how: Unpack[How]) -> None:
    """Cast as `casts.cast_rows.run` does, into the outputs of `p`, on simulated SMs."""
    read, written = ({name: getattr(p, name) for name in names} for names in (INPUTS, OUTPUTS))
    aligned = dict.fromkeys(("x", "values"), 16) if config.vector > 1 else {}
    stage = Stage(config, read, written, aligned, **how)
    grid = num_ctas(config, p.x.shape[0], p.k, stage.num_sms)
    stage.run(cast_rows.KERNEL, kernel, lambda _, at: cast_rows.params_of(p._replace(**at)), grid)


@dataclass(frozen=True)
class RowTrial(Trial):
    """One configuration, what it casts, a seed and a schedule."""

    kernel = cast_rows.KERNEL
    config: CastConfig
    m: int
    k: int
    seed: int = 0
    schedule: str | None = None
    data: str = "wild"
    """`wild`: of everything there is; `ordinary`: of one size; `mixed`: blocks of both; `hard`: `hard_quotients`;
    `largest`: the largest numbers, infinities among them; `far`: gates far below zero, and the largest for up."""
    is_m_major: bool = True
    min_amax: float = 0.0
    rounds_up: bool = False
    sizes: tuple[int, ...] = ()
    """Counts or ends of groups; m is the number of all rows."""
    alignment: int = 1
    topk: int = 3
    has_weights: bool = False
    gating: Gating = GATINGS[0]
    matrix: Tensor | None = None
    """x itself, instead of `data`."""
    padding: int = 16
    """How much further apart rows of values lie than they are long."""
    padding_of_x: int | None = None
    """The same of x, if it is not that of values."""

    @classmethod
    def drawn(cls, config: CastConfig, seed: int) -> RowTrial:
        """Draw sizes, data, and what a configuration leaves open."""
        draw = random.Random(seed)
        step = max(config.vector, 2) if config.format != Format.FP8 else config.vector
        m, k = draw.randint(1, 60), draw.randint(1, 600 // step) * step
        data = draw.choice(("mixed", "ordinary") if config.activates else ("wild", "mixed", "ordinary"))
        is_m_major, rounds_up, sizes = draw.random() < 0.5, draw.random() < 0.5, tuple[int, ...]()
        rounds_up |= config.stored == Stored.WORDS
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
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare values, scales and what lies around: to the bit, or values within a step of FP8 if activated.

        A GPU has approximations of exp and of the reciprocal, which the simulator rounds.
        """
        p = problem(self)
        run_cast(kernel, self.config, p, **self.how)
        part = verdict(self, p) / MOST_OTHERS
        if part > 1:
            raise ValueError(f"{part * MOST_OTHERS:.2%} of values are beside the right ones")
        return part


def ragged(which: CastConfig) -> list[RowTrial]:
    """Columns, rows and groups that no number of a configuration divides, and the smallest ones."""
    trials = _ragged(which)
    return [replace(trial, rounds_up=True) for trial in trials] if which.stored == Stored.WORDS else trials


def _ragged(which: CastConfig) -> list[RowTrial]:
    step = which.vector
    padding = 16 if step > 1 else 3
    if which.groups == Groups.COUNTS:
        sizes: tuple[int, ...] = (0, 12, 5, 1, 11)
        return [
            RowTrial(which, 60, 264 + step, 1, sizes=sizes, padding=padding),
            RowTrial(which, 3, step, 2, sizes=(1, 0, 1), padding=padding),
        ]
    if which.groups == Groups.ENDS:
        return [
            RowTrial(which, 60, 264 + step, 1, sizes=(0, 5, 5, 17, 33, 50), alignment=8, padding=padding),
            RowTrial(which, 11, 128, 2, sizes=(3, 3, 9), padding=padding),
            RowTrial(which, 1, step, 3, sizes=(1,), alignment=128, padding=padding),
        ]
    if which.groups == Groups.UNTIL:
        return [
            RowTrial(which, 60, 264 + step, 1, sizes=(0, 5, 5, 17, 50), padding=padding),
            RowTrial(which, 3, step, 2, sizes=(3,), padding=padding),
        ]
    if which.format != Format.FP8:
        step = max(step, 2)
    return [
        RowTrial(which, 2 * which.rows + 3, 5 * 128 + 3 * step, 1, padding=padding),
        RowTrial(which, 1, step, 2, padding=0, topk=1),
        RowTrial(which, 2, 128, 3, padding=padding),
        RowTrial(which, 5, 129 * step, 4, padding=padding),
    ]


def verdict(trial: RowTrial, p: RowCast) -> float:
    """Check what came of a trial's problem. Give the share of values that are not the reference's."""
    right = expected(trial)
    if trial.config.activates:
        share = assert_near((p.values, p.scales), (right.values, right.scales))
    else:
        share = 0.0
        assert_same_bits((p.values, p.scales), (right.values, right.scales))
    # What lies between rows too.
    for found, its in ((p.values, right.values), (p.scales, right.scales)):
        found.copy_(its)
        same = torch.equal(flat_memory(found).view(torch.uint8), flat_memory(its).view(torch.uint8))
        assert same, "a write outside of the outputs"
    return share


def problem(trial: RowTrial) -> RowCast:
    """Give the kernel's problem; outputs are full of poison."""
    x = data(trial)
    rows = trial.m * trial.topk if trial.config.to_routes else trial.m
    blocks, groups = ceil_div(trial.k, trial.config.block), len(trial.sizes)
    row_bytes = trial.k // 2 if trial.config.format != Format.FP8 else trial.k
    values = wider(torch.full((rows, row_bytes), POISON, dtype=torch.uint8), trial.padding, POISON)
    if trial.config.groups == Groups.COUNTS:
        shape: tuple[int, ...] = (groups, trial.m // groups, blocks)
        pitch = align(trial.m // groups, 4)
        # Groups that lie further apart than a group's scales need.
        strides: tuple[int, ...] = (
            (blocks * pitch + 8, 1, pitch) if trial.is_m_major else (shape[1] * blocks, blocks, 1)
        )
    else:
        shape = (rows, blocks)
        if trial.config.stored == Stored.WORDS:
            shape = (rows, ceil_div(blocks, UE8M0_PER_WORD))
        strides = (1, align(rows, 4) + 4) if trial.is_m_major else (shape[1] + 1, 1)
    sizes = torch.tensor(trial.sizes, dtype=torch.int32)
    return RowCast(
        x,
        values if trial.config.format != Format.FP8 else values.view(torch.float8_e4m3fn),
        strided(shape, strides).view(torch.int32 if trial.config.stored == Stored.WORDS else torch.float32),
        trial.min_amax,
        trial.rounds_up,
        gating=trial.gating if trial.config.activates else None,
        row_weights=weights(trial),
        counts=sizes if trial.config.groups == Groups.COUNTS else None,
        ends=sizes if trial.config.groups in (Groups.ENDS, Groups.UNTIL) else None,
        alignment=trial.alignment,
        row_of=row_of(trial) if trial.config.to_routes else None,
        block=trial.config.block,
        format=trial.config.format,
    )


def expected(trial: RowTrial) -> RowCast:
    """Give the problem with outputs as they must become, poison where nothing is written."""
    p = problem(trial)
    y: Tensor = p.x
    if trial.config.activates:
        y = activated(y, trial.gating)
        y = y if p.row_weights is None else y * p.row_weights[:, None]
    values, scales = cast_by_reference(trial, y)
    bytes_of_values = p.values.view(torch.uint8)
    if p.row_of is not None:
        token, route = (p.row_of >= 0).nonzero(as_tuple=True)
        row = p.row_of[token, route].long()
        bytes_of_values[row] = values.view(torch.uint8)[token]
        p.scales[row] = scales[token]
        return p
    row = is_cast(trial).nonzero().flatten()
    bytes_of_values[row] = values.view(torch.uint8)[row]
    if p.counts is not None:
        most = trial.m // len(trial.sizes)
        p.scales[row // most, row % most] = scales[row]
    else:
        p.scales[row] = scales[row]
    return p


def cast_by_reference(trial: RowTrial, y: Tensor) -> Quantized:
    """Cast all rows as the CPU does."""
    if trial.config.format != Format.FP8:
        return cast_by_torch(y, trial.rounds_up, trial.config.block, LARGEST[trial.config.format])
    is_packed = trial.config.stored == Stored.WORDS
    said = trial.rounds_up, trial.config.block
    return per_token_cast_to_fp8(y, *said, min_amax=trial.min_amax, use_packed_ue8m0=is_packed)


def data(trial: RowTrial) -> Tensor:
    """Make rows of x; those that must not matter are NaN."""
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
    """Make factors of rows; of those that must not matter NaN."""
    if not trial.has_weights:
        return None
    weight = torch.randn(trial.m, generator=torch.Generator().manual_seed(trial.seed + 1), dtype=torch.float32)
    weight[~is_cast(trial)] = torch.nan
    return weight


def row_of(trial: RowTrial) -> Tensor:
    """Draw routes of each token, a fifth of them without an expert; the first token has none at all."""
    generator = torch.Generator().manual_seed(trial.seed)
    ids = torch.randint(0, EXPERTS, (trial.m, trial.topk), generator=generator)
    ids[torch.rand(ids.shape, generator=generator, dtype=torch.float32) < 0.2] = -1
    if trial.m > 1:
        ids[0] = -1
    return expert_rows(ids, EXPERTS).row_of


def is_cast(trial: RowTrial) -> Tensor:
    """Tell of each row whether a group has it, whatever sizes say: none reaches out of its rows."""
    found = torch.zeros(trial.m, dtype=torch.bool)
    if trial.config.groups == Groups.NONE:
        return ~found
    if trial.config.groups == Groups.COUNTS:
        most = trial.m // len(trial.sizes)
        for group, count in enumerate(trial.sizes):
            found[group * most : group * most + min(max(count, 0), most)] = True
        return found
    if trial.config.groups == Groups.UNTIL:
        found[: max(trial.sizes[-1], 0)] = True
        return found
    before = 0
    for end in trial.sizes:
        found[align(before, trial.alignment) : max(end, 0)] = True
        before = max(end, 0)
    return found


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Make room for scales, all of it NaN."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.full((extent,), torch.nan, dtype=torch.float32).as_strided(shape, strides)
