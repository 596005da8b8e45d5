"""The common parts of kernels that cast: the types that they take, and the constants of casts/cast/values.cuh."""

from __future__ import annotations

import torch

from ..core.check.layout import SCALE_BLOCK

VECTOR_BYTES = 16
"""Bytes that a lane loads at once if rows allow it."""
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def cast_constants(dtype: torch.dtype, *, vector: int, num_threads: int) -> dict[str, int | bool]:
    """Give the constants that casts/cast/values.cuh asks for."""
    return {
        "kInputBytes": dtype.itemsize,
        "kVector": vector,
        "kNumThreads": num_threads,
        "kInputIsFp32": dtype == torch.float32,
        "kInputIsFp16": dtype == torch.float16,
    }


def lanes_of(vector: int) -> int:
    """Lanes of a team, which takes 128 columns of a row."""
    return min(SCALE_BLOCK // vector, 32)


def vector_of(dtype: torch.dtype, is_aligned: bool) -> int:
    """Elements that a lane loads at once."""
    return VECTOR_BYTES // dtype.itemsize if is_aligned else 1
