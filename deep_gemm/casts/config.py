"""What kernels that cast have in common: the types that they take, and constants of casts/cast/values.cuh."""

from __future__ import annotations

from collections.abc import Mapping

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


def cast_header(
    dtype: torch.dtype,
    constants: Mapping[str, int],
    switches: Mapping[str, bool],
    *,
    vector: int,
    num_threads: int,
    files: Mapping[str, str],
) -> str:
    """Give `config.cuh` of kernels in the old form, until none is left."""
    made = {**cast_constants(dtype, vector=vector, num_threads=num_threads), **constants, **switches}
    kinds = {name: "bool" if isinstance(value, bool) else "uint32_t" for name, value in made.items()}
    lines = [f"constexpr {kinds[name]} {name} = {str(value).lower()};" for name, value in made.items()]
    lines += [f'#define {kind} "{file}"' for kind, file in files.items()]
    return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


def lanes_of(vector: int) -> int:
    """Lanes of a team, which takes 128 columns of a row."""
    return min(SCALE_BLOCK // vector, 32)


def vector_of(dtype: torch.dtype, is_aligned: bool) -> int:
    """Elements that a lane loads at once."""
    return VECTOR_BYTES // dtype.itemsize if is_aligned else 1
