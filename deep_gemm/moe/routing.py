"""Rows of experts: stack tokens' routes by expert, copy tokens into these rows, and sum the rows up for each token.

The host does not wait for the GPU, so a CUDA graph is captured once and replayed with other routes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..casts import cast_rows, lay_scales
from ..casts.by_kernels import as_rows, has_kernels
from ..casts.cast_rows import BLOCKS_OF_GROUPS, RowCast
from ..casts.fp8 import per_token_cast_to_fp8
from ..casts.rules import UNSCALED, Quantized, Rows, Target, granularity
from ..core.call import FREE_ROWS, Function, never, run
from ..core.check.checks import cuts_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK
from ..core.check.memory import empty
from ..core.check.numbers import magnitude
from ..core.check.recipes import PER_ROW, Scales
from ..core.gpu import is_hopper
from ..core.replay import FIXED
from . import gather_weighted as gather_weighted_kernel
from . import route_rows
from .check import ExpertRows, check_gather, check_routes, check_rows, check_weighted, present

__all__ = ["ExpertRows", "expert_rows", "gather_cast_to_fp8", "gather_weighted"]

MANY_ROWS = 4096
MAX_PITCH = 1 << 31
"""Kernels count elements from a row to the next in 32 bits."""


def expert_rows(topk_ids: Tensor, num_experts: int) -> ExpertRows:
    """Give each route of a token a row; the rows are stacked by expert without gaps.

    `topk_ids` is int32 or int64 `[tokens, topk]`: the experts of each token, -1 for none. An expert may occur several
    times in a token's row. Rows are ordered by expert, then by token, then by column, so the result is always the
    same. A GPU treats an id without an expert as -1; on the CPU it is a mistake.

    >>> rows = expert_rows(torch.tensor([[2, 0], [-1, 2]]), 3)
    >>> rows.ends.tolist(), rows.row_of.tolist()
    ([1, 1, 3], [[1, 0], [-1, 2]])
    >>> rows.ids.tolist(), rows.token_of.tolist()
    ([0, 2, 2, -1], [0, 0, 1, -1])
    """
    return run(STACKED, (topk_ids,), (num_experts,))  # type: ignore[no-any-return]


STACKED = Function(
    lambda topk_ids, num_experts: stack_routes(topk_ids, check_routes(topk_ids, num_experts)),
    lambda *call: ExpertRows(*torch.ops.deep_gemm.expert_rows.default(*call)),
    lambda topk_ids: (topk_ids,),
    never,
    free=[FREE_ROWS],
)


def stack_routes(topk_ids: Tensor, num_experts: int, first: int = 0, used: int | None = None) -> ExpertRows:
    """Compute `expert_rows` for the experts with ids `first` to `first + num_experts - 1`; other ids count as -1.

    `used`: the number of rows with a token, if the host knows it; the result then has only these rows.
    """
    if on_hopper(topk_ids) and 0 < num_experts <= route_rows.MAX_EXPERTS[-1]:
        p = route_rows.RouteProblem(with_contiguous_rows(topk_ids), num_experts, first)
        route_rows.run(p)
        rows = p.rows
    else:
        rows = _stacked_by_torch(topk_ids, num_experts, first)
    return rows if used is None else rows._replace(token_of=rows.token_of[:used], ids=rows.ids[:used])


def _stacked_by_torch(topk_ids: Tensor, num_experts: int, first: int) -> ExpertRows:
    has_expert = (topk_ids >= first) & (topk_ids < first + num_experts)
    # Routes without an expert are sorted after all others.
    expert = torch.where(has_expert, topk_ids - first, num_experts).flatten()
    sorted_expert, route = expert.sort(stable=True)
    device = topk_ids.device
    experts = torch.arange(num_experts, dtype=sorted_expert.dtype, device=device)
    ends = torch.searchsorted(sorted_expert, experts, right=True, out_int32=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    rows = torch.arange(expert.numel(), dtype=torch.int32, device=device)
    row_of = torch.empty_like(rows).scatter_(0, route, rows).view(topk_ids.shape).masked_fill_(~has_expert, -1)
    is_behind = sorted_expert == num_experts
    token_of = route.div(max(topk_ids.shape[1], 1), rounding_mode="floor").to(torch.int32).masked_fill_(is_behind, -1)
    ids = sorted_expert.to(torch.int32).masked_fill(is_behind, -1)
    return ExpertRows(counts, ends, row_of, token_of, ids)


def gather_cast_to_fp8(
    x: Tensor,
    rows: ExpertRows,
    *,
    use_ue8m0: bool = False,
    min_amax: float = 0.0,
    mn_major: bool = False,
    gran_k: int = SCALE_BLOCK,
) -> Quantized:
    """Cast tokens to FP8 and copy each into its rows.

    `x` is `[tokens, k]`, BF16, FP16 or FP32; `rows` comes from `expert_rows`. The result is that of
    `per_token_cast_to_fp8(x[rows.token_of])`: values `[rows, k]` and scales `[rows, ceil(k / gran_k)]`. Rows without a
    token are undefined (on the CPU zeros with scale 1). A GPU reads and casts each token once. There is no
    gradient: see `experts`.

    >>> rows = expert_rows(torch.tensor([[1], [0]]), 2)
    >>> values, scales = gather_cast_to_fp8(torch.tensor([[448.0], [896.0]]), rows)
    >>> values.float().tolist(), scales.tolist()
    ([[448.0], [448.0]], [[2.0], [1.0]])
    """
    return run(GATHERED, (x, rows), (use_ue8m0, min_amax, mn_major, gran_k, False))  # type: ignore[no-any-return]


def gather_and_cast(x: Tensor, rows: ExpertRows, scaled: Scales | None = PER_ROW, *, is_dependent: bool = False) -> Any:
    """Compute `gather_cast_to_fp8` for a product; if `scaled` is None, copy BF16 `Rows` instead.

    `is_dependent`: as for `Kernel.run`.
    """
    return run(GATHERED, (x, rows), (False, 0.0, True, None if scaled is None else scaled.columns, is_dependent))


def _gather_as_operator(x: Tensor, rows: ExpertRows, *said: Any) -> Rows:
    *others, gran_k, _ = said
    if gran_k is None:  # layers, which are operators themselves, call this
        return _gather_checked(x, rows, *said)
    operator = torch.ops.deep_gemm.gather_cast_to_fp8.default
    return operator(x, [*check_rows(rows)], *others, granularity(gran_k, 0))  # type: ignore[no-any-return]


def _gather_checked(x: Tensor, rows: ExpertRows, *said: Any) -> Rows:
    use_ue8m0, min_amax, mn_major, gran_k, is_dependent = said
    check_gather(x, rows)
    with torch.no_grad():
        block = None if gran_k is None else granularity(gran_k, 0)
        count = rows.token_of.shape[0]
        if has_kernels(x) and (block is None or block in BLOCKS_OF_GROUPS):
            # With many rows, scattered single scales cost more memory time than a second layout pass over the scales.
            is_few = count <= MANY_ROWS or not block
            to = UNSCALED
            if block is not None:
                to = Target(1, block, use_ue8m0, magnitude("min_amax", min_amax), is_few and mn_major)
            values, scales = to.empty((count, x.shape[1]), x)
            cast = RowCast(as_rows(x), values, scales, to, row_of=rows.row_of.contiguous())
            cast_rows.run(cast, is_dependent=is_dependent)
            return values, lay_scales.laid_out(scales) if mn_major and not is_few and scales is not None else scales
        token, has_none = rows.token_of.clamp_min(0), (rows.token_of < 0)[:, None]
        if block is None:
            return x.index_select(0, token).to(torch.bfloat16).masked_fill_(has_none, 0), None
        values, scales = per_token_cast_to_fp8(x, use_ue8m0, block, min_amax=min_amax)
        gathered = values.view(torch.uint8).index_select(0, token).masked_fill_(has_none, 0)
        scales = scales.index_select(0, token).masked_fill_(has_none, 1)
        return gathered.view(values.dtype), lay_scales.laid_out(scales) if mn_major else scales


GATHERED = Function(
    _gather_checked,
    _gather_as_operator,
    lambda x, rows: (x, rows.counts, rows.ends, rows.row_of, rows.token_of, rows.ids),
    lambda tensors: cuts_gradient(tensors[:1], ()),
    free=[FREE_ROWS, FIXED, FIXED, FREE_ROWS, FREE_ROWS, FREE_ROWS],
)


def gather_weighted(y: Tensor, rows: ExpertRows, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor | None:
    """Sum up the rows of each token, each times the weight of its route.

    - `y`: `[rows, n]`, BF16, FP16 or FP32, n a multiple of 8; `rows`: the result of `expert_rows`.
    - `topk_weights`: `[tokens, topk]`, FP32, BF16 or FP16.
    - `out`: BF16 `[tokens, n]`. If it is given, the function returns None; if it is left out, the function makes it
      and returns it.

    A sum starts from 0 and adds the routes in order of their columns. Each product and each addition is rounded to
    FP32 separately (no fused multiply-add), and the sum is rounded once to BF16, so the bits are always the same.
    A route without a row adds nothing, whatever its weight is, and a row without a route may hold anything. There is
    no gradient: see `experts`.

    >>> rows = expert_rows(torch.tensor([[1, 0], [0, -1]]), 2)
    >>> y = torch.tensor([[1.0], [2.0], [4.0], [torch.nan]]).repeat(1, 8)
    >>> gather_weighted(y, rows, torch.tensor([[0.5, 3.0], [1.0, torch.nan]]))[:, 0].tolist()
    [5.0, 2.0]
    """
    return run(WEIGHTED if out is None else WEIGHTED_INTO, (y, rows, topk_weights, out))  # type: ignore[no-any-return]


def _weighted_as_operator(y: Tensor, rows: ExpertRows, topk_weights: Tensor, out: Tensor | None) -> Tensor | None:
    operator = torch.ops.deep_gemm.gather_weighted
    if out is None:
        return operator.default(y, [*check_rows(rows)], topk_weights)  # type: ignore[no-any-return]
    operator.into(y, [*check_rows(rows)], topk_weights, out)
    return None


def _weighted(y: Tensor, rows: ExpertRows, topk_weights: Tensor, out: Tensor | None) -> Tensor | None:
    check_weighted(y, rows, topk_weights, out)
    return _sum_rows(y, rows.row_of, topk_weights, out)


WEIGHTED = Function(
    _weighted,
    _weighted_as_operator,
    lambda y, rows, p, out: present(y, rows.counts, rows.ends, rows.row_of, rows.token_of, rows.ids, p, out),
    lambda tensors: cuts_gradient((tensors[0], tensors[6]), tensors[7:]),
    free=[FREE_ROWS, FIXED, FIXED, *[FREE_ROWS] * 5],
)
WEIGHTED_INTO = replace(WEIGHTED, outputs=1)


def sum_rows(
    y: Tensor, row_of: Tensor, weights: Tensor | None = None, out: Tensor | None = None, *, is_dependent: bool = False
) -> Tensor:
    """Compute `gather_weighted` without checks; if `weights` is None, each is 1. Return the output.

    `is_dependent`: as for `Kernel.run`.
    """
    function = SUMMED if out is None else SUMMED_INTO
    made: Tensor = run(function, (y, row_of, weights, out), (is_dependent, weights is None))
    return made if out is None else out


@torch.no_grad()
def _sum_rows(
    y: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor | None, is_dependent: bool = False, _: bool = False
) -> Tensor | None:
    d = empty("the sums", (row_of.shape[0], y.shape[1]), torch.bfloat16, y.device) if out is None else out
    is_bf16 = on_hopper(y) and y.dtype == torch.bfloat16
    # A thread loads 16 bytes.
    if is_bf16 and y.stride(1) == 1 and y.stride(0) % 8 == 0 and y.data_ptr() % ADDRESS_ALIGNMENT == 0:
        row_of, weights = row_of.contiguous(), None if weights is None else with_contiguous_rows(weights)
        gather_weighted_kernel.run(y, row_of, weights, d, is_dependent=is_dependent)
    else:
        d.copy_(weighted_sum(y, row_of, weights))
    return d if out is None else None


SUMMED = Function(_sum_rows, _sum_rows, present, free=[FREE_ROWS] * 4)
SUMMED_INTO = replace(SUMMED, outputs=1)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Return a matrix itself if each row is contiguous and rows do not overlap; else a contiguous copy."""
    return x if x.stride(1) == 1 and x.shape[1] <= x.stride(0) < MAX_PITCH else x.contiguous()


def on_hopper(x: Tensor) -> bool:
    """Tell whether a tensor is on a GPU that the kernels support."""
    return x.is_cuda and is_hopper(x.get_device())


def weighted_sum(y: Tensor, row_of: Tensor, weights: Tensor | None) -> Tensor:
    """Compute FP32 `[tokens, n]`: each token's rows, times their weights or 1, summed in order of columns."""
    tokens, topk = row_of.shape
    total = torch.zeros(tokens, y.shape[1], dtype=torch.float32, device=y.device)
    for column in range(topk):
        row = row_of[:, column]
        term = y.index_select(0, row.clamp_min(0)).float()
        if weights is not None:
            term = term * weights[:, column, None].float()
        total = torch.where(row[:, None] < 0, total, total + term)
    return total
