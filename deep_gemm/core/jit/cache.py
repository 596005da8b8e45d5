"""Compiled kernels in memory and on disk.

One file holds one kernel (entry.py). The file is written under a temporary name and then renamed. Its digest is checked
on load. A truncated, empty or damaged file, or a file of another format, counts as missing and is never an error.
A kernel is machine code, which runs with all rights of its process. So no kernel is loaded from a folder or file that
other users could have written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import secrets
import stat
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from . import one_builder
from .compiler import CompiledKernel, CompileError
from .entry import STEM, SUFFIX, Unsound, file_name, open_regular, pack, read_entry, read_whole, unpack

DUMPS = (".ptx", ".cubin", ".sass")
"""Suffixes of dump files, which have a kernel's name and are beside the kernel (core/jit/dumps.py)."""
FAILED, QUARANTINE = "failed", "quarantine"
MOST_IN_QUARANTINE = 16
"""The most bad files that are kept for people to inspect."""
NO_LIMIT = 1 << 62
SHIPPED = "hopper_gemm_cache"
"""The module of a wheel whose folder holds compiled kernels (`python -m lab ship kernels` makes the wheel)."""
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
_FRESH_S = 3600.0
"""A load stores its time only if the last stored time is older than this, so that most loads write nothing."""


def kernel_key(
    name: str,
    source: str,
    headers: Mapping[str, str],
    *,
    options: Sequence[str],
    compiler: str,
    passes: Iterable[tuple[str, int]],
) -> str:
    """Hash everything that decides the machine code. As JSON, different inputs are different texts before hashing."""
    inputs = [name, source, sorted(headers.items()), list(options), compiler, list(passes)]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


@functools.cache
def shipped() -> tuple[Path, ...]:
    """Find the folder of kernels of an installed wheel, if there is one, without importing the wheel's module."""
    spec = importlib.util.find_spec(SHIPPED)
    return () if spec is None else tuple(map(Path, spec.submodule_search_locations or ()))


class KernelCache:
    """Kernels in this process's memory and in shared directories. One directory is written; all are read.

    Directories in `only_read` are never written, because a wheel owns its files.
    """

    def __init__(self, *directories: Path, only_read: tuple[Path, ...] = (), limit_bytes: int = NO_LIMIT) -> None:
        self.directories = (*directories, *only_read)
        self.directory = written_directory(directories)
        """The directory that receives new kernels."""
        self._only_read = only_read
        self._limit_bytes = limit_bytes
        self._memory: dict[str, CompiledKernel] = {}
        self._newest_compiler: str | None = None
        self._warned: set[object] = set()

    def path(self, name: str, key: str) -> Path:
        """Return the path of a kernel's file."""
        return self.directory / file_name(name, key)

    def builder(self, name: str, key: str) -> AbstractContextManager[None]:
        """Let one thread of one process at a time build this kernel."""
        with contextlib.suppress(OSError):
            make_directory(self.directory)
        # Make no lock file in a folder of another user: that user might hold the lock for ever.
        among_processes = can_be_written(self.directory)
        file = self.directory / f".{name}-{key}{one_builder.SUFFIX}"
        return one_builder.one_builder(file, among_processes=among_processes)

    def load(self, name: str, key: str) -> CompiledKernel | None:
        """Return the kernel, or None if neither this process nor an intact file has it."""
        if (kernel := self._memory.get(key)) is not None:
            return kernel
        for directory in self.directories:
            with contextlib.suppress(OSError, Unsound):
                if self._is_trusted(directory, directory.stat()):
                    kernel = self._read(directory / file_name(name, key), name, key)
                    return self._memory.setdefault(key, kernel)  # another thread may have been faster
        return None

    def store(self, key: str, kernel: CompiledKernel, *, options: Sequence[str], passes: Sequence[str]) -> None:
        """Store the kernel in memory, and on disk if possible. A bad file under its name is moved to the quarantine."""
        self._memory[key] = kernel
        path = self.path(kernel.name, key)
        try:
            make_directory(self.directory)
            if not self._is_trusted(self.directory, self.directory.stat()):
                return
            with contextlib.suppress(OSError):
                set_aside_if_bad(path)
            write_entry(path, pack(key, kernel, options=options, passes=passes))
        except OSError as error:
            self._warn(
                "store",
                f"compiled kernels cannot be kept in {self.directory} ({error}); each process compiles its own. "
                f"DG_JIT_CACHE_DIR names another directory.",
            )
        else:
            evict(self.directory, self._limit_bytes, keep=path)

    def newest_compiler(self) -> str | None:
        """Return the build of NVRTC that made the newest loadable kernel; None without a kernel. The answer is kept."""
        if self._newest_compiler is not None:
            return self._newest_compiler
        # The wheel is first: it is made for machines without a compiler, and has more kernels than the local cache.
        for directory in sorted(self.directories, key=lambda each: each not in self._only_read):
            with contextlib.suppress(OSError):
                if not self._is_trusted(directory, directory.stat()):
                    continue
                for path in sorted(files_in(directory), key=lambda path: -path.stat().st_mtime):
                    with contextlib.suppress(OSError, Unsound):
                        name, _, key = path.stem.rpartition("-")
                        self._newest_compiler = self._read(path, name, key).compiler
                        return self._newest_compiler
        return None

    def keep_failed_source(self, error: CompileError, headers: Mapping[str, str], key: str) -> None:
        """Write a source that the compiler refused, its headers and its log as files. Store the path in the error.

        Headers stay separate files, so that the line numbers in the log are right.
        """
        files = {**headers, f"{error.name}.cu": error.source, "log.txt": str(error)}
        try:
            make_directory(self.directory)
            folder = _write_all(self.directory / FAILED / f"{error.name}-{key[:16]}", files)
        except OSError:
            try:
                folder = _write_all(Path(tempfile.mkdtemp(prefix="deep_gemm-")), files)
            except OSError:
                return  # the error itself still carries the source
        error.source_path = folder / f"{error.name}.cu"

    def _read(self, path: Path, name: str, key: str) -> CompiledKernel:
        with open_regular(path) as (descriptor, state):
            if not self._is_trusted(path, state):
                raise Unsound("it is not trusted")
            kernel = unpack(read_whole(descriptor, state), name, key)
            if path.parent == self.directory and time.time() - state.st_atime > _FRESH_S:
                # The file system may not store the time of this read, so store it here. Keep the time of the write.
                with contextlib.suppress(OSError):
                    os.utime(descriptor, ns=(time.time_ns(), state.st_mtime_ns))
            return kernel

    def _is_trusted(self, path: Path, state: os.stat_result) -> bool:
        reason = why_not_taken(path, state)
        if reason is not None:
            folder = path if path in self.directories else path.parent
            self._warn(folder, f"compiled kernels are not loaded from {path}: {reason}")
        return reason is None

    def _warn(self, about: object, message: str) -> None:
        """Warn, but only once about each subject."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def written_directory(directories: Sequence[Path]) -> Path:
    """Return the first directory that can be written; if none can, the first directory."""
    return next((directory for directory in directories if can_be_written(directory)), directories[0])


def can_be_written(directory: Path) -> bool:
    """Tell whether kernels can be stored in a directory, or whether the directory can be made."""
    try:
        state = directory.stat()
    except OSError:
        nearest = next((path for path in directory.parents if path.exists()), directory)
        return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return directory.is_dir() and why_untrusted(state) is None and os.access(directory, os.W_OK | os.X_OK)


def why_not_taken(path: Path, state: os.stat_result) -> str | None:
    """Return why no kernel may be loaded from a folder of kernels, or from a file in it; None if loading is allowed."""
    is_shipped = not {path, path.parent}.isdisjoint(shipped())
    return why_untrusted(state, os.stat(__file__) if is_shipped else None)  # noqa: PTH116


def why_untrusted(state: os.stat_result, package: os.stat_result | None = None) -> str | None:
    """Return why a file or folder with this state must not be loaded; None if it may be.

    Root's files are trusted, as in a container image, because root can write anywhere anyway. `package` is the state of
    a file of the package. Its owner and writers are trusted too: they can change the package's code anyway.
    """
    owners, writers = {os.geteuid(), 0}, stat.S_IWGRP | stat.S_IWOTH
    if package is not None:
        owners.add(package.st_uid)
        writers &= ~package.st_mode
    if state.st_uid not in owners:
        return f"it belongs to user {state.st_uid}, not to user {os.geteuid()} or root"
    if state.st_mode & writers:
        return f"others may write to it (mode {stat.S_IMODE(state.st_mode):o}): chmod go-w"
    return None


def make_directory(directory: Path) -> None:
    """Make the directory, readable and writable only for this user."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def write_entry(path: Path, data: bytes) -> None:
    """Write a kernel's file so that a reader sees the whole file or no file."""
    # The temporary file is in the same directory, because a rename is atomic only within a file system. `tempfile` does
    # not fit: other users cannot read its files, but they may read a cache.
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with _create(temporary) as file:
            file.write(data)
        os.replace(temporary, path)  # noqa: PTH105  the tests stop a process right here
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def set_aside_if_bad(path: Path) -> None:
    """Move a file that is not sound into the quarantine, with the reason beside it."""
    try:
        read_entry(path)
    except Unsound as unsound:
        if path.is_dir():
            return
        folder = path.parent / QUARANTINE
        folder.mkdir(mode=0o700, exist_ok=True)
        kept = folder / f"{path.stem}.{secrets.token_hex(4)}.bad"
        kept.with_suffix(".txt").write_text(f"{path.name} was set aside: {unsound}\n")
        path.rename(kept)
        by_age = sorted(folder.glob("*.txt"), key=lambda reason: reason.stat().st_mtime_ns)
        for old in by_age[:-MOST_IN_QUARANTINE]:
            old.with_suffix(".bad").unlink(missing_ok=True)
            old.unlink(missing_ok=True)


def evict(directory: Path, limit_bytes: int, *, keep: Path) -> None:
    """Remove the least recently used kernels and their dumps until the total size is within the limit."""
    if limit_bytes >= NO_LIMIT:
        return
    files: dict[str, list[tuple[Path, os.stat_result]]] = {}
    used: dict[str, float] = {}
    for path in _within(directory):
        if path.suffix in (SUFFIX, *DUMPS) and STEM.fullmatch(path.stem):
            with contextlib.suppress(OSError):
                state = path.stat()
                files.setdefault(path.stem, []).append((path, state))
                if path.suffix == SUFFIX:
                    used[path.stem] = max(state.st_atime, state.st_mtime)
    excess = sum(state.st_size for kernel in files.values() for _, state in kernel) - limit_bytes
    for stem in sorted(files, key=lambda stem: used.get(stem, 0.0)):
        if excess <= 0:
            return
        if stem != keep.stem:
            for path, state in files[stem]:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    excess -= state.st_size


def files_in(directory: Path) -> list[Path]:
    """List the files of a directory that have a kernel's name, including bad files."""
    return [path for path in _within(directory) if path.suffix == SUFFIX and STEM.fullmatch(path.stem)]


def left_behind(directory: Path) -> list[Path]:
    """List the cache's other files in a directory: dumps, bad files, failed sources, files of killed processes."""
    beside = [
        path
        for path in _within(directory)
        if (path.suffix in DUMPS and STEM.fullmatch(path.stem))
        or (path.suffix == one_builder.SUFFIX and STEM.fullmatch(path.stem.removeprefix(".")))
        or _TEMPORARY.fullmatch(path.name)
    ]
    return [*beside, *_files_below(directory / FAILED), *_files_below(directory / QUARANTINE)]


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if not path.is_dir())


def _within(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if not path.is_dir())
    except OSError:
        return []


def _create(path: Path) -> BinaryIO:
    """Open a new file that other users may read, if the umask allows, but not write."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb")  # noqa: PTH123


def _write_all(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder
