"""A trial describes a kind of problem: operands, a call, and the right results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .draw import Draw, Output

Tensors = Mapping[str, Tensor]
Call = Callable[..., Any]


@dataclass
class Right:
    """The right result at the `written` elements: within `allowed` of `exact`; without `allowed`, the same bits.

    All other elements keep their values, but are undefined if the call made the tensor, or without `rest_is_kept`.
    """

    exact: Tensor
    allowed: Tensor | float | None = None
    written: Tensor | None = None
    """A mask that expands to the result's shape; None means all elements."""
    rest_is_kept: bool = True
    norms_along: tuple[int, ...] | None = None
    """If set, the error's norm along these dimensions may be `allowed` times (the right norm + the mean right norm)."""


class Part:
    """A part of a trial with separate draws, which the trial's text includes."""


def described(attributes: Mapping[str, object]) -> str:
    """Name attributes that are numbers, words or types. Parts, or dicts of parts, are named with their attributes.

    >>> described({"m": 3, "dtype": torch.bfloat16, "draw": object(), "ks": [1, 2], "c": None})
    'm=3 dtype=torch.bfloat16 ks=[1, 2] c=None'
    """
    found = []
    for name, value in attributes.items():
        if isinstance(value, int | float | str | torch.dtype | list | tuple | None):
            found.append(f"{name}={value}")
        elif isinstance(value, Part):
            found.append(f"{name}: ({described(vars(value))})")
        elif isinstance(value, dict) and all(isinstance(each, Part) for each in value.values()) and value:
            found.append(described({f"{name} {key}": part for key, part in value.items()}))
    return " ".join(found)


class Trial(ABC):
    """One random problem. A subclass draws it in `__init__`, and is listed in `kinds/__init__.py`."""

    kind: ClassVar[str]
    dtype: torch.dtype
    faults: ClassVar[Mapping[str, str]] = {}
    """Operands, and the faults of each operand that the call must refuse (faults.py)."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.operands: dict[str, Tensor] = {}
        self.outputs: dict[str, Output] = {}
        self.starts: dict[str, Tensor] = {}
        """Values of outputs before a call, if the call reads them; other outputs are poisoned."""

    @property
    def text(self) -> str:
        """Describe the problem in short: its drawn attributes, and the layout of its operands."""
        operands = ", ".join(
            f"{name} {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} {x.stride()}"
            for name, x in self.operands.items()
        )
        return f"{described(vars(self))}; {operands}"

    @abstractmethod
    def fill(self) -> None:
        """Draw the values of the operands, in place."""

    @abstractmethod
    def call(self, x: Tensors) -> Tensors:
        """Make the call with these operands and outputs; return the tensors that it makes, by name."""

    @abstractmethod
    def right(self) -> dict[str, Right]:
        """Return the right contents of each output, and of each tensor that a call makes."""

    def draw_c(self, shape: tuple[int, ...], c: str | None) -> None:
        """Draw C as an operand, or as the initial values of D."""
        if c is not None:
            drawn = self.draw.integers(shape, -8, 8).to(self.dtype)
            if c == "c":
                self.operands["c"].copy_(drawn)
            else:
                self.starts["d"] = drawn

    def refused_faults(self) -> Mapping[str, str]:
        """Return the `faults` that this problem must refuse."""
        return self.faults

    def everything(self) -> dict[str, Tensor]:
        """Return operands and outputs in the form of `call`."""
        return {**self.operands, **{name: output.view for name, output in self.outputs.items()}}

    def poison(self) -> None:
        """Fill outputs with their initial values, or with NaN."""
        for name, output in self.outputs.items():
            start = self.starts.get(name)
            if start is None:
                output.view.fill_(torch.nan)
            else:
                output.view.copy_(start)
