"""Casts of columns within groups of rows, for gradients of experts' weights. The host reads no value on a GPU.

Groups of rows follow each other without gaps; `ends` has each group's end. A group's depth in a product is its number
of rows, rounded up to 16: zeros follow its rows. On a GPU, results have memory for the largest depths that the groups
can have, and the memory behind the last group is undefined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call import Function, run
from ..core.check.checks import K_MULTIPLE
from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div
from ..core.check.memory import empty
from . import cast_depths
from .by_kernels import has_kernels, with_rows
from .cast_depths import WEIGHTED, DepthsCast, room_of
from .cast_rows import is_aligned
from .config import INPUTS
from .fp8 import k_grouped_cast_to_fp8, per_token_cast_to_fp8
from .rules import UNSCALED, Quantized, Target, empty_scales, empty_values

COLUMNS, GRADIENT, ACTIVATED = (("columns", "column_scales"), ("values", "scales"), ("activated", "activated_scales"))
"""Names of members of `DepthsCast`: values and their scales."""


class GroupedRows(NamedTuple):
    """Groups of rows that follow each other without gaps."""

    counts: Tensor
    """int32 `[groups]`"""
    ends: Tensor
    """int32 `[groups]`"""
    token_of: Tensor
    """int32 `[rows]`: each row's token. Rows behind the last end may have any token."""

    @property
    def depths(self) -> Tensor:
        """int32 `[groups]`: the depths of groups in a product, which are multiples of 16."""
        return (self.counts + (K_MULTIPLE - 1)) & -K_MULTIPLE


def cast_along_groups(x: Tensor, groups: GroupedRows, row_weights: Tensor | None = None) -> Quantized:
    """Cast the columns of groups of rows. A row is its token in x `[tokens, k]`, times the row's FP32 weight.

    The result equals `k_grouped_cast_to_fp8` of `x[token_of].T` with the groups' depths and m-major scales. Weighted
    rows are first rounded to the type of x; weighted FP16 rows are rounded to FP32.
    """
    return run(ALONG, (x, groups, row_weights))  # type: ignore[no-any-return]


@torch.no_grad()
def _cast_along(x: Tensor, groups: GroupedRows, row_weights: Tensor | None) -> Quantized:
    if x.dtype not in (INPUTS if row_weights is None else WEIGHTED):
        x = x.float()
    rows, k = groups.token_of.shape[0], x.shape[1]
    if has_kernels(x) and rows and k % ADDRESS_ALIGNMENT == 0:
        columns, x = _room(rows, k, groups, x), with_rows(x)
        x = x if is_aligned(x, x) else x.clone(memory_format=torch.contiguous_format)
        cast_depths.run(DepthsCast(x, groups.ends, rows, groups.token_of, row_weights, *columns))
        return columns
    gathered = x[groups.token_of.clamp_min(0).long()]
    if row_weights is not None:
        gathered = (gathered.float() * row_weights[:, None]).to(x.dtype)
    return _along_groups(gathered, groups)


ALONG = Function(
    _cast_along, _cast_along, lambda x, groups, weights: (x, *groups, *([] if weights is None else [weights]))
)


class SiluCasts(NamedTuple):
    """The casts that a backward pass needs for the activation s = silu(gate) * up."""

    rows: Any
    """The gradient of gate and up `[rows, 2 i]`, cast along rows, with m-major scales; or BF16 `Rows`."""
    columns: Quantized | None
    """The gradient of gate and up, cast along the columns of each group."""
    activated: Any
    """s, cast along the columns of each group; or BF16 `Rows` of s times the rows' weights."""
    of_weights: Tensor | None
    """FP32 `[parts, rows]`: parts of the gradient of the rows' weights. The caller adds the parts up."""


def cast_silu_gradient(
    h: Tensor,
    ds: Tensor | None,
    groups: GroupedRows,
    row_weights: Tensor,
    limit: float | None = None,
    *,
    gradient_too: bool = True,
    activation_too: bool = True,
    scaled: bool = True,
) -> SiluCasts:
    """Cast the gradient of gate and up along rows and along the columns of each group, and s along these columns.

    `h`: BF16 `[rows, 2 i]`, gate first. `ds`: BF16 `[rows, i]`, the gradient of s without the rows' FP32 weights; None
    if only s is needed. Every step is rounded to FP32, and numbers to cast are rounded to BF16. `limit` is as in
    `silu_mul_cast_to_fp8`. Rows behind the last end may have any content, and their results are undefined. A GPU adds
    up a weight's gradient in its own order, which is always the same. Without `scaled`, results are BF16.
    """
    said = limit, gradient_too, activation_too, scaled
    return run(SILU, (h, ds, groups, row_weights), said)  # type: ignore[no-any-return]


@torch.no_grad()
def _cast_silu(
    h: Tensor,
    ds: Tensor | None,
    groups: GroupedRows,
    row_weights: Tensor,
    limit: float | None,
    gradient_too: bool,
    activation_too: bool,
    scaled: bool,
) -> SiluCasts:
    rows, both = h.shape
    ds = h[:, : both // 2] if ds is None else ds  # without ds, the caller ignores the weights' gradient
    if has_kernels(h):
        columns = gradient = of_s = sums = None
        if gradient_too:
            columns = _room(rows, both, groups, h) if scaled else None
            gradient = (Target(mn_major=True) if scaled else UNSCALED).empty(h.shape, h)
        if activation_too:
            of_s = _room(rows, both // 2, groups, h) if scaled else UNSCALED.empty(ds.shape, h)
            sums = empty("sums of rows", (ceil_div(both // 2, SCALE_BLOCK), rows), torch.float32, h.device)
        made: dict[str, Any] = {"sums": sums}
        for names, pair in ((COLUMNS, columns), (GRADIENT, gradient), (ACTIVATED, of_s)):
            made |= zip(names, pair or (None, None), strict=True)
        ends = groups.ends if scaled else groups.ends[groups.ends.shape[0] - 1 :]  # only the last end matters
        cast_depths.run(DepthsCast(h, ends, rows, row_weights=row_weights, ds=ds, limit=limit, **made))
        return SiluCasts(gradient, columns, of_s, sums)
    of_rows = columns = of_s = of_weights = None
    is_there = (torch.arange(rows, device=h.device) < groups.ends[-1:])[:, None]
    silu, wide = Silu.of(h.masked_fill(~is_there, 0), limit), ds.float().masked_fill(~is_there, 0)
    weights = row_weights[:, None].masked_fill(~is_there, 0)
    if gradient_too:
        dh = silu.gradient(wide * weights).to(h.dtype)
        of_rows = per_token_cast_to_fp8(dh, mn_major=True) if scaled else (dh, None)
        columns = _along_groups(dh, groups) if scaled else None
    if activation_too:
        of_weights = (silu.s * wide).sum(1)[None]
        of_s = _along_groups(silu.s.to(h.dtype), groups) if scaled else ((silu.s * weights).to(h.dtype), None)
    return SiluCasts(of_rows, columns, of_s, of_weights)


SILU = Function(
    _cast_silu, _cast_silu, lambda h, ds, groups, weights: (h, *groups, weights, *([] if ds is None else [ds]))
)


class Silu(NamedTuple):
    """FP32 s = silu(gate) * up, and the derivatives of s with respect to gate and up."""

    s: Tensor
    of_gate: Tensor
    """The derivative of s with respect to gate."""
    of_up: Tensor

    @classmethod
    def of(cls, h: Tensor, limit: float | None) -> Silu:
        """Compute s and its derivatives for rows of gate and up side by side."""
        gate, up = (half.float() for half in h.chunk(2, dim=1))
        cut_gate = gate if limit is None else gate.clamp_max(limit)
        cut_up = up if limit is None else up.clamp(-limit, limit)
        sigmoid = cut_gate.sigmoid()
        silu = cut_gate * sigmoid
        of_gate, of_up = cut_up * sigmoid * (1 + cut_gate - silu), silu
        if limit is not None:
            of_gate = of_gate.masked_fill(gate > limit, 0)
            of_up = of_up.masked_fill(up.abs() > limit, 0)
        return cls(silu * cut_up, of_gate, of_up)

    def gradient(self, ds: Tensor) -> Tensor:
        """Return the gradient of gate and up, side by side."""
        return torch.cat([ds * self.of_gate, ds * self.of_up], dim=1)


def _room(rows: int, k: int, groups: GroupedRows, x: Tensor) -> Quantized:
    """Allocate values and scales for the columns of all groups."""
    depth, blocks = room_of(rows, groups.ends.numel())
    return empty_values((k * depth,), x), empty_scales((k,), blocks * SCALE_BLOCK, x, mn_major=True)


def _along_groups(rows: Tensor, groups: GroupedRows) -> Quantized:
    """Cast the columns of each group by torch. The host waits for the groups' sizes."""
    counts, depths = groups.counts.tolist(), groups.depths.tolist()
    parts = torch.split(rows, [*counts, len(rows) - sum(counts)])[: len(counts)]
    padded = [F.pad(part, (0, 0, 0, depth - len(part))) for part, depth in zip(parts, depths, strict=True)]
    return k_grouped_cast_to_fp8(torch.cat([rows[:0], *padded]).t(), depths, mn_major=True)
