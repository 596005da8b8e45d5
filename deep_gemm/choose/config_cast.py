"""The configuration of the `cast_rows` kernel, and which one casts a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from ..problem.layout import ceil_div
from .config import BLOCK_K

VECTOR_BYTES = 16
"""What a lane loads at once if rows allow it."""
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CastConfig:
    """One configuration. A CTA casts `rows` rows of `blocks` blocks of 128 columns."""

    dtype: torch.dtype
    vector: int
    """Elements that a lane loads at once: 16 bytes of them, or 1 where rows lie otherwise."""
    rows: int
    blocks: int = 4
    num_threads: int = 256
    ctas_per_sm: int = 2

    @property
    def name(self) -> str:
        """Short, for people: rows x columns, and what a lane loads; such as "32x512 bfloat16 by 8"."""
        return f"{self.rows}x{self.blocks * BLOCK_K} {str(self.dtype).removeprefix('torch.')} by {self.vector}"

    @property
    def teams(self) -> int:
        """Groups of lanes that each cast a block at a time."""
        return self.num_threads // min(BLOCK_K // self.vector, 32)

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/cast_rows.cuh, which asserts that it is the same."""
        return self.rows * self.blocks * 4

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.dtype in INPUTS, "BF16, FP16 or FP32"
        yield self.vector in (1, VECTOR_BYTES // self.dtype.itemsize), "16 bytes, or one element, at once"
        yield self.rows * self.blocks % self.teams == 0, "as many blocks for each team"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kInputBytes": self.dtype.itemsize,
            "kVector": self.vector,
            "kRows": self.rows,
            "kBlocks": self.blocks,
            "kNumThreads": self.num_threads,
            "kCtasPerSm": self.ctas_per_sm,
            "kSharedBytes": self.shared_bytes,
        }
        switches = {"kInputIsFp32": self.dtype == torch.float32, "kInputIsFp16": self.dtype == torch.float16}
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
        lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in switches.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


MANY_ROWS, FEW_ROWS = 32, 4
"""Rows of a CTA: so many that scales fill lines of memory, and so few that all SMs have work."""


@cache
def cast_config(dtype: torch.dtype, *, is_aligned: bool, is_few: bool) -> CastConfig:
    """The configuration for rows of a type; `is_aligned`: all of them, and their casts, begin where 16 bytes may."""
    vector = VECTOR_BYTES // dtype.itemsize if is_aligned else 1
    return CastConfig(dtype, vector, FEW_ROWS if is_few else MANY_ROWS)


def select_cast(dtype: torch.dtype, m: int, k: int, *, is_aligned: bool, num_sms: int) -> CastConfig:
    """The configuration for a matrix: CTAs of many rows if there are two for each SM."""
    config = cast_config(dtype, is_aligned=is_aligned, is_few=False)
    return config if num_ctas(config, m, k) >= 2 * num_sms else cast_config(dtype, is_aligned=is_aligned, is_few=True)


def num_ctas(config: CastConfig, m: int, k: int) -> int:
    """A CTA for each tile of rows and blocks."""
    return ceil_div(m, config.rows) * ceil_div(ceil_div(k, BLOCK_K), config.blocks)


def reachable_cast() -> list[CastConfig]:
    """Every configuration that `select_cast` can give."""
    return [
        cast_config(dtype, is_aligned=is_aligned, is_few=is_few)
        for dtype in INPUTS
        for is_aligned in (True, False)
        for is_few in (True, False)
    ]
