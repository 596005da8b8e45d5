"""The two products of mega MoE, by the reference: see docs/experts_across_gpus.md for what they compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import silu_mul
from ..problem import Operand
from ..problem.layout import SCALE_BLOCK
from ..problem.mega_moe import INTERLEAVED, MIDDLE_BLOCK
from ..quantize import Quantized, per_token_cast_to_fp8
from ..reference import block_scaled_product


def activated_product(
    a: Quantized, l1: Operand, ids: Tensor, row_weights: Tensor, limit: float | None, out: Quantized
) -> None:
    """FP8 of weight * silu(gate) * up of each row, gate and up being FP32 products with its expert's l1.

    Rows are stacked by expert, `ids` being int32 `[rows]`; those of -1 stay as they are. `l1` has gate and up in turns.
    """
    for expert, rows in _rows_of(ids, len(l1[0])):
        gate_up = block_scaled_product(a[0][rows], a[1][rows], gate_first(l1[0][expert]), l1[1][expert], SCALE_BLOCK)
        middle = silu_mul(gate_up, limit) * row_weights[rows, None]
        values, scales = per_token_cast_to_fp8(middle, gran_k=MIDDLE_BLOCK)
        out[0][rows], out[1][rows] = values, scales


def product_of_middles(a: Quantized, l2: Operand, ids: Tensor, out: Tensor) -> None:
    """Product of each row, with a scale for each 64 columns, with its expert's l2, rounded once to BF16.

    A block of 64 beside 64 zeros is one of 128, so the definition of the other products is this one's too.
    """
    for expert, rows in _rows_of(ids, len(l2[0])):
        b, sfb = _spread(l2[0][expert]), l2[1][expert].repeat_interleave(SCALE_BLOCK // MIDDLE_BLOCK, 1)
        out[rows] = block_scaled_product(_spread(a[0][rows]), a[1][rows], b, sfb, SCALE_BLOCK).to(out.dtype)


def gate_first(l1: Tensor) -> Tensor:
    """Give rows that are in turns as all rows of the gate, then all of up."""
    rows, hidden = l1.shape[-2:]
    # [..., turns, gate or up, 8, hidden] -> [..., gate or up, turns, 8, hidden]
    turns = l1.reshape(*l1.shape[:-2], rows // (2 * INTERLEAVED), 2, INTERLEAVED, hidden)
    return turns.transpose(-4, -3).reshape(l1.shape)


def in_turns(l1: Tensor) -> Tensor:
    """Give all rows of the gate, then all of up, in turns of 8."""
    rows, hidden = l1.shape[-2:]
    halves = l1.reshape(*l1.shape[:-2], 2, rows // (2 * INTERLEAVED), INTERLEAVED, hidden)
    return halves.transpose(-4, -3).reshape(l1.shape)


def _rows_of(ids: Tensor, experts: int) -> list[tuple[int, Tensor]]:
    """Rows of each expert that has any. The host reads ids."""
    found = ((expert, (ids == expert).nonzero().flatten()) for expert in range(experts))
    return [(expert, rows) for expert, rows in found if len(rows)]


def _spread(values: Tensor) -> Tensor:
    """Put zeros behind each 64 columns."""
    blocks = values.view(torch.uint8).view(*values.shape[:-1], -1, MIDDLE_BLOCK)
    return F.pad(blocks, (0, SCALE_BLOCK - MIDDLE_BLOCK)).flatten(-2).view(values.dtype)
