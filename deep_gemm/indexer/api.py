"""Logits of the indexer: of many tokens with keys in rows, and of a few tokens of each sequence with keys in pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compat.forms import Request, tells_options_by_type
from ..core.call import FREE_ROWS, Function, run
from ..core.check.checks import nothing
from ..core.operators import declared, flops_of, operator
from ..core.replay import FIXED
from . import kernel, plan_paged_contexts, reference
from .check import Keys, Logits, PagedLogits, metadata_problem, mqa_logits_problem, paged_logits_problem, without_scales


@tells_options_by_type
def fp8_mqa_logits(
    q: Tensor,
    kv: Keys,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
    schedule_meta: None = None,
) -> Request:
    """Score the keys of each token's range: FP32 logits by which the indexer chooses keys.

    ``logits[i, j] = sf[j] * sum over heads h of max(0, q[i, h] . kv[j]) * weights[i, h]``

    - `q`: FP8 `[tokens, heads, depth]`, heads a multiple of 8 up to 128, depth 32, 64 or 128.
    - `kv`: FP8 `[keys, depth]` and FP32 scales `[keys]`, one for each key.
    - `weights`: FP32 `[tokens, heads]`. They must include the scale of a query, and a softmax scale.
    - `cu_seq_len_k_start`, `cu_seq_len_k_end`: int32 `[tokens]`. Token i has the keys start <= j < end, cut off to
      0..keys; no keys if end <= start.
    - `max_seqlen_k`: 0, or the columns of compressed rows: `logits[i, j - start[i]]`, undefined after the end of
      a range.
    - `clean_logits`: if True, logits outside a range are -inf; else they are undefined. None means True, but False in
      compressed rows, which cannot be cleaned.

    Releases of DeepGEMM have the last two arguments in different orders, so by position their types tell them apart: a
    bool is `clean_logits`, an integer is `max_seqlen_k`.

    The result is a view of longer rows, so it is not contiguous. Sums have a fixed order, so the bits are the same each
    time.

    >>> q, k = (torch.ones(*shape, dtype=torch.float8_e4m3fn) for shape in ((2, 8, 32), (3, 32)))
    >>> start, end = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    >>> fp8_mqa_logits(q, (k, torch.ones(3)), torch.full((2, 8), 0.5), start, end).tolist()
    [[128.0, 128.0, -inf], [-inf, 128.0, 128.0]]
    """
    nothing("schedule_meta", schedule_meta)  # the kernel makes its own schedule
    said = clean_logits, max_seqlen_k, torch.float32
    return run, LOGITS, (q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end), said


@tells_options_by_type
def fp8_fp4_mqa_logits(
    q: tuple[Tensor, None],
    kv: Keys,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: None = None,
) -> Request:
    """Compute `fp8_mqa_logits` with `q` in a pair `(q, None)`. Logits are FP32 or, rounded at the end, BF16.

    The second member of the pair would be the scales of FP4 queries, which Hopper does not support.
    """
    nothing("schedule_meta", schedule_meta)  # the kernel makes its own schedule
    said = clean_logits, max_seqlen_k, logits_dtype
    return run, LOGITS, (without_scales(q), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end), said


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: None = None) -> Tensor:
    """Plan which SM computes which logits of `fp8_paged_mqa_logits`: int32 `[num_sms + 1, 2]`.

    The plan is valid for these contexts, int32 `[sequences, next_n]` or `[sequences]`, in all layers, and may be copied
    into a tensor that a graph reads.

    >>> get_paged_mqa_logits_metadata(torch.tensor([[1000], [24]], dtype=torch.int32), 64, 2).tolist()
    [[0, 0], [0, 4], [1, 1]]
    """
    nothing("indices", indices)  # indices of sequences, which only kernels for Blackwell support
    return run(SCHEDULE, (context_lens,), (block_kv, num_sms))  # type: ignore[no-any-return]


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
    - `kv_cache`: uint8 `[blocks, page, 1, depth + 4]`, page 32 or 64. A block has all its keys first, then their FP32
      scales. Blocks may have gaps between them, and begin at multiples of 16 bytes.
    - `weights`: FP32 `[sequences * next_n, heads]`.
    - `context_lens`: int32 `[sequences, next_n]`: token t has the keys j < context_lens[b, t]; or `[sequences]`, one
      number for all tokens of a sequence. 0 is allowed.
    - `block_table`: int32 `[sequences, pages]`: the block of each page. Entries after the context may be anything; the
      kernel does not read their pages.
    - `schedule_meta`: from `get_paged_mqa_logits_metadata` for these contexts, for all SMs or for half of them.
    - `clean_logits`: must be False. Logits after a context are undefined.
    - `indices`: must be None. By position, `indices` and `clean_logits` may be in either order, as releases differ.

    The result is a view of longer rows, so it is not contiguous. Sums have a fixed order, so the bits are the same each
    time.
    """
    nothing("indices", indices)  # indices of sequences, which only kernels for Blackwell support
    operands = q, kv_cache, weights, context_lens, block_table, schedule_meta
    return run, PAGED_LOGITS, operands, (max_context_len, clean_logits, torch.float32)


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
    """Compute `fp8_paged_mqa_logits` with `q` in a pair `(q, None)`. Logits are FP32 or, rounded at the end, BF16.

    The second member of the pair would be the scales of FP4 queries, which Hopper does not support.
    """
    nothing("indices", indices)  # indices of sequences, which only kernels for Blackwell support
    operands = without_scales(q), kv_cache, weights, context_lens, block_table, schedule_meta
    return run, PAGED_LOGITS, operands, (max_context_len, clean_logits, logits_dtype)


@torch.no_grad()
def compute(p: Logits) -> None:
    """Compute a problem's logits on the device of its operands."""
    if p.logits.numel() == 0 or (isinstance(p, PagedLogits) and p.cache.shape[0] == 0):
        return
    if p.q.is_cuda:
        kernel.run(p)
    elif isinstance(p, PagedLogits):
        reference.paged_mqa_logits(p)
    else:
        reference.mqa_logits(p)


def _answer(problem: Callable[..., Logits], *given: Any) -> Tensor:
    p = problem(*given)
    compute(p)
    return p.logits


@torch.no_grad()
def _answer_schedule(contexts: Tensor, block_kv: int, num_sms: int) -> Tensor:
    schedule = metadata_problem(contexts, block_kv, num_sms)
    if contexts.is_cuda:
        plan_paged_contexts.run(contexts, schedule)
    else:
        reference.schedule(contexts, schedule)
    return schedule


MQA_OPERATOR = declared(
    "fp8_mqa_logits(Tensor q, Tensor kv, Tensor sfkv, Tensor weights, Tensor cu_seq_len_k_start, "
    "Tensor cu_seq_len_k_end, bool? clean_logits=None, SymInt max_seqlen_k=0, ScalarType logits_dtype=float) -> Tensor",
    lambda q, kv, sfkv, *rest: fp8_fp4_mqa_logits((q, None), (kv, sfkv), *rest),
    lambda q, kv, sfkv, *rest: mqa_logits_problem(q, (kv, sfkv), *rest).logits,
    operator,
    flops=flops_of("q"),
)
PAGED_OPERATOR = declared(
    "fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
    "Tensor schedule_meta, SymInt max_context_len, bool clean_logits=False, ScalarType logits_dtype=float) -> Tensor",
    lambda q, *rest: fp8_fp4_paged_mqa_logits((q, None), *rest),
    lambda *given: paged_logits_problem(*given).logits,
    operator,
    flops=flops_of("q"),
)
SCHEDULE_OPERATOR = declared(
    "plan_paged_contexts(Tensor context_lens, int block_kv, int num_sms) -> Tensor",
    get_paged_mqa_logits_metadata,
    metadata_problem,
)
LOGITS = Function(
    partial(_answer, mqa_logits_problem),
    lambda q, kv, *others: MQA_OPERATOR(q, *kv, *others),
    lambda q, kv, *others: (q, *kv, *others),
    free=[FREE_ROWS] * 6,
)
PAGED_LOGITS = Function(
    partial(_answer, paged_logits_problem),
    PAGED_OPERATOR,
    lambda *tensors: tensors,
    free=[FREE_ROWS, FIXED, FREE_ROWS, FREE_ROWS, FREE_ROWS],
)
SCHEDULE = Function(_answer_schedule, SCHEDULE_OPERATOR, lambda *tensors: tensors, free=[FREE_ROWS])
