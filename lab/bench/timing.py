"""Times of kernels: cold, one call at a time after the L2 is evicted, and sustained, back to back.

Cold calls of all contenders are interleaved in one recording of the profiler:

    fill  call of A  fill  call of B  fill  call of C  fill  call of B  fill  call of C  fill  call of A ...

A fill evicts the L2 and marks the start of a call: all kernels between two fills belong to one call. The order of the
contenders rotates by one in each round.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from deep_gemm.testing.bench import L2_FLUSH_BYTES

WARM_UPS = 3
# Fills before the first call. If the profiler loses events when it starts, it loses these fills.
LEADING_FILLS = 3
SUSTAINED_SECONDS = 0.4
SUSTAINED_CHUNKS = 5


class PairingError(RuntimeError):
    """The profiler's kernels do not match the calls."""


@dataclass(frozen=True)
class KernelEvent:
    """One kernel, copy or fill in the profiler's record."""

    name: str
    start_us: float
    us: float


Kernels = tuple[KernelEvent, ...]


@dataclass(frozen=True)
class Spread:
    """A measured time: median, least and most, in microseconds."""

    us: float
    us_min: float
    us_max: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Summarize times of repeated calls."""
        return cls(statistics.median(times), min(times), max(times))


class L2Flush:
    """A fill of 512 MB, and the fill's name in the profiler's record."""

    def __init__(self) -> None:
        # FP64, because no contender launches a fill of FP64 numbers.
        self._buffer = torch.empty(L2_FLUSH_BYTES // 8, dtype=torch.float64, device="cuda")
        self.name = self._learn_name()

    def __call__(self) -> None:
        """Evict the L2."""
        self._buffer.fill_(1.0)

    def _learn_name(self) -> str:
        names: Counter[str] = Counter()
        for _ in range(3):  # a process's first recording may be empty
            names = Counter(event.name for event in profiled(lambda: [self._buffer.fill_(1.0) for _ in range(4)]))
            if len(names) == 1:
                return next(iter(names))
        raise PairingError(f"a fill: expected one kernel, got {dict(names) or 'none'}")


def cold(
    calls: Mapping[str, Callable[[], Any]], flush: L2Flush, repeats: int, while_busy: Callable[[], None] | None = None
) -> dict[str, tuple[Spread, tuple[str, ...]]]:
    """Time each contender's calls cold, and name the kernels of one call.

    `while_busy` runs once all work is queued, while the GPU is still busy.
    """
    found = recorded(calls, flush, repeats, while_busy)
    return {
        name: (Spread.of([busy_us(each) for each in of_calls]), names_of(of_calls[0]))
        for name, of_calls in found.items()
    }


def recorded(
    calls: Mapping[str, Callable[[], Any]], flush: L2Flush, repeats: int, while_busy: Callable[[], None] | None = None
) -> dict[str, list[Kernels]]:
    """Run each contender's calls cold, and return the kernels of every call in order of their starts."""
    order = rotated(list(calls), repeats)
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()

    def work() -> None:
        for _ in range(LEADING_FILLS):
            flush()
        for name in order:
            flush()
            calls[name]()
        if while_busy is not None:
            while_busy()

    try:
        return kernels_of_calls(profiled(work), flush.name, order)
    except PairingError:  # the profiler may drop events when it swaps buffers, so record once more
        return kernels_of_calls(profiled(work), flush.name, order)


def sustained(call: Callable[[], Any], cold_us: float, while_busy: Callable[[], None] | None = None) -> Spread:
    """Time calls back to back for about 0.4 s, in five parts. The GPU settles at the clock of its power limit."""
    repeats = max(1, round(SUSTAINED_SECONDS / SUSTAINED_CHUNKS / (cold_us * 1e-6)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(SUSTAINED_CHUNKS + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        for _ in range(repeats):
            call()
        event.record()
    if while_busy is not None:
        while_busy()
    torch.cuda.synchronize()
    parts = pairwise(events)
    return Spread.of([begin.elapsed_time(end) * 1e3 / repeats for begin, end in parts])


def warm(call: Callable[[], Any], repeats: int = 10) -> Spread:
    """Time calls one after the other, each between two events, after warm-up calls; the host's waits count."""
    for _ in range(WARM_UPS):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return Spread.of([begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)])


def rotated(names: Sequence[str], repeats: int) -> list[str]:
    """Return the order of calls. Each round starts with the contender that was second in the previous round.

    >>> rotated("abc", 3)
    ['a', 'b', 'c', 'b', 'c', 'a', 'c', 'a', 'b']
    """
    return [names[(turn + place) % len(names)] for turn in range(repeats) for place in range(len(names))]


def kernels_of_calls(events: Sequence[KernelEvent], fill: str, order: Sequence[str]) -> dict[str, list[Kernels]]:
    """Assign kernels to calls: for each contender, the kernels of every call in the order of their starts.

    Calls are counted from the end, where the profiler loses no events. All calls of a contender must have the same
    kernels; this proves that no kernel was assigned to a neighbouring call. Their order may differ: launches overlap.
    """
    segments: list[list[KernelEvent]] = []
    for event in sorted(events, key=lambda event: event.start_us):
        if event.name == fill:
            segments.append([])
        elif segments:
            segments[-1].append(event)
    if not len(order) <= len(segments) <= len(order) + LEADING_FILLS:
        raise PairingError(f"expected {len(order)} fills, one for each call, got {len(segments)}")
    found: dict[str, list[Kernels]] = {name: [] for name in order}
    for name, kernels in zip(order, segments[len(segments) - len(order) :], strict=True):
        found[name].append(tuple(kernels))
    for name, calls in found.items():
        kinds = Counter(tuple(sorted(names_of(kernels))) for kernels in calls)
        if len(kinds) > 1 or not calls[0]:
            seen = "; ".join(f"{count} x {list(kernels) or 'no kernel'}" for kernels, count in kinds.items())
            raise PairingError(f"{name}: expected the same kernels in every call, got {seen}")
    return found


def names_of(kernels: Kernels) -> tuple[str, ...]:
    """List the names of a call's kernels."""
    return tuple(kernel.name for kernel in kernels)


def span_us(kernels: Kernels) -> float:
    """Measure a call on the GPU, from the start of its first kernel to the end of its last.

    >>> span_us((KernelEvent("cast", 10, 2), KernelEvent("begins meanwhile", 11, 5), KernelEvent("last", 20, 1)))
    11
    """
    return max(kernel.start_us + kernel.us for kernel in kernels) - min(kernel.start_us for kernel in kernels)


def busy_us(kernels: Sequence[KernelEvent]) -> float:
    """Measure the time during which at least one kernel ran. The kernels must be in order of their starts.

    >>> busy_us([KernelEvent("makes maps", 10, 2), KernelEvent("begins meanwhile", 11, 5), KernelEvent("last", 20, 1)])
    7.0
    """
    busy, end = 0.0, float("-inf")
    for kernel in kernels:
        kernel_end = kernel.start_us + kernel.us
        busy += max(0.0, kernel_end - max(kernel.start_us, end))
        end = max(end, kernel_end)
    return busy


def profiled(work: Callable[[], Any]) -> list[KernelEvent]:
    """List all kernels, copies and fills that the GPU runs for `work`."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    return [
        KernelEvent(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in on_gpu
        if not event.name.endswith(" Sync")  # "Stream Sync", "Context Sync": waits, not work
    ]
