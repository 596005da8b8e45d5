"""The file of a compiled kernel. One file holds all of a kernel, so that no reader sees half of it.

    line 1  deep_gemm kernel 1 <sha256 of all that follows>
    line 2  {"key": ..., "name": ..., "compiler": ..., "config": ..., "options": ..., "passes": ..., "log": ...}
    rest    the cubin

`head -2 <file>` shows the kernel's facts. The bytes may come from anywhere: nothing is unpickled, and each
fault raises an `Unsound` that names the fault.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .compiler import CompiledKernel

SUFFIX = ".kernel"
STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*-[0-9a-f]{64}")
"""A kernel's name and key. The pattern has no slash, so no name can point outside a folder."""
MOST_BYTES = 64 << 20
"""All kernels are much smaller. A larger file cannot be a kernel and is not read."""
_MAGIC = b"deep_gemm kernel 1 "


class Unsound(Exception):  # noqa: N818  "UnsoundError" would say less
    """The bytes are not a kernel, or not the kernel that the file's name states."""


def file_name(name: str, key: str) -> str:
    """Name a kernel's file. The file's name starts with the kernel's name, for people."""
    return f"{name}-{key}{SUFFIX}"


def pack(key: str, kernel: CompiledKernel, *, options: Sequence[str], passes: Sequence[str]) -> bytes:
    """Return the bytes of a kernel's file."""
    facts = {
        "key": key,
        "name": kernel.name,
        "compiler": kernel.compiler,
        "config": kernel.config,
        "options": list(options),
        "passes": list(passes),
        "log": kernel.log,
    }
    body = json.dumps(facts).encode() + b"\n" + kernel.cubin
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unpack(data: bytes, name: str, key: str) -> CompiledKernel:
    """Return the kernel in these bytes, which must have this name and key."""
    head, _, body = data.partition(b"\n")
    if not head.startswith(_MAGIC):
        raise Unsound("it is not a kernel's file, or it has another format" if data else "it is empty")
    if head != _MAGIC + hashlib.sha256(body).hexdigest().encode():
        raise Unsound("its content does not have the digest that it states")
    line, _, cubin = body.partition(b"\n")
    try:
        facts = json.loads(line)
        found = tuple(facts[fact] for fact in ("key", "name", "log", "compiler"))
        found = *found, facts.get("config", "")  # files of older versions have no config
    except (ValueError, LookupError, TypeError, RecursionError):  # intact, but not written by `pack`
        raise Unsound("it does not state what it holds") from None
    if not all(isinstance(text, str) for text in found):
        raise Unsound("it does not state what it holds")
    found_key, found_name, log, compiler, config = found
    if (found_name, found_key) != (name, key):  # an intact file, renamed or copied over another
        raise Unsound(f"it holds another kernel: {found_name}-{found_key[:16]}")
    return CompiledKernel(found_name, cubin, log, compiler, config)


def unpack_named(data: bytes, file: str) -> CompiledKernel:
    """Return the kernel in the bytes of a file, whose name states the kernel's name and key."""
    stem = file.removesuffix(SUFFIX)
    if not file.endswith(SUFFIX) or not STEM.fullmatch(stem):
        raise Unsound("its name is not a kernel's")
    name, _, key = stem.rpartition("-")
    return unpack(data, name, key)


def read_entry(path: Path) -> CompiledKernel:
    """Read the kernel of a file. Raise an Unsound or an OSError if the file has no valid kernel."""
    with open_regular(path) as file:
        return unpack_named(read_whole(*file), path.name)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file for reading: its descriptor and its state. Raise an Unsound unless it is a regular file.

    Only regular files are read, because reading a pipe, for example, would wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise Unsound("it is not a regular file")
        yield descriptor, state
    finally:
        os.close(descriptor)


def read_whole(descriptor: int, state: os.stat_result) -> bytes:
    """Read all bytes of a file. Raise an Unsound if the file is larger than any kernel."""
    if state.st_size > MOST_BYTES:
        raise Unsound(f"it has {state.st_size} bytes, more than any kernel")
    with open(descriptor, "rb", closefd=False) as whole:
        return whole.read(MOST_BYTES)
