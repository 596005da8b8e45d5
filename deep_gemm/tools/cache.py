"""`python -m deep_gemm cache`: what lies in the directory of kernels, whether it is sound, and away with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..jit.cache import SUFFIX, files_in, left_behind, read_entry


@dataclass(frozen=True)
class Entry:
    """A file of the cache."""

    path: Path
    size: int
    written: float
    compiler: str | None
    """The build of NVRTC that made it; None if the file is not sound."""

    @property
    def kernel(self) -> str:
        """The kernel's name, from the file's."""
        return self.path.name.removesuffix(SUFFIX).rpartition("-")[0]

    @property
    def key(self) -> str:
        """The digest of everything that decides the machine code, from the file's name."""
        return self.path.name.removesuffix(SUFFIX).rpartition("-")[2]


def entries(directory: Path) -> list[Entry]:
    """Read all kernels of a cache, the newest first."""
    found = []
    for path in files_in(directory):
        kernel, state = read_entry(path), path.stat()
        found.append(Entry(path, state.st_size, state.st_mtime, None if kernel is None else kernel.compiler))
    return sorted(found, key=lambda entry: -entry.written)


def show(directory: Path, console: Console) -> None:
    """List what the cache holds."""
    found = entries(directory)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("kernel", "key", "NVRTC"):
        table.add_column(heading, no_wrap=True)
    table.add_column("KiB", justify="right")
    table.add_column("written", no_wrap=True)
    for entry in found:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.written))
        cells = (entry.kernel, entry.key[:16], entry.compiler or "[red]not sound[/]", f"{entry.size / 1024:.0f}")
        table.add_row(*cells, written)
    if found:
        console.print(table)
    console.print(_summary(directory, found), markup=False, soft_wrap=True)


def verify(directory: Path, console: Console, *, remove: bool) -> bool:
    """Check every kernel's digest, and its name; tell whether all are sound, or are now."""
    found = entries(directory)
    bad = [entry for entry in found if entry.compiler is None]
    for entry in bad:
        if remove:
            entry.path.unlink(missing_ok=True)
        what = "removed" if remove else "not sound; it is compiled anew when it is needed"
        console.print(f"{entry.path}: {what}", markup=False, soft_wrap=True)
    console.print(
        f"{len(found) - len(bad)} of {len(found)} kernels in {directory} are sound", markup=False, soft_wrap=True
    )
    return remove or not bad


def clear(directory: Path) -> int:
    """Remove all that a cache has written to a directory, and give the number of kernels. Other files stay."""
    kernels = files_in(directory)
    for path in (*kernels, *left_behind(directory)):
        path.unlink(missing_ok=True)
    for folder in sorted((directory / "failed").rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return len(kernels)


def _summary(directory: Path, found: Sequence[Entry]) -> str:
    return f"{len(found)} kernels, {sum(entry.size for entry in found) / 1e6:.1f} MB, in {directory}"
