"""Operators of the indexer whose keys lie in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import indexer
from ..core.operators import operator
from .paged_check import metadata_problem, paged_logits_problem


def logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Score the keys of each token's context."""
    return indexer.fp8_fp4_paged_mqa_logits(
        (q, None),
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        logits_dtype,
    )


def fake_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Stand for logits."""
    return paged_logits_problem(
        q,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        logits_dtype,
    ).logits


operator(
    "fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
    "Tensor schedule_meta, SymInt max_context_len, bool clean_logits=False, ScalarType logits_dtype=float) -> Tensor",
    logits,
    fake_logits,
)
operator(
    "plan_paged_contexts(Tensor context_lens, int block_kv, int num_sms) -> Tensor",
    indexer.get_paged_mqa_logits_metadata,
    metadata_problem,
)
