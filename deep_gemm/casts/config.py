"""The common parts of kernels that cast: the types of their inputs, and the constants of casts/cast/values.cuh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.check.layout import SCALE_BLOCK
from ..core.kernel import constants_of
from ..core.params import Params

VECTOR_BYTES = 16
"""Bytes that a lane loads at once if rows are aligned to this number."""
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def cast_constants(
    config: Any, *fields: str, block: int = SCALE_BLOCK, marks_blocks: bool = False, activates: bool = False
) -> dict[str, int | bool]:
    """Return the constants of casts/cast/values.cuh, and `fields` of a configuration as constants.

    `marks_blocks`: the scale of a block with a NaN or an infinity becomes NaN.
    """
    return {
        "kBlock": block,
        "kInputBytes": config.dtype.itemsize,
        "kInputIsFp32": config.dtype == torch.float32,
        "kInputIsFp16": config.dtype == torch.float16,
        "kMarksBlocks": marks_blocks,
        "kActivates": activates,
        **constants_of(config, "vector", "num_threads", "ctas_per_sm", *fields),
    }


def lanes_of(vector: int, block: int = SCALE_BLOCK) -> int:
    """Count the lanes of a team, which casts `block` columns of a row."""
    return block // (4 if vector == 1 else vector)


def vector_of(dtype: torch.dtype, is_aligned: bool) -> int:
    """Count the elements that a lane loads at once."""
    return VECTOR_BYTES // dtype.itemsize if is_aligned else 1


def operands(params: Params, problem: Any) -> dict[str, Any]:
    """Return a problem's tensors (or None) by the names of the kernel's parameters."""
    return {name: getattr(problem, name) for name in params.pointers}


def pitch(x: Tensor | None, dim: int) -> int:
    """Return the bytes from one index of a dimension to the next; 0 if x is None."""
    return 0 if x is None else x.stride(dim) * x.element_size()
