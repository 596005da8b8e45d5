"""The indexer's logits on the CPU: the definition of the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from .check import MqaLogits

SCORES_AT_A_TIME = 1 << 24
"""FP32 scores of all heads that are in memory at a time."""


def mqa_logits(p: MqaLogits) -> None:
    """Compute the logits of each token's range. What is outside becomes -inf if logits are cleaned, else it stays."""
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


def weighted_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of relu(q . key) * weight: `[tokens, heads, depth]`, `[keys, depth]` -> `[tokens, keys]`."""
    scores = torch.einsum("thd,kd->thk", q, keys).relu()
    return torch.einsum("thk,th->tk", scores, weights)
