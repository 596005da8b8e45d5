"""A lock by which only one thread of one process builds a kernel at a time.

Among processes it is the operating system's lock on a file, which ends with its process, however the process ends. A
forked child does not inherit this kind of lock, and network file systems support it. If a file cannot be locked, or
its holder never ends, several builders compile the same kernel. This only costs time: finished files are renamed.
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
"""A builder waits this long for the lock, and then builds without it: the holder may be stopped or gone."""
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1


_guard = threading.Lock()
_of_threads: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
"""A lock for each kernel that threads of this process want to build."""


def _forget_threads() -> None:
    """Forget all locks in a forked child, which lacks the parent's other threads and must not wait for them."""
    global _guard, _of_threads
    _guard, _of_threads = threading.Lock(), WeakValueDictionary()


os.register_at_fork(after_in_child=_forget_threads)


@contextlib.contextmanager
def one_builder(path: Path, *, among_processes: bool = True) -> Iterator[None]:
    """Hold the lock file `path` during the block, and then remove the file. If it cannot be locked, do not hold it."""
    until = time.monotonic() + PATIENCE_S
    with _guard:
        of_threads = _of_threads.setdefault(path, threading.Lock())
    is_alone = of_threads.acquire(timeout=max(until - time.monotonic(), 0))
    try:
        descriptor = _locked(path, until) if is_alone and among_processes else None
        try:
            yield
        finally:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    path.unlink()  # before the close: later this could remove the next holder's file
                os.close(descriptor)
    finally:
        if is_alone:
            of_threads.release()


def _locked(path: Path, until: float) -> int | None:
    """Lock the lock file and return its descriptor; None if it cannot be locked in time."""
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
        pause = min(2 * pause, _LAST_POLL_S)  # many waiting processes must not slow the builder down


def _try_to_lock(path: Path) -> int | None:
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed this file after it was opened here. A lock on a removed file locks nothing.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, PermissionError, FileNotFoundError):  # locked by another process, or just removed
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
