"""Parts that plugins of engines share: a start that never raises, whether a release is as those that are known, and why
a layer is not taken.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from ..core.check.checks import K_MULTIPLE
from ..core.check.layout import SCALE_BLOCK
from ..gemm import packed
from ..linear.check import SCALES_OF_WEIGHTS

Places = Mapping[tuple[str, str], tuple[str, ...] | None]
"""Parameters of each thing in an engine that a plugin changes or fills in, by its module and its path there."""

BLOCKS = tuple(block for block in SCALES_OF_WEIGHTS if block.rows == block.columns)
"""How weights of linear layers may be scaled; activations are cast by as many columns."""


def all_or_nothing(engine: str, logger: logging.Logger, change: Callable[[ExitStack], None]) -> None:
    """Let a plugin change an engine: all of its changes are made, or none, and one line in the log says why.

    `change` pushes the way back from each. It may raise; this does not, because an engine may start plugins unguarded.
    """
    try:
        with ExitStack() as undo:
            change(undo)
            undo.pop_all()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logger.error("deep_gemm leaves all layers to %s: %s", engine, reason)


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Put a value in the place of an engine's own."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def why_not(engine: str, places: Places) -> str | None:
    """Say in what this release of an engine differs from those that are known; None if in nothing that matters here."""
    release = f"{engine} {import_module(engine).__version__}"
    for (module, path), expected in places.items():
        try:
            found: Any = import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            return f"{release} has no {module}.{path}"
        got = expected and tuple(inspect.signature(found).parameters)
        if got != expected:
            return f"{release}: expected {path} of {expected}, got {got}"
    return None


def linear_refusal(dtype: torch.dtype, block: Sequence[int], n: int, k: int) -> str | None:
    """Say why a linear layer with an FP8 weight of n rows and k columns is not taken; None if it is."""
    if dtype != torch.bfloat16:
        return f"gives BF16, not {dtype}"
    if tuple(block) not in BLOCKS:
        return f"has a scale for 128x128, 64x64 or 32x32, not {tuple(block)}"
    if n % 8 or k % K_MULTIPLE:
        return f"expects n % 8 and k % 16 to be 0, not n = {n} and k = {k}"
    return None


def experts_refusal(dtype: torch.dtype, hidden: int, intermediate: int, *, is_fp4: bool) -> str | None:
    """Say why a layer of experts is not taken; None if it is. FP8 weights have a scale for 128x128."""
    whole = packed.COLUMNS if is_fp4 else SCALE_BLOCK
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not BF16"
    if intermediate % whole:
        return f"the intermediate size {intermediate} is no multiple of {whole}"
    if hidden % packed.COLUMNS:
        return f"the hidden size {hidden} is no multiple of {packed.COLUMNS}"
    return None
