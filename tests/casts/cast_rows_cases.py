"""Cases of the cast_rows kernel in the simulator: what is cast, and the verdict on what came of it.

A case has rows that must not matter, full of NaN, and outputs with room around them, full of poison: what is not to be
written must be poison afterwards, and everything else as the reference casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.casts import cast_rows
from deep_gemm.casts.cast_rows import CastConfig, Groups, RowCast
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.layout import align, ceil_div
from deep_gemm.moe.activation import silu_mul
from deep_gemm.moe.routing import expert_rows
from lab.casts import assert_near, hard_quotients, wild
from lab.sim import HostKernel
from lab.sim import cast_rows as sim
from lab.sim.launcher import flat_memory

EXPERTS = 24
HARD_EXPONENTS = (-125, -117, -101, -97, -60, 0, 100)
"""Powers of two by which the hard quotients are multiplied: scales of all sizes, the tiny ones too."""
HARD_SHAPE = (len(HARD_EXPONENTS) * hard_quotients().shape[0], 128)


@dataclass(frozen=True)
class Case:
    """One configuration, what it casts, a seed and a schedule. It is a trial of mutations too."""

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
    limit: float | None = None
    matrix: Tensor | None = None
    """x itself, instead of `data`."""
    padding: int = 16
    """How much further apart rows of x and of values lie than they are long."""
    num_sms: int = 2

    def headers(self) -> dict[str, str]:
        """Everything that the unbroken kernel includes."""
        return cast_rows.KERNEL.headers(self.config)

    def run(self, headers: Mapping[str, str]) -> None:
        """Compile with these headers, and check."""
        check(self, sim.compile_config(self.config, headers))


def ragged(which: CastConfig) -> list[Case]:
    """Columns, rows and groups that no number of a configuration divides, and the smallest ones."""
    step = which.vector
    padding = 16 if step > 1 else 3
    if which.groups == Groups.COUNTS:
        sizes: tuple[int, ...] = (0, 12, 5, 1, 11)
        return [
            Case(which, 60, 264 + step, 1, sizes=sizes, padding=padding),
            Case(which, 3, step, 2, sizes=(1, 0, 1), padding=padding),
        ]
    if which.groups == Groups.ENDS:
        return [
            Case(which, 60, 264 + step, 1, sizes=(0, 5, 5, 17, 33, 50), alignment=8, padding=padding),
            Case(which, 11, 128, 2, sizes=(3, 3, 9), padding=padding),
            Case(which, 1, step, 3, sizes=(1,), alignment=128, padding=padding),
        ]
    if which.groups == Groups.UNTIL:
        return [
            Case(which, 60, 264 + step, 1, sizes=(0, 5, 5, 17, 50), padding=padding),
            Case(which, 3, step, 2, sizes=(3,), padding=padding),
        ]
    return [
        Case(which, 2 * which.rows + 3, 5 * 128 + 3 * step, 1, padding=padding),
        Case(which, 1, step, 2, padding=0, topk=1),
        Case(which, 2, 128, 3, padding=padding),
        Case(which, 5, 129 * step, 4, padding=padding),
    ]


def check(case: Case, kernel: HostKernel) -> float:
    """Run a case. Give the share of values that are not the reference's, which is 0 unless rows are activated."""
    p = problem(case)
    sim.run_cast(kernel, case.config, p, num_sms=case.num_sms, seed=case.seed, schedule=case.schedule)
    return verdict(case, p)


def verdict(case: Case, p: RowCast) -> float:
    """Check what came of a case's problem. Give the share of values that are not the reference's."""
    right = expected(case)
    if case.config.activates:
        share = assert_near((p.values, p.scales), (right.values, right.scales))
    else:
        share = 0.0
        assert_same((p.values, p.scales), (right.values, right.scales))
    # What lies between rows too.
    for found, its in ((p.values, right.values), (p.scales, right.scales)):
        found.copy_(its)
        same = torch.equal(flat_memory(found).view(torch.uint8), flat_memory(its).view(torch.uint8))
        assert same, "a write outside of the outputs"
    return share


def problem(case: Case) -> RowCast:
    """What the kernel is given; outputs are full of poison."""
    x = data(case)
    rows = case.m * case.topk if case.config.to_routes else case.m
    blocks, groups = ceil_div(case.k, 128), len(case.sizes)
    if case.config.groups == Groups.COUNTS:
        shape: tuple[int, ...] = (groups, case.m // groups, blocks)
        pitch = align(case.m // groups, 4)
        # Groups that lie further apart than a group's scales need.
        strides: tuple[int, ...] = (blocks * pitch + 8, 1, pitch) if case.is_m_major else (shape[1] * blocks, blocks, 1)
    else:
        shape = (rows, blocks)
        strides = (1, align(rows, 4) + 4) if case.is_m_major else (blocks + 1, 1)
    sizes = torch.tensor(case.sizes, dtype=torch.int32)
    return RowCast(
        x,
        wider(torch.full((rows, case.k), sim.POISON, dtype=torch.uint8), case.padding, sim.POISON).view(
            torch.float8_e4m3fn
        ),
        strided(shape, strides),
        case.min_amax,
        case.rounds_up,
        activates=case.config.activates,
        limit=case.limit,
        row_weights=weights(case),
        counts=sizes if case.config.groups == Groups.COUNTS else None,
        ends=sizes if case.config.groups in (Groups.ENDS, Groups.UNTIL) else None,
        alignment=case.alignment,
        row_of=row_of(case) if case.config.to_routes else None,
    )


def expected(case: Case) -> RowCast:
    """The problem with outputs as they must become, poison where nothing is written."""
    p = problem(case)
    y: Tensor = p.x
    if case.config.activates:
        y = silu_mul(y, case.limit)
        y = y if p.row_weights is None else y * p.row_weights[:, None]
    values, scales = per_token_cast_to_fp8(y, case.rounds_up, min_amax=case.min_amax)
    bytes_of_values = p.values.view(torch.uint8)
    if p.row_of is not None:
        token, route = (p.row_of >= 0).nonzero(as_tuple=True)
        row = p.row_of[token, route].long()
        bytes_of_values[row] = values.view(torch.uint8)[token]
        p.scales[row] = scales[token]
        return p
    row = is_cast(case).nonzero().flatten()
    bytes_of_values[row] = values.view(torch.uint8)[row]
    if p.counts is not None:
        most = case.m // len(case.sizes)
        p.scales[row // most, row % most] = scales[row]
    else:
        p.scales[row] = scales[row]
    return p


def data(case: Case) -> Tensor:
    """Rows of x; those that must not matter are NaN."""
    dtype, columns = case.config.dtype, case.k * (2 if case.config.activates else 1)
    generator = torch.Generator().manual_seed(case.seed)
    ordinary = (torch.randn(case.m, columns, generator=generator) * 3).to(dtype)
    if case.matrix is not None:
        x = case.matrix.clone()
    elif case.data == "wild":
        x = wild(case.m, columns, dtype, case.seed)
    elif case.data == "hard":
        x = torch.cat([hard_quotients() * 2.0**exponent for exponent in HARD_EXPONENTS])
    elif case.data == "mixed":
        is_wild = torch.rand(case.m, ceil_div(columns, 128), generator=generator) < 0.1
        is_wild = is_wild.repeat_interleave(128, 1)[:, :columns]
        x = torch.where(is_wild, wild(case.m, columns, dtype, case.seed), ordinary)
    elif case.data == "largest":
        x = ordinary.sign() * torch.finfo(dtype).max
        x[ordinary < -6] = torch.inf
    elif case.data == "far":
        x = torch.cat([ordinary[:, : case.k] - 60, ordinary[:, case.k :] * 2.0**124], dim=1)
    else:
        x = ordinary
    if case.config.groups != Groups.NONE:
        x[~is_cast(case)] = torch.nan
    return wider(x, case.padding, 3.0)


def weights(case: Case) -> Tensor | None:
    """Factors of rows; of those that must not matter NaN."""
    if not case.has_weights:
        return None
    weight = torch.randn(case.m, generator=torch.Generator().manual_seed(case.seed + 1))
    weight[~is_cast(case)] = torch.nan
    return weight


def row_of(case: Case) -> Tensor:
    """Routes of each token, a fifth of them without an expert; the first token has none at all."""
    generator = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(0, EXPERTS, (case.m, case.topk), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    if case.m > 1:
        ids[0] = -1
    return expert_rows(ids, EXPERTS).row_of


def is_cast(case: Case) -> Tensor:
    """Tell of each row whether a group has it, whatever sizes say: none reaches out of its rows."""
    found = torch.zeros(case.m, dtype=torch.bool)
    if case.config.groups == Groups.NONE:
        return ~found
    if case.config.groups == Groups.COUNTS:
        most = case.m // len(case.sizes)
        for group, count in enumerate(case.sizes):
            found[group * most : group * most + min(max(count, 0), most)] = True
        return found
    if case.config.groups == Groups.UNTIL:
        found[: max(case.sizes[-1], 0)] = True
        return found
    before = 0
    for end in case.sizes:
        found[align(before, case.alignment) : max(end, 0)] = True
        before = max(end, 0)
    return found


def wider(x: Tensor, padding: int, filling: float) -> Tensor:
    """The same rows further apart."""
    room = torch.full((x.shape[0], x.shape[1] + padding), filling, dtype=x.dtype)
    room[:, : x.shape[1]] = x
    return room[:, : x.shape[1]]


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Room for scales, all of it NaN."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.full((extent,), torch.nan).as_strided(shape, strides)


def assert_same(found: Quantized, right: Quantized) -> None:
    """Values and scales are those of the reference, to the bit."""
    assert torch.equal(found[1].contiguous().view(torch.int32), right[1].contiguous().view(torch.int32)), "other scales"
    assert torch.equal(found[0].view(torch.uint8), right[0].view(torch.uint8)), "other values"
