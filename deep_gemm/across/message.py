"""The message of a token: one row of 4-byte words, so that one collective carries all of it.

[ FP8 values: hidden / 4 | scales: ceil(hidden / 128) | ids of experts: topk | weights: topk | up to 16 bytes ]

A scale may also cover 64 or 32 columns, or all. Or values are BF16, hidden / 2 words, and there are no scales.
Kernels pack and gather rows with scales for 128 columns, torch rows with other scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..casts import lay_scales
from ..casts.by_kernels import PITCH_LIMIT
from ..casts.fp8 import per_token_cast_to_fp8
from ..casts.rules import Quantized, Rows, empty_scales, granularity
from ..core.call import FREE_ROWS, Function, never, run
from ..core.check.layout import ADDRESS_ALIGNMENT, BF16_BYTES, SCALE_BLOCK, WORD_BYTES, align, ceil_div
from ..core.check.memory import empty
from ..core.check.numbers import INT32_MAX, integers_from
from ..core.meeting import MAX_ROW_BYTES, Room
from ..moe.api import activates_in_product, experts_workspace_bytes
from ..moe.check import ExpertRows
from ..moe.routing import on_hopper
from . import gather_rows, pack_rows, rows_twice
from .check import count_of_each
from .gather_rows import Gathered, Slots
from .owners import tokens_of_rows

WORD = torch.int32
ADDRESS_BYTES = 8


class Arrived(NamedTuple):
    """Rows that arrived, and views of their parts."""

    message: Tensor
    """Words `[rows, ...]`; if values are BF16, the same bytes viewed as BF16 numbers, the values first."""
    hidden: int
    topk: int
    columns: int | None = SCALE_BLOCK
    """Columns that share a scale; 0: all; None: values are BF16."""

    @property
    def values(self) -> Tensor:
        """Words of FP8 values `[rows, hidden / 4]`."""
        return self.message[:, : self.hidden // WORD_BYTES]

    @property
    def scales(self) -> Tensor:
        """FP32 `[rows, blocks]`."""
        return self.message.view(torch.float32)[:, self.hidden // WORD_BYTES : self._routes]

    @property
    def ids(self) -> Tensor:
        """int32 `[rows, topk]`, numbered over all processes."""
        return self.message.view(WORD)[:, self._routes : self._routes + self.topk]

    @property
    def weights(self) -> Tensor:
        """FP32 `[rows, topk]`."""
        return self.message.view(torch.float32)[:, self._routes + self.topk : self._routes + 2 * self.topk]

    @property
    def _routes(self) -> int:
        return _value_bytes(self.hidden, self.columns) // WORD_BYTES


def _value_bytes(hidden: int, columns: int | None) -> int:
    """Bytes of a row's values and scales."""
    return BF16_BYTES * hidden if columns is None else hidden + WORD_BYTES * ceil_div(hidden, columns or hidden)


def row_bytes(hidden: int, topk: int, columns: int | None = SCALE_BLOCK) -> int:
    """Count the bytes sent to one process for a token. `columns` columns share a scale; 0: all; None: values are BF16.

    >>> row_bytes(hidden=7168, topk=6)  # 7168 values, 56 scales, 6 ids and 6 weights
    7440
    """
    return align(_value_bytes(hidden, columns) + WORD_BYTES * 2 * topk, ADDRESS_ALIGNMENT)


def pack(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    row_of: Tensor | None = None,
    rows: int | None = None,
    columns: int | None = SCALE_BLOCK,
) -> Tensor:
    """Cast tokens to FP8, and write each token with its routes into the token's rows.

    `row_of`, `[tokens, topk]`, lists a token's rows, with -1 after the last; rows without a token may hold anything.
    Without `row_of` token i has row i, and the other rows up to `rows` have no routes. `columns` columns share a scale;
    None: tokens are BF16.
    """
    rows = x.shape[0] if rows is None else rows
    words = row_bytes(x.shape[1], topk_ids.shape[1], columns) // WORD_BYTES
    if on_hopper(x) and columns == SCALE_BLOCK:
        return run(PACKED, (x, topk_ids, topk_weights, row_of, [rows]), (words,))  # type: ignore[no-any-return]
    of_x: Rows = (x.bfloat16().contiguous(), None) if columns is None else per_token_cast_to_fp8(x, gran_k=columns)
    of_tokens = pack_parts(of_x, topk_ids, topk_weights)
    if row_of is not None:
        return of_tokens.index_select(0, tokens_of_rows(row_of, rows))
    message = of_tokens.new_full((rows, words), -1)
    message[: len(x)] = of_tokens
    return message


def _packed(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, row_of: Tensor | None, rows: Sequence[int], words: int
) -> Tensor:
    message = empty("a message", (rows[0], words), WORD, x.device)
    p = topk_weights if topk_weights.dtype == torch.float32 else topk_weights.float()
    pack_rows.run(with_aligned_rows(x), topk_ids.contiguous(), p.contiguous(), row_of, message)
    return message


PACKED = Function(
    _packed,
    _packed,
    lambda x, ids, p, row_of, _: (x, ids, p) if row_of is None else (x, ids, p, row_of),
    never,
    free=[FREE_ROWS] * 4,
    numbers=4,
)


def pack_parts(x: Rows, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Write tokens that are cast already, or BF16, and their routes: token i into row i."""
    of_x = [each.view(WORD) for each in x if each is not None]
    parts = [*of_x, words_of_ids(topk_ids), topk_weights.float().view(WORD)]
    words = -sum(part.shape[1] for part in parts) % (ADDRESS_ALIGNMENT // WORD_BYTES)
    return torch.cat([*parts, parts[0].new_zeros(len(topk_ids), words)], dim=1)


def words_of_ids(topk_ids: Tensor) -> Tensor:
    """Convert ids to words. An id that no expert has becomes a word that no expert has: ids are not cut to 32 bits.

    >>> words_of_ids(torch.tensor([7, -1, -(2**63), 2**32 + 3])).tolist()
    [7, -1, -1, 2147483647]
    """
    return topk_ids.clamp(-1, INT32_MAX).to(WORD)


def with_aligned_rows(x: Tensor) -> Tensor:
    """Return the matrix if kernels may load 16 bytes of its rows at once, else a copy."""
    pitch = x.stride(0) * x.element_size()
    is_aligned = x.stride(1) == 1 and pitch % ADDRESS_ALIGNMENT == 0 and x.data_ptr() % ADDRESS_ALIGNMENT == 0
    return x if is_aligned and pitch < PITCH_LIMIT else x.clone(memory_format=torch.contiguous_format)


def gather(arrived: Arrived, rows: ExpertRows) -> Quantized:
    """Copy each received row into the rows of its experts, in the form that products load."""
    has_kernel = on_hopper(arrived.message) and arrived.columns == SCALE_BLOCK
    if has_kernel and arrived.hidden <= MAX_ROW_BYTES:
        hidden, count = arrived.hidden, rows.token_of.shape[0]
        values = empty("rows of experts", (count, hidden), torch.float8_e4m3fn, arrived.message.device)
        scales = empty_scales((count,), hidden, values, mn_major=True)
        gather_rows.run(Slots(arrived.message, hidden), rows, Gathered(values, scales))
        return values, scales
    source = rows.token_of.clamp_min(0)  # rows without a token may hold anything
    values = arrived.values.index_select(0, source).view(torch.float8_e4m3fn)
    return values, lay_scales.laid_out(arrived.scales.index_select(0, source))


def prefill_bytes(rows: int, hidden: int, topk: int, *, gran_k: int | None = SCALE_BLOCK) -> int:
    """Count the bytes sent and returned in the prefill form if `rows` (token, process) pairs leave their process.

    `gran_k` columns of a token share a scale, 0: all; None counts tokens in BF16.

    >>> prefill_bytes(rows=1, hidden=7168, topk=6)  # FP8 with scales and routes there, BF16 back
    21776
    """
    rows, hidden, topk = integers_from(0, rows=rows, hidden=hidden, topk=topk)
    columns = None if gran_k is None else granularity(gran_k, 0)
    return rows * (row_bytes(hidden, topk, columns) + BF16_BYTES * hidden)


def decode_bytes(
    world_size: int,
    max_tokens: int,
    topk: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    peer_memory: bool = False,
    gran_k: int | None = SCALE_BLOCK,
) -> tuple[int, int]:
    """Count a process's bytes in the decode form: bytes sent to other processes and back, and bytes of memory.

    The second number is all memory together in the worst case: every token of every process on every expert here. With
    `peer_memory` the first number is the worst case too: a row to each other process, and a result of each route back;
    and many rows with FP8 weights need less memory than the second number, because rows and activations are in rings.
    `gran_k` columns of a row share a scale, 0: all; 128 with `peer_memory`; None: BF16. In the batch invariant mode
    collectives take `max_tokens * topk` rows with a topk of 1: pass these, and add a BF16 row of sums for each row.

    >>> decode_bytes(world_size=4, max_tokens=128, topk=6, num_experts=256, hidden=7168, intermediate=2048)
    (8361984, 117881344)
    >>> decode_bytes(4, 128, 6, 256, 7168, 2048, peer_memory=True)
    (13860864, 66396736)
    """
    world_size, max_tokens, topk = integers_from(1, world_size=world_size, max_tokens=max_tokens, topk=topk)
    sizes = integers_from(1, num_experts=num_experts, hidden=hidden, intermediate=intermediate)
    num_experts, hidden, intermediate = sizes
    rows, experts_here = world_size * max_tokens, count_of_each(num_experts, world_size)
    if peer_memory:
        columns = None if gran_k is None else SCALE_BLOCK
        room = Room(world_size, max_tokens, hidden, topk, columns)
        results = max_tokens * topk * BF16_BYTES * hidden
        held = experts_workspace_bytes(rows, topk, experts_here, hidden, intermediate, gran_k=columns)
        held -= rows * topk * BF16_BYTES * hidden  # results of experts here are not held: they go to rooms at once
        if columns is not None and activates_in_product(rows * topk, intermediate):  # rings may have more rows
            tables = experts_workspace_bytes(rows, topk, experts_here, 0, 0)
            held = max(held, tables + rows_twice.bytes_of_rings(rows * topk, experts_here, hidden, intermediate))
        addresses = rows * topk * ADDRESS_BYTES
        sent = (rows - max_tokens) * room.row_bytes + (results if world_size > 1 else 0)
        return sent, room.num_bytes + held + addresses
    sent = prefill_bytes(rows - max_tokens, hidden, topk, gran_k=gran_k)
    messages = (rows + max_tokens) * row_bytes(hidden, topk, gran_k)
    sums = 2 * rows * BF16_BYTES * hidden
    here = experts_workspace_bytes(rows, topk, experts_here, hidden, intermediate, gran_k=gran_k)
    return sent, messages + sums + here
