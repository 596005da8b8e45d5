"""The indexer's logits: ours beside torch, and beside what DeepGEMM would take. Cold, on a GPU.

A kind of logits is an entry of `KINDS`: its shapes, and what makes its work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..indexer import prefill, reference
from ..problem.indexer import MqaLogits, mqa_logits_problem
from ..testing import calc_diff
from . import yardsticks
from .cases import PEAK_TFLOPS, Shape, cold_copy_us
from .contenders import OURS
from .layers import EAGER
from .products import MAX_NAME, raise_if_lost, reason
from .report import Row
from .timing import L2Flush, cold

METHOD = (
    "attention: GPU time of all kernels of a call from torch.profiler, a 512 MB fill before each call to evict the L2, "
    "contenders of a shape interleaved in one process in rotating order, median, least and most; random normal "
    "operands; mqa_logits: shapes are queries, keys, heads, depth, each query sees the keys up to its own, which is "
    "one of the last, FP32 logits; mqa_logits_clean: with -inf elsewhere; torch: dequantized to BF16, in parts of at "
    "most 2^28 scores, up to 2^34 scores in all; our results checked against the reference on the same GPU for some "
    f"queries; {yardsticks.METHOD}"
)
REPEATS, SECONDS = 15, 0.05
"""Calls of each contender; fewer if they take so long together."""
CONTENDERS = (OURS, EAGER)
MOST_DIFFERENCE = 5e-6
SCORES_AT_A_TIME, MOST_SCORES = 1 << 28, 1 << 34
CHECKED_QUERIES = 256


class Logits(NamedTuple):
    """A work on logits: its size, our call, the same in torch if that can be, and how far ours are from right."""

    operations: int
    bytes: int
    ours: Callable[[], Any]
    in_torch: Callable[[], Any] | None
    error: Callable[[], float]


class Kind(NamedTuple):
    """A kind of logits."""

    shapes: Sequence[Shape]
    quick: Sequence[Shape]
    make: Callable[[Shape], Logits]


def shapes_of(*, quick: bool = False) -> list[tuple[str, Shape]]:
    """What is measured: kinds with shapes."""
    return [(name, shape) for name, kind in KINDS.items() for shape in (kind.quick if quick else kind.shapes)]


def chosen(shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """These shapes, of each kind that has them."""
    found = [(name, shape) for name, shape in shapes_of() if shape in shapes]
    return found or [("mqa_logits", shape) for shape in shapes if len(shape) == MQA_NUMBERS]


def measure(
    kinds: Sequence[tuple[str, Shape]],
    *,
    only: Sequence[str] = (),
    add: Callable[[list[Row]], None],
    announce: Callable[[str], None],
) -> None:
    """Time the yardsticks, and logits of these kinds and shapes."""
    flush = L2Flush()
    add(yardsticks.measure(flush))
    for kind, shape in kinds:
        announce(f"{kind} {'x'.join(map(str, shape))}")
        try:
            add(rows_of(kind, shape, KINDS[kind].make(shape), flush, only))
        except Exception as exception:
            raise_if_lost(exception)
            add([Row(kind, shape, OURS, "cold", failed=reason(exception))])


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
    repeats = max(3, min(REPEATS, int(SECONDS / max(floor_us * 1e-6, 1e-6))))
    return [
        Row(
            kind,
            shape,
            name,
            "cold",
            error=error if name == OURS else None,
            failed=wrong if name == OURS else None,
            kernels=tuple(kernel[:MAX_NAME] for kernel in kernels),
            **work,
            **asdict(spread),
        )
        for name, (spread, kernels) in cold(calls, flush, repeats).items()
    ]


# Logits of many tokens

MQA_NUMBERS = 4
MQA_SHAPES: tuple[Shape, ...] = (
    (2048, 4096, 64, 128),
    (2048, 8192, 64, 128),
    (2048, 32768, 64, 128),
    (8192, 8192, 64, 128),
    (8192, 65536, 64, 128),
    (2048, 8192, 32, 128),
    (2048, 65536, 32, 128),
    (2048, 8192, 64, 64),
    (1, 4096, 64, 128),
    (4, 8192, 64, 128),
    (16, 65536, 64, 128),
    (64, 65536, 64, 128),
    (256, 65536, 64, 128),
)


def mqa_logits(shape: Shape, *, clean: bool = False, device: str = "cuda") -> Logits:
    """Make the work of causal logits."""
    p = causal_problem(shape, clean=clean, device=device)
    queries, num_keys, heads, depth = shape
    pairs = sum(num_keys - queries + 1 + i for i in range(queries))
    written = queries * num_keys if clean else pairs
    moved = p.q.numel() + p.keys.numel() + (num_keys + p.weights.numel() + queries * 2 + written) * 4
    has_torch = pairs * heads <= MOST_SCORES
    return Logits(
        2 * pairs * heads * depth,
        moved,
        lambda: prefill.compute(p),
        (lambda: in_torch(p)) if has_torch else None,
        lambda: difference(p),
    )


def causal_problem(shape: Shape, *, clean: bool, device: str) -> MqaLogits:
    """Each query sees the keys up to its own."""
    queries, num_keys, heads, depth = shape
    torch.manual_seed(0)
    sizes = (queries, heads, depth), (num_keys, depth)
    q, keys = (torch.randn(size, device=device).to(torch.float8_e4m3fn) for size in sizes)
    weights, scales = torch.randn(queries, heads, device=device), torch.rand(num_keys, device=device) + 0.5
    last = torch.arange(num_keys - queries + 1, num_keys + 1, dtype=torch.int32, device=device)
    return mqa_logits_problem(q, (keys, scales), weights, torch.zeros_like(last), last, clean, 0, torch.float32)


def in_torch(p: MqaLogits) -> Tensor:
    """The same by torch's products, all keys for every query."""
    queries, heads, depth = p.q.shape
    keys = (p.keys.float() * p.scales[:, None]).to(torch.bfloat16)
    out = torch.empty(queries, len(keys), device=p.q.device)
    step = max(SCORES_AT_A_TIME // (heads * len(keys)), 1)
    for first in range(0, queries, step):
        rows = slice(first, first + step)
        scores = (p.q[rows].to(torch.bfloat16).view(-1, depth) @ keys.t()).relu_().view(-1, heads, len(keys))
        out[rows] = torch.bmm(p.weights[rows, None].to(torch.bfloat16), scores)[:, 0]
    return out


def difference(p: MqaLogits) -> float:
    """How far our logits are from the reference's, for some queries; NaN where ranges differ."""
    p.logits.fill_(torch.nan)
    prefill.compute(p)
    rows = torch.linspace(0, len(p.q) - 1, min(len(p.q), CHECKED_QUERIES), device=p.q.device).long()
    found = p.logits[rows]
    right = mqa_logits_problem(
        p.q[rows], (p.keys, p.scales), p.weights[rows], p.starts[rows], p.ends[rows], p.clean_logits, 0, torch.float32
    )
    right.logits.fill_(torch.nan)
    reference.mqa_logits(right)
    is_number = right.logits.isfinite()
    if not torch.equal(found.isfinite(), is_number) or not torch.equal(found.isnan(), right.logits.isnan()):
        return torch.nan
    return float(calc_diff(found[is_number], right.logits[is_number]))


KINDS: Mapping[str, Kind] = {
    "mqa_logits": Kind(MQA_SHAPES, MQA_SHAPES[1:2] + MQA_SHAPES[8:9], mqa_logits),
    "mqa_logits_clean": Kind(MQA_SHAPES[2:3], (), lambda shape: mqa_logits(shape, clean=True)),
}
