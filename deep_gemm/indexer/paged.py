"""Logits of the indexer for a few tokens of each sequence, whose keys lie in the pages of a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compat.forms import Request, tells_options_by_type
from ..core.call import CallPlan, Function, run
from ..core.check.checks import nothing
from . import paged_kernel, plan_paged_contexts, reference
from .check import without_scales
from .paged_check import PagedLogits, metadata_problem, paged_logits_problem


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: None = None) -> Tensor:
    """Plan which SM computes which logits of `fp8_paged_mqa_logits`: int32 `[num_sms + 1, 2]`.

    It holds for these contexts, int32 `[sequences, next_n]` or `[sequences]`, whatever the layer, and may be copied
    into a tensor that a graph reads.

    >>> get_paged_mqa_logits_metadata(torch.tensor([[1000], [24]], dtype=torch.int32), 64, 2).tolist()
    [[0, 0], [0, 2], [1, 1]]
    """
    nothing("indices", indices)  # of sequences: only kernels for Blackwell take them
    made: Tensor = run(SCHEDULE, (context_lens,), (block_kv, num_sms))
    return made


@tells_options_by_type
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: None = None,
) -> Request:
    """Score the keys of each token's context: FP32 logits `[sequences * next_n, max_context_len]`.

    ``logits[b * next_n + t, j] = sf[j] * sum over heads h of max(0, q[b, t, h] . key[j]) * weights[b * next_n + t, h]``

    - `q`: FP8 `[sequences, next_n, heads, depth]`, next_n 1 to 4, heads a multiple of 8, next_n x heads up to 256,
      depth 32, 64 or 128.
    - `kv_cache`: uint8 `[blocks, page, 1, depth + 4]`, page 32 or 64. In a block all keys come first, then their FP32
      scales. Blocks may lie apart, at multiples of 16 bytes.
    - `weights`: FP32 `[sequences * next_n, heads]`.
    - `context_lens`: int32 `[sequences, next_n]`: token t has the keys j < context_lens[b, t]; or `[sequences]`, of all
      tokens of a sequence. 0 is allowed.
    - `block_table`: int32 `[sequences, pages]`: where each page is. Entries behind the context may be anything; the
      pages that they name are not read.
    - `schedule_meta`: of `get_paged_mqa_logits_metadata` for these contexts, for all SMs, or for half as many.
    - `clean_logits`: must be False. Logits behind a context are undefined.
    - `indices`: must be None. Releases differ in whether it or `clean_logits` comes first by position; either may.

    The result is a view of rows that have room for more, so it is not contiguous. Sums have one order, so the bits are
    the same each time.
    """
    nothing("indices", indices)  # of sequences: only kernels for Blackwell take them
    operands = q, kv_cache, weights, context_lens, block_table, schedule_meta
    return run, LOGITS, operands, (max_context_len, clean_logits, torch.float32)


@tells_options_by_type
def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: None = None,
) -> Request:
    """Do what `fp8_paged_mqa_logits` does with `q` in a pair `(q, None)`. Logits are FP32 or, rounded at the end, BF16.

    The other member would be the scales of FP4 queries, which Hopper does not have.
    """
    nothing("indices", indices)  # of sequences: only kernels for Blackwell take them
    operands = without_scales(q), kv_cache, weights, context_lens, block_table, schedule_meta
    return run, LOGITS, operands, (max_context_len, clean_logits, logits_dtype)


@torch.no_grad()
def compute(p: PagedLogits) -> CallPlan | None:
    """Compute a problem's logits where its operands are; on a GPU give the plan, which serves other calls."""
    if p.logits.numel() == 0 or p.cache.shape[0] == 0:
        return None
    if p.q.is_cuda:
        return paged_kernel.run(p)
    reference.paged_mqa_logits(p)
    return None


def _answer_logits(*given: Any) -> tuple[Tensor, CallPlan | None]:
    p = paged_logits_problem(*given)
    return p.logits, compute(p)


@torch.no_grad()
def _answer_schedule(contexts: Tensor, block_kv: int, num_sms: int) -> tuple[Tensor, CallPlan | None]:
    schedule = metadata_problem(contexts, block_kv, num_sms)
    if contexts.is_cuda:
        return schedule, plan_paged_contexts.run(contexts, schedule)
    reference.schedule(contexts, schedule)
    return schedule, None


def _logits_operator(*given: Any) -> Tensor:
    return torch.ops.deep_gemm.fp8_paged_mqa_logits.default(*given)  # type: ignore[no-any-return]


def _schedule_operator(*given: Any) -> Tensor:
    return torch.ops.deep_gemm.plan_paged_contexts.default(*given)  # type: ignore[no-any-return]


def _all(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


LOGITS = Function(_answer_logits, _logits_operator, _all)
SCHEDULE = Function(_answer_schedule, _schedule_operator, _all)
