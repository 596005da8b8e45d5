"""The CPU backend, and the definition of the arithmetic: what every kernel is compared with.

For each block of k in order, 128 deep, or less if a scale of one side is for fewer columns:

    partial = round_fp32(sum of the block's exact products of E4M3 values)
    acc     = fma(partial, round_fp32(sfa * sfb), acc)                      in FP32, one rounding

An FP4 weight has a scale 2^s for each 32 columns. A block's partial is then summed up group by group, in order:

    partial = fma(round_fp32(sum of the group's exact products), 2^s, partial);   acc = fma(partial, sfa, acc)

If no scale changes along k, no scale is multiplied with a block, and the sum is scaled at last:

    acc = round_fp32(acc + partial);                            D's sum = round_fp32(acc * round_fp32(sfa * sfb))

and at the end D = round_d(acc), or round_d(round_fp32(acc + C)). A tensor core sums a block with fewer bits than the
exact sum here; everything after the partial sums is the same on every machine, to the bit.

FP64 makes that exact with ordinary torch operations. Products of two E4M3 values are multiples of 2^-18 below 2^18, so
128 of them add up within 43 bits, exactly and in any order. A product of two FP32 numbers fits 48 bits, so only
the sum in the fma rounds; `fma_fp32` says how rounding twice is kept from showing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts.gating import Gating, activated
from ..core.check.layout import SCALE_BLOCK, align, ceil_div
from ..core.check.recipes import E2M1, MX, PER_BLOCK, PER_ROW, WHOLE, Scales
from ..core.check.ue8m0 import numbers_of
from ..core.settings import get_batch_invariant
from .ask.silu import INTERLEAVED
from .kinds.epilogues import store
from .kinds.output import values_of
from .packed import as_e4m3
from .problem import Problem, padding_rows

# One tile of FP64 partial sums stays in a core's cache.
TILE_M, TILE_N = 256, 1024
FP32_MIN_NORMAL = 2.0**-126
ELEMENTS_AT_A_TIME = 1 << 24
"""Elements of rows, multiplied by vectors, that are in memory as FP64 at a time."""


@torch.no_grad()
def compute(p: Problem) -> None:
    """Write D.

    The sizes of stacked groups and of groups along k decide shapes here, so the host waits for them if a GPU has them.
    """
    if p.work.groups_rows:
        (_counted_rows if p.work.has_planes else _stacked_rows)(p)
    elif p.work.may_be_empty:
        _depths(p)
    elif p.work.is_summed:
        a, b = (x.transpose(0, 1).flatten(1) for x in (p.a, p.b))
        store(p.d, p.c, product(p, a, None, b, None))
    elif p.work.has_planes:
        for head in range(p.groups):
            of_head = _of(p.a, head), _of(p.sfa, head), _of(p.b, head), _of(p.sfb, head)
            store(p.d[head], _of(p.c, head), product(p, *of_head))
    else:
        p.epilogue.write(p, product(p, p.a, p.sfa, p.b, p.sfb))


def product(p: Problem, a: Tensor, sfa: Any, b: Tensor, sfb: Any) -> Tensor:
    """Compute the FP32 `[m, n]` of one A `[m, k]` and one B `[n, k]` of a problem.

    Sums of BF16 have no defined order: torch's order may change with m. In the batch invariant mode each row is
    multiplied alone, from memory of its own, so that all rows have one order; this takes long.
    """
    if p.of_a is None or p.of_b is None:
        if not get_batch_invariant() or p.work.may_be_empty or not len(a):
            return a.float() @ b.float().mT
        of_b = b.float().contiguous()
        return torch.stack([torch.mv(of_b, row) for row in (row.float().clone() for row in a)])
    if p.of_a == WHOLE:
        ones = sfa.new_ones(1, ceil_div(a.shape[1], PER_ROW.columns))
        sums = block_scaled_product(a, ones.expand(len(a), -1), b, ones.expand(len(b), -1), PER_ROW, PER_ROW)
        return sums * torch.mul(sfa, sfb.mT)
    return block_scaled_product(a, sfa, b, sfb, p.of_b, p.of_a)


def _of(x: Tensor | None, plane: Any) -> Any:
    return None if x is None else x[plane]


def _stacked_rows(p: Problem) -> None:
    """Write the rows of each group, and zeros into the padding that shares a block with them."""
    ids = p.ids
    for group in range(p.groups):
        rows = (ids == group).nonzero().flatten()
        if len(rows):
            made = product(p, p.a[rows], _of(p.sfa, rows), p.b[group], _of(p.sfb, group))
            if p.epilogue.activates:
                made = activated(made.bfloat16(), Gating(limit=p.limit))
            p.d[rows] = (made if p.bias is None else made + p.bias[group]).to(p.d.dtype)
    if p.zero_padding and p.m:
        p.d[padding_rows(ids, p.alignment)] = 0


def _counted_rows(p: Problem) -> None:
    """Write the first rows of each group.

    The host never reads counts on a GPU, because a CUDA graph must be able to capture the call: all rows are computed
    there, and D keeps its rows from a group's count on. On the CPU only the needed rows are computed.
    """
    counts = p.c.tolist() if p.c.is_cpu else [p.m] * p.groups
    for group, rows in enumerate(counts):
        d, sfa = p.d[group, :rows], None if p.sfa is None else p.sfa[group, :rows]
        made = product(p, p.a[group, :rows], sfa, p.b[group], _of(p.sfb, group))
        made = made if p.bias is None else made + p.bias[group]
        is_written = torch.arange(rows, device=d.device) < p.c[group]
        d.copy_(torch.where(is_written[:, None], made.to(d.dtype), d))


def _depths(p: Problem) -> None:
    """Write D[g] = C[g] + A_g @ B_g.T."""
    ks = p.ks if p.ks is not None else tuple(p.ks_tensor.tolist())  # type: ignore[union-attr]
    first_k = first_block = 0
    for group, k in enumerate(ks):
        blocks = slice(first_block, first_block + ceil_div(k, SCALE_BLOCK))
        sfa, sfb = (None if sf is None else sf[:, blocks] for sf in (p.sfa, p.sfb))
        a, b = depth_of(p.a, p.m, first_k, k), depth_of(p.b, p.n, first_k, k)
        store(p.d[group], _of(p.c, group), product(p, a, sfa, b, sfb))
        first_k, first_block = first_k + k, blocks.stop


def depth_of(x: Tensor, rows: int, first: int, k: int) -> Tensor:
    """Give a group's part of an operand. An operand of one dimension holds the values of one group after the other."""
    return x[:, first : first + k] if x.dim() > 1 else x[rows * first : rows * (first + k)].view(rows, k)


@torch.no_grad()
def gate_and_up(p: Problem) -> Tensor:
    """Give the FP32 products `[m, n]` that are activated: of each row, gate and then up; zeros of rows without a group.

    The sizes of the groups decide shapes here, so the host waits for ends on a GPU.
    """
    made = torch.zeros(len(p.a), p.b.shape[1], dtype=torch.float32, device=p.a.device)
    ids = p.ids
    for group in range(len(p.b)):
        rows = (ids == group).nonzero().flatten()
        if len(rows):
            b = p.b[group]
            if not p.epilogue.gates_apart:
                b = b.reshape(-1, 2, INTERLEAVED, b.shape[1]).transpose(0, 1).reshape(b.shape)
            made[rows] = product(p, p.a[rows], _of(p.sfa, rows), b, _of(p.sfb, group))
    return made.bfloat16().float() if p.epilogue.gates_apart else made


def block_scaled_product(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, of_b: Scales = PER_BLOCK, of_a: Scales = PER_ROW
) -> Tensor:
    """FP32 `[m, n]` of A `[m, k]` and B `[n, k]`, accumulated as this module's head defines.

    A block of k that is summed from zero is as deep as a scale of A and one of B reach.
    """
    m, k, n = *a.shape, b.shape[0]
    sfa = numbers_of(sfa, ceil_div(k, of_a.columns))
    if values_of(b) == E2M1:
        return _packed_product(a, sfa, b, sfb)
    sfb = numbers_of(sfb, ceil_div(k, of_b.columns))
    columns_of_block = min(of_a.columns, of_b.columns)
    out = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    for first_n in range(0, n, TILE_N):
        columns = slice(first_n, min(first_n + TILE_N, n))
        b_tile = F.pad(b[columns].double(), (0, 0, 0, align(columns.stop, of_b.rows) - columns.stop))
        sfb_tile = sfb[first_n // of_b.rows : ceil_div(columns.stop, of_b.rows)]
        for first_m in range(0, m, TILE_M):
            rows = slice(first_m, min(first_m + TILE_M, m))
            a_tile = a[rows].double()
            # [rows, columns] -> [rows, scales of B, columns under one scale]
            acc = torch.zeros(len(a_tile), len(sfb_tile), of_b.rows, dtype=torch.float64, device=a.device)
            for first_k in range(0, k, columns_of_block):
                ks = slice(first_k, first_k + columns_of_block)
                partial = (a_tile[:, ks] @ b_tile[:, ks].t()).float().view_as(acc)
                scale = sfa[rows, first_k // of_a.columns, None] * sfb_tile[:, first_k // of_b.columns]  # in FP32
                acc = fma_fp32(partial, scale[..., None], acc)
            out[rows, columns] = acc.view(len(a_tile), -1)[:, : columns.stop - first_n].float()
    return out


def _packed_product(a: Tensor, sfa: Tensor, b: Tensor, words: Tensor) -> Tensor:
    """FP32 `[m, n]` of A `[m, k]` and an FP4 weight: values `[n, k / 2]`, words of scales `[n, ceil(k / 128)]`."""
    k = a.shape[1]
    values, scales = as_e4m3(b).double(), numbers_of(words, k // MX.columns).double()
    acc = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for block in range(ceil_div(k, SCALE_BLOCK)):
        of_block = torch.zeros_like(acc)
        for first in range(block * SCALE_BLOCK, min((block + 1) * SCALE_BLOCK, k), MX.columns):
            ks = slice(first, first + MX.columns)
            partial = (a[:, ks].double() @ values[:, ks].t()).float()
            of_block = fma_fp32(partial, scales[:, first // MX.columns].expand_as(partial), of_block)
        acc = fma_fp32(of_block, sfa[:, block, None], acc)
    return acc.float()


def fma_fp32(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Compute x * y + z with one rounding to FP32, as FP64 numbers; x and y are FP32, z FP32 values in FP64.

    x * y is exact in FP64, so the sum is rounded once to FP64 and once to FP32. The second rounding can go wrong only
    if the first landed exactly between two FP32 numbers. Such a sum is first moved towards the part that was lost.
    """
    x, y = x.double(), y.double()
    total = torch.addcmul(z, x, y)
    # Halfway between two normal numbers the 29 bits that FP32 lacks are 100...0. All subnormal sums are suspects.
    suspect = ((total.view(torch.int64) & 0x1FFF_FFFF) == 0x1000_0000).logical_or_(total.abs() < FP32_MIN_NORMAL)
    # On a GPU all sums are moved and the suspects are kept: picking them would make the host wait for their number.
    at = suspect.nonzero(as_tuple=True) if suspect.is_cpu else (...,)
    moved = _towards_exact(total[at], x[at] * y.expand_as(x)[at], z[at])
    total[at] = torch.where(suspect[at], moved, total[at])
    return total.float().double()


def _towards_exact(total: Tensor, product: Tensor, z: Tensor) -> Tensor:
    """Move sums that lie halfway between two FP32 numbers to the side of the exact product + z."""
    virtual_z = total - product
    lost = (product - (total - virtual_z)) + (z - virtual_z)  # exact: Knuth's two-sum
    units = total * 2.0**149  # in units of the smallest subnormal number
    halfway_subnormal = units - units.floor() == 0.5
    halfway = torch.where(total.abs() < FP32_MIN_NORMAL, halfway_subnormal, True)
    towards = torch.where(lost > 0, torch.inf, -torch.inf).to(total.dtype)
    return torch.where(halfway & (lost != 0) & lost.isfinite(), total.nextafter(towards), total)
