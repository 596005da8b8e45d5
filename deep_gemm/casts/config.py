"""The configurations of the kernels that cast, `cast_rows` and `cast_tiles`, and which one casts a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

from ..core.check.layout import SCALE_BLOCK, align, ceil_div

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
    """Give `config.cuh`; casts/cast/values.cuh asks for the constants that are made here."""
    constants = {"kInputBytes": dtype.itemsize, "kVector": vector, "kNumThreads": num_threads, **constants}
    switches = {"kInputIsFp32": dtype == torch.float32, "kInputIsFp16": dtype == torch.float16, **switches}
    lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in switches.items()]
    lines += [f'#define {kind} "{file}"' for kind, file in files.items()]
    return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


def _lanes(vector: int) -> int:
    """Lanes of a team, which takes 128 columns of a row."""
    return min(SCALE_BLOCK // vector, 32)


def _vector(dtype: torch.dtype, *, is_aligned: bool) -> int:
    return VECTOR_BYTES // dtype.itemsize if is_aligned else 1


class Groups(Enum):
    """Which rows of x a cast takes. The values are files of cuda/cast."""

    NONE = "rows_all"
    """All."""
    COUNTS = "rows_counted"
    """The first rows of each group, as many as its count says."""
    UNTIL = "rows_until"
    """All rows up to where the last group ends: groups without gaps between them."""
    ENDS = "rows_ended"
    """Rows from where the group before ended, aligned, to where each ends."""


MAX_GROUPS = 1024


@dataclass(frozen=True)
class CastConfig:
    """One configuration of `cast_rows`. A team of lanes casts `rows` rows of 128 columns at a time."""

    dtype: torch.dtype
    vector: int
    """Elements that a lane loads at once: 16 bytes of them, or 1 where rows lie otherwise."""
    rows: int
    activates: bool = False
    """silu(gate) * up is cast, instead of x as it is."""
    groups: Groups = Groups.NONE
    to_routes: bool = False
    """A row goes to the rows of its routes."""
    num_threads: int = 128
    ctas_per_sm: int = 8

    @property
    def name(self) -> str:
        """Short, for people: rows of a team, and what a lane loads; such as "silu 4 rows of ends bfloat16 by 8"."""
        what = "silu " * self.activates + f"{self.rows} rows"
        of_groups = "" if self.groups == Groups.NONE else f" of {self.groups.name.lower()}"
        to = " to routes" * self.to_routes
        return f"{what}{of_groups}{to} {str(self.dtype).removeprefix('torch.')} by {self.vector}"

    @property
    def teams(self) -> int:
        """Groups of lanes that each cast a unit, some rows of a block, at a time."""
        return self.num_threads // _lanes(self.vector)

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in casts/cast/rows_of_groups.cuh, which asserts that it is the same."""
        return 0 if self.groups in (Groups.NONE, Groups.UNTIL) else (3 * MAX_GROUPS + self.num_threads // 32) * 4

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.dtype in INPUTS, "BF16, FP16 or FP32"
        yield self.vector in (1, VECTOR_BYTES // self.dtype.itemsize), "16 bytes, or one element, at once"
        yield self.rows in (1, 2, 4, 8), "1, 2, 4 or 8 rows of a team"
        yield not self.to_routes or self.groups == Groups.NONE, "rows of groups, or rows that go to routes"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kRows": self.rows,
            "kCtasPerSm": self.ctas_per_sm,
            "kMaxGroups": MAX_GROUPS,
            "kSharedBytes": self.shared_bytes,
        }
        switches = {"kActivates": self.activates}
        files = {
            "ROWS": f"cast/{self.groups.value}.cuh",
            "SOURCE": f"cast/source_{'silu' if self.activates else 'plain'}.cuh",
            "TARGETS": f"cast/to_{'routes' if self.to_routes else 'rows'}.cuh",
        }
        vector, num_threads = self.vector, self.num_threads
        return cast_header(self.dtype, constants, switches, vector=vector, num_threads=num_threads, files=files)


class Grain(Enum):
    """The part of a tile with a scale, in a cast whose values lie as those of x do. Named as the kernel's switches."""

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
        """Size of `SharedStorage` in casts/cast_tiles.cuh, which asserts that it is the same."""
        lanes = _lanes(self.vector)
        teams = self.num_threads // lanes if self.column_bytes or self.grain == Grain.CHANNELS else 1
        columns = (SCALE_BLOCK if self.column_bytes else 1) * SCALE_BLOCK
        keys = teams * SCALE_BLOCK * self.dtype.itemsize
        return align(columns + keys + 2 * SCALE_BLOCK * 8 + self.num_threads // 32 * 4, 16)

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.dtype in INPUTS, "BF16, FP16 or FP32"
        yield self.vector in (1, VECTOR_BYTES // self.dtype.itemsize), "16 bytes, or one element, at once"
        yield self.column_bytes in (0, 1, VECTOR_BYTES), "16 bytes, or one, of columns at once"
        yield self.grain is not None or self.column_bytes > 0, "an output"
        yield self.grain in (None, Grain.ROWS) or self.column_bytes == 0, "columns alone or beside rows"
        yield self.grain != Grain.ROWS or self.column_bytes > 0, "columns beside rows, which cast_rows casts alone"
        yield self.num_threads == 2 * SCALE_BLOCK, "a thread for each row and each column of a tile"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kColumnBytes": self.column_bytes,
            "kCtasPerSm": self.ctas_per_sm,
            "kSharedBytes": self.shared_bytes,
        }
        switches = {grain.value: grain == self.grain for grain in Grain} | {"kActivates": False}
        return cast_header(self.dtype, constants, switches, vector=self.vector, num_threads=self.num_threads, files={})


@cache
def cast_config(
    dtype: torch.dtype,
    *,
    is_aligned: bool,
    is_few: bool,
    activates: bool = False,
    groups: Groups = Groups.NONE,
    to_routes: bool = False,
) -> CastConfig:
    """The configuration for rows of a type; `is_aligned`: all of them, and their casts, begin where 16 bytes may."""
    # Teams that look for their rows among groups first take more of them at a time.
    rows = 1 if is_few or to_routes else 4 if groups in (Groups.COUNTS, Groups.ENDS) else 2 if activates else 8
    vector = _vector(dtype, is_aligned=is_aligned)
    num_threads = 256 if to_routes or rows == 2 else 128
    ctas_per_sm = {8: 6, 4: 5}.get(rows, 1024 // num_threads)
    return CastConfig(dtype, vector, rows, activates, groups, to_routes, num_threads, ctas_per_sm)


def select_cast(
    dtype: torch.dtype,
    m: int,
    k: int,
    num_sms: int,
    *,
    is_aligned: bool,
    activates: bool = False,
    groups: Groups = Groups.NONE,
    to_routes: bool = False,
) -> CastConfig:
    """The configuration for a matrix: teams take several rows if there are enough for all SMs."""
    many, few = (
        cast_config(
            dtype, is_aligned=is_aligned, is_few=is_few, activates=activates, groups=groups, to_routes=to_routes
        )
        for is_few in (False, True)
    )
    return many if num_units(many, m, k) >= num_sms * many.ctas_per_sm * many.teams else few


def num_units(config: CastConfig, m: int, k: int) -> int:
    """Count the units that teams of lanes take: some rows of 128 columns."""
    return ceil_div(m, config.rows) * ceil_div(k, SCALE_BLOCK)


def num_ctas(config: CastConfig, m: int, k: int, num_sms: int) -> int:
    """A team for each unit; if only the GPU knows how many there are, no more than run at a time."""
    ctas = ceil_div(num_units(config, m, k), config.teams)
    return ctas if config.groups == Groups.NONE else min(ctas, num_sms * config.ctas_per_sm)


def reachable_cast() -> list[CastConfig]:
    """Every configuration of `cast_rows` that casts can ask for."""
    plain, silu = (Groups.NONE, Groups.COUNTS), tuple(Groups)  # casts of plain rows know no ends
    kinds = [(activates, groups, False) for activates, some in ((False, plain), (True, silu)) for groups in some]
    return [
        cast_config(
            dtype, is_aligned=is_aligned, is_few=is_few, activates=activates, groups=groups, to_routes=to_routes
        )
        for dtype in INPUTS
        for is_aligned in (True, False)
        for is_few in (True, False)
        for activates, groups, to_routes in [*kinds, (False, Groups.NONE, True)]
        if is_few or not to_routes
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
    # A tile in FP32 fills half of the registers, and addresses of single elements take more than those of vectors.
    ctas_per_sm = (4 if grain is None else 3) if dtype != torch.float32 else 2
    if vector == 1:
        ctas_per_sm = ctas_per_sm // 2
    return TileCastConfig(dtype, vector, grain, column_bytes, ctas_per_sm)


def num_tiles(m: int, k: int) -> int:
    """A CTA for each 128x128 tile."""
    return ceil_div(m, SCALE_BLOCK) * ceil_div(k, SCALE_BLOCK)


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
