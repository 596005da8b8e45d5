"""Parts that plugins of engines share: a start that never raises, a check that a release is like the known ones, and
reasons why a layer is not taken.
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
"""Parameters of things that a plugin changes or fills in, by module and path. A release may lack one that ends in ?."""

BLOCKS = tuple(block for block in SCALES_OF_WEIGHTS if block.rows == block.columns)
"""Blocks of a linear layer's weight that share a scale; activations are cast by as many columns."""


class Weights(NamedTuple):
    """A kind of experts' weights: what their sizes are multiples of, and how values and scales become an operand."""

    hidden: int
    intermediate: int
    operand: Callable[[Tensor, Any], Any]


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
    """Say how places of an engine differ in this release from the known ones; None if they do not differ."""
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
    """Give each part of a plugin, named as in `layers`, in a list, which is empty if this release lacks its places."""
    found: list[list[Any]] = []
    for name, places in parts.items():
        refusal = why_not(engine, places)
        found.append([] if refusal else [getattr(layers, name)])
        if refusal:
            logger.warning("deep_gemm leaves out %s: %s", name, refusal)
    return found


def linear_refusal(dtype: torch.dtype, block: Sequence[int] | None, n: int, k: int) -> str | None:
    """Say why a linear layer with an FP8 weight of n rows and k columns is not taken; None if it is.

    `block`: the rows and columns that share a scale; None for a scale for each row, or one for the weight.
    """
    if dtype != torch.bfloat16:
        return f"gives BF16, not {dtype}"
    if block is not None and tuple(block) not in BLOCKS:
        return f"has a scale for 128x128, 64x64 or 32x32, not {tuple(block)}"
    if n % 8 or k % K_MULTIPLE:
        return f"expects n % 8 and k % 16 to be 0, not n = {n} and k = {k}"
    return None


def experts_refusal(dtype: torch.dtype, hidden: int, intermediate: int, weights: Weights) -> str | None:
    """Say why a layer of experts is not taken; None if it is."""
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not BF16"
    if intermediate % weights.intermediate:
        return f"the intermediate size {intermediate} is no multiple of {weights.intermediate}"
    if hidden % weights.hidden:
        return f"the hidden size {hidden} is no multiple of {weights.hidden}"
    return None


def row_operand(weight: Tensor, scales: Tensor) -> Operand:
    """Give a weight, or one for each expert, as layers take it, with a scale for each row or one for a whole weight."""
    *experts, rows, _ = weight.shape
    of_rows = scales.numel() == prod(weight.shape[:-1])
    return weight, scales.reshape(*experts, rows, 1) if of_rows else scales.reshape(experts)


FP4 = Weights(packed.COLUMNS, packed.COLUMNS, as_operand)
BY_BLOCKS = Weights(packed.COLUMNS, SCALE_BLOCK, as_operand)
BY_ROWS = Weights(K_MULTIPLE, K_MULTIPLE, row_operand)
PLAIN = Weights(8, 8, lambda weight, _: weight)
