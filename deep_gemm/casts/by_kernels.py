"""Casts on a Hopper GPU: the tensors that kernels can cast, and the launches of each cast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div
from ..core.check.memory import empty
from ..core.gpu import is_hopper
from ..core.shadow import TENSORS
from . import cast_rows, cast_tiles
from .cast_rows import BLOCKS_OF_GROUPS, MAX_GROUPS, RowCast, is_aligned
from .cast_tiles import TileCast
from .config import INPUTS
from .rules import AMAX_OF_TENSOR, PER_BLOCK, PER_ROW, PER_TENSOR, Quantized, Target, empty_scales, empty_values

PITCH_LIMIT = 1 << 32
"""Pitches must be below this number of bytes, because kernels that cast rows store pitches in 32 bits."""


def has_kernels(x: Tensor) -> bool:
    """Tell whether kernels can cast a tensor: it is on a Hopper GPU, not empty, and not FP64."""
    return (
        isinstance(x, TENSORS)
        and x.is_cuda
        and x.layout is torch.strided
        and x.dtype in INPUTS
        and x.dim() >= 2
        and x.numel() > 0
        and is_hopper(x.get_device())
    )


def can_cast(x: Tensor, to: Target, groups: Tensor | None = None) -> bool:
    """Tell whether a kernel can cast x to `to`: all of x, or the rows of groups. `groups`: counts or ends of groups."""
    blocks = to.format.blocks if groups is None else BLOCKS_OF_GROUPS
    return (to.block in blocks or not to.block) and has_kernels(x) and (groups is None or len(groups) <= MAX_GROUPS)


def lies_transposed(x: Tensor) -> bool:
    """Tell whether a matrix is stored transposed: its columns are contiguous, and its rows are not."""
    return x.shape[1] > 1 and x.stride(1) != 1 and x.stride(0) == 1


def as_rows(x: Tensor) -> Tensor:
    """View a tensor as a matrix of all its rows, with contiguous rows. Copy it if no such view exists."""
    if x.dim() == 2:
        return with_rows(x)
    m, k = x.shape[:-1].numel(), x.shape[-1]
    return with_rows(with_rows(x).reshape(m, k))


def with_rows(x: Tensor) -> Tensor:
    """Return x `[..., m, k]` if kernels can read its rows (contiguous, with a pitch below 4 GiB), else a copy."""
    is_readable = x.stride(-1) == 1 or x.shape[-1] <= 1
    return x if is_readable and x.stride(-2) * x.element_size() < PITCH_LIMIT else x.contiguous()


@torch.no_grad()
def cast_of(x: Tensor, to: Target, masked_m: Tensor | None = None) -> Quantized:
    """Cast on a GPU a tensor that `can_cast` accepts."""
    values, scales = to.empty(x.shape, x)
    if to.rows > 1:
        m, k = x.shape[-2:]
        # If no block spans two matrices, all matrices are cast as one.
        rows = x.numel() // k if m % to.rows == 0 else m
        parts = (
            with_rows(x).reshape(-1, rows, k),
            values.view(-1, rows, k),
            scales.view(-1, ceil_div(rows, to.rows), scales.shape[-1]),
        )
        for one, *its in zip(*parts, strict=True):
            cast_tiles.run(TileCast(one, to, *its))
    elif x.dim() == 2 and lies_transposed(x) and not to.packs and to.format.has_nan and to.columns:
        cast_tiles.run(TileCast(with_rows(x.t()), to, columns=values, column_scales=scales))
    elif x.dim() == 3 and to.mn_major and masked_m is None:
        for part in zip(x, values, scales, strict=True):
            cast_rows.run(RowCast(as_rows(part[0]), *part[1:], to))
    else:
        of_rows = scales if masked_m is not None or to.mn_major else as_rows(scales)
        cast_rows.run(RowCast(as_rows(x), as_rows(values), of_rows, to, counts=masked_m))
    return values, scales


@torch.no_grad()
def cast_tensor_of(x: Tensor, to: Target, given: Tensor | None) -> tuple[Tensor, ...]:
    """Cast all of x on a GPU with one scale: a given scale, or the scale of x's largest magnitude."""
    values = empty_values(x.shape, x)
    cast = RowCast(as_rows(x), as_rows(values), values, AMAX_OF_TENSOR)
    if given is not None:
        cast_rows.run(cast._replace(scales=given.view(1, 1), to=PER_TENSOR))
        return (values,)
    config = cast_rows.config_of(cast, 1)
    num_parts = config.teams * cast_rows.num_ctas(config, cast.x.shape[0], cast.k, 1)
    parts, scale = (empty("scales", (1, size), torch.float32, x.device) for size in (num_parts, 1))
    cast_rows.run(cast._replace(scales=parts))
    cast_rows.run(RowCast(parts, empty_values(parts.shape, x), scale, to), is_dependent=True)
    cast_rows.run(cast._replace(scales=scale, to=PER_TENSOR), is_dependent=True)
    return values, scale.view(1)


@torch.no_grad()
def cast_groups_of(x: Tensor, ks: Sequence[int], to: Target) -> Quantized:
    """Cast groups of columns on a GPU. Return one tensor of the values of all groups, and one of their scales."""
    m, is_transposed = x.shape[0], lies_transposed(x)
    x = with_rows(x.t()).t() if is_transposed else with_rows(x)
    values = empty_values((x.numel(),), x)
    scales = empty_scales((m,), SCALE_BLOCK * sum(ceil_div(k, SCALE_BLOCK) for k in ks), x, mn_major=to.mn_major)
    column = block = 0
    for k in ks:
        part, its_values = x[:, column : column + k], values[m * column : m * (column + k)].view(m, k)
        its_scales = scales[:, block : block + ceil_div(k, SCALE_BLOCK)]
        if is_transposed:
            cast_tiles.run(TileCast(part.t(), to, columns=its_values, column_scales=its_scales))
        else:
            cast_rows.run(RowCast(part, its_values, its_scales, to))
        column, block = column + k, block + ceil_div(k, SCALE_BLOCK)
    return values, scales


@torch.no_grad()
def cast_both_of(x: Tensor, to: Target) -> tuple[Quantized, Quantized]:
    """Cast a matrix and its transpose on a GPU."""
    if lies_transposed(x):
        columns, rows = cast_both_of(x.t(), to)
        return rows, columns
    rows, columns = to.empty(x.shape, x), to.empty(x.shape[::-1], x)
    cast_tiles.run(TileCast(with_rows(x), to, *rows, *columns))
    return rows, columns


@torch.no_grad()
def cast_turned_rows_of(x: Tensor, amaxes: Tensor) -> Quantized:
    """Cast the transpose of a matrix `[m, k]` on a GPU, with a scale for each of its k rows. `amaxes`: FP32 `[k]`."""
    values, scales = Target(1, 0).empty(x.shape[::-1], x)
    cast_tiles.run(TileCast(with_rows(x), PER_ROW, columns=values, column_scales=scales, column_amaxes=amaxes))
    return values, scales


def can_turn_blocks(x: Tensor) -> bool:
    """Tell whether a kernel can cast and transpose blocks of `[..., m, k]`: x is contiguous with aligned rows."""
    if not has_kernels(x) or not x.is_contiguous():
        return False
    rows = x.view(-1, x.shape[-1])
    return is_aligned(rows, rows) and x.shape[-2] % ADDRESS_ALIGNMENT == 0


@torch.no_grad()
def cast_turned_blocks_of(x: Tensor, *, in_order: bool) -> tuple[Tensor, ...]:
    """Cast 128x128 blocks of matrices `[..., m, k]` on a GPU. Return values `[..., k, m]` and scales.

    `in_order`: also return values `[..., m, k]`, ahead of the transposed values. The kernel reads x only once.
    """
    *batch, m, k = x.shape
    turned = empty_values((*batch, k, m), x)
    scales = empty_scales((*batch, ceil_div(m, SCALE_BLOCK)), k, x, mn_major=False)
    cast = TileCast(x.view(-1, k), PER_BLOCK, None, scales.view(-1, scales.shape[-1]), turned.view(-1, k, m))
    if not in_order:
        cast_tiles.run(cast)
        return turned, scales
    values = empty_values(x.shape, x)
    cast_tiles.run(cast._replace(values=values.view(-1, k)))
    return values, turned, scales
