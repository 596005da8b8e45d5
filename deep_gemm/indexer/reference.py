"""The indexer's logits and schedules on the CPU, which define the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from .check import SCALE_BYTES, SEGMENT_KEYS, MqaLogits, PagedLogits

SCORES_AT_A_TIME = 1 << 24
"""FP32 scores of all heads that are in memory at a time."""


def mqa_logits(p: MqaLogits) -> None:
    """Compute the logits of each token's range. Other logits become -inf if logits are cleaned, else stay unchanged."""
    tokens, heads, _ = p.q.shape
    num_keys = p.keys.shape[0]
    keys = p.keys.float()
    positions = torch.arange(num_keys, dtype=torch.int32, device=p.q.device)
    chunk = max(SCORES_AT_A_TIME // max(heads * num_keys, 1), 1)
    for first in range(0, tokens, chunk):
        rows = slice(first, first + chunk)
        logits = weighted_scores(p.q[rows].float(), keys, p.weights[rows]) * p.scales
        begins, ends = p.starts[rows, None].clamp(min=0), p.ends[rows, None].clamp(max=num_keys)
        is_in_range = (positions >= begins) & (positions < ends)
        out = p.logits[rows]
        if p.is_compressed:
            columns = positions - begins
            is_in_range &= columns < p.logits.shape[1]
            row, key = is_in_range.nonzero(as_tuple=True)
            out[row, columns[row, key].long()] = logits[row, key].to(out.dtype)
        elif p.clean_logits:
            out.copy_(logits.masked_fill(~is_in_range, -torch.inf))
        else:
            out.copy_(torch.where(is_in_range, logits.to(out.dtype), out))


def paged_mqa_logits(p: PagedLogits) -> None:
    """Compute the logits of each token's keys. Logits after a token's context stay unchanged."""
    sequences, next_n, _, _ = p.q.shape
    contexts = p.contexts.view(sequences, -1).expand(sequences, next_n)
    contexts = contexts.clamp(0, min(p.logits.shape[1], p.table.shape[1] * p.cache.shape[1]))
    for sequence, lengths in enumerate(contexts.tolist()):
        values, scales = keys_of(p, sequence, max(lengths))
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        logits = weighted_scores(p.q[sequence].float(), values.float(), p.weights[rows]) * scales
        for token, length in enumerate(lengths):
            p.logits[sequence * next_n + token, :length] = logits[token, :length].to(p.logits.dtype)


def keys_of(p: PagedLogits, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """Gather a sequence's first keys: FP8 `[length, depth]` and FP32 scales `[length]`."""
    _, page, _, row = p.cache.shape
    depth = row - SCALE_BYTES
    blocks = p.table[sequence, : -(-length // page)].long()
    memory = p.cache.as_strided((p.cache.shape[0], page * row), (p.cache.stride(0), 1))[blocks]
    values = memory[:, : page * depth].reshape(-1, depth)[:length].view(torch.float8_e4m3fn)
    scales = memory[:, page * depth :].contiguous().view(torch.float32).reshape(-1)[:length]
    return values, scales


def schedule(contexts: Tensor, out: Tensor) -> None:
    """Divide all segments, in one line, into equal shares; store where each share begins, and where the last ends."""
    sequences, shares = contexts.shape[0], out.shape[0] - 1
    longest = contexts.reshape(sequences, -1).clamp(min=0).long().amax(1) if sequences else contexts.long()
    segments = -(-longest // SEGMENT_KEYS)
    ends = segments.cumsum(0)
    total = int(ends[-1]) if sequences else 0
    if total == 0:
        out.zero_()
        return
    at = total * torch.arange(shares + 1) // shares
    at[-1] -= 1
    sequence = torch.searchsorted(ends, at, right=True)
    segment = at - (ends - segments)[sequence]
    segment[-1] += 1
    out.copy_(torch.stack((sequence, segment), dim=1))


def weighted_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of relu(q . key) * weight: `[tokens, heads, depth]`, `[keys, depth]` -> `[tokens, keys]`."""
    scores = torch.einsum("thd,kd->thk", q, keys).relu()
    return torch.einsum("thk,th->tk", scores, weights)
