"""Operators of the indexer. Keys that lie one behind another and their scales are two tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import indexer
from ..core.operators import flops_of, operator
from .check import mqa_logits_problem
from .paged_check import metadata_problem, paged_logits_problem


def logits(q: Tensor, kv: Tensor, sfkv: Tensor, *rest: Any) -> Tensor:
    """Score the keys of each token's range."""
    return indexer.fp8_fp4_mqa_logits((q, None), (kv, sfkv), *rest)


def fake_logits(q: Tensor, kv: Tensor, sfkv: Tensor, *rest: Any) -> Tensor:
    """Stand for these logits."""
    return mqa_logits_problem(q, (kv, sfkv), *rest).logits


def paged_logits(q: Tensor, *rest: Any) -> Tensor:
    """Score the keys of each token's context."""
    return indexer.fp8_fp4_paged_mqa_logits((q, None), *rest)


def fake_paged_logits(*given: Any) -> Tensor:
    """Stand for these logits."""
    return paged_logits_problem(*given).logits


operator(
    "fp8_mqa_logits(Tensor q, Tensor kv, Tensor sfkv, Tensor weights, Tensor cu_seq_len_k_start, "
    "Tensor cu_seq_len_k_end, bool? clean_logits=None, SymInt max_seqlen_k=0, ScalarType logits_dtype=float) -> Tensor",
    logits,
    fake_logits,
    flops=flops_of("q"),
)
operator(
    "fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
    "Tensor schedule_meta, SymInt max_context_len, bool clean_logits=False, ScalarType logits_dtype=float) -> Tensor",
    paged_logits,
    fake_paged_logits,
    flops=flops_of("q"),
)
operator(
    "plan_paged_contexts(Tensor context_lens, int block_kv, int num_sms) -> Tensor",
    indexer.get_paged_mqa_logits_metadata,
    metadata_problem,
)
