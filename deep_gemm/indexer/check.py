"""Requests for the indexer's logits: queries of several heads, keys of one, and each query's range of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.check import checks
from ..core.check.integers import integer_in_range
from ..core.check.layout import ADDRESS_ALIGNMENT, align, whole_elements
from ..core.check.tracing import has_memory

HEADS_MULTIPLE, MAX_HEADS = 8, 128
HEADS = tuple(range(HEADS_MULTIPLE, MAX_HEADS + 1, HEADS_MULTIPLE))
DEPTHS = (32, 64, 128)
LOGITS_TYPES = (torch.float32, torch.bfloat16)
ROW_BYTES = 1024
"""Rows of logits begin at multiples of this."""
ROOM = 256
"""Keys for which a row has room behind those that the caller sees. A kernel may write there."""
NUMBER_LIMIT = 1 << 31
"""TMA counts rows with signed numbers of 32 bits."""

Keys = tuple[Tensor, Tensor]
"""FP8 values `[keys, depth]` and their FP32 scales `[keys]`."""


class MqaLogits(NamedTuple):
    """Checked arguments, and the logits to write."""

    q: Tensor
    keys: Tensor
    scales: Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor
    logits: Tensor
    is_compressed: bool
    clean_logits: bool


def mqa_logits_problem(
    q: Tensor,
    kv: Keys,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    clean_logits: bool | None,
    max_seqlen_k: int,
    logits_dtype: torch.dtype,
) -> MqaLogits:
    """Check the arguments, and make the logits. `clean_logits` None: unless they are compressed."""
    sizes: checks.Sizes = {}
    checks.fp8("q", checks.tensor("q", q))
    checks.bind("q", q, ("tokens", "heads", "depth"), sizes)
    checks.supported_device("q", q)
    keys, scales = checks.pair("kv", kv)
    checks.fp8("kv", keys)
    checks.bind("kv", keys, ("keys", "depth"), sizes)
    checks.fp32_scales("sfkv", scales)
    checks.bind("sfkv", scales, ("keys",), sizes)
    checks.has_type("weights", checks.tensor("weights", weights), (torch.float32,))
    checks.bind("weights", weights, ("tokens", "heads"), sizes)
    whole_elements("weights", weights)
    ranges = {
        name: checks.int32(name, x, "tokens", sizes["tokens"])
        for name, x in (("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends))
    }
    checks.same_device({"kv": keys, "sfkv": scales, "weights": weights, **ranges}, q.device, "q")
    for name, x in (("q", q), ("weights", weights)):
        if torch.is_grad_enabled() and x.requires_grad:
            checks.refuse_gradient(name)
    _sizes(q, sizes)
    for name, x in (("q", q), ("kv", keys), ("sfkv", scales)):
        _contiguous(name, x)
    if weights.shape[1] > 1 and weights.stride(1) != 1:
        raise ValueError(f"weights: expected values contiguous along heads, got strides {weights.stride()}")
    max_seqlen_k = integer_in_range("max_seqlen_k", max_seqlen_k, 0, NUMBER_LIMIT - 1)
    is_compressed = max_seqlen_k > 0
    if is_compressed and clean_logits:
        raise ValueError("clean_logits: expected False, because max_seqlen_k is given, got True")
    cleans = not is_compressed if clean_logits is None else bool(clean_logits)
    if logits_dtype not in LOGITS_TYPES:
        raise ValueError(f"logits_dtype: expected {' or '.join(map(str, LOGITS_TYPES))}, got {logits_dtype}")
    logits = empty_logits(sizes["tokens"], sizes["keys"], max_seqlen_k, logits_dtype, q.device)
    return MqaLogits(q, keys, scales, weights, starts, ends, logits, is_compressed, cleans)


def empty_logits(tokens: int, keys: int, max_seqlen_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make logits `[tokens, keys]`, or `[tokens, max_seqlen_k]` if that is given, in rows that have room for more."""
    columns = max_seqlen_k if max_seqlen_k > 0 else keys
    room = align(columns, ROOM) if max_seqlen_k > 0 else columns + ROOM
    pitch = align(room, ROW_BYTES // dtype.itemsize)
    return torch.empty((tokens, pitch), dtype=dtype, device=device)[:, :columns]


def no_q_scales(sfq: object) -> None:
    """Refuse scales of q, which only FP4 queries have."""
    if sfq is not None:
        raise NotImplementedError("q: FP4 queries are not supported, expected a pair (q, None) with q in FP8")


def no_schedule(schedule_meta: object) -> None:
    """Refuse a schedule: the kernel makes its own."""
    if schedule_meta is not None:
        raise NotImplementedError(f"schedule_meta: expected None, got {type(schedule_meta).__name__}")


def _sizes(q: Tensor, sizes: checks.Sizes) -> None:
    heads, depth = sizes["heads"], sizes["depth"]
    if not (0 < heads <= MAX_HEADS and heads % HEADS_MULTIPLE == 0):
        raise NotImplementedError(
            f"q: expected a number of heads that is a multiple of {HEADS_MULTIPLE} up to {MAX_HEADS}, got {heads}"
        )
    if depth not in DEPTHS:
        raise NotImplementedError(f"q: expected a depth of {', '.join(map(str, DEPTHS))}, got {depth}")
    # Not while torch traces, for which this would be a guard on the number of tokens.
    if has_memory(q) and (sizes["tokens"] * heads >= NUMBER_LIMIT or sizes["keys"] >= NUMBER_LIMIT - ROOM):
        raise ValueError(
            f"q: expected tokens x heads and keys below 2^31, got {sizes['tokens']} x {heads} and {sizes['keys']}"
        )


def _contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
    if has_memory(x) and x.data_ptr() % ADDRESS_ALIGNMENT:
        raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got {x.data_ptr():#x}")
