"""Products of grouped rows that store each row of the result at its own address: gemm/epilogue/store_rows.cuh.

The table of addresses takes the place of D among the operands.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..casts.rules import Rows
from ..core.check.checks import Operand
from ..core.check.recipes import E2M1, MX, PER_64, PER_BLOCK, PER_ROW, Scales
from ..core.shadow import plain
from ..gemm import product
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


def run(a: Rows, w: Rows, ends: Tensor, addresses: Tensor, *, of_a: Scales = PER_ROW) -> None:
    """Multiply each row by its group's weight, and store the result, BF16 `[n]`, at the row's address.

    `addresses` is int64 `[rows]`, 0 for a result that is not stored; `ends` is int32 `[groups]`: the end of each
    group's rows, where the next group's rows begin. Operands are as for `m_grouped_fp8_gemm_nt_contiguous`, but a scale
    of A may cover 64 columns; or both are BF16, without scales. This function does not check them.
    """
    if w[1] is None:
        product.run(IN_BF16, a[0], w[0], addresses, ends)
    else:
        product.run(PRODUCT, a, w, addresses, ends, (of_a,))


def check_weight(name: str, w: Rows) -> None:
    """Refuse a weight that `run` has no kernel for: FP4 with FP32 scales, which need not be powers of two."""
    if is_packed(w) and w[1] is not None and w[1].dtype == torch.float32:
        raise NotImplementedError(f"sf{name}: expected UE8M0 beside FP4 where rows go to other GPUs, got torch.float32")


def problem(a: Operand, w: Operand, addresses: Tensor, ends: Tensor, *, of_a: Scales = PER_ROW) -> Problem:
    """State the operands of `run` as a product of grouped rows. With FP8 weights a scale of A may cover 64 columns."""
    (b, sfb), of_b = w, PER_BLOCK
    if is_packed(w):
        (b, sfb), of_b = packed_weight("b", w, ("groups", "n", "k"), {}), MX
    rows_of_group = plain(addresses.shape[0]) / max(b.shape[0], 1)
    return Problem(*a, b, sfb, addresses, ends, ENDS, of_b, of_a, epilogue=TO_ADDRESSES, expected_m=rows_of_group)


def problem_in_bf16(a: Tensor, b: Tensor, addresses: Tensor, ends: Tensor) -> Problem:
    """State BF16 operands of `run` as a product of grouped rows."""
    of_rows = {"expected_m": plain(addresses.shape[0]) / max(b.shape[0], 1), "epilogue": TO_ADDRESSES_IN_BF16}
    return Problem(a, None, b, None, addresses, ends, ENDS, None, None, **of_rows)


def _refuse(*_: object) -> None:
    raise NotImplementedError("rows to addresses: expected tensors on a Hopper GPU, outside of torch.compile")


PRODUCT = product.Product("", problem, ("of_a",), ("ends",), _refuse, reference=_refuse, free=product.FREE)
IN_BF16 = replace(OF_EXPERTS, ask=problem_in_bf16, options=(), inputs=("ends",), as_operator=_refuse, reference=_refuse)
