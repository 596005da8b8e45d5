"""`python -m deep_gemm compile`: fills the cache with the kernels of given shapes, on a machine with or without a GPU.

What is chosen follows from shapes and from the kind of GPU alone. A GPU finds these kernels if its machine has the same
version of this package and the same build of NVRTC, and reads the same directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from ..benchmark.command import with_progress
from ..choose.config import GemmConfig
from ..choose.config_decode import DecodeConfig
from ..choose.config_linear_decode import serving
from ..choose.dense import select
from ..choose.depths import select_k_grouped
from ..choose.explain import Question
from ..choose.heads import select_heads
from ..choose.output import Groups
from ..choose.rows import select_grouped
from ..jit import CompileError
from ..jit.cache import files_in, written_directory
from ..jit.compiler import compiler_version
from ..kernels import (
    fp8_gemm,
    fp8_gemm_decode,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    hc_prenorm,
    k_group_maps,
    linear_decode,
)
from ..kernels.ordinary import reachable_ordinary
from ..problem.integers import integer_in_range
from ..settings import get_batch_invariant, settings

MOST_ROWS = 1 << 16
"""Rows up to which all sizes of a batch are looked at for a weight that is given without m."""


@dataclass(frozen=True)
class Job:
    """A kernel to be compiled, or to be found in the cache."""

    kernel: str
    config: Any
    build: Callable[[], object] = field(compare=False)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kernel} {self.config.name}" if self.config is not None else self.kernel


def jobs_of(asked: Question, *, any_m: bool, with_layers: bool) -> Iterator[Job]:
    """Kernels of a product; with `any_m`, of its weight with any m that a program may come with."""
    for m in every_m() if any_m else (asked.m,):
        config = config_of(asked, m)
        if isinstance(config, DecodeConfig):
            yield Job(fp8_gemm_decode.NAME, config, partial(fp8_gemm_decode.build, config))
            casting = (
                serving(m, asked.k, config)
                if with_layers and asked.output.groups == Groups.NONE and not asked.output.is_fp32
                else None
            )
            if casting is not None:
                yield Job(linear_decode.NAME, casting, partial(linear_decode.build, casting))
        else:
            yield Job(config.kernel_name, config, partial(fp8_gemm.build, config))
    if asked.output.groups == Groups.DEPTHS:
        yield Job(k_group_maps.NAME, None, k_group_maps.build)


def config_of(asked: Question, m: int) -> GemmConfig | DecodeConfig:
    """What runs a product that has so many rows, or so many in all groups."""
    n, k, output, num_groups, gpu = asked.n, asked.k, asked.output, asked.num_groups, asked.gpu
    if output.groups == Groups.NONE:
        return select(m, n, k, output, gpu, split_k=not get_batch_invariant())
    if output.groups == Groups.DEPTHS:
        return select_k_grouped(num_groups, m, n, k, output, gpu)
    if output.groups == Groups.HEADS:
        return select_heads(num_groups, m, n, k, output, gpu, split_k=not get_batch_invariant())
    return select_grouped(num_groups, m if output.groups == Groups.COUNTS else m / num_groups, n, k, output, gpu)


def every_m() -> Iterator[int]:
    """Sizes of batches among which all are that choose differently: each to 128, then ever larger steps."""
    m = 1
    while m <= MOST_ROWS:
        yield m
        m += 1 if m < 128 else max(m // 64 // 8 * 8, 8)


def parsed(shapes: str) -> tuple[int | None, int, int]:
    """Read `m,n,k`, or `n,k` for a weight and any m."""
    parts = shapes.replace("x", ",").split(",")
    if len(parts) not in (2, 3) or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"shapes: expected m,n,k or n,k, such as 64,2112,7168, got {shapes!r}")
    numbers = [int(part) for part in parts]
    m, n, k = numbers if len(numbers) == 3 else (1, *numbers)
    for name, size in (("m", m), ("n", n), ("k", k)):
        integer_in_range(name, size, 1)
    return (m if len(numbers) == 3 else None), n, k


def jobs_of_layers() -> Iterator[Job]:
    """All kernels of casts, of routes and of scales, whatever the shape; of the others the usual ones."""
    for kernel, configs in reachable_ordinary():
        for config in configs:
            yield Job(kernel.name, config, partial(kernel.build, config))
    for logits in fp8_mqa_logits.usual_mqa():
        yield Job(fp8_mqa_logits.NAME, logits, partial(fp8_mqa_logits.build, logits))
    for paged in fp8_paged_mqa_logits.usual_paged():
        yield Job(fp8_paged_mqa_logits.NAME, paged, partial(fp8_paged_mqa_logits.build, paged))
    for prenorm in hc_prenorm.usual_hc():
        kernel_of_rows = hc_prenorm.kernel_of(prenorm)
        yield Job(kernel_of_rows.NAME, prenorm, partial(kernel_of_rows.build, prenorm))


def run(jobs: Iterable[Job], console: Console) -> bool:
    """Compile all that the cache lacks, with progress, and say what it has now. Tell whether all is ready and kept."""
    todo = list(dict.fromkeys(jobs))
    directory, begin = written_directory(settings().jit_cache_dirs), time.perf_counter()
    before, failed = len(files_in(directory)), list[str]()
    compiler_version()  # says what is missing before any work

    def work(announce: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {pool.submit(job.build): job for job in todo}
            for place, done in enumerate(as_completed(running), 1):
                job, error = running[done], done.exception()
                if error is not None and not isinstance(error, CompileError):
                    raise error
                if error is not None:
                    failed.append(str(error))
                announce(job.name)
                if not console.is_terminal:  # nobody sees the bar there
                    seconds = time.perf_counter() - begin
                    console.print(f"{seconds:6.1f} s  {place:3}/{len(todo)}  {job.name}", markup=False)

    with_progress(len(todo), console, work)
    added = len(files_in(directory)) - before
    for log in failed:
        console.print(log, markup=False, soft_wrap=True)
    console.print(
        f"{len(todo) - len(failed)} of {len(todo)} kernels are ready, {added} of them new, after "
        f"{time.perf_counter() - begin:.1f} s; NVRTC {compiler_version()}; in {directory}",
        markup=False,
        soft_wrap=True,
    )
    return not failed and (added > 0 or before > 0 or not todo)
