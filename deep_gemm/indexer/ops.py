"""Operators of the indexer. Keys that lie one behind another and their scales are two tensors."""

from __future__ import annotations

from .. import indexer
from ..core.operators import flops_of, operator
from .check import metadata_problem, mqa_logits_problem, paged_logits_problem

operator(
    "fp8_mqa_logits(Tensor q, Tensor kv, Tensor sfkv, Tensor weights, Tensor cu_seq_len_k_start, "
    "Tensor cu_seq_len_k_end, bool? clean_logits=None, SymInt max_seqlen_k=0, ScalarType logits_dtype=float) -> Tensor",
    lambda q, kv, sfkv, *rest: indexer.fp8_fp4_mqa_logits((q, None), (kv, sfkv), *rest),
    lambda q, kv, sfkv, *rest: mqa_logits_problem(q, (kv, sfkv), *rest).logits,
    flops=flops_of("q"),
)
operator(
    "fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
    "Tensor schedule_meta, SymInt max_context_len, bool clean_logits=False, ScalarType logits_dtype=float) -> Tensor",
    lambda q, *rest: indexer.fp8_fp4_paged_mqa_logits((q, None), *rest),
    lambda *given: paged_logits_problem(*given).logits,
    flops=flops_of("q"),
)
operator(
    "plan_paged_contexts(Tensor context_lens, int block_kv, int num_sms) -> Tensor",
    indexer.get_paged_mqa_logits_metadata,
    metadata_problem,
)
