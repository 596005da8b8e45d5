"""Writes a kernel's PTX, machine code and disassembly as files for people, beside the kernel's file in the cache.

    fp8_gemm_dense-<key>.ptx      DG_JIT_DUMP_PTX
    fp8_gemm_dense-<key>.cubin    DG_JIT_DUMP_SASS
    fp8_gemm_dense-<key>.sass     the same, if there is a disassembler

If a file cannot be written, there is only a warning, because a dump must not stop an engine.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from .cache import make_directory
from .compiler import CompiledKernel, compile_ptx
from .cubin import NO_DISASSEMBLER, disassemble


def dump(kernel: CompiledKernel, path: Path, source: str, headers: Mapping[str, str], *, ptx: bool, sass: bool) -> None:
    """Write the requested files beside `path`, the kernel's file in the cache. PTX is compiled from `source`."""
    if ptx:
        _write(path.with_suffix(".ptx"), compile_ptx(source, headers, name=kernel.name))
    if sass:
        _write(path.with_suffix(".cubin"), kernel.cubin)
        try:
            code = disassemble(kernel.cubin)
        except ValueError as error:
            _warn(f"{kernel.name}: {error}")
            return
        if code is None:
            _warn(f"DG_JIT_DUMP_SASS: {NO_DISASSEMBLER} The machine code is in {path.parent}, as *.cubin.")
        else:
            _write(path.with_suffix(".sass"), code.encode())


@cache
def _warn(message: str) -> None:
    """Warn, but only once for each message in a process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _write(path: Path, data: bytes) -> None:
    try:
        make_directory(path.parent)
        path.write_bytes(data)
    except OSError as error:
        _warn(f"dumps of kernels cannot be written to {path.parent} ({error})")
    else:
        print(f"deep_gemm: wrote {path}", file=sys.stderr)
