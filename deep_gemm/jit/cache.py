"""Compiled kernels in memory and on disk.

One file holds one kernel, so no partial state can be read: it is written under a temporary name and renamed, and
its digest is checked on load. A truncated, empty or damaged file, or one of another format, is a miss, never an error.

    line 1  deep_gemm kernel 1 <sha256 of all that follows>
    line 2  {"key": ..., "name": ..., "compiler": ..., "options": ..., "passes": ..., "log": ...}
    rest    the cubin

`head -2 <file>` shows a person what it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .compiler import CompiledKernel, CompileError

SUFFIX = ".kernel"
DUMPS = (".ptx", ".cubin", ".sass")
"""What people asked for lies beside a kernel, under its name (jit/dumps.py)."""
FAILED = "failed"
_MAGIC = b"deep_gemm kernel 1 "
_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*-[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


def kernel_key(
    name: str,
    source: str,
    headers: Mapping[str, str],
    *,
    options: Sequence[str],
    compiler: str,
    passes: Iterable[tuple[str, int]],
) -> str:
    """Digest of everything that decides the machine code. Different inputs are different texts before hashing."""
    inputs = [name, source, sorted(headers.items()), list(options), compiler, list(passes)]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


class KernelCache:
    """Kernels in this process's memory, backed by a directory that processes share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._memory: dict[str, CompiledKernel] = {}
        self._has_warned = False

    def path(self, name: str, key: str) -> Path:
        """The file of a kernel. It starts with the kernel's name, for people."""
        return self.directory / f"{name}-{key}{SUFFIX}"

    def load(self, name: str, key: str) -> CompiledKernel | None:
        """The kernel, or None if neither this process nor an intact file has it."""
        if (kernel := self._memory.get(key)) is not None:
            return kernel
        try:
            data = _read(self.path(name, key))
        except OSError:
            return None
        kernel = _unpack(data, key)
        if kernel is not None:
            self._memory[key] = kernel
        return kernel

    def store(self, key: str, kernel: CompiledKernel, *, options: Sequence[str], passes: Sequence[str]) -> None:
        """Keep the kernel in memory, and on disk if possible."""
        self._memory[key] = kernel
        path = self.path(kernel.name, key)
        # In the same directory, because a rename is atomic only within a file system. Not `tempfile`: other users
        # could not read its files, and a cache may be shared.
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(_pack(key, kernel, options=options, passes=passes))
                os.replace(temporary, path)  # noqa: PTH105  the tests stop a process right here
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"compiled kernels cannot be kept in {self.directory} ({error}); each process compiles its own. "
                    f"DG_JIT_CACHE_DIR names another directory.",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def keep_failed_source(self, error: CompileError, headers: Mapping[str, str], key: str) -> None:
        """Write a refused source, its headers and the log as files, and store the path in the error.

        Headers stay separate files, so that the log's line numbers are right.
        """
        files = {**headers, f"{error.name}.cu": error.source, "log.txt": str(error)}
        try:
            folder = _write_all(self.directory / FAILED / f"{error.name}-{key[:16]}", files)
        except OSError:
            try:
                folder = _write_all(Path(tempfile.mkdtemp(prefix="deep_gemm-")), files)
            except OSError:
                return  # the error itself still carries the source
        error.source_path = folder / f"{error.name}.cu"


def files_in(directory: Path) -> list[Path]:
    """Files of a directory that are named as kernels are, sound or not."""
    return [path for path in _within(directory) if path.suffix == SUFFIX and _STEM.fullmatch(path.stem)]


def left_behind(directory: Path) -> list[Path]:
    """What else was written there: dumps, failed sources with their logs, what processes were killed over."""
    beside = [
        path
        for path in _within(directory)
        if (path.suffix in DUMPS and _STEM.fullmatch(path.stem)) or _TEMPORARY.fullmatch(path.name)
    ]
    return [*beside, *(path for path in sorted((directory / FAILED).rglob("*")) if not path.is_dir())]


def read_entry(path: Path) -> CompiledKernel | None:
    """The kernel in a file; None if the file is not sound, or is another kernel's."""
    name, _, key = path.stem.rpartition("-")
    try:
        kernel = _unpack(_read(path), key)
    except OSError:
        return None
    return kernel if kernel is not None and kernel.name == name else None


def _within(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if not path.is_dir())
    except OSError:
        return []


def _read(path: Path) -> bytes:
    """Bytes of a regular file. Another kind is empty: to open a pipe, for one, would wait for somebody to write."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123  Path.open takes no descriptor
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _write_all(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def _pack(key: str, kernel: CompiledKernel, *, options: Sequence[str], passes: Sequence[str]) -> bytes:
    facts = {
        "key": key,
        "name": kernel.name,
        "compiler": kernel.compiler,
        "options": list(options),
        "passes": list(passes),
        "log": kernel.log,
    }
    body = json.dumps(facts).encode() + b"\n" + kernel.cubin
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpack(data: bytes, key: str) -> CompiledKernel | None:
    head, _, body = data.partition(b"\n")
    if head != _MAGIC + hashlib.sha256(body).hexdigest().encode():
        return None
    line, _, cubin = body.partition(b"\n")
    try:
        facts = json.loads(line)
        found, kernel_name, log, compiler = (facts[name] for name in ("key", "name", "log", "compiler"))
    except (ValueError, LookupError, TypeError, RecursionError):  # intact, but not written by `_pack`
        return None
    if found != key:  # an intact file, renamed or copied over another
        return None
    if not all(isinstance(text, str) for text in (kernel_name, log, compiler)):
        return None
    return CompiledKernel(kernel_name, cubin, log, compiler)
