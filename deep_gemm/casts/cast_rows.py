"""The kernel of casts/cast_rows.cuh, which casts rows: its configurations, its choice, and its launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div
from ..core.gpu import gpu_of
from ..core.kernel import Config, Kernel, Prepared
from ..core.params import Field, Kind, Params
from ..core.settings import num_sms_of
from .config import INPUTS, VECTOR_BYTES, cast_constants, lanes_of, vector_of
from .gating import Gating

SCALE_BYTES = 4
PARAMS = Params(
    "CastParams",
    Field("x", Kind.POINTER),
    Field("values", Kind.POINTER),
    Field("scales", Kind.POINTER),
    Field("sizes", Kind.POINTER),
    Field("row_weights", Kind.POINTER),
    Field("row_of", Kind.POINTER),
    Field("x_pitch", Kind.UINT32),
    Field("values_pitch", Kind.UINT32),
    Field("scales_stride_m", Kind.UINT32),
    Field("scales_stride_k", Kind.UINT32),
    Field("scales_stride_g", Kind.UINT32),
    Field("m", Kind.UINT32),
    Field("k", Kind.UINT32),
    Field("block_reciprocal", Kind.UINT32),
    Field("num_groups", Kind.UINT32),
    Field("alignment", Kind.UINT32),
    Field("topk", Kind.UINT32),
    Field("min_amax", Kind.FLOAT32),
    Field("limit", Kind.FLOAT32),
    Field("gating", Kind.UINT32),
    Field("rounds_up", Kind.UINT32),
    Field("alpha", Kind.FLOAT32),
    Field("beta", Kind.FLOAT32),
    Field("alpha_reciprocal", Kind.FLOAT32),
    Field("beta_reciprocal", Kind.FLOAT32),
)
"""`CastParams` of casts/cast_rows.cuh."""


class Format(Enum):
    """Types that elements are cast to. The values are files of casts/cast."""

    FP8 = "fp8"
    """E4M3, with a scale for each 32, 64 or 128 columns."""
    FP4 = "fp4"
    """E2M1, two to a byte, with a scale for each 32 or 128 columns."""
    MXFP4 = "mxfp4"
    """The same for each 32 columns, and a block's largest magnitude may be up to 7 times its scale."""


class Stored(Enum):
    """Ways in which scales lie. The values are files of casts/cast."""

    FP32 = "scales_fp32"
    """A number for each."""
    WORDS = "scales_words"
    """UE8M0, four in an int32."""


class Groups(Enum):
    """Choices of the rows of x that a cast takes. The values are files of casts/cast."""

    NONE = "rows_all"
    """All."""
    COUNTS = "rows_counted"
    """The first rows of each group, as many as its count says."""
    UNTIL = "rows_until"
    """All rows up to where the last group ends: groups without gaps between them."""
    ENDS = "rows_ended"
    """Rows from where the group before ended, aligned, to where each ends."""


MAX_GROUPS = 1024
MX_BLOCK = 32
FP8_BLOCKS = (MX_BLOCK, 64, SCALE_BLOCK)
BLOCKS_OF_GROUPS = (MX_BLOCK, SCALE_BLOCK)
"""The same of rows of groups, of activations, and of rows that go to routes."""
FP4_BLOCKS = (MX_BLOCK, SCALE_BLOCK)
"""Columns under a scale of FP4 values."""
BLOCKS = {Format.FP8: FP8_BLOCKS, Format.FP4: FP4_BLOCKS, Format.MXFP4: (MX_BLOCK,)}
"""Columns under a scale, by the format."""


@dataclass(frozen=True)
class CastConfig(Config):
    """One configuration of `cast_rows`. A team of lanes casts `rows` rows of `block` columns at a time."""

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
    format: Format = Format.FP8
    block: int = SCALE_BLOCK
    """Columns of a row under one scale."""
    stored: Stored = Stored.FP32

    @property
    def name(self) -> str:
        """Short, for people: rows of a team, and what a lane loads; such as "silu 4 rows of ends bfloat16 by 8"."""
        what = "silu " * self.activates + f"{self.rows} rows"
        if self.format != Format.FP8 or self.block != SCALE_BLOCK:
            what = f"{self.format.value} by {self.block}, {what}"
        if self.stored != Stored.FP32:
            what = f"{self.stored.name.lower()}, {what}"
        of_groups = "" if self.groups == Groups.NONE else f" of {self.groups.name.lower()}"
        to = " to routes" * self.to_routes
        return f"{what}{of_groups}{to} {str(self.dtype).removeprefix('torch.')} by {self.vector}"

    @property
    def teams(self) -> int:
        """Groups of lanes that each cast a unit, some rows of a block, at a time."""
        return self.num_threads // lanes_of(self.vector, self.block)

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in casts/cast/rows_of_groups.cuh, which asserts that it is the same."""
        return 0 if self.groups in (Groups.NONE, Groups.UNTIL) else (3 * MAX_GROUPS + self.num_threads // 32) * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.dtype in INPUTS, "BF16, FP16 or FP32"
        yield self.vector in (1, VECTOR_BYTES // self.dtype.itemsize), "16 bytes, or one element, at once"
        yield self.rows in (1, 2, 4, 8), "1, 2, 4 or 8 rows of a team"
        yield self.block in BLOCKS[self.format], "128 columns under a scale, in FP8 also 32 or 64, in MXFP4 32 alone"
        is_plain = not self.activates and not self.to_routes and self.groups == Groups.NONE
        yield self.format == Format.FP8 or is_plain, "all rows of x as they are, if they become FP4"
        yield is_plain or self.block in BLOCKS_OF_GROUPS, "all rows of x as they are, if 64 columns share a scale"
        is_packed = self.stored == Stored.WORDS
        yield not is_packed or (is_plain and self.format == Format.FP8), "all rows of x in FP8, if scales are words"
        yield self.rows <= lanes_of(self.vector, self.block), "a lane for each row of a team"
        yield not self.to_routes or self.groups == Groups.NONE, "rows of groups, or rows that go to routes"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes."""
        return {
            **cast_constants(
                self.dtype,
                vector=self.vector,
                num_threads=self.num_threads,
                block=self.block,
                marks_blocks=self.format != Format.FP8,
            ),
            "kRows": self.rows,
            "kCtasPerSm": self.ctas_per_sm,
            "kMaxGroups": MAX_GROUPS,
            "kSharedBytes": self.shared_bytes,
            "kActivates": self.activates,
        }

    def choices(self) -> dict[str, str]:
        """Give the files that the source picks."""
        return {
            "FORMAT": f"cast/{self.format.value}.cuh",
            "ROWS": f"cast/{self.groups.value}.cuh",
            "SCALES": f"cast/{self.stored.value}.cuh",
            "SOURCE": f"cast/source_{'silu' if self.activates else 'plain'}.cuh",
            "TARGETS": f"cast/to_{'routes' if self.to_routes else 'rows'}.cuh",
        }


@cache
def cast_config(
    dtype: torch.dtype,
    is_aligned: bool,
    is_few: bool,
    activates: bool = False,
    groups: Groups = Groups.NONE,
    to_routes: bool = False,
    format: Format = Format.FP8,
    block: int = SCALE_BLOCK,
    stored: Stored = Stored.FP32,
) -> CastConfig:
    """The configuration for rows of a type; `is_aligned`: all of them, and their casts, begin where 16 bytes may."""
    vector = vector_of(dtype, is_aligned)
    if format != Format.FP8:
        return CastConfig(dtype, vector, 1 if is_few else 4, format=format, block=block)
    lanes = lanes_of(vector, block)
    # Teams that look for their rows among groups first take more of them at a time.
    of_groups = groups in (Groups.COUNTS, Groups.ENDS)
    rows = 1 if is_few or to_routes else 4 if of_groups else 2 if activates else min(8, lanes)
    num_threads = 256 if to_routes or rows == 2 else 128
    ctas_per_sm = 6 if rows == 8 else 5 if rows == 4 and of_groups else 1024 // num_threads
    return CastConfig(
        dtype, vector, rows, activates, groups, to_routes, num_threads, ctas_per_sm, block=block, stored=stored
    )


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
    format: Format = Format.FP8,
    block: int = SCALE_BLOCK,
    stored: Stored = Stored.FP32,
) -> CastConfig:
    """The configuration for a matrix: teams take several rows if there are enough for all SMs."""
    kind = activates, groups, to_routes, format, block, stored
    many, few = (cast_config(dtype, is_aligned, is_few, *kind) for is_few in (False, True))
    return many if num_units(many, m, k) >= num_sms * many.ctas_per_sm * many.teams else few


def num_units(config: CastConfig, m: int, k: int) -> int:
    """Count the units that teams of lanes take: some rows of a block."""
    return ceil_div(m, config.rows) * ceil_div(k, config.block)


def num_ctas(config: CastConfig, m: int, k: int, num_sms: int) -> int:
    """A team for each unit; if only the GPU knows how many there are, no more than run at a time."""
    ctas = ceil_div(num_units(config, m, k), config.teams)
    return ctas if config.groups == Groups.NONE else min(ctas, num_sms * config.ctas_per_sm)


def reachable_cast() -> list[CastConfig]:
    """Every configuration of `cast_rows` that casts can ask for."""
    plain, silu = (Groups.NONE, Groups.COUNTS), tuple(Groups)  # casts of plain rows know no ends
    kinds = [(activates, groups, False) for activates, some in ((False, plain), (True, silu)) for groups in some]
    kinds += [(False, Groups.NONE, True)]
    rows = [(dtype, is_aligned, is_few) for dtype in INPUTS for is_aligned in (True, False) for is_few in (True, False)]
    to_fp8 = [
        cast_config(*which, *kind, block=block)
        for which in rows
        for kind in kinds
        for block in BLOCKS_OF_GROUPS
        if which[-1] or not kind[-1]
    ]
    to_fp8 += [cast_config(*which, block=64) for which in rows]
    to_fp8 += [cast_config(*which, block=block, stored=Stored.WORDS) for which in rows for block in FP8_BLOCKS]
    to_fp4 = [(format, block) for format, blocks in BLOCKS.items() if format != Format.FP8 for block in blocks]
    return [*to_fp8, *(cast_config(*which, format=format, block=block) for which in rows for format, block in to_fp4)]


KERNEL: Kernel[CastConfig] = Kernel("cast_rows", PARAMS, reachable_cast)


class RowCast(NamedTuple):
    """A cast: what is cast, and to where. All tensors lie on one device; x and values are contiguous in rows."""

    x: Tensor
    """`[m, k]`; `[m, 2 k]`, gate and up, if it is activated."""
    values: Tensor
    """`[m, k]` of E4M3; `[rows of routes, k]` with `row_of`; bytes `[m, k / 2]` of E2M1."""
    scales: Tensor
    """One for each row of values and `block` columns, by any strides; `[groups, rows, blocks]` with `counts`. In FP32,
    or four to a word in int32, powers of two then."""
    min_amax: float = 0.0
    rounds_up: bool = False
    gating: Gating | None = None
    """The activation of gate and up that is cast."""
    row_weights: Tensor | None = None
    """FP32 `[m]`: factors of activated rows."""
    counts: Tensor | None = None
    """int32 `[groups]`: the first rows of each m / groups that are cast."""
    ends: Tensor | None = None
    """int32 `[groups]`: groups follow each other, each from the end of the one before, aligned."""
    alignment: int = 1
    row_of: Tensor | None = None
    """int32 `[m, topk]`: the rows of values to which each row goes, -1 for none."""
    block: int = SCALE_BLOCK
    """Columns under one scale."""
    format: Format = Format.FP8

    @property
    def k(self) -> int:
        """Columns of what is cast."""
        return self.values.shape[1] * values_of_byte(self.values)


def values_of_byte(values: Tensor) -> int:
    """Count the values of a byte: two of E2M1."""
    return 2 if values.dtype == torch.uint8 else 1


def run(
    p: RowCast, changing: Sequence[str] = (), *, is_dependent: bool = False
) -> tuple[Prepared[CastConfig] | None, int]:
    """Cast on the GPU on which x is. Give what `Kernel.run` gives, and how many CTAs it takes."""
    if p.x.numel() == 0 or p.values.numel() == 0:
        return None, 0
    device = p.x.get_device()
    num_sms = num_sms_of(gpu_of(device).num_sms)
    config = config_of(p, num_sms)
    ctas = num_ctas(config, p.x.shape[0], p.k, num_sms)
    return KERNEL.run(config, params_of(p), ctas, device, changing, is_dependent=is_dependent), ctas


def config_of(p: RowCast, num_sms: int) -> CastConfig:
    """Choose the configuration: lanes load 16 bytes at once where everything lies so that they may."""
    return select_cast(
        p.x.dtype,
        p.x.shape[0],
        p.k,
        num_sms,
        is_aligned=is_aligned(p.x, p.values),
        activates=p.gating is not None,
        groups=_groups_of(p),
        to_routes=p.row_of is not None,
        format=p.format,
        block=p.block,
        stored=Stored.WORDS if p.scales.dtype == torch.int32 else Stored.FP32,
    )


def _groups_of(p: RowCast) -> Groups:
    if p.counts is not None:
        return Groups.COUNTS
    if p.ends is not None:
        has_gaps = p.alignment > 1 or p.ends.numel() == 0
        return Groups.ENDS if has_gaps else Groups.UNTIL
    return Groups.NONE


def is_aligned(x: Tensor, values: Tensor) -> bool:
    """Tell whether lanes may load 16 bytes at once, and store what becomes of them."""
    elements = ADDRESS_ALIGNMENT // x.element_size()
    stored = elements // values_of_byte(values)
    return (
        x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and values.data_ptr() % ADDRESS_ALIGNMENT == 0
        and values.shape[1] % stored == 0
        and (x.shape[0] == 1 or x.stride(0) % elements == 0)
        and (values.shape[0] == 1 or values.stride(0) % stored == 0)
    )


def block_reciprocal(k: int, block: int = SCALE_BLOCK) -> int:
    """Give the number by which `BlockOfRows` of casts/cast/values.cuh divides by the blocks of a row."""
    return min((1 << 32) // ceil_div(k, block), (1 << 32) - 1)


def _kind_of(gating: Gating, has_weights: bool) -> int:
    if gating.name == "situ":
        return 2
    return int(gating != Gating() or has_weights)


def params_of(p: RowCast) -> bytes:
    """Give the kernel's parameters."""
    (m, _), k, scales = p.x.shape, p.k, p.scales
    sizes = p.ends if p.counts is None else p.counts
    gating = p.gating or Gating()
    # How much further away a group lies than if all rows were those of one matrix.
    further = scales.stride(0) - scales.shape[1] * scales.stride(1) if scales.dim() == 3 else 0
    return PARAMS.pack(
        {
            "x": p.x.data_ptr(),
            "values": p.values.data_ptr(),
            "scales": scales.data_ptr(),
            "sizes": 0 if sizes is None else sizes.data_ptr(),
            "row_weights": 0 if p.row_weights is None else p.row_weights.data_ptr(),
            "row_of": 0 if p.row_of is None else p.row_of.data_ptr(),
            "x_pitch": p.x.stride(0) * p.x.element_size() if m != 1 else 0,
            "values_pitch": p.values.stride(0) if p.values.shape[0] > 1 else 0,
            "scales_stride_m": scales.stride(-2) * SCALE_BYTES,
            "scales_stride_k": scales.stride(-1) * SCALE_BYTES,
            "scales_stride_g": further * SCALE_BYTES,
            "m": m,
            "k": k,
            "block_reciprocal": block_reciprocal(k, p.block),
            "num_groups": 0 if sizes is None else sizes.numel(),
            "alignment": p.alignment,
            "topk": 0 if p.row_of is None else p.row_of.shape[1],
            "min_amax": p.min_amax,
            "limit": math.inf if gating.limit is None else gating.limit,
            "alpha": gating.alpha,
            "beta": gating.beta or -0.0,  # which no sum notices, a zero's sign neither
            "alpha_reciprocal": 1 / gating.alpha,
            "beta_reciprocal": 1 / gating.beta if gating.beta else 0.0,
            "gating": _kind_of(gating, p.row_weights is not None),
            "rounds_up": int(p.rounds_up),
        }
    )
