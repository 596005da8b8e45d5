"""The configurations of the kernels that cast, `cast_rows` and `cast_tiles`, and which one casts a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

from ..problem.layout import align, ceil_div
from .config import BLOCK_K

VECTOR_BYTES = 16
"""What a lane loads at once if rows allow it."""
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def _header(
    dtype: torch.dtype, constants: Mapping[str, int], switches: Mapping[str, bool], *, vector: int, num_threads: int
) -> str:
    """Give `config.cuh`; cuda/cast/values.cuh asks for the constants that are made here."""
    constants = {"kInputBytes": dtype.itemsize, "kVector": vector, "kNumThreads": num_threads, **constants}
    switches = {"kInputIsFp32": dtype == torch.float32, "kInputIsFp16": dtype == torch.float16, **switches}
    lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in switches.items()]
    return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


def _lanes(vector: int) -> int:
    """Lanes of a team, which takes 128 columns of a row."""
    return min(BLOCK_K // vector, 32)


def _vector(dtype: torch.dtype, *, is_aligned: bool) -> int:
    return VECTOR_BYTES // dtype.itemsize if is_aligned else 1


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
        return self.num_threads // _lanes(self.vector)

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/cast_rows.cuh, which asserts that it is the same."""
        return self.rows * self.blocks * 8

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
            "kRows": self.rows,
            "kBlocks": self.blocks,
            "kCtasPerSm": self.ctas_per_sm,
            "kSharedBytes": self.shared_bytes,
        }
        return _header(self.dtype, constants, {}, vector=self.vector, num_threads=self.num_threads)


class Grain(Enum):
    """What has a scale in a cast of tiles whose values lie as those of x do. Named as the kernel's switches."""

    ROWS = "kCastsRows"
    """Each row and 128 columns."""
    CHANNELS = "kCastsChannels"
    """Each column and 128 rows."""
    BLOCKS = "kCastsBlocks"
    """Each 128x128 block."""


@dataclass(frozen=True)
class TileCastConfig:
    """One configuration of `cast_tiles`, of which a CTA casts a 128x128 tile."""

    dtype: torch.dtype
    vector: int
    """Elements that a lane loads at once: 16 bytes of them, or 1 where rows lie otherwise."""
    grain: Grain | None
    """The scales of values that lie as x does; None: there are no such values."""
    column_bytes: int
    """Bytes of the transposed values that a lane stores at once: 16, or 1 where they lie otherwise; 0: none."""
    ctas_per_sm: int = 2
    num_threads: int = 256

    @property
    def name(self) -> str:
        """Short, for people, such as "rows, columns by 16, bfloat16 by 8"."""
        parts = [self.grain.name.lower()] if self.grain else []
        parts += [f"columns by {self.column_bytes}"] if self.column_bytes else []
        return ", ".join([*parts, f"{str(self.dtype).removeprefix('torch.')} by {self.vector}"])

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/cast_tiles.cuh, which asserts that it is the same."""
        lanes = _lanes(self.vector)
        teams = self.num_threads // lanes if self.column_bytes or self.grain == Grain.CHANNELS else 1
        columns = (BLOCK_K if self.column_bytes else 1) * BLOCK_K
        keys = teams * BLOCK_K * self.dtype.itemsize
        return align(columns + keys + 2 * BLOCK_K * 8 + self.num_threads // 32 * 4, 16)

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.dtype in INPUTS, "BF16, FP16 or FP32"
        yield self.vector in (1, VECTOR_BYTES // self.dtype.itemsize), "16 bytes, or one element, at once"
        yield self.column_bytes in (0, 1, VECTOR_BYTES), "16 bytes, or one, of columns at once"
        yield self.grain is not None or self.column_bytes > 0, "an output"
        yield self.grain in (None, Grain.ROWS) or self.column_bytes == 0, "columns alone or beside rows"
        yield self.num_threads == 2 * BLOCK_K, "a thread for each row and each column of a tile"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kColumnBytes": self.column_bytes,
            "kCtasPerSm": self.ctas_per_sm,
            "kSharedBytes": self.shared_bytes,
        }
        switches = {grain.value: grain == self.grain for grain in Grain}
        return _header(self.dtype, constants, switches, vector=self.vector, num_threads=self.num_threads)


MANY_ROWS, FEW_ROWS = 32, 4
"""Rows of a CTA: so many that scales fill lines of memory, and so few that all SMs have work."""


@cache
def cast_config(dtype: torch.dtype, *, is_aligned: bool, is_few: bool) -> CastConfig:
    """The configuration for rows of a type; `is_aligned`: all of them, and their casts, begin where 16 bytes may."""
    return CastConfig(dtype, _vector(dtype, is_aligned=is_aligned), FEW_ROWS if is_few else MANY_ROWS)


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


@cache
def tile_cast_config(
    dtype: torch.dtype,
    grain: Grain | None,
    *,
    with_columns: bool,
    is_aligned: bool,
    has_aligned_columns: bool = True,
) -> TileCastConfig:
    """The configuration of `cast_tiles` for rows of a type.

    `is_aligned`: all rows of x, and what lies as they do, begin where 16 bytes may; `has_aligned_columns`: the rows of
    the transposed values do.
    """
    column_bytes = (VECTOR_BYTES if has_aligned_columns else 1) if with_columns else 0
    vector = _vector(dtype, is_aligned=is_aligned)
    # A tile in FP32 fills half of the registers; the addresses of single elements that go to two places take more.
    has_two_places = vector == 1 and with_columns and grain is not None
    ctas_per_sm = 3 if dtype != torch.float32 else 1 if has_two_places else 2
    return TileCastConfig(dtype, vector, grain, column_bytes, ctas_per_sm)


def num_tiles(m: int, k: int) -> int:
    """A CTA for each 128x128 tile."""
    return ceil_div(m, BLOCK_K) * ceil_div(k, BLOCK_K)


def reachable_tile_casts() -> list[TileCastConfig]:
    """Every configuration of `cast_tiles` that casts can ask for."""
    outputs = [(Grain.ROWS, True), (None, True), (Grain.CHANNELS, False), (Grain.BLOCKS, False)]
    return [
        tile_cast_config(
            dtype, grain, with_columns=with_columns, is_aligned=is_aligned, has_aligned_columns=has_aligned_columns
        )
        for dtype in INPUTS
        for grain, with_columns in outputs
        for is_aligned in (True, False)
        for has_aligned_columns in ((True, False) if with_columns else (True,))
    ]
