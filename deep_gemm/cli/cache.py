"""`python -m deep_gemm cache`: list, check, clear, export and import the compiled kernels of the cache.

An archive is a tar of kernels' files. An import checks each file as the cache does: its name must be a kernel's, and
its digest must match. An import uses nothing else in an archive: no path, owner, mode or link.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..core.jit.cache import FAILED, QUARANTINE, files_in, left_behind, make_directory, why_not_taken, write_entry
from ..core.jit.entry import MOST_BYTES, Unsound, open_regular, read_entry, read_whole, unpack_named


@dataclass(frozen=True)
class Entry:
    """A file of the cache."""

    path: Path
    size: int
    written: float
    compiler: str | None
    """The build of NVRTC that made the kernel; None if the file is not sound."""
    config: str = ""
    """The kernel's configuration, such as its tile; empty if the file does not state it."""
    reason: str = ""
    """The reason why the file is not sound."""


def entries(directory: Path) -> list[Entry]:
    """Read all kernels of a cache, the newest first."""
    found = []
    for path in files_in(directory):
        state = path.stat()
        try:
            kernel = read_entry(path)
            found.append(Entry(path, state.st_size, state.st_mtime, kernel.compiler, kernel.config))
        except (Unsound, OSError) as error:
            found.append(Entry(path, state.st_size, state.st_mtime, None, reason=str(error)))
    return sorted(found, key=lambda entry: -entry.written)


def show(directory: Path, console: Console) -> None:
    """List the kernels in the cache."""
    found = entries(directory)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("kernel", "configuration"):
        table.add_column(heading, overflow="fold")
    for heading in ("key", "NVRTC"):
        table.add_column(heading, no_wrap=True)
    table.add_column("KiB", justify="right")
    table.add_column("written", no_wrap=True)
    for entry in found:
        kernel, _, key = entry.path.stem.rpartition("-")
        written = time.strftime("%m-%d %H:%M", time.localtime(entry.written))
        compiler = entry.compiler.split()[0] if entry.compiler else "[red]not sound[/]"
        table.add_row(kernel, escape(entry.config), key[:8], compiler, f"{entry.size / 1024:.0f}", written)
    if found:
        console.print(table)
    aside = len([path for path in left_behind(directory) if path.suffix == ".bad"])
    beside = f"; {aside} bad files are in {directory / QUARANTINE}" if aside else ""
    size = sum(entry.size for entry in found) / 1e6
    _say(console, f"{len(found)} kernels, {size:.1f} MB, in {directory}{beside}")


def verify(directory: Path, console: Console, *, remove: bool) -> bool:
    """Check every kernel's digest and name. `remove`: remove bad kernels. Tell whether all kernels left are sound."""
    found = entries(directory)
    bad = [entry for entry in found if entry.compiler is None]
    for entry in bad:
        if remove:
            entry.path.unlink(missing_ok=True)
        what = "removed" if remove else "not sound; it is compiled again when needed"
        _say(console, f"{entry.path}: {what} ({entry.reason})")
    _say(console, f"{len(found) - len(bad)} of {len(found)} kernels in {directory} are sound")
    return remove or not bad


def clear(directory: Path) -> int:
    """Remove all files that a cache has written to a directory. Return the number of kernels. Other files stay."""
    kernels = files_in(directory)
    for path in (*kernels, *left_behind(directory)):
        path.unlink(missing_ok=True)
    for top in (directory / FAILED, directory / QUARANTINE):
        for folder in sorted((top, *top.rglob("*")), reverse=True):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    return len(kernels)


def export_to(file: Path, directories: Sequence[Path], console: Console) -> bool:
    """Write the sound kernels of these directories into an archive. Equal kernels make archives of equal bytes."""
    kernels: dict[str, bytes] = {}
    for path in (path for directory in directories for path in files_in(directory)):
        try:
            with open_regular(path) as (descriptor, state):
                if (reason := why_not_taken(path, state)) is not None:
                    raise Unsound(reason)
                data = read_whole(descriptor, state)
            unpack_named(data, path.name)
            kernels.setdefault(path.name, data)
        except (OSError, Unsound) as error:
            _say(console, f"{path}: left out ({error})")
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(kernels.items()):
            member = tarfile.TarInfo(name)  # with time 0 and user 0
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    size = sum(map(len, kernels.values())) / 1e6
    _say(console, f"{len(kernels)} kernels, {size:.1f} MB, written to {file}")
    return bool(kernels)


def import_from(file: Path, directory: Path, console: Console) -> bool:
    """Copy the kernels of an archive into a directory. Tell whether all its members were sound kernels."""
    make_directory(directory)
    if (reason := why_not_taken(directory, directory.stat())) is not None:
        raise ValueError(f"{directory}: {reason}")
    compilers, taken, refused = set[str](), 0, 0
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                try:
                    data = _read_member(archive, member)
                    compilers.add(unpack_named(data, member.name).compiler)
                    write_entry(directory / member.name, data)
                    taken += 1
                except Unsound as unsound:
                    _say(console, f"{member.name!r}: refused: {unsound}")
                    refused += 1
    except tarfile.TarError as error:
        raise ValueError(f"file: expected a tar from `cache export`, got {file}: {error}") from error
    made_by = f", made by NVRTC {', '.join(sorted(compilers))}," if compilers else ""
    _say(console, f"{taken} kernels{made_by} are in {directory}; {refused} members were refused")
    return taken > 0 and refused == 0


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not member.isreg():
        raise Unsound("it is not a regular file")
    if member.size > MOST_BYTES:
        raise Unsound(f"it has {member.size} bytes, more than any kernel")
    content = archive.extractfile(member)
    return b"" if content is None else content.read()


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
