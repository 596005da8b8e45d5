"""Logits of the indexer for many tokens, whose keys lie one behind another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compat.forms import Request, tells_options_by_type
from ..core.call import CallPlan, Function, run
from ..core.check.checks import nothing
from . import kernel, reference
from .check import Keys, MqaLogits, mqa_logits_problem, without_scales


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
    """Score the keys of each token's range: FP32 logits, by which the indexer chooses what a token attends to.

    ``logits[i, j] = sf[j] * sum over heads h of max(0, q[i, h] . kv[j]) * weights[i, h]``

    - `q`: FP8 `[tokens, heads, depth]`, heads a multiple of 8 up to 128, depth 32, 64 or 128.
    - `kv`: FP8 `[keys, depth]` and FP32 scales `[keys]`, one for each key.
    - `weights`: FP32 `[tokens, heads]`. The scale of a query, and a softmax scale, belong in here.
    - `cu_seq_len_k_start`, `cu_seq_len_k_end`: int32 `[tokens]`. Token i has the keys start <= j < end, of those that
      there are; none if end <= start.
    - `max_seqlen_k`: 0, or the columns of compressed rows: `logits[i, j - start[i]]`, where what is behind a range is
      undefined.
    - `clean_logits`: what is outside of a range is -inf; else it is undefined. None means True, and False in compressed
      rows, where it cannot be True.

    Releases differ in the order of these two by position, so their types tell them apart: a bool is `clean_logits`, an
    integer `max_seqlen_k`.

    The result is a view of rows that have room for more, so it is not contiguous. Sums have one order, so the bits are
    the same each time.

    >>> q, k = (torch.ones(*shape, dtype=torch.float8_e4m3fn) for shape in ((2, 8, 32), (3, 32)))
    >>> start, end = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    >>> fp8_mqa_logits(q, (k, torch.ones(3)), torch.full((2, 8), 0.5), start, end).tolist()
    [[128.0, 128.0, -inf], [-inf, 128.0, 128.0]]
    """
    nothing("schedule_meta", schedule_meta)  # the kernel makes its own
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
    """Do what `fp8_mqa_logits` does with `q` in a pair `(q, None)`. Logits are FP32 or, rounded at the end, BF16.

    The other member would be the scales of FP4 queries, which Hopper does not have.
    """
    nothing("schedule_meta", schedule_meta)  # the kernel makes its own
    said = clean_logits, max_seqlen_k, logits_dtype
    return run, LOGITS, (without_scales(q), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end), said


@torch.no_grad()
def compute(p: MqaLogits) -> CallPlan | None:
    """Compute a problem's logits where its operands are; on a GPU give the plan, which serves other calls."""
    if p.logits.numel() == 0:
        return None
    if p.q.is_cuda:
        return kernel.run(p)
    reference.mqa_logits(p)
    return None


def _as_operator(q: Tensor, kv: Keys, *others: Any) -> Tensor:
    return torch.ops.deep_gemm.fp8_mqa_logits.default(q, *kv, *others)  # type: ignore[no-any-return]


def _answer(*given: Any) -> tuple[Tensor, CallPlan | None]:
    p = mqa_logits_problem(*given)
    return p.logits, compute(p)


LOGITS = Function(_answer, _as_operator, lambda q, kv, *others: (q, *kv, *others))
