"""The owners whose files may be loaded: a kernel is machine code, which runs with all that its process may do."""

from __future__ import annotations

import os
import stat


def why_untrusted(state: os.stat_result) -> str | None:
    """Why nothing may be loaded from a file or folder in this state; None if it may.

    Root can write anywhere anyway, so what is root's is trusted: a container image is such.
    """
    if state.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {state.st_uid}, not to user {os.geteuid()} or root"
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(state.st_mode):o}): chmod go-w"
    return None
