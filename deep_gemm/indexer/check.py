"""Requests for the indexer's logits: queries of several heads, keys of one, in rows or in pages, and which count."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.check import checks
from ..core.check.layout import ADDRESS_ALIGNMENT, address, align, either, rows_of_counts, whole_elements
from ..core.check.memory import empty
from ..core.check.numbers import integer_in_range
from ..core.check.tracing import has_memory

HEADS_MULTIPLE, MAX_HEADS = 8, 128
HEADS = tuple(range(HEADS_MULTIPLE, MAX_HEADS + 1, HEADS_MULTIPLE))
DEPTHS = (32, 64, 128)
LOGITS_TYPES = (torch.float32, torch.bfloat16)
ROW_BYTES = 1024
"""Rows of logits begin at multiples of this."""
ROOM = 256
"""Extra keys at the end of each row of logits, which the caller does not see and a kernel may write."""
NUMBER_LIMIT = 1 << 31
"""TMA counts rows with signed numbers of 32 bits."""
MAX_NEXT_N, MAX_COLUMNS = 4, 256
PAGES = (32, 64)
SCALE_BYTES = 4
SEGMENT_KEYS = 128
"""Keys of a segment, the unit of a schedule: a block of the kernel, so that few keys still reach many SMs."""
MAX_SHARES = 1 << 16

Keys = tuple[Tensor, Tensor]
"""FP8 values `[keys, depth]` and their FP32 scales `[keys]`."""


class MqaLogits(NamedTuple):
    """Checked arguments of keys in rows, and the logits to write."""

    q: Tensor
    keys: Tensor
    scales: Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor
    logits: Tensor
    is_compressed: bool
    clean_logits: bool


class PagedLogits(NamedTuple):
    """Checked arguments of keys in pages, and the logits to write."""

    q: Tensor
    cache: Tensor
    """uint8 `[blocks, page, 1, depth + 4]`."""
    weights: Tensor
    contexts: Tensor
    table: Tensor
    schedule: Tensor
    logits: Tensor


Logits = MqaLogits | PagedLogits


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
    """Check the arguments, and make the logits. `clean_logits=None` cleans them unless they are compressed."""
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
    # Skipped while torch traces, where this check would become a guard on the number of tokens.
    if has_memory(q) and (sizes["tokens"] * sizes["heads"] >= NUMBER_LIMIT or sizes["keys"] >= NUMBER_LIMIT - ROOM):
        got = f"{sizes['tokens']} x {sizes['heads']} and {sizes['keys']}"
        raise ValueError(f"q: expected tokens x heads and keys below 2^31, got {got}")
    for name, x in (("q", q), ("kv", keys), ("sfkv", scales)):
        contiguous(name, x)
    max_seqlen_k = integer_in_range("max_seqlen_k", max_seqlen_k, 0, NUMBER_LIMIT - 1)
    is_compressed = max_seqlen_k > 0
    if is_compressed and clean_logits:
        raise ValueError("clean_logits: expected False, because max_seqlen_k is given, got True")
    cleans = not is_compressed if clean_logits is None else bool(clean_logits)
    type_of_logits(logits_dtype)
    columns, room = (max_seqlen_k, 0) if is_compressed else (sizes["keys"], ROOM)
    logits = empty_logits(sizes["tokens"], columns, logits_dtype, q.device, room)
    return MqaLogits(q, keys, scales, weights, starts, ends, logits, is_compressed, cleans)


def paged_logits_problem(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
) -> PagedLogits:
    """Check the arguments, and make the logits."""
    sizes: checks.Sizes = {}
    queries(q, ("sequences", "next_n", "heads", "depth"), sizes)
    sequences, next_n, heads, depth = (sizes[axis] for axis in ("sequences", "next_n", "heads", "depth"))
    if not 1 <= next_n <= MAX_NEXT_N:
        raise NotImplementedError(f"q: expected 1 to {MAX_NEXT_N} tokens of a sequence, got {next_n}")
    if next_n * heads > MAX_COLUMNS:
        raise NotImplementedError(f"q: expected next_n x heads up to {MAX_COLUMNS}, got {next_n} x {heads}")
    # Skipped while torch traces, where this check would become a guard on the size of a batch.
    if has_memory(q) and q.numel() >= NUMBER_LIMIT * depth:
        raise ValueError(f"q: expected sequences x next_n x heads below 2^31, got shape {tuple(q.shape)}")
    page = _cache(kv_cache, depth)
    weights_of_heads(weights, sequences * next_n, heads)
    _contexts(context_lens, sequences, next_n)
    checks.shaped("block_table", block_table, (torch.int32,), ("sequences", "pages"), {"sequences": sequences})
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table: expected entries contiguous along pages, got strides {block_table.stride()}")
    checks.has_type("schedule_meta", checks.tensor("schedule_meta", schedule_meta), (torch.int32,))
    rows = schedule_meta.shape[0] if schedule_meta.dim() else 0
    if schedule_meta.dim() != 2 or rows < 2 or schedule_meta.shape[1] != 2 or not schedule_meta.is_contiguous():
        raise ValueError(
            f"schedule_meta: expected a contiguous (num_sms + 1, 2) of get_paged_mqa_logits_metadata, "
            f"got {tuple(schedule_meta.shape)} with strides {schedule_meta.stride()}"
        )
    others = {
        "kv_cache": kv_cache,
        "weights": weights,
        "context_lens": context_lens,
        "block_table": block_table,
        "schedule_meta": schedule_meta,
    }
    checks.same_device(others, q.device, "q")
    checks.without_gradients({"q": q, "weights": weights})
    contiguous("q", q)
    address("schedule_meta", schedule_meta, 8)
    if clean_logits:
        raise ValueError("clean_logits: expected False, because contexts are those of tokens, got True")
    max_context_len = integer_in_range("max_context_len", max_context_len, 0, NUMBER_LIMIT - ROOM - 1)
    type_of_logits(logits_dtype)
    if page * block_table.shape[1] >= NUMBER_LIMIT:
        raise ValueError(f"block_table: expected fewer than 2^31 keys, got {block_table.shape[1]} pages of {page}")
    # The host reads no lengths on a GPU, so a page that may be asked for is enough.
    if kv_cache.shape[0] == 0 and sequences > 0 and block_table.shape[1] > 0 and max_context_len > 0:
        shape = tuple(kv_cache.shape)
        raise ValueError(f"kv_cache: expected at least one block for the entries of block_table, got {shape}")
    if checks.on_host(block_table) and checks.on_host(context_lens):
        _entries(block_table, context_lens, max_context_len, page, kv_cache.shape[0])
    logits = empty_logits(sequences * next_n, max_context_len, logits_dtype, q.device)
    return PagedLogits(q, kv_cache, weights, context_lens, block_table, schedule_meta, logits)


def metadata_problem(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    """Check the arguments, and make the schedule."""
    checks.has_type("context_lens", checks.tensor("context_lens", context_lens), (torch.int32,))
    if context_lens.dim() not in (1, 2) or not context_lens.is_contiguous():
        raise ValueError(
            f"context_lens: expected a contiguous (sequences, next_n) or (sequences,), "
            f"got {tuple(context_lens.shape)} with strides {context_lens.stride()}"
        )
    if context_lens.dim() == 2 and context_lens.shape[1] == 0:
        raise ValueError(f"context_lens: expected at least one token, got {tuple(context_lens.shape)}")
    whole_elements("context_lens", context_lens)
    checks.supported_device("context_lens", context_lens)
    if integer_in_range("block_kv", block_kv, 1) not in PAGES:
        raise NotImplementedError(f"block_kv: expected pages of {either(PAGES)} keys, got {block_kv}")
    num_sms = integer_in_range("num_sms", num_sms, 1, MAX_SHARES)
    return empty("the schedule", (num_sms + 1, 2), torch.int32, context_lens.device)


def empty_logits(tokens: int, columns: int, dtype: torch.dtype, device: torch.device, room: int = 0) -> Tensor:
    """Make logits `[tokens, columns]`; each row has room for `room` columns more."""
    pitch = align(columns + room, ROW_BYTES // dtype.itemsize)
    return empty("logits", (tokens, pitch), dtype, device)[:, :columns]


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
    heads, depth = sizes["heads"], sizes["depth"]
    if not (0 < heads <= MAX_HEADS and heads % HEADS_MULTIPLE == 0):
        raise NotImplementedError(
            f"q: expected a number of heads that is a multiple of {HEADS_MULTIPLE} up to {MAX_HEADS}, got {heads}"
        )
    if depth not in DEPTHS:
        raise NotImplementedError(f"q: expected a depth of {either(DEPTHS)}, got {depth}")


def weights_of_heads(weights: Tensor, tokens: int, heads: int) -> None:
    """Check weights `[tokens, heads]`, whose rows may lie apart."""
    checks.shaped("weights", weights, (torch.float32,), ("tokens", "heads"), {"tokens": tokens, "heads": heads})
    whole_elements("weights", weights)
    if weights.shape[1] > 1 and weights.stride(1) != 1:
        raise ValueError(f"weights: expected values contiguous along heads, got strides {weights.stride()}")


def type_of_logits(dtype: torch.dtype) -> None:
    """Check the type of logits that a caller asks for."""
    if dtype not in LOGITS_TYPES:
        raise ValueError(f"logits_dtype: expected {' or '.join(map(str, LOGITS_TYPES))}, got {dtype}")


def contiguous(name: str, x: Tensor) -> None:
    """Check that a tensor has no gaps, and begins where TMA can load from."""
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
    address(name, x, ADDRESS_ALIGNMENT)


def block_stride(cache: Tensor) -> int:
    """Give the bytes from block to block of a cache. A single block may have any stride, which is ignored."""
    return cache.stride(0) if cache.shape[0] > 1 else cache.shape[1] * cache.shape[3]


def _cache(cache: Tensor, depth: int) -> int:
    """Check the cache; give the keys of a page."""
    known = {"one": 1, "depth + 4": depth + SCALE_BYTES}
    checks.shaped("kv_cache", cache, (torch.uint8,), ("blocks", "page", "one", "depth + 4"), known)
    page, row = cache.shape[1], depth + SCALE_BYTES
    if page not in PAGES:
        raise NotImplementedError(f"kv_cache: expected pages of {either(PAGES)} keys, got {page}")
    if cache.stride(1) != row or cache.stride(3) != 1:
        raise ValueError(f"kv_cache: expected blocks without gaps, strides (..., {row}, ..., 1), got {cache.stride()}")
    stride = block_stride(cache)
    if stride % ADDRESS_ALIGNMENT or stride < page * row:
        raise ValueError(
            f"kv_cache: expected a block stride that is a multiple of {ADDRESS_ALIGNMENT} bytes, "
            f"and at least {page * row}, got {stride}"
        )
    if cache.shape[0] >= NUMBER_LIMIT:
        raise ValueError(f"kv_cache: expected fewer than 2^31 blocks, got {cache.shape[0]}")
    address("kv_cache", cache, ADDRESS_ALIGNMENT)
    return int(page)


def _contexts(contexts: Tensor, sequences: int, next_n: int) -> None:
    checks.has_type("context_lens", checks.tensor("context_lens", contexts), (torch.int32,))
    if tuple(contexts.shape) not in ((sequences, next_n), (sequences,)):
        raise ValueError(
            f"context_lens: expected shape (sequences, next_n) = ({sequences}, {next_n}) or (sequences,), "
            f"got {tuple(contexts.shape)}"
        )
    if not contexts.is_contiguous():
        raise ValueError(f"context_lens: expected a contiguous tensor, got strides {contexts.stride()}")
    whole_elements("context_lens", contexts)


def _entries(table: Tensor, contexts: Tensor, most: int, page: int, blocks: int) -> None:
    """Check the entries of the pages that the contexts reach, up to `most` keys. Later entries may be anything."""
    if contexts.numel() == 0 or blocks == 0:
        return
    longest = contexts.reshape(len(contexts), -1).amax(1).clamp(0, most)
    is_read = rows_of_counts((longest + page - 1) // page, table.shape[1])
    checks.in_range("block_table", table.where(is_read, 0), 0, blocks - 1)
