"""Comparing and timing products. Programs of this family of libraries import these names from here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .core.gpu import HOPPER

Function = TypeVar("Function", bound=Callable[..., Any])

L2_FLUSH_BYTES = 512 << 20


def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """Get the share by which two tensors differ, 1 - 2 <x, y> / (<x, x> + <y, y>): 0 if equal, in FP64.

    About half the square of the relative error, so 1e-3 means a relative error of 4.5%. Two zero tensors differ by 0.

    >>> calc_diff(torch.ones(4), torch.ones(4)).item()
    0.0
    """
    if x.shape != y.shape:  # broadcasting would compare an output of a wrong shape, and might find it right
        raise ValueError(f"y: expected shape {tuple(x.shape)}, which x has, got {tuple(y.shape)}")
    x, y = x.double(), y.double()
    denominator = (x * x + y * y).sum()
    return torch.where(denominator == 0, 0.0, 1 - 2 * (x * y).sum() / denominator)


def count_bytes(*tensors: Any) -> int:
    """Count the bytes of tensors, and of those in tuples and lists; None counts nothing.

    >>> count_bytes(torch.ones(4), (torch.ones(2), None))
    24
    """
    total = 0
    for x in tensors:
        if isinstance(x, tuple | list):
            total += count_bytes(*x)
        elif x is not None:
            total += x.numel() * x.element_size()
    return total


def get_arch_major() -> int:
    """Get the major number of the GPU's architecture; without a GPU 9 (Hopper), for which kernels are compiled."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else HOPPER


def ignore_env(name: str, condition: Callable[[], bool]) -> Callable[[Function], Function]:
    """Decorate a function to run without an environment variable while `condition()` holds."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            saved = os.environ.pop(name, None) if condition() else None
            try:
                return function(*args, **kwargs)
            finally:
                if saved is not None:
                    os.environ[name] = saved

        return cast(Function, call)

    return decorate


def test_filter(condition: Callable[[], bool]) -> Callable[[Function], Function]:
    """Decorate a test to run only while `condition()` holds; otherwise it says that it is left out."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if condition():
                return function(*args, **kwargs)
            print(f"{function.__name__}: left out, its condition does not hold")
            return None

        return cast(Function, call)

    return decorate


test_filter.__test__ = False  # type: ignore[attr-defined]  # no test itself, to pytest


def assert_bitwise_equal(a: Tensor, b: Tensor, label: str = "") -> None:
    """Raise an AssertionError unless two tensors have one type, one shape and the same bytes; a NaN equals its like.

    It names the first element that differs, and begins with `label`.

    >>> assert_bitwise_equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "gate")
    Traceback (most recent call last):
    AssertionError: gate: 1 of 2 elements differ, the first at (1,): 2.0 and 3.0
    """
    told = f"{label}: " if label else ""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"{told}{a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}")
    if a.numel() == 0:
        return
    bytes_of_a, bytes_of_b = (each.detach().contiguous().flatten().view(torch.uint8) for each in (a, b))
    if torch.equal(bytes_of_a, bytes_of_b):
        return
    differs = (bytes_of_a != bytes_of_b).view(a.numel(), -1).any(dim=1)
    flat = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    raise AssertionError(
        f"{told}{int(differs.sum())} of {a.numel()} elements differ, the first at {index}: {a[index].item()!r} and "
        f"{b[index].item()!r}"
    )


def bench(fn: Callable[[], Any], num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False) -> float:
    """Get the mean GPU time of a call in seconds. The calls run back to back between two events.

    `high_precision` first fills the GPU's queue with work, so that the time does not include waits for the host.
    """
    _need_gpu("bench")
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(num_warmups):
        fn()
    flush.zero_()
    if high_precision:
        filler = torch.randn((8192, 8192), device="cuda")
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
) -> float | tuple[float, ...]:
    """Get the mean GPU time, in seconds, of the kernels whose names contain each of the given texts.

    One text gives one time, several give a tuple. The L2 is flushed before every call unless `flush_l2` is false.
    A call may launch several kernels that match a text only with `with_multiple_kernels`, which adds their times up.
    A text that matches no kernel gives 0.
    """
    _need_gpu("bench_kineto")
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    fn()
    torch.cuda.synchronize()
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if flush_l2 else None
    quiet = _stderr_and_stdout_closed() if suppress_kineto_output else contextlib.nullcontext()
    with quiet, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_tests):
            if flush is not None:
                flush.zero_()
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


@contextlib.contextmanager
def _stderr_and_stdout_closed() -> Iterator[None]:
    """Send both streams to /dev/null, including what native code writes to them."""
    with Path(os.devnull).open("w") as null, contextlib.ExitStack() as stack:
        for descriptor in (1, 2):
            saved = os.dup(descriptor)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, descriptor)
            os.dup2(null.fileno(), descriptor)
        yield
