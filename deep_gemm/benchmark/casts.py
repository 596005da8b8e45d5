"""Casts beside a copy of as many bytes, and beside the same cast in torch, compiled and eager. Cold, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import activation, quantize, routing
from ..problem.layout import SCALE_BLOCK, ceil_div
from .products import raise_if_lost, reason
from .report import Row
from .timing import L2Flush, cold

METHOD = (
    "casts: GPU time of all kernels of a call from torch.profiler, a 512 MB fill before each call to evict the L2, "
    "contenders of a shape interleaved in one process in rotating order, 20 calls each, median, least and most; BF16 "
    "input of random normal numbers; copy: of as many bytes as the cast reads and writes together, half of them read; "
    "compiled: torch.compile of the cast in torch; torch: the same, eager; our results checked bit for bit against the "
    "reference of the same GPU (activations within one FP8 step)"
)
OURS, COPY, COMPILED, EAGER = "deep_gemm", "copy", "compiled", "torch"
REPEATS = 20
ROWS = ((1, 7168), (16, 7168), (64, 7168), (1024, 7168), (8192, 7168), (16384, 16384))
TILES = ((1024, 7168), (8192, 7168), (16384, 16384))
TOPK, NUM_EXPERTS = 8, 128
Outputs = Sequence[Tensor]


class Cast(NamedTuple):
    """A cast of one shape: its kind, the bytes that it must move, our call, and the same in torch."""

    kind: str
    shape: tuple[int, ...]
    bytes: int
    ours: Callable[[], Any]
    in_torch: Callable[[], Any]
    is_exact: bool = True


def kinds_and_shapes() -> list[tuple[str, tuple[int, int]]]:
    """What is measured."""
    of_tiles = ("cast_128x1", "cast_both", "cast_128x128", "gather_cast", "gather_weighted")
    return [(kind, shape) for kind in ("cast_1x128", "silu_cast") for shape in ROWS] + [
        (kind, shape) for kind in of_tiles for shape in TILES
    ]


def measure(*, add: Callable[[list[Row]], None], announce: Callable[[str], None]) -> None:
    """Measure every cast."""
    flush = L2Flush()
    for kind, shape in kinds_and_shapes():
        announce(f"{kind} {'x'.join(map(str, shape))}")
        add(rows_of(kind, shape, flush))


def rows_of(kind: str, shape: tuple[int, int], flush: L2Flush) -> list[Row]:
    """Check and time all contenders of a cast."""
    torch.manual_seed(0)
    cast = cast_of(kind, shape)
    calls = {OURS: cast.ours, COPY: _copy(cast.bytes), EAGER: cast.in_torch}
    failed: dict[str, str] = {}
    try:
        calls[COMPILED] = torch.compile(cast.in_torch, dynamic=False)
        calls[COMPILED]()
    except Exception as exception:
        raise_if_lost(exception)
        del calls[COMPILED]
        failed[COMPILED] = reason(exception)
    wrong = difference(cast)
    found = cold(calls, flush, REPEATS)
    rows = [
        Row(kind, shape, name, "cold", bytes=cast.bytes, kernels=kernels, **asdict(spread))
        for name, (spread, kernels) in found.items()
    ]
    rows = [row if row.contender != OURS or wrong is None else Row(**{**asdict(row), "failed": wrong}) for row in rows]
    return rows + [Row(kind, shape, name, "cold", bytes=cast.bytes, failed=why) for name, why in failed.items()]


def difference(cast: Cast) -> str | None:
    """Say where our result differs from torch's; None if it does not."""
    for number, (ours, right) in enumerate(zip(_flat(cast.ours()), _flat(cast.in_torch()), strict=True)):
        if cast.is_exact and not torch.equal(ours.float(), right.float()):
            return f"output {number} differs in {int((ours.float() != right.float()).sum())} elements"
        if not cast.is_exact and not torch.allclose(ours.float(), right.float(), rtol=0.13, atol=2.0**-9):
            return f"output {number} differs by more than a step of FP8"
    return None


def cast_of(kind: str, shape: tuple[int, int], device: str = "cuda") -> Cast:
    """Make random input of a cast, and the calls."""
    m, k = shape
    of_rows, of_columns = m * ceil_div(k, SCALE_BLOCK) * 4, k * ceil_div(m, SCALE_BLOCK) * 4
    if kind == "silu_cast":
        x = torch.randn(m, 2 * k, device=device).bfloat16()
        count = m * k * 5 + of_rows
        in_torch = lambda: _rows(activation.silu_mul(x, None))  # noqa: E731
        return Cast(kind, shape, count, lambda: activation.silu_mul_cast_to_fp8(x), in_torch, is_exact=False)
    if kind in ("gather_cast", "gather_weighted"):
        return _of_experts(kind, shape, device)
    x = torch.randn(m, k, device=device).bfloat16()
    calls: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
        "cast_1x128": (m * k * 3 + of_rows, lambda: quantize.per_token_cast_to_fp8(x, mn_major=True), lambda: _rows(x)),
        "cast_128x1": (m * k * 3 + of_columns, lambda: quantize.per_token_cast_to_fp8(x.t()), lambda: _rows(x.t())),
        "cast_both": (
            m * k * 4 + of_rows + of_columns,
            lambda: quantize.cast_both_to_fp8(x),
            lambda: (_rows(x), _rows(x.t())),
        ),
        "cast_128x128": (
            m * k * 3,
            lambda: quantize.per_block_cast_to_fp8(x),
            lambda: quantize.cast_by_torch(x, SCALE_BLOCK, SCALE_BLOCK),
        ),
    }
    return Cast(kind, shape, *calls[kind])


def _of_experts(kind: str, shape: tuple[int, int], device: str) -> Cast:
    tokens, k = shape
    ids = torch.stack([torch.randperm(NUM_EXPERTS, device=device)[:TOPK] for _ in range(min(tokens, 1024))])
    ids = ids.repeat(ceil_div(tokens, len(ids)), 1)[:tokens]
    rows = routing.expert_rows(ids, NUM_EXPERTS)
    if kind == "gather_cast":
        x = torch.randn(tokens, k, device=device).bfloat16()
        count = tokens * k * 2 + tokens * TOPK * (k + ceil_div(k, SCALE_BLOCK) * 4)
        return Cast(kind, shape, count, lambda: routing.gather_cast_to_fp8(x, rows), lambda: _rows(x[rows.token_of]))
    y = torch.randn(tokens * TOPK, k, device=device).bfloat16()
    weights = torch.rand(tokens, TOPK, device=device)
    in_torch = lambda: routing.weighted_sum(y, rows.row_of, weights).bfloat16()  # noqa: E731
    count = tokens * k * 2 * (TOPK + 1)
    return Cast(kind, shape, count, lambda: routing.gather_weighted(y, rows, weights), in_torch)


def _rows(x: Tensor) -> quantize.Quantized:
    return quantize.cast_by_torch(x, 1, SCALE_BLOCK)


def _copy(count: int) -> Callable[[], Any]:
    source = torch.empty(count // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _flat(outputs: Any) -> Outputs:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [x for each in outputs for x in _flat(each)]
