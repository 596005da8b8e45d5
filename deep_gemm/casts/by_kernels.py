"""Casts on a Hopper GPU: which tensors have kernels, and how a cast becomes launches of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.call import CallPlan, plan_at
from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div
from ..core.gpu import is_hopper
from . import cast_rows, cast_tiles
from .cast_rows import Format, RowCast, is_aligned
from .cast_tiles import Grain, TileCast
from .config import INPUTS
from .rules import Quantized, empty_scales, empty_values

PITCH_LIMIT = 1 << 32
"""Bytes from a row to the next for which kernels that cast rows have room."""


def has_kernels(x: Tensor) -> bool:
    """Tell whether a tensor's casts have kernels: on a Hopper GPU, of every type but FP64."""
    return (
        isinstance(x, Tensor)
        and x.is_cuda
        and x.layout is torch.strided
        and x.dtype in INPUTS
        and x.dim() >= 2
        and x.numel() > 0
        and is_hopper(x.get_device())
    )


def lies_transposed(x: Tensor) -> bool:
    """Tell whether a matrix's columns lie as kernels need rows, and its rows do not."""
    return x.shape[1] > 1 and x.stride(1) != 1 and x.stride(0) == 1


def as_rows(x: Tensor) -> Tensor:
    """See a tensor as a matrix of all its rows, each contiguous; a copy if that is not possible."""
    if x.dim() == 2:
        return with_rows(x)
    m, k = x.shape[:-1].numel(), x.shape[-1]
    return with_rows(with_rows(x).reshape(m, k))


def with_rows(x: Tensor) -> Tensor:
    """Give `[..., m, k]`, or a copy if kernels cannot read its rows: contiguous, within 4 GiB of each other."""
    is_readable = x.stride(-1) == 1 or x.shape[-1] <= 1
    return x if is_readable and x.stride(-2) * x.element_size() < PITCH_LIMIT else x.contiguous()


@torch.no_grad()
def cast_rows_of(
    x: Tensor,
    use_ue8m0: bool,
    min_amax: float,
    mn_major: bool,
    masked_m: Tensor | None = None,
    block: int = SCALE_BLOCK,
    dtype: torch.dtype = torch.float32,
) -> tuple[Quantized, CallPlan | None]:
    """Cast on a GPU, each row's `block` columns with a scale of a type; give the plan if it serves other casts."""
    *outer, k = x.shape
    values, scales = empty_values(x.shape, x), empty_scales(outer, k, x, mn_major=mn_major, gran_k=block, dtype=dtype)
    if x.dim() == 3 and mn_major and masked_m is None:
        for part in zip(x, values, scales, strict=True):
            cast_rows.run(RowCast(as_rows(part[0]), *part[1:], min_amax, use_ue8m0, block=block))
        return (values, scales), None
    rows, of_rows = as_rows(x), scales if masked_m is not None or mn_major else as_rows(scales)
    cast = RowCast(rows, as_rows(values), of_rows, min_amax, use_ue8m0, counts=masked_m, block=block)
    ready = cast_rows.run(cast, ("x", "values", "scales") if masked_m is None else ())
    return (values, scales), plan_at(ready, [(0, rows), (1, values), (2, scales)], (x,), (values, scales))


@torch.no_grad()
def cast_rows_to_fp4(x: Tensor, format: Format, use_ue8m0: bool, block: int) -> Quantized:
    """Cast on a GPU to bytes of two FP4 values, each row's `block` columns with a scale."""
    *rows, k = x.shape
    values = torch.empty((*rows, k // 2), dtype=torch.uint8, device=x.device)
    scales = empty_scales(rows, k, x, mn_major=False, gran_k=block)
    cast = RowCast(as_rows(x), as_rows(values), as_rows(scales), rounds_up=use_ue8m0, block=block, format=format)
    cast_rows.run(cast)
    return values, scales


@torch.no_grad()
def cast_columns_of(
    x: Tensor, use_ue8m0: bool, min_amax: float, mn_major: bool, block: int
) -> tuple[Quantized, CallPlan | None]:
    """Cast the transpose of `x` `[m, k]` on a GPU, each column's `block` rows with a scale; give the plan too."""
    rows = with_rows(x)
    m, k = x.shape
    values, scales = empty_values((k, m), x), empty_scales((k,), m, x, mn_major=mn_major, gran_k=block)
    cast = TileCast(rows, None, None, None, values, scales, min_amax, use_ue8m0, block)
    ready = cast_tiles.run(cast, ("x", "columns", "column_scales"))
    return (values, scales), plan_at(ready, [(0, rows), (1, values), (2, scales)], (x,), (values, scales))


@torch.no_grad()
def cast_groups_of(x: Tensor, ks: Sequence[int], use_ue8m0: bool, min_amax: float, mn_major: bool) -> Quantized:
    """Cast groups of columns on a GPU, each to its part of what all have."""
    m, is_transposed = x.shape[0], lies_transposed(x)
    x = with_rows(x.t()).t() if is_transposed else with_rows(x)
    values = empty_values((x.numel(),), x)
    scales = empty_scales((m,), SCALE_BLOCK * sum(ceil_div(k, SCALE_BLOCK) for k in ks), x, mn_major=mn_major)
    column = block = 0
    for k in ks:
        part, its_values = x[:, column : column + k], values[m * column : m * (column + k)].view(m, k)
        its_scales = scales[:, block : block + ceil_div(k, SCALE_BLOCK)]
        if is_transposed:
            cast_tiles.run(TileCast(part.t(), None, None, None, its_values, its_scales, min_amax, use_ue8m0))
        else:
            cast_rows.run(RowCast(part, its_values, its_scales, min_amax, use_ue8m0))
        column, block = column + k, block + ceil_div(k, SCALE_BLOCK)
    return values, scales


@torch.no_grad()
def cast_both_of(x: Tensor, use_ue8m0: bool, min_amax: float) -> tuple[tuple[Quantized, Quantized], CallPlan | None]:
    """Cast a matrix and its transpose on a GPU; give the plan if it serves other casts."""
    if lies_transposed(x):
        both, _ = cast_both_of(x.t(), use_ue8m0, min_amax)
        return (both[1], both[0]), None
    matrix = with_rows(x)
    m, k = x.shape
    values, scales = empty_values((m, k), x), empty_scales((m,), k, x, mn_major=True)
    columns, of_columns = empty_values((k, m), x), empty_scales((k,), m, x, mn_major=True)
    cast = TileCast(matrix, Grain.ROWS, values, scales, columns, of_columns, min_amax, use_ue8m0)
    ready = cast_tiles.run(cast, ("x", "values", "columns", "scales", "column_scales"))
    made = values, scales, columns, of_columns
    launched = [(0, matrix), (1, values), (3, columns), (2, scales), (4, of_columns)]
    return in_pairs(made), plan_at(ready, launched, (x,), made, result=in_pairs)


def in_pairs(made: tuple[Tensor, ...]) -> tuple[Quantized, Quantized]:
    """Give values and scales of rows, and those of columns."""
    values, scales, columns, of_columns = made
    return (values, scales), (columns, of_columns)


@torch.no_grad()
def cast_tiles_of(
    x: Tensor, grain: Grain, use_ue8m0: bool, min_amax: float, block: int
) -> tuple[Quantized, CallPlan | None]:
    """Cast on a GPU, each `block` rows with a scale for as many columns, or with one for each column.

    Give the plan if it serves other casts.
    """
    given, (*batch, m, k) = x, x.shape
    x = with_rows(x)
    columns = k if grain == Grain.CHANNELS else ceil_div(k, block)
    values = empty_values(x.shape, x)
    scales = torch.empty((*batch, ceil_div(m, block), columns), dtype=torch.float32, device=x.device)
    # Matrices whose blocks are all whole are one matrix.
    rows = x.numel() // k if m % block == 0 else m
    parts = x.reshape(-1, rows, k), values.view(-1, rows, k), scales.view(-1, ceil_div(rows, block), columns)
    changing = ("x", "values", "scales") if len(parts[0]) == 1 else ()
    for one, its_values, its_scales in zip(*parts, strict=True):
        cast = TileCast(one, grain, its_values, its_scales, min_amax=min_amax, rounds_up=use_ue8m0, block=block)
        ready = cast_tiles.run(cast, changing)
    return (values, scales), plan_at(ready, [(0, parts[0]), (1, values), (2, scales)], (given,), (values, scales))


def can_turn_blocks(x: Tensor) -> bool:
    """Tell whether a kernel casts blocks and transposes them: of matrices `[..., m, k]` that lie as it loads them."""
    if not has_kernels(x) or not x.is_contiguous():
        return False
    rows = x.view(-1, x.shape[-1])
    return is_aligned(rows, rows) and x.shape[-2] % ADDRESS_ALIGNMENT == 0


@torch.no_grad()
def cast_turned_blocks_of(x: Tensor) -> tuple[Quantized, CallPlan | None]:
    """Cast 128x128 blocks of matrices `[..., m, k]` on a GPU: values `[..., k, m]`, and scales transposed too.

    Give the plan if it serves other casts.
    """
    cast, turned, scales = _turning(x, None)
    ready, made = cast_tiles.run(cast, ("x", "columns", "scales")), (turned, scales.mT)
    return made, plan_at(ready, [(0, x), (1, turned), (2, scales)], (x,), made)


@torch.no_grad()
def cast_blocks_both_ways_of(x: Tensor) -> tuple[tuple[Quantized, Quantized], CallPlan | None]:
    """Cast blocks as they lie and, from the same read, transposed as by `cast_turned_blocks_of`."""
    values = empty_values(x.shape, x)
    cast, turned, scales = _turning(x, values)
    ready, made = cast_tiles.run(cast, ("x", "values", "columns", "scales")), (values, turned, scales)
    launched = [(0, x), (1, values), (2, turned), (3, scales)]
    return both_ways(made), plan_at(ready, launched, (x,), made, result=both_ways)


def _turning(x: Tensor, values: Tensor | None) -> tuple[TileCast, Tensor, Tensor]:
    """Give the cast, and the transposed values and the scales in order that it makes."""
    *batch, m, k = x.shape
    blocks = ceil_div(m, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    turned = empty_values((*batch, k, m), x)
    scales = torch.empty((*batch, *blocks), dtype=torch.float32, device=x.device)
    of_rows = None if values is None else values.view(-1, k)
    cast = TileCast(x.view(-1, k), Grain.BLOCKS, of_rows, scales.view(-1, blocks[1]), turned.view(-1, k, m))
    return cast, turned, scales


def both_ways(made: tuple[Tensor, ...]) -> tuple[Quantized, Quantized]:
    """Give values in order and transposed, whose scales are a view of the same."""
    values, turned, scales = made
    return (values, scales), (turned, scales.mT)
