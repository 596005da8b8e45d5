"""Common parts of the plugins for engines: a start that never raises, a check that a release is like the known ones,
and the reasons why a layer is not taken, which means that the engine's own function computes it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.check.checks import K_MULTIPLE, Operand
from ..core.check.layout import SCALE_BLOCK
from ..gemm import packed
from ..linear.check import SCALES_OF_WEIGHTS
from .transformers import as_operand

Places = Mapping[tuple[str, str], tuple[str, ...] | None]
"""Parameters of an engine's functions that a plugin uses, by (module, path). A release may lack names that end in ?."""

BLOCKS = tuple(block for block in SCALES_OF_WEIGHTS if block.rows == block.columns)
"""Blocks of a linear layer's weight that share a scale. Activations have a scale for the same number of columns."""


class Weights(NamedTuple):
    """A kind of experts' weights: the divisors of their sizes, and the function that makes operands."""

    hidden: int
    intermediate: int
    operand: Callable[[Tensor, Any], Any]


def all_or_nothing(engine: str, logger: logging.Logger, change: Callable[[ExitStack], None]) -> None:
    """Let a plugin change an engine: either all its changes are made, or none is, and the log has one line of reason.

    `change` pushes the undo of each change. It may raise. This function never raises, since that may stop an engine.
    """
    try:
        with ExitStack() as undo:
            change(undo)
            undo.pop_all()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logger.error("deep_gemm leaves all layers to %s: %s", engine, reason)


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of an engine, and push the undo."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def why_not(engine: str, places: Places) -> str | None:
    """Return how this release of an engine differs from known releases in these places; None if it does not."""
    release = f"{engine} {import_module(engine).__version__}"
    for (module, path), expected in places.items():
        try:
            found = attrgetter(path)(import_module(module))
        except (ImportError, AttributeError):
            return f"{release} has no {module}.{path}"
        got = tuple(inspect.signature(found).parameters) if expected else ()
        known = tuple(name.rstrip("?") for name in expected or () if name[-1] != "?" or name[:-1] in got)
        if got != known:
            return f"{release}: expected {path} of {known}, got {got}"
    return None


def parts_there(engine: str, logger: logging.Logger, parts: Mapping[str, Places], layers: Any) -> list[list[Any]]:
    """Return a list for each part of a plugin: its object in `layers`, or nothing if the release lacks its places."""
    found: list[list[Any]] = []
    for name, places in parts.items():
        refusal = why_not(engine, places)
        found.append([] if refusal else [getattr(layers, name)])
        if refusal:
            logger.warning("deep_gemm leaves out %s: %s", name, refusal)
    return found


def linear_refusal(dtype: torch.dtype, block: Sequence[int] | None, n: int, k: int) -> str | None:
    """Return why a linear layer with an FP8 weight of n rows and k columns is not taken; None if it is.

    `block`: the rows and columns that share a scale; None for a scale of each row or of the whole weight.
    """
    if dtype != torch.bfloat16:
        return f"the result is BF16, not {dtype}"
    if block is not None and tuple(block) not in BLOCKS:
        return f"scales must be for 128x128, 64x64 or 32x32, not {tuple(block)}"
    if n % 8 or k % K_MULTIPLE:
        return f"n % 8 and k % 16 must be 0, not n = {n} and k = {k}"
    return None


def experts_refusal(dtype: torch.dtype, hidden: int, intermediate: int, weights: Weights) -> str | None:
    """Return why a layer of experts is not taken; None if it is."""
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not BF16"
    if intermediate % weights.intermediate:
        return f"the intermediate size {intermediate} is not a multiple of {weights.intermediate}"
    if hidden % weights.hidden:
        return f"the hidden size {hidden} is not a multiple of {weights.hidden}"
    return None


def row_operand(weight: Tensor, scales: Tensor) -> Operand:
    """Make an operand of a weight, or of all experts' weights, with a scale for each row or for each whole weight."""
    *experts, rows, _ = weight.shape
    of_rows = scales.numel() == prod(weight.shape[:-1])
    return weight, scales.reshape(*experts, rows, 1) if of_rows else scales.reshape(experts)


FP4 = Weights(packed.COLUMNS, packed.COLUMNS, as_operand)
BY_BLOCKS = Weights(packed.COLUMNS, SCALE_BLOCK, as_operand)
BY_ROWS = Weights(K_MULTIPLE, K_MULTIPLE, row_operand)
PLAIN = Weights(8, 8, lambda weight, _: weight)
