"""Functions that time calls on a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

L2_FLUSH_BYTES = 512 << 20


def bench(fn: Callable[[], Any], num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False) -> float:
    """Measure the mean GPU time of a call in seconds. The calls run one after another between two events.

    `high_precision` first fills the GPU's queue with work, so that the time does not include waits for the host.
    """
    _need_gpu("bench")
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(num_warmups):
        fn()
    flush.zero_()
    if high_precision:
        filler = torch.randn((8192, 8192), device="cuda", dtype=torch.float32)
        torch.mm(filler, filler)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(num_tests):
        fn()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / num_tests / 1e3


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
    barrier: Callable[[], Any] | None = None,
) -> float | tuple[float, ...]:
    """Measure the mean GPU time, in seconds, of the kernels whose names contain each of the given texts.

    One text returns one time, several texts return a tuple. The L2 is flushed before every call unless `flush_l2` is
    false. If a call launches several kernels that match a text, pass `with_multiple_kernels`, which adds up their
    times. The time of a text that matches no kernel is 0. `barrier` is called before every call, so that several
    processes begin the call together.
    """
    _need_gpu("bench_kineto")
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    fn()
    torch.cuda.synchronize()
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if flush_l2 else None
    quiet = suppress_stdout_stderr() if suppress_kineto_output else empty_suppress()
    with quiet, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_tests):
            if flush is not None:
                flush.zero_()
            if barrier is not None:
                barrier()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    events = [(e.key, e.count, e.self_device_time_total) for e in profiler.key_averages()]
    times = tuple(_mean_time(name, events, num_tests, with_multiple_kernels) for name in names)
    return times[0] if isinstance(kernel_names, str) else times


def _mean_time(
    name: str, events: Sequence[tuple[str, int, float]], num_tests: int, with_multiple_kernels: bool
) -> float:
    matching = [(key, count, us) for key, count, us in events if name in key]
    if sum(count for _, count, _ in matching) > num_tests and not with_multiple_kernels:
        kernels = ", ".join(f"{key} x {count}" for key, count, _ in matching)
        raise ValueError(
            f"kernel_names: {name!r} matches more than one kernel a call ({kernels}); pass with_multiple_kernels=True"
        )
    return sum(us for _, _, us in matching) / num_tests / 1e6


def _need_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{name} measures GPU kernels and found no CUDA GPU")


empty_suppress = contextlib.nullcontext
"""A context that suppresses nothing."""


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Send stdout and stderr to /dev/null, including the output of native code."""
    with Path(os.devnull).open("w") as null, contextlib.ExitStack() as stack:
        for descriptor in (1, 2):
            saved = os.dup(descriptor)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, descriptor)
            os.dup2(null.fileno(), descriptor)
        yield
