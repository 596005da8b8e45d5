"""Memory that a call allocates through torch. If memory runs out, the error names the purpose of the allocation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..shadow import target


def empty(
    what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Tensor:
    """Make a tensor with these strides, or a contiguous one. While a call is recorded, add a room to its record."""
    into = target()
    if into is not None:
        return into.room(shape, dtype, strides)  # type: ignore[no-any-return]
    try:
        if strides is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(_text(what, shape, dtype, error)) from error


def copied(what: str, x: Tensor) -> Tensor:
    """Copy a tensor to contiguous memory."""
    try:
        return x.contiguous()
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(_text(what, x.shape, x.dtype, error)) from error


def _text(what: str, shape: Sequence[int], dtype: torch.dtype, error: Exception) -> str:
    return f"no memory for {what}, {tuple(shape)} of {dtype}: {error}"
