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
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> MqaLogits:
    """Check the arguments, and make the logits. `clean_logits` None: unless they are compressed."""
    sizes: checks.Sizes = {}
    queries(q, ("tokens", "heads", "depth"), sizes)
    keys, scales = checks.pair("kv", kv)
    checks.fp8("kv", keys)
    checks.bind("kv", keys, ("keys", "depth"), sizes)
    checks.fp32_scales("sfkv", scales)
    checks.bind("sfkv", scales, ("keys",), sizes)
    weights_of_heads(weights, sizes["tokens"], sizes["heads"])
    ranges = {
        name: checks.int32(name, x, "tokens", sizes["tokens"])
        for name, x in (("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends))
    }
    checks.same_device({"kv": keys, "sfkv": scales, "weights": weights, **ranges}, q.device, "q")
    checks.without_gradients({"q": q, "weights": weights})
    _sizes(q, sizes)
    for name, x in (("q", q), ("kv", keys), ("sfkv", scales)):
        contiguous(name, x)
    max_seqlen_k = integer_in_range("max_seqlen_k", max_seqlen_k, 0, NUMBER_LIMIT - 1)
    is_compressed = max_seqlen_k > 0
    if is_compressed and clean_logits:
        raise ValueError("clean_logits: expected False, because max_seqlen_k is given, got True")
    cleans = not is_compressed if clean_logits is None else bool(clean_logits)
    type_of_logits(logits_dtype)
    logits = empty_logits(sizes["tokens"], sizes["keys"], max_seqlen_k, logits_dtype, q.device)
    return MqaLogits(q, keys, scales, weights, starts, ends, logits, is_compressed, cleans)


def empty_logits(tokens: int, keys: int, max_seqlen_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make logits `[tokens, keys]`, or `[tokens, max_seqlen_k]` if that is given, in rows that have room for more."""
    columns = max_seqlen_k if max_seqlen_k > 0 else keys
    return rows_of_logits(tokens, columns, align(columns, ROOM) if max_seqlen_k > 0 else columns + ROOM, dtype, device)


def rows_of_logits(tokens: int, columns: int, room: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make logits `[tokens, columns]`, in rows that have room for so many."""
    pitch = align(room, ROW_BYTES // dtype.itemsize)
    return torch.empty((tokens, pitch), dtype=dtype, device=device)[:, :columns]


def without_scales(q: tuple[Tensor, None]) -> Tensor:
    """Give the queries of a pair `(q, None)`. Only FP4 queries have scales."""
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise TypeError(f"q: expected a pair (q, None), got a {type(q).__name__}")
    values, sfq = q
    if sfq is not None:
        raise NotImplementedError("q: FP4 queries are not supported, expected a pair (q, None) with q in FP8")
    return values


def queries(q: Tensor, axes: checks.Axes, sizes: checks.Sizes) -> None:
    """Check the type, the shape and the device of queries."""
    checks.fp8("q", checks.tensor("q", q))
    checks.bind("q", q, axes, sizes)
    checks.supported_device("q", q)


def weights_of_heads(weights: Tensor, tokens: int, heads: int) -> None:
    """Check weights `[tokens, heads]`, whose rows may lie apart."""
    checks.has_type("weights", checks.tensor("weights", weights), (torch.float32,))
    checks.bind("weights", weights, ("tokens", "heads"), {"tokens": tokens, "heads": heads})
    whole_elements("weights", weights)
    if weights.shape[1] > 1 and weights.stride(1) != 1:
        raise ValueError(f"weights: expected values contiguous along heads, got strides {weights.stride()}")


def type_of_logits(dtype: torch.dtype) -> None:
    """Check in which type logits are asked for."""
    if dtype not in LOGITS_TYPES:
        raise ValueError(f"logits_dtype: expected {' or '.join(map(str, LOGITS_TYPES))}, got {dtype}")


def contiguous(name: str, x: Tensor) -> None:
    """Check that a tensor has no gaps, and begins where TMA can load from."""
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
    address(name, x, ADDRESS_ALIGNMENT)


def address(name: str, x: Tensor, alignment: int) -> None:
    """Check that a tensor begins at a multiple of so many bytes."""
    if has_memory(x) and x.data_ptr() % alignment:
        raise ValueError(f"{name}: expected an address that is a multiple of {alignment} bytes, got {x.data_ptr():#x}")


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
