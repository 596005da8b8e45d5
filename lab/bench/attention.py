"""The indexer's logits: ours beside torch, and beside what DeepGEMM would take. Cold, on a GPU.

A kind of logits is an entry of `KINDS`: its shapes, and what makes its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import yardsticks
from .cases import PEAK_TFLOPS, Shape, cold_copy_us
from .contenders import OURS
from .layers import EAGER
from .logits import Kind, Logits
from .logits_paged import METADATA_SHAPES, PAGED_SHAPES, metadata, paged_mqa_logits
from .logits_prefill import MQA_SHAPES, mqa_logits
from .products import measure_each
from .report import Add, Announce, Row, cold_rows_of
from .timing import L2Flush, cold

METHOD = (
    "attention: GPU time of all kernels of a call from torch.profiler, a 512 MB fill before each call to evict the L2, "
    "contenders of a shape interleaved in one process in rotating order, median, least and most; random normal "
    "operands; mqa_logits: shapes are queries, keys, heads, depth, each query sees the keys up to its own, which is "
    "one of the last, FP32 logits; mqa_logits_clean: with -inf elsewhere; torch: dequantized to BF16, in parts of at "
    "most 2^28 scores, up to 2^34 scores in all; paged_mqa_logits: sequences, tokens of each, heads, depth, context, "
    "from 0.7 to 1.3 of it, with the mean that DeepGEMM was timed with, in pages of 64 keys in any order; "
    "paged_metadata: sequences, tokens, context; our results checked against the reference for some queries; "
    f"{yardsticks.METHOD}"
)
REPEATS, SECONDS = 15, 0.05
"""Calls of each contender; fewer if they take so long together."""
COOL_SECONDS = 0.25
"""Pause ahead of a shape: a GPU that a long one has warmed runs the next at a lower clock."""
CONTENDERS = (OURS, EAGER)
MOST_DIFFERENCE = 5e-6


def shapes_of(*, quick: bool = False) -> list[tuple[str, Shape]]:
    """List what is measured: kinds with shapes."""
    return [(name, shape) for name, kind in KINDS.items() for shape in (kind.quick if quick else kind.shapes)]


def chosen(shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """These shapes, of each kind that has them."""
    found = [(name, shape) for name, shape in shapes_of() if shape in shapes]
    return found or [(KIND_OF_NUMBERS[len(shape)], shape) for shape in shapes]


def measure(kinds: Sequence[tuple[str, Shape]], *, only: Sequence[str] = (), add: Add, announce: Announce) -> None:
    """Time the yardsticks, and logits of these kinds and shapes."""
    flush = L2Flush()
    add(yardsticks.measure(flush))
    measure_each(kinds, lambda kind, shape: rows_of(kind, shape, KINDS[kind].make(shape), flush, only), add, announce)


def rows_of(kind: str, shape: Shape, logits: Logits, flush: L2Flush, only: Sequence[str]) -> list[Row]:
    """Check ours, and time all contenders."""
    floor_us = round(max(logits.operations / (PEAK_TFLOPS * 1e6), cold_copy_us(logits.bytes)), 3)
    work: dict[str, Any] = {"operations": logits.operations, "bytes": logits.bytes, "floor_us": floor_us}
    calls: dict[str, Callable[[], Any]] = {OURS: logits.ours}
    if logits.in_torch is not None:
        calls[EAGER] = logits.in_torch
    if only:
        calls = {name: call for name, call in calls.items() if name in only}
    error = logits.error() if OURS in calls else None
    wrong = f"wrong: difference {error:.2g}" if error is not None and not error <= MOST_DIFFERENCE else None
    time.sleep(COOL_SECONDS)
    repeats = max(3, min(REPEATS, int(SECONDS / max(floor_us * 1e-6, 1e-6))))
    return cold_rows_of(kind, shape, cold(calls, flush, repeats), errors={OURS: error}, failed={OURS: wrong}, **work)


KINDS: Mapping[str, Kind] = {
    "mqa_logits": Kind(MQA_SHAPES, MQA_SHAPES[1:2] + MQA_SHAPES[8:9], mqa_logits),
    "mqa_logits_clean": Kind(MQA_SHAPES[2:3], (), lambda shape: mqa_logits(shape, clean=True)),
    "paged_mqa_logits": Kind(PAGED_SHAPES, PAGED_SHAPES[:2], paged_mqa_logits),
    "paged_metadata": Kind(METADATA_SHAPES, METADATA_SHAPES[:1], metadata),
}
KIND_OF_NUMBERS = {len(kind.shapes[0]): name for name, kind in reversed(list(KINDS.items()))}
"""The kind of a shape with so many numbers that no kind lists."""
