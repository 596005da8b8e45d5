"""The activation between the two products of a gated layer: silu(gate) * up, cast to FP8 in the same kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..casts import cast_rows
from ..casts.by_kernels import as_rows, has_kernels
from ..casts.cast_rows import BLOCKS_OF_GROUPS, MAX_GROUPS, RowCast
from ..casts.fp8 import per_token_cast_to_fp8
from ..casts.gating import Gating, activated, gating_of
from ..casts.rules import UNSCALED, Quantized, Rows, Target, granularity
from ..core.call import FREE_ROWS, Function, Key, never, run
from ..core.check.checks import Operand, cuts_gradient
from ..core.check.layout import SCALE_BLOCK, rows_of_counts, rows_of_groups
from ..core.check.numbers import magnitude
from ..core.check.recipes import PER_ROW, Scales
from ..core.check.tracing import is_dispatched
from ..core.replay import FIXED
from ..core.settings import get_mk_alignment_for_contiguous_layout
from ..gemm import reference
from ..gemm.ask.silu import SILU_COLUMNS, silu_rows_problem
from ..gemm.launch import run as multiply
from .check import ActivationProblem, activation_problem, present


def silu_mul_cast_to_fp8(
    x: Tensor,
    row_weights: Tensor | None = None,
    *,
    masked_m: Tensor | None = None,
    ends: Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = False,
    min_amax: float = 0.0,
    mn_major: bool = False,
    activation: str = "swiglu",
    alpha: float | None = None,
    beta: float | None = None,
    gran_k: int = SCALE_BLOCK,
) -> Quantized:
    """Compute silu(gate) * up of each row, or another activation, and cast it with one scale for each `gran_k` columns.

    - `x`: `[..., m, 2 i]`, BF16, FP16 or FP32: gate in the first i columns, up in the others.
    - `row_weights`: FP32 `[..., m]`, factors of rows.
    - `masked_m`: int32 `[groups]` where x is `[groups, max_m, 2 i]`: only the first `masked_m[g]` rows of group g are
      computed.
    - `ends`: int32 `[groups]` where x is `[m, 2 i]`: only rows of groups are computed. Group g owns the rows from
      `ends[g - 1]`, aligned to `get_mk_alignment_for_contiguous_layout()`, to `ends[g]`.
    - `limit`: gate is clamped to at most `limit`, and up to between -`limit` and `limit`. A NaN stays NaN.
    - `use_ue8m0`, `min_amax`, `mn_major`, `gran_k`: as for `per_token_cast_to_fp8`, which casts the result.
    - `activation`: "swiglu", gate * sigmoid(alpha * gate) * (up + beta), by default alpha 1 and beta 0; or "situ",
      alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta), by default alpha 4 and beta 25; no `limit`.

    The result is values `[..., m, i]` (torch.float8_e4m3fn) and scales `[..., m, ceil(i / gran_k)]` (torch.float32). A
    row outside the groups may hold anything, NaN too, and its result is undefined (on the CPU zeros, scale 1). Every
    step is rounded to FP32: sigmoid(gate), which is zero below 2^-126, then its product with gate, with up and with the
    row's weight, in this order. A GPU's sigmoid has a relative error up to 2^-17 (2^-20 for gates from -10 on), so an
    element may become the FP8 number next to the CPU's. There is no gradient: see `experts`.

    >>> x = torch.tensor([[0.0, 100.0, 3.0, 4.48]])
    >>> values, scales = silu_mul_cast_to_fp8(x)
    >>> values.float().tolist(), round(scales.item(), 4)
    ([[0.0, 448.0]], 1.0)
    """
    gran_k = granularity(gran_k, 0)
    if is_dispatched(x):
        operator = torch.ops.deep_gemm.silu_mul_cast_to_fp8.default
        said = row_weights, masked_m, ends, limit, use_ue8m0, min_amax, mn_major, activation, alpha, beta, gran_k
        return operator(x, *said)  # type: ignore[no-any-return]
    alignment = get_mk_alignment_for_contiguous_layout()
    problem = ActivationProblem(x, row_weights, masked_m, ends, alignment, gating_of(activation, alpha, beta, limit))
    return run(ACTIVATED, *_as_call(problem, use_ue8m0, min_amax, mn_major, gran_k, False))  # type: ignore[no-any-return]


def cast_activated(
    p: ActivationProblem, *, mn_major: bool = False, scaled: Scales | None = PER_ROW, is_dependent: bool = False
) -> Any:
    """Check and compute an activation: `Quantized`, or BF16 `Rows` if it is not `scaled`.

    The host does not wait for the GPU. `is_dependent`: as for `Kernel.run`.
    """
    columns = None if scaled is None else scaled.columns
    return run(ACTIVATED, *_as_call(p, False, 0.0, mn_major, columns, is_dependent))


def _as_call(p: ActivationProblem, *said: Any) -> tuple[tuple[Tensor | None, ...], Key]:
    *tensors, alignment, gating = p
    are_there = [each is not None for each in tensors]
    return tuple(tensors), (*said, alignment, *gating, *are_there)


def _cast_activated(
    x: Tensor, row_weights: Tensor | None, masked_m: Tensor | None, ends: Tensor | None, *said: Any
) -> Rows:
    use_ue8m0, min_amax, mn_major, columns, is_dependent, alignment, *others = said
    p = activation_problem(x, row_weights, masked_m, ends, Gating(*others[: len(Gating._fields)]), alignment)
    with torch.no_grad():
        groups = p.masked_m if p.ends is None else p.ends
        if (
            has_kernels(p.x)
            and (columns is None or columns in BLOCKS_OF_GROUPS)
            and (groups is None or groups.shape[0] <= MAX_GROUPS)
            and (p.x.dim() == 2 or p.masked_m is not None or not mn_major)
        ):
            to = UNSCALED
            if columns is not None:
                to = Target(1, columns, use_ue8m0, magnitude("min_amax", min_amax), mn_major)
            values, scales = to.empty((*p.x.shape[:-1], p.x.shape[-1] // 2), p.x)
            cast = RowCast(
                as_rows(p.x),
                as_rows(values),
                scales if p.masked_m is not None or to.mn_major or scales is None else as_rows(scales),
                to,
                gating=p.gating,
                row_weights=None if p.row_weights is None else p.row_weights.reshape(-1).contiguous(),
                counts=p.masked_m,
                ends=p.ends,
                alignment=p.alignment,
            )
            cast_rows.run(cast, is_dependent=is_dependent)
            return values, scales
        y = activated(p.x, p.gating)
        if p.row_weights is not None:
            y *= p.row_weights[..., None]
        is_defined = None
        if p.masked_m is not None:
            is_defined = rows_of_counts(p.masked_m, p.x.shape[1])[..., None]
        elif p.ends is not None:
            is_defined = rows_of_groups(p.ends, p.x.shape[0], p.alignment)[..., None]
        if is_defined is not None:
            y.masked_fill_(~is_defined, 0)
        if columns is None:
            return y.to(torch.bfloat16), None
        values, scales = per_token_cast_to_fp8(y, use_ue8m0, columns, min_amax=min_amax, mn_major=mn_major)
        return values, scales if is_defined is None else scales.masked_fill_(~is_defined, 1)


ACTIVATED = Function(
    _cast_activated, _cast_activated, present, lambda tensors: cuts_gradient(tensors[:2], ()), free=[FREE_ROWS] * 2
)


def silu_mul(x: Tensor, limit: float | None) -> Tensor:
    """Compute FP32 silu(gate) * up of rows that hold gate and up side by side."""
    return activated(x, Gating(limit=limit))


@torch.no_grad()
def activated_product_of_rows(
    a: Operand,
    b: Operand,
    d: Operand,
    ends: Tensor,
    row_weights: Tensor | None = None,
    *,
    limit: float | None = None,
    gates_apart: bool = False,
) -> None:
    """Multiply rows by gate and up of their groups; activate, weight and cast the products, in one kernel, into `d`.

    `b` `[groups, 2 i, k]` alternates 8 rows of gate and 8 rows of up, but all scales of gate, one for each 128x128
    block, precede all scales of up. `d` holds values `[m, i]` and scales `[m, i / 64]`, m-major, as
    `product_of_rows_by_64` reads them. `ends`: the row that ends each group; rows from the last end on stay unchanged.

    The result is `silu_mul_cast_to_fp8` of the FP32 product, but with a scale for each row and 64 columns.

    With `gates_apart` all rows of gate in b precede the rows of up, and scales are `[m, i / 128]`: the result is
    `silu_mul_cast_to_fp8` of the product in BF16, bit for bit if both are computed on one device.
    """
    run(ACTIVATED_PRODUCT, (a, b, d, ends, row_weights), (limit, gates_apart, row_weights is None))


def _activated_product(
    a: Operand,
    b: Operand,
    d: Operand,
    ends: Tensor,
    row_weights: Tensor | None,
    limit: float | None,
    gates_apart: bool,
    _: bool,
) -> None:
    p = silu_rows_problem(a, b, d, ends, row_weights, limit, gates_apart)
    if p.d.is_cuda:
        multiply(p)
        return
    y = silu_mul(reference.gate_and_up(p), p.limit)
    if p.row_weights is not None:
        y *= p.row_weights[:, None]
    values, scales = per_token_cast_to_fp8(y, gran_k=SCALE_BLOCK if gates_apart else SILU_COLUMNS)
    is_written = (p.ids >= 0)[:, None]
    for to, made in ((p.d.view(torch.uint8), values.view(torch.uint8)), (d[1], scales)):
        to.copy_(torch.where(is_written, made, to))


ACTIVATED_PRODUCT = Function(
    _activated_product,
    _activated_product,
    lambda a, b, d, ends, row_weights: (*a, *b, ends, *present(row_weights), *d),
    never,
    free=[FREE_ROWS, ((0,), (1,)), *[FIXED] * 3, FREE_ROWS, *[((0,), (1,))] * 2],
    outputs=2,
)
