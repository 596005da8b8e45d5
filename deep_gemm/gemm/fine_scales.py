"""Scales of fewer than 128 columns: each group of columns that share one gets a block of 128 columns of its own.

    [rows, k]  ->  [rows, ceil(k / g), 128]: g columns of each 128, and zeros

Zeros add nothing to the sum of a block, so products of 128 columns give what the definition asks: for each g columns in
order, acc = fma(sum, round(sfa * sfb), acc). It costs a copy of both operands in each call, and 128 / g times the work.
The host reads no value, so any FP32 scale is right, and a captured graph may be replayed with others.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts.scales import exponents_of, words_of
from ..core.check.layout import SCALE_BLOCK, ceil_div
from ..core.check.memory import empty
from ..core.check.recipes import MX, PER_BLOCK, PER_ROW, Scales
from ..core.check.tracing import has_memory
from . import packed

TIMES = {32: 10, 64: 6}
"""How long a call takes beside one with scales of 128 columns: the middle of five products on an H100, in the log."""


def in_whole_blocks(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    of_a: Scales,
    of_b: Scales,
    taken: Collection[Scales | None] = (PER_ROW, PER_BLOCK),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Scales]:
    """Give checked operands whose scales have 128 columns, and how B is scaled then: the same if theirs have.

    `taken` are the scales of B for which there are kernels; others are given to each row. An FP4 weight remains one
    if its scales are words.
    """
    if b.dtype == torch.uint8:
        if sfb.dtype == torch.int32:
            return _beside_words(a, sfa, b, sfb, of_a.columns)
        b = packed.as_e4m3(b)
    columns = min(of_a.columns, of_b.columns)
    if columns == SCALE_BLOCK and of_b in taken:
        return a, sfa, b, sfb, of_b
    if columns == SCALE_BLOCK:
        return a, sfa, b, sfb.detach().repeat_interleave(of_b.rows, -2)[..., : b.shape[-2], :], PER_ROW
    if a.is_cuda and has_memory(a):
        _warn(columns)
    groups, whole = ceil_div(a.shape[-1], columns), Scales(of_b.rows, SCALE_BLOCK)
    if whole not in taken:
        sfb, whole = sfb.repeat_interleave(of_b.rows, -2)[..., : b.shape[-2], :], PER_ROW
    sfa, sfb = (
        sf.detach().repeat_interleave(of.columns // columns, -1)[..., :groups] for sf, of in ((sfa, of_a), (sfb, of_b))
    )
    return _widened("a", a, columns, groups), sfa, _widened("b", b, columns, groups), sfb, whole


def _beside_words(
    a: Tensor, sfa: Tensor, b: Tensor, words: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Scales]:
    """Give the same of operands of which B is FP4, beside scales of A of these columns: a word for each block of B."""
    if columns == SCALE_BLOCK:
        return a, sfa, b, words, MX
    if a.is_cuda and has_memory(a):
        _warn(columns)
    k, of_group = a.shape[-1], columns // packed.COLUMNS
    groups = ceil_div(k, columns)
    exponents = exponents_of(words)[..., : k // packed.COLUMNS].to(torch.uint8)
    exponents = F.pad(exponents, (0, groups * of_group - exponents.shape[-1])).view(*b.shape[:-1], groups, of_group)
    b = _widened("b", b, columns // 2, groups, SCALE_BLOCK // 2).view(torch.uint8)
    return _widened("a", a, columns, groups), sfa.detach(), b, words_of(exponents).squeeze(-1), MX


def _widened(name: str, values: Tensor, columns: int, groups: int, block: int = SCALE_BLOCK) -> Tensor:
    *outer, k = values.shape
    wide = empty(f"{name} in blocks of {SCALE_BLOCK}", (*outer, groups, block), torch.uint8, values.device)
    values, whole = values.detach().view(torch.uint8), k // columns
    wide[..., columns:] = 0
    wide[..., :whole, :columns] = values[..., : whole * columns].view(*outer, whole, columns)
    if whole < groups:
        wide[..., whole, : k % columns] = values[..., whole * columns :]
        wide[..., whole, k % columns : columns] = 0
    return wide.view(torch.float8_e4m3fn).flatten(-2)


@cache
def _warn(columns: int) -> None:
    warnings.warn(
        f"scales of {columns} columns are right but slow: each call copies both operands into blocks of {SCALE_BLOCK} "
        f"columns, and takes about {TIMES[columns]} times as long as with scales of {SCALE_BLOCK}",
        RuntimeWarning,
        stacklevel=2,
    )
