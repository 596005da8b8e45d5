"""The common parts of kernels that cast: the types that they take, and the constants of casts/cast/values.cuh."""

from __future__ import annotations

import torch

from ..core.check.layout import SCALE_BLOCK

VECTOR_BYTES = 16
"""Bytes that a lane loads at once if rows allow it."""
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def cast_constants(
    dtype: torch.dtype, *, vector: int, num_threads: int, block: int = SCALE_BLOCK, marks_blocks: bool = False
) -> dict[str, int | bool]:
    """Give the constants that casts/cast/values.cuh asks for.

    `marks_blocks`: the scale of a block with a NaN or an infinity is NaN.
    """
    return {
        "kBlock": block,
        "kInputBytes": dtype.itemsize,
        "kVector": vector,
        "kNumThreads": num_threads,
        "kInputIsFp32": dtype == torch.float32,
        "kInputIsFp16": dtype == torch.float16,
        "kMarksBlocks": marks_blocks,
    }


def lanes_of(vector: int, block: int = SCALE_BLOCK) -> int:
    """Lanes of a team, which takes `block` columns of a row."""
    return block // (4 if vector == 1 else vector)


def vector_of(dtype: torch.dtype, is_aligned: bool) -> int:
    """Elements that a lane loads at once."""
    return VECTOR_BYTES // dtype.itemsize if is_aligned else 1
