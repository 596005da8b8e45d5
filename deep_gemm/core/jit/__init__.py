"""Run-time compilation: render -> compile -> passes -> store.

The caller renders. The first three steps depend only on their arguments. Only the last step touches the disk.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..settings import settings
from . import interleave, ptxas_log
from .cache import KernelCache, kernel_key, shipped
from .compiler import (
    DEFAULT_OPTIONS,
    CompiledKernel,
    CompileError,
    CompilerMissing,
    check_strictly,
    compile_cubin,
    compiler_version,
    full_options,
)
from .dumps import dump

__all__ = ["CompileError", "CompiledKernel", "CompilerMissing", "Pass", "applied", "build", "directories", "passes_for"]


class Pass(NamedTuple):
    """A change to compiled machine code. `version` is part of the cache's key: raise it whenever `apply` changes."""

    name: str
    version: int
    apply: Callable[[bytes], bytes]


def passes_for(threads_per_sm: int) -> tuple[Pass, ...]:
    """Return the passes for a kernel with `threads_per_sm` threads on an SM, by the compiler and the settings."""
    if settings().disable_ffma_interleave or not interleave.helps(_compiler(_cache()), threads_per_sm):
        return ()
    return (Pass("interleave", interleave.VERSION, interleave.interleave),)


def applied(passes: Iterable[Pass], kernel: CompiledKernel) -> CompiledKernel:
    """Apply passes to a kernel in order, and return the changed kernel."""
    for p in passes:
        kernel = replace(kernel, cubin=p.apply(kernel.cubin))
    return kernel


_cache_of = functools.cache(KernelCache)


def _cache() -> KernelCache:
    limit_bytes = settings().jit_cache_limit_mb * 10**6
    return _cache_of(*settings().jit_cache_dirs, only_read=shipped(), limit_bytes=limit_bytes)


def directories() -> tuple[Path, ...]:
    """List the folders that are searched for kernels: the folders of the settings, and the folder of a wheel."""
    return _cache().directories


def _compiler(kernel_cache: KernelCache) -> str:
    """Return the build of NVRTC whose kernels are used: the installed one, else the build of the newest cached kernel.

    A machine without NVRTC can thus run the kernels that another machine has compiled for it.
    """
    try:
        return compiler_version()
    except CompilerMissing:
        if (made_by := kernel_cache.newest_compiler()) is None:
            raise
        return made_by


def build(
    source: str, headers: Mapping[str, str], *, name: str, passes: Sequence[Pass] = (), config: str = ""
) -> CompiledKernel:
    """Compile the kernel of `source`, or load it from the cache of `settings().jit_cache_dirs`.

    `headers` maps include names (`"ptx/mbarrier.cuh"`) to texts. Logs, errors and file names show `name` to people.
    `cache list` shows `config`.
    If several threads or processes need the same kernel at the same time, one compiles it, and the rest wait.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise ValueError(f"name: expected up to 100 letters, digits, '_', '-' or '.', got {name!r}")
    all_options = full_options(DEFAULT_OPTIONS)
    kernel_cache = _cache()
    key = kernel_key(
        name,
        source,
        headers,
        options=all_options,
        compiler=_compiler(kernel_cache),
        passes=[(p.name, p.version) for p in passes],
    )
    try:
        kernel = kernel_cache.load(name, key)
        if kernel is None:
            with kernel_cache.builder(name, key):
                kernel = kernel_cache.load(name, key)  # another thread or process may have made it
                if kernel is None:
                    kernel = replace(_compiled(source, headers, name, passes), config=config)
                    done = [f"{p.name} {p.version}" for p in passes]
                    kernel_cache.store(key, kernel, options=all_options, passes=done)
        if settings().jit_strict:  # a cached kernel may have been compiled without the check
            check_strictly(kernel, all_options, source)
        else:
            _warn_if_slow(kernel)
    except CompileError as error:
        kernel_cache.keep_failed_source(error, headers, key)
        raise
    if settings().print_reg_reuse:
        found = interleave.pairs(kernel.cubin)
        each = ", ".join(f"{pair}: {count}" for pair, count in sorted(found.items()))
        print(f"deep_gemm: {name}: {found.total()} promotion FFMAs, by (yield, reuse): {each}", file=sys.stderr)
    ptx, sass = settings().jit_dump_ptx, settings().jit_dump_sass
    if ptx or sass:
        dump(kernel, kernel_cache.path(name, key), source, headers, ptx=ptx, sass=sass)
    return kernel


def _compiled(source: str, headers: Mapping[str, str], name: str, passes: Sequence[Pass]) -> CompiledKernel:
    start = time.perf_counter()
    try:
        kernel = compile_cubin(source, headers, name=name, strict=settings().jit_strict)
    except CompilerMissing as error:
        places = os.pathsep.join(map(str, directories()))
        raise CompilerMissing(f"{name} is not among the compiled kernels in {places}. {error}") from error
    kernel = applied(passes, kernel)
    if settings().jit_debug:
        ms = (time.perf_counter() - start) * 1e3
        # To stderr, because an engine may use its standard output as a protocol.
        print(
            f"deep_gemm: compiled {kernel.name} in {ms:.0f} ms, {len(kernel.cubin)} bytes, NVRTC {kernel.compiler}\n"
            f"  options: {' '.join(full_options(DEFAULT_OPTIONS))}\n  passes: {[p.name for p in passes]}\n{kernel.log}",
            file=sys.stderr,
        )
    return kernel


_told_slow: set[str] = set()


def _warn_if_slow(kernel: CompiledKernel) -> None:
    """Warn, once for each name, if a kernel is correct but slower than planned."""
    if kernel.name in _told_slow or not ptxas_log.local_memory(kernel.log):  # without a report, nothing is known
        return
    if complaints := ptxas_log.complaints(kernel.log):
        _told_slow.add(kernel.name)
        warnings.warn(
            f"{kernel.name} is slower than it is meant to be, because NVRTC {kernel.compiler} compiled it badly; "
            f"another release may not: {complaints[0]}",
            RuntimeWarning,
            stacklevel=3,
        )
