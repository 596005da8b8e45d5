"""One builder at a time for each kernel, among threads and among processes.

The lock of a file is the operating system's and goes with its process, however that ends. It is of the kind that a
forked child does not inherit, and that network file systems know too. Where nothing can be locked, or a holder
does not come back, several builders compile the same: files are renamed into place, so that costs time alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakValueDictionary

SUFFIX = ".lock"
PATIENCE_S = 60.0
"""A builder waits this long for the lock's holder, then goes on without it: the holder may be stopped or gone."""
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1


class _Threads:
    """A lock for each kernel that threads of this process want to build."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.of_path: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()

    def lock(self, path: Path) -> threading.Lock:
        with self.guard:
            return self.of_path.setdefault(path, threading.Lock())


_threads = _Threads()


def _forget_threads() -> None:
    """A forked child has none of the parent's other threads, and must not wait for them."""
    global _threads  # noqa: PLW0603
    _threads = _Threads()


os.register_at_fork(after_in_child=_forget_threads)


@contextlib.contextmanager
def one_builder(path: Path, *, among_processes: bool = True) -> Iterator[None]:
    """Hold the lock file `path`, which is removed afterwards, or go on without it if it cannot be locked."""
    until = time.monotonic() + PATIENCE_S
    of_threads = _threads.lock(path)
    is_alone = of_threads.acquire(timeout=max(until - time.monotonic(), 0))
    try:
        descriptor = _locked(path, until) if is_alone and among_processes else None
        try:
            yield
        finally:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    path.unlink()  # before closing it, or this could remove the next holder's file
                os.close(descriptor)
    finally:
        if is_alone:
            of_threads.release()


def _locked(path: Path, until: float) -> int | None:
    """Lock the lock file and give its descriptor; None if it cannot be locked in time."""
    pause = _FIRST_POLL_S
    while True:
        try:
            if (descriptor := _try_to_lock(path)) is not None:
                return descriptor
        except (OSError, ImportError):
            return None
        if time.monotonic() > until:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)  # many waiting processes must not take the builder's time


def _try_to_lock(path: Path) -> int | None:
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before may have removed this file after it was opened here: then its lock keeps no process out.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, PermissionError, FileNotFoundError):  # held by another, or just removed
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
