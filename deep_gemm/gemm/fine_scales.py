"""FP4 weights with scales that the kernels for FP4 cannot read.

These kernels read words of scales, and scales of A for 128 columns. If B's scales are FP32, B becomes E4M3 with the
same scales. If a scale of A covers fewer columns, the columns under each scale get their own block of 128 columns:

    [rows, k]  ->  [rows, ceil(k / g), 128]: g columns of each 128, and zeros

Zeros add nothing to a block's sum, so products of 128 columns give the defined result. Each call copies both operands,
and multiplies 128 / g times as much. The host reads no value, so scales may have any values, and a captured graph may
be replayed with other scales.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.check.layout import SCALE_BLOCK, ceil_div
from ..core.check.memory import empty
from ..core.check.recipes import PER_ROW, Scales
from ..core.check.tracing import has_memory
from ..core.check.ue8m0 import exponents_of, words_of
from . import packed

TIMES = {32: 10, 64: 6}
"""Factor on a call's time compared with scales of 128 columns: the median of five products on an H100, in the log."""


def as_kernels_take_it(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, of_a: Scales
) -> tuple[Tensor, Tensor, Tensor, Tensor, Scales]:
    """Convert checked operands with an FP4 B to operands that kernels can read; also return the new scales of A."""
    if sfb.dtype != torch.int32:
        return a, sfa, packed.as_e4m3(b), sfb, of_a
    if of_a.columns == SCALE_BLOCK:
        return a, sfa, b, sfb, of_a
    # Copy each group of columns under a scale of A to a block of 128 columns, and make words of B's scales for it.
    columns = of_a.columns
    if a.is_cuda and has_memory(a):
        _warn(columns)
    k, of_group = a.shape[-1], columns // packed.COLUMNS
    groups = ceil_div(k, columns)
    exponents = exponents_of(sfb)[..., : k // packed.COLUMNS].to(torch.uint8)
    exponents = F.pad(exponents, (0, groups * of_group - exponents.shape[-1])).view(*b.shape[:-1], groups, of_group)
    # B is copied first: a product right after a cast loads B while the cast still runs.
    b = _widened("b", b, columns // 2, groups, SCALE_BLOCK // 2).view(torch.uint8)
    return _widened("a", a, columns, groups), sfa.detach(), b, words_of(exponents).squeeze(-1), PER_ROW


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
