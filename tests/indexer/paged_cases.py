"""Problems of the indexer's logits of keys in pages, and what is wrong with logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mqa_cases import ROUNDINGS
from torch import Tensor

from deep_gemm.indexer.paged import get_paged_mqa_logits_metadata
from deep_gemm.indexer.paged_check import PagedLogits, paged_logits_problem
from deep_gemm.indexer.reference import keys_of, weighted_scores

GARBAGE = -0x11111111
"""An entry of the table that must not be read."""


def problem(
    contexts: Sequence[Sequence[int]] | Sequence[int],
    next_n: int,
    heads: int = 64,
    depth: int = 128,
    *,
    page: int = 64,
    room: int = 0,
    shares: int = 2,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
    names_last_block: bool = False,
) -> PagedLogits:
    """Random operands; `room` bytes between blocks. Pages lie in any order, and entries behind are garbage.

    Or they name the last block, in which no page lies.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    sequences = len(contexts)
    longest = lengths.reshape(sequences, -1).amax(1).clamp(min=0) if sequences else lengths
    pages = -(-longest // page)
    most, blocks = int(pages.max()) + 1 if sequences else 1, int(pages.sum()) + 3
    order = torch.randperm(blocks - names_last_block, generator=g).int()
    table = torch.full((sequences, most + 2), blocks - 1 if names_last_block else GARBAGE).int()
    taken = 0
    for sequence, count in enumerate(pages.tolist()):
        table[sequence, :count] = order[taken : taken + count]
        taken += count
    stride = page * (depth + 4) + room
    memory = torch.full((blocks, stride), 0x7F, dtype=torch.uint8)  # NaN
    keys = torch.randn(blocks, page * depth, generator=g).to(torch.float8_e4m3fn)
    memory[:, : page * depth] = keys.view(torch.uint8)
    scales = torch.rand(blocks, page, generator=g) + 0.5
    memory[:, page * depth : page * (depth + 4)] = scales.view(torch.uint8)
    q = torch.randn(sequences, next_n, heads, depth, generator=g).to(torch.float8_e4m3fn).to(device)
    weights = torch.randn(sequences * next_n, heads, generator=g).to(device)
    shape, strides = (blocks, page, 1, depth + 4), (stride, depth + 4, depth + 4, 1)
    cache, lengths = memory.to(device).as_strided(shape, strides), lengths.to(device)
    schedule = get_paged_mqa_logits_metadata(lengths, page, shares)
    if columns is None:
        columns = int(longest.max()) if sequences else 5
    return paged_logits_problem(q, cache, weights, lengths, table.to(device), schedule, columns, False, dtype)


def mistakes(p: PagedLogits, got: Tensor, unwritten: float = torch.nan, of_addends: float = 0.0) -> str | None:
    """Say what is wrong with logits, where the kernel has left `unwritten`; None if nothing is.

    What a logit may be off by: `mistakes` of mqa_cases.
    """
    sequences, next_n, heads, _ = p.q.shape
    expected = torch.full(got.shape, unwritten, dtype=torch.float64, device=got.device)
    allowed = torch.full_like(expected, -1)
    contexts = p.contexts.view(sequences, -1).expand(sequences, next_n).clamp(0, got.shape[1])
    for sequence, lengths in enumerate(contexts.tolist()):
        values, scales = keys_of(p, sequence, max(lengths))
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        q, keys, weights = p.q[sequence].double(), values.double(), p.weights[rows].double()
        right, magnitude, addends = (
            weighted_scores(*operands) * scales.double()
            for operands in ((q, keys, weights), (q, keys, weights.abs()), (q.abs(), keys.abs(), weights.abs()))
        )
        for token, length in enumerate(lengths):
            expected[rows][token, :length] = right[token, :length]
            roundings = magnitude[token, :length] * ((heads + 16) * ROUNDINGS)
            allowed[rows][token, :length] = roundings + addends[token, :length] * of_addends
    if p.logits.dtype == torch.bfloat16:
        allowed += torch.where(allowed >= 0, expected.abs() * 2.0**-8, 0)
    found, is_left = got.double(), allowed < 0
    same = (found == expected) | (found.isnan() & expected.isnan())
    wrong = torch.where(is_left, ~same, ~((found - expected).abs() <= allowed))
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} logits are wrong, the first of token {row}, column {column}: "
        f"expected {expected[row, column]}, got {found[row, column]}"
    )
