"""Operators of the indexer. Keys and their scales are two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import indexer
from ..core.operators import operator
from .check import mqa_logits_problem


def logits(
    q: Tensor,
    kv: Tensor,
    sfkv: Tensor,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Score the keys of each token's range."""
    return indexer.fp8_fp4_mqa_logits(
        (q, None),
        (kv, sfkv),
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        clean_logits=clean_logits,
        max_seqlen_k=max_seqlen_k,
        logits_dtype=logits_dtype,
    )


def fake_logits(
    q: Tensor,
    kv: Tensor,
    sfkv: Tensor,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Stand for logits."""
    return mqa_logits_problem(
        q, (kv, sfkv), weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype
    ).logits


operator(
    "fp8_mqa_logits(Tensor q, Tensor kv, Tensor sfkv, Tensor weights, Tensor cu_seq_len_k_start, "
    "Tensor cu_seq_len_k_end, bool? clean_logits=None, SymInt max_seqlen_k=0, ScalarType logits_dtype=float) -> Tensor",
    logits,
    fake_logits,
)
