"""Layers as replayed CUDA graphs: time from the first kernel's start to the last kernel's end, and of each part.

A layer's kernels overlap as dependent launches, and gaps between kernels count too. In a replayed graph no
contender waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from .bulk_read import READ
from .cases import Shape, floor_of
from .contenders import OURS
from .fp4 import PRODUCT
from .machine import GpuState, gpu_state
from .products import SETTLE_SECONDS, raise_if_lost, reason
from .report import MAX_NAME, Row
from .timing import Kernels, L2Flush, PairingError, Spread, names_of, recorded, span_us

COPY, EAGER, ALONE = "copy", "torch", "product_alone"
METHOD = (
    "every contender a CUDA graph that is replayed; GPU time of a call from the start of its first kernel to the end "
    "of its last, from torch.profiler, a 512 MB fill before each call to evict the L2, contenders of a shape "
    "interleaved in one process in rotating order, 20 calls each, median, least and most; a part's time ends where "
    "its last kernel ends and begins where the part before it ended"
)
REPEATS = 20
WARM_UPS = 2
ROUTING, CAST, ACTIVATION, GATHER = "routing", "cast", "activation", "weighted gather"
FIRST, SECOND = "product 1", "product 2"

Parts = Callable[[Sequence[str]], Sequence[str] | None]
"""Names the part of each kernel of a call, from the kernels' names; None if the names do not tell the parts."""
Steps = Sequence[tuple[str, Callable[[], Any]]]
"""The steps of a chain: a part's name, and the call that computes the part."""


@dataclass(frozen=True)
class Layer:
    """One way to compute a layer."""

    name: str
    """The contender. If several layers share a name, the fastest counts."""
    call: Callable[[], Any]
    chain: str | None = None
    """A name that tells this way from other ways of the same contender."""
    parts: Parts = lambda names: None
    steps: Steps = ()
    """Steps that `call` runs one after the other, if kernels' names do not tell the parts."""
    error: Callable[[], float] | None = None
    """Returns the error of a rival's last call."""
    table: Callable[[], str] | None = None
    """Names the table from which a rival's last call took its configuration."""


@dataclass(frozen=True)
class Work:
    """The work of a layer of one shape."""

    kind: str
    shape: Shape
    operations: int
    bytes: int
    cast_bytes: int = 0
    """Number of bytes that the copy moves for comparison with the cast."""

    def row(self, contender: str, **more: Any) -> Row:
        """Make a contender's row. The rows of a copy and of a read count no operations."""
        if contender in (COPY, READ):
            count = self.cast_bytes if contender == COPY else self.bytes
            return Row(self.kind, self.shape, contender, "cold", bytes=count, **more)
        floor_us = round(floor_of(self.operations, self.bytes), 3)
        more = {"operations": self.operations, "bytes": self.bytes, "floor_us": floor_us, **more}
        return Row(self.kind, self.shape, contender, "cold", **more)


Check = Callable[[Callable[[], Any]], tuple[float, str | None]]
"""Runs our call, and returns its error, and a sentence if it is wrong (else None)."""


def rows_of(work: Work, layers: Iterable[Layer], check: Check, flush: L2Flush) -> list[Row]:
    """Check our result, time all layers, and keep the fastest layer of each name."""
    rows: list[Row] = []
    replays: dict[str, Callable[[], Any]] = {}
    by_key: dict[str, Layer] = {}
    for layer in layers:
        key = layer.name if layer.chain is None else f"{layer.name} {layer.chain}"
        try:
            replays[key], by_key[key] = captured(layer.call), layer
        except Exception as exception:
            raise_if_lost(exception)
            rows.append(work.row(layer.name, config=layer.chain, failed=reason(exception)))
    error, wrong = _checked(check, replays[OURS]) if OURS in replays else (None, None)
    if wrong is not None:
        del replays[OURS]
        rows.append(work.row(OURS, error=error, failed=wrong))
    states: list[GpuState] = []
    time.sleep(SETTLE_SECONDS)
    try:
        counted = {key: counted_parts(by_key[key].steps, flush) for key in replays if by_key[key].steps}
        found = recorded(replays, flush, REPEATS, lambda: states.append(gpu_state())) if replays else {}
    except Exception as exception:
        raise_if_lost(exception)
        return rows + [work.row(by_key[key].name, failed=reason(exception)) for key in replays]
    timed: dict[str, Row] = {}
    for key, calls in found.items():
        layer, spread = by_key[key], Spread.of([span_us(kernels) for kernels in calls])
        if layer.name in timed and (timed[layer.name].us or 0) <= spread.us:
            continue
        timed[layer.name] = work.row(
            layer.name,
            us=spread.us,
            us_min=spread.us_min,
            us_max=spread.us_max,
            error=error if layer.name == OURS else layer.error and layer.error(),
            config=layer.table() if layer.table else layer.chain,
            kernels=tuple(name[:MAX_NAME] for name in names_of(calls[0])),
            parts=part_times(calls, counted.get(key, layer.parts)),
            **asdict(states[-1]),
        )
    kept = [row for row in rows if row.contender == OURS or row.contender not in timed]
    return [*timed.values(), *kept]


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call in a CUDA graph, and return the function that replays it."""
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            call()
    finally:
        torch.cuda.set_stream(stream)  # a failed capture may leave its stream current
    return graph.replay


def _checked(check: Check, call: Callable[[], Any]) -> tuple[float | None, str | None]:
    try:
        return check(call)
    except Exception as exception:
        raise_if_lost(exception)
        return None, reason(exception)


# Parts


def part_times(calls: Sequence[Kernels], parts: Parts) -> dict[str, float] | None:
    """Return each part's median time over the calls, in microseconds; None if the parts of a call are unknown.

    >>> calls = [(KernelEvent("cast", 0, 3), KernelEvent("gemm", 2, 8)), (KernelEvent("cast", 0, 5),)]
    >>> part_times(calls[:1], parts_of_linear)
    {'cast': 3.0, 'product': 7.0}
    >>> part_times(calls, parts_of_linear)
    """
    sums = []
    for kernels in calls:
        of_kernels = parts(names_of(kernels))
        if of_kernels is None:
            return None
        end, times = kernels[0].start_us, dict.fromkeys(of_kernels, 0.0)
        for kernel, part in zip(kernels, of_kernels, strict=True):
            kernel_end = kernel.start_us + kernel.us
            times[part] += max(0.0, kernel_end - end)
            end = max(end, kernel_end)
        sums.append(times)
    return {part: statistics.median(times.get(part, 0.0) for times in sums) for part in sums[0]}


def parts_of_linear(names: Sequence[str]) -> Sequence[str] | None:
    """Name the part of each kernel of a linear layer: the product by its name, all other kernels are casts.

    >>> parts_of_linear(["cast_rows", "fp8_gemm_dense"])
    ['cast', 'product']
    """
    return [PRODUCT if is_product(name) else CAST for name in names] if any(map(is_product, names)) else None


def parts_of_experts(names: Sequence[str]) -> Sequence[str] | None:
    """Name the part of each kernel of a layer of experts: products by name, all others by position.

    If no kernel runs between the two products, the last product is the second.

    >>> parts_of_experts(["route_rows", "cast_rows", "fp8_gemm_", "silu", "fp8_gemm_", "gather_weighted"])
    ['routing', 'cast', 'product 1', 'activation', 'product 2', 'weighted gather']
    """
    products = [place for place, name in enumerate(names) if is_product(name)]
    if len(products) < 2:
        return None
    runs = [list(places) for _, places in groupby(products, key=lambda place: place - products.index(place))]
    first, last = (runs[0], runs[-1]) if len(runs) > 1 else (products[:-1], products[-1:])

    def part(place: int) -> str:
        if place < first[0]:
            return ROUTING if "route" in names[place] else CAST
        if place > last[-1]:
            return GATHER
        return FIRST if place <= first[-1] else SECOND if place >= last[0] else ACTIVATION

    return [part(place) for place in range(len(names))]


def is_product(name: str) -> bool:
    """Tell whether a kernel of this package is a product, alone or fused with other work."""
    return "gemm" in name


def counted_parts(steps: Steps, flush: L2Flush) -> Parts:
    """Name each kernel's part by the number of kernels that each step of a chain launches."""
    try:
        found = recorded({str(place): call for place, (_, call) in enumerate(steps)}, flush, 1)
    except PairingError:
        return lambda names: None
    parts = [part for place, (part, _) in enumerate(steps) for _ in found[str(place)][0]]
    return lambda names: parts if len(parts) == len(names) else None


def only_asked_for(layers: Iterable[Layer], only: Sequence[str]) -> list[Layer]:
    """Return the contenders to measure: all if `only` is empty."""
    return [layer for layer in layers if not only or layer.name in only]
