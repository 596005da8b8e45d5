"""Products of grouped rows whose results go each to an address of its own: gemm/epilogue/store_rows.cuh.

The table of addresses takes the place of D among the operands. Such a product may run beside the one whose rows it
multiplies, so that results leave for other GPUs while that one multiplies: gemm/work/tile_queue.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..casts.rules import Rows
from ..core.check.checks import Operand
from ..core.check.layout import WORD_BYTES, ceil_div
from ..core.check.memory import empty
from ..core.check.recipes import E2M1, MX, PER_64, PER_BLOCK, PER_ROW, Scales
from ..core.gpu import WGMMA_ROWS, gpu_of
from ..core.meeting import Node
from ..core.settings import num_sms_of
from ..core.shadow import Behind, plain
from ..gemm import launch, product
from ..gemm.api.bf16_grouped import OF_EXPERTS
from ..gemm.kinds.epilogues import TO_ADDRESSES, TO_ADDRESSES_IN_BF16
from ..gemm.kinds.output import Output
from ..gemm.kinds.works import ENDS
from ..gemm.packed import is_packed
from ..gemm.packed import weight as packed_weight
from ..gemm.problem import Problem

OUTPUT = Output(work=ENDS, epilogue=TO_ADDRESSES)
OUTPUT_BY_64 = Output(work=ENDS, epilogue=TO_ADDRESSES, sfa=PER_64)
OUTPUTS = {
    (each.sfa, each.sfb): each
    for each in (OUTPUT, OUTPUT_BY_64, Output(work=ENDS, epilogue=TO_ADDRESSES, b=E2M1, sfb=MX))
}
"""Outputs by the scales of A and B."""
LEAST_RANKS = 2
"""Both products run at once on at least this many ranks: a single one has no link to keep busy."""
FIRST_PART = 8 / 11
"""The first product's part of the SMs: it has two thirds of both products' work, and activates. 92 to 104 of 132 take
as long (two and four H200, 2026-11-29)."""
COUNTS_OF_TILE = 2
"""Counts of a warp that has stored its rows of a whole tile."""
WARPS = 4
"""Warps that store 64 rows of a tile."""


def run(a: Rows, w: Rows, ends: Tensor, addresses: Tensor, *, of_a: Scales = PER_ROW) -> None:
    """Multiply each row by its group's weight, and store the result, BF16 `[n]`, at the row's address.

    `addresses` is int64 `[rows]`, 0 for a result that goes nowhere; `ends` is int32 `[groups]`: where each group's rows
    end, the next one's following them. Operands are as `m_grouped_fp8_gemm_nt_contiguous` takes them, but a scale of A
    may be for 64 columns; or both are BF16, without scales. Nobody checks them.
    """
    if w[1] is None:
        product.run(IN_BF16, a[0], w[0], addresses, ends)
    else:
        product.run(PRODUCT, a, w, addresses, ends, (of_a,))


def check_weight(name: str, w: Rows) -> None:
    """Refuse a weight that `run` has no kernel for: FP4 whose scales may be no powers of two."""
    if is_packed(w) and w[1] is not None and w[1].dtype == torch.float32:
        raise NotImplementedError(f"sf{name}: expected UE8M0 beside FP4 where rows go to other GPUs, got torch.float32")


def problem(a: Operand, w: Operand, addresses: Tensor, ends: Tensor, *, of_a: Scales = PER_ROW) -> Problem:
    """State the operands of `run` as a product of grouped rows; beside FP8 a scale of A may be for 64 columns."""
    (b, sfb), of_b = w, PER_BLOCK
    if is_packed(w):
        (b, sfb), of_b = packed_weight("b", w, ("groups", "n", "k"), {}), MX
    rows_of_group = plain(addresses.shape[0]) / max(b.shape[0], 1)
    return Problem(*a, b, sfb, addresses, ends, ENDS, of_b, of_a, epilogue=TO_ADDRESSES, expected_m=rows_of_group)


def problem_in_bf16(a: Tensor, b: Tensor, addresses: Tensor, ends: Tensor) -> Problem:
    """State the same of BF16 operands."""
    of_rows = {"expected_m": plain(addresses.shape[0]) / max(b.shape[0], 1), "epilogue": TO_ADDRESSES_IN_BF16}
    return Problem(a, None, b, None, addresses, ends, ENDS, None, None, **of_rows)


def counts_of(node: Node, rows: int) -> Tensor | None:
    """Make room for the counts of two products that run beside each other; None if one should follow the other.

    They are zeros when the first product starts: its next tile, and for each block of rows the parts that are stored.
    """
    if node.room.ranks < LEAST_RANKS:
        return None
    count = 1 + ceil_div(rows, WGMMA_ROWS) + node.experts
    return empty("counts of stored rows", (count,), torch.int32, node.state.device)


def run_both(first: Problem, second: Problem, counts: Tensor | None) -> None:
    """Compute two products of the same rows: beside each other if there are counts, else one after the other.

    The D and the scales of `first` are the A of `second`, whose D are addresses. Under `set_num_sms` one follows the
    other, as two at once would use the SMs that this leaves to others.
    """
    gpu = gpu_of(first.d.get_device())
    num_sms = num_sms_of(gpu.num_sms)
    if counts is None or num_sms < gpu.num_sms:
        launch.run(first)
        launch.run(second)
        return
    configs = launch.fitting(None, first, gpu), launch.fitting(None, second, gpu)
    places = {"stored": Behind(counts, WORD_BYTES), "next_tile": counts}
    start_both(first, second, configs, places, num_sms, max(1, round(num_sms * FIRST_PART)))


def start_both(
    first: Problem,
    second: Problem,
    configs: tuple[Any, Any],
    places: Mapping[str, Any],
    num_sms: int,
    sms_of_first: int,
) -> None:
    """Launch both products beside each other. `places` has `stored` and `next_tile` of gemm/work/tile_queue.cuh."""
    of_first, of_second = configs
    arrivals = ceil_div(first.n, of_first.block_n) * WARPS * COUNTS_OF_TILE
    beside = {**places, "block_rows": of_first.block_m, "arrivals": arrivals}
    first, second = launch.prepared(first, of_first), launch.prepared(second, of_second)
    launch.start(first, of_first, sms_of_first, **beside)
    launch.start(second, of_second, num_sms, is_dependent=True, **beside)  # nothing may run between them


def _refuse(*_: object) -> None:
    raise NotImplementedError("rows to addresses: expected tensors on a Hopper GPU, outside of torch.compile")


PRODUCT = product.Product("", problem, ("of_a",), ("ends",), _refuse, reference=_refuse, free=product.FREE)
IN_BF16 = replace(OF_EXPERTS, ask=problem_in_bf16, options=(), inputs=("ends",), as_operator=_refuse, reference=_refuse)
