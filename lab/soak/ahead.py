"""Compiles kernels in other threads while attempts run, the slowest kernels first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from deep_gemm.indexer import kernel as logits_kernel
from deep_gemm.indexer.config import is_usual
from deep_gemm.kernels import ORDINARY
from deep_gemm.linear import kernel as linear_decode

from .. import configs
from ..bench import tune
from .attempt import Kind, picked
from .kernels import OfKernel

CORES_FOR_ATTEMPTS = 2
MOST_DRAWN = 2000


def drawn(seed: int, first: int, count: int | None, kinds: Sequence[Kind]) -> Iterator[Callable[[], object]]:
    """Yield builds of the kernels of future trials, in order."""
    for number in range(first, first + min(count or MOST_DRAWN, MOST_DRAWN)):
        kind, own_seed = picked(seed, number, kinds)
        if isinstance(kind, OfKernel):
            yield partial(kind.kernel.build, kind.drawn(own_seed).config)


def likely() -> Iterator[Callable[[], object]]:
    """Yield builds of each kernel that calls are likely to need. A kernel in the cache is only read."""
    for kernel in (logits_kernel.IN_ROWS, logits_kernel.IN_PAGES):
        for logits in filter(is_usual, kernel.configs()):
            yield partial(kernel.build, logits)
    for linear in linear_decode.reachable_linear():
        yield partial(linear_decode.KERNEL.build, linear)
    for config in (
        *configs.reachable_k_grouped(),
        *configs.reachable_grouped(),
        *configs.reachable_dense(),
        *configs.reachable_decode(),
        *configs.reachable_heads(),
        *configs.reachable_skipping(),
    ):
        yield partial(tune.build, config)
    for kernel in ORDINARY:
        for of_kernel in kernel.configs():
            yield partial(kernel.build, of_kernel)


@contextmanager
def compiling(builds: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Compile on most cores, but leave a few free; builds that have not begun by the end are dropped."""
    pool = ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) - CORES_FOR_ATTEMPTS, 1))
    for build in builds:
        pool.submit(build)  # a build that fails here fails again in an attempt, which reports the failure
    try:
        yield
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
