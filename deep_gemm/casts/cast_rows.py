"""The kernel of casts/cast_rows.cuh, which casts rows: its configurations, the choice of one, and its launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div
from ..core.gpu import gpu_of
from ..core.kernel import Config, Kernel
from ..core.settings import num_sms_of
from ..core.shadow import least
from .config import INPUTS, VECTOR_BYTES, cast_constants, lanes_of, operands, pitch, vector_of
from .gating import Gating
from .rules import AMAX_OF_TENSOR, BF16, FP4, FP8, MX_BLOCK, MXFP4, PER_ROW, PER_TENSOR, UNSCALED, Target


class Groups(Enum):
    """The rows of x that are cast."""

    NONE = auto()
    """All rows."""
    COUNTS = auto()
    """The first `count` rows of each group."""
    UNTIL = auto()
    """All rows up to the end of the last group, if groups have no gaps between them."""
    ENDS = auto()
    """The rows of each group, from the aligned end of the previous group to the group's end."""


ROWS = {Groups.NONE: "rows_all", Groups.UNTIL: "rows_until"}
"""Files of casts/cast for rows without gaps."""
MAX_GROUPS = 1024
BLOCKS_OF_GROUPS = (MX_BLOCK, SCALE_BLOCK, 0)
"""Columns under a scale for rows of groups, for activations, and for rows that are copied to routes; 0: all columns."""
LANES = (32, 128, 256, 512)
"""Numbers of lanes of a team that casts whole rows. The smallest team that can hold a row is chosen."""
PIECES = 4
"""Pieces of a row that a lane holds."""
MOST_PARTS = 1024
"""The most CTAs that share the search for a tensor's amax."""


@dataclass(frozen=True)
class CastConfig(Config):
    """One configuration of `cast_rows`. A team of lanes casts `rows` rows at a time, of the columns under one scale."""

    dtype: torch.dtype
    vector: int
    """Elements that a lane loads at once: 16 bytes, or one element if rows are not aligned to 16 bytes."""
    rows: int
    activates: bool = False
    """Cast silu(gate) * up instead of x itself."""
    groups: Groups = Groups.NONE
    to_routes: bool = False
    """Write a token's row to the row of each of its routes."""
    num_threads: int = 128
    ctas_per_sm: int = 8
    to: Target = PER_ROW
    """The result of the cast of a row."""
    lanes: int = 0
    """Lanes of a team that casts whole rows; 0 if a team casts blocks."""

    @property
    def name(self) -> str:
        """Short description, such as "silu 4 rows of ends bfloat16 by 8": a team has 4 rows, a load has 8 elements."""
        what = "silu " * self.activates + f"{self.rows} rows"
        if self.to.format != FP8 or self.to.columns != SCALE_BLOCK:
            by = self.to.columns or f"{'all' if self.to.rows else 'a given scale'}, {self.lanes} lanes"
            what = f"{self.to.format.name} by {by}, {what}"
        what = "words, " * self.to.packs + what
        of_groups = "" if self.groups == Groups.NONE else f" of {self.groups.name.lower()}"
        to = " to routes" * self.to_routes
        return f"{what}{of_groups}{to} {str(self.dtype).removeprefix('torch.')} by {self.vector}"

    @property
    def teams(self) -> int:
        """Teams of lanes in a CTA. A team casts a unit at a time: some rows of a block."""
        return self.num_threads // (self.lanes or lanes_of(self.vector, self.to.columns))

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in casts/cast/rows_of_groups.cuh, which asserts the same size."""
        of_warps = self.num_threads // 32 * 4 if self.groups not in ROWS or self.lanes > 32 else 0
        return of_warps + (0 if self.groups in ROWS else 3 * MAX_GROUPS * 4)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs for a configuration that the kernel can be built for."""
        yield self.dtype in INPUTS, "BF16, FP16 or FP32"
        yield self.vector in (1, VECTOR_BYTES // self.dtype.itemsize), "16 bytes, or one element, at once"
        yield self.rows in (1, 2, 4, 8), "1, 2, 4 or 8 rows of a team"
        is_known = self.to.columns in self.to.format.blocks if self.to.columns else self.lanes in LANES
        yield is_known, "128 columns under a scale, in FP8 also 32, 64 or all, in MXFP4 32 alone"
        is_plain = not self.activates and not self.to_routes and self.groups == Groups.NONE
        is_any = self.to.format in (FP8, BF16) and self.to.rows > 0
        yield is_any or is_plain, "all rows of x as they are, if they become FP4, or one scale has all"
        yield is_plain or self.to.columns in BLOCKS_OF_GROUPS, "all rows of x as they are, if 64 columns share a scale"
        yield not self.to.packs or (is_plain and self.to.format == FP8), "all rows of x in FP8, if scales are words"
        yield self.rows <= self.num_threads // self.teams, "a lane for each row of a team"
        yield not self.to_routes or self.groups == Groups.NONE, "rows of groups, or rows that go to routes"
        yield self.lanes == 0 or self.to.columns == 0 == self.rows - 1, "a block, or lanes for one whole row"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source reads."""
        return {
            **cast_constants(
                *(self, "rows", "shared_bytes", "activates"),
                block=self.to.columns or self.lanes * max(self.vector, 4),
                marks_blocks=not self.to.format.has_nan,
            ),
            "kPieces": PIECES,
            "kWholeRows": self.lanes > 0,
            "kIsGiven": self.to == PER_TENSOR,
            "kFindsAmax": self.to == AMAX_OF_TENSOR,
            "kMaxGroups": MAX_GROUPS,
            "kCutsLargest": self.to.format == MXFP4,
            "kHasScales": self.to.format != BF16,
            "kGroupsEnd": self.groups == Groups.ENDS,
        }

    def choices(self) -> dict[str, str]:
        """Return the files that the source includes."""
        return {
            "FORMAT": f"cast/{self.to.format.source}.cuh",
            "ROWS": f"cast/{ROWS.get(self.groups, 'rows_of_groups')}.cuh",
            "SCALES": f"cast/scales_{'words' if self.to.packs else 'fp32'}.cuh",
            "SOURCE": f"cast/source_{'silu' if self.activates else 'plain'}.cuh",
            "TARGETS": f"cast/to_{'routes' if self.to_routes else 'rows'}.cuh",
            "TEAM": f"cast/team_of_{'row' if self.lanes else 'block'}.cuh",
        }


@cache
def cast_config(
    dtype: torch.dtype,
    is_aligned: bool,
    is_few: bool,
    activates: bool = False,
    groups: Groups = Groups.NONE,
    to_routes: bool = False,
    to: Target = PER_ROW,
    lanes: int = 0,
) -> CastConfig:
    """Choose the configuration for rows of a type. `is_aligned`: lanes may load and store 16 bytes at once."""
    vector = vector_of(dtype, is_aligned)
    if lanes:
        num_threads, threads_per_sm = max(lanes, 128), 1024 if to.rows and not activates else 768
        ctas_per_sm = threads_per_sm // num_threads
        return CastConfig(dtype, vector, 1, activates, groups, to_routes, num_threads, ctas_per_sm, to, lanes)
    if to.format in (FP4, MXFP4):
        return CastConfig(dtype, vector, 1 if is_few else 4, to=to)
    lanes = lanes_of(vector, to.columns)
    # A team must first find its rows among groups, so it casts more rows at a time.
    of_groups = groups in (Groups.COUNTS, Groups.ENDS)
    rows = 1 if is_few or to_routes else 4 if of_groups else 2 if activates else min(8, lanes)
    num_threads = 256 if to_routes or rows == 2 else 128
    ctas_per_sm = 6 if rows == 8 else 5 if rows == 4 and of_groups else 1024 // num_threads
    return CastConfig(dtype, vector, rows, activates, groups, to_routes, num_threads, ctas_per_sm, to)


def num_units(config: CastConfig, m: int, k: int) -> int:
    """Count the units of a cast: a unit is some rows of a block, which a team casts at a time."""
    return ceil_div(m, config.rows) * ceil_div(k, config.to.columns or k)


def num_ctas(config: CastConfig, m: int, k: int, num_sms: int) -> int:
    """Count CTAs, with a team for each unit; or at most as many as run at a time, if only the GPU knows all units."""
    ctas = ceil_div(num_units(config, m, k), config.teams)
    most = MOST_PARTS if config.to == AMAX_OF_TENSOR else num_sms * config.ctas_per_sm
    return ctas if config.groups == Groups.NONE and config.to != AMAX_OF_TENSOR else least(ctas, most)


def reachable_cast() -> list[CastConfig]:
    """List every configuration of `cast_rows` that a cast may choose."""
    plain, silu = (Groups.NONE, Groups.COUNTS), tuple(Groups)  # plain rows are never cast by ends
    kinds = [(activates, groups, False) for activates, some in ((False, plain), (True, silu)) for groups in some]
    kinds += [(False, Groups.NONE, True)]
    rows = [(dtype, is_aligned, is_few) for dtype in INPUTS for is_aligned in (True, False) for is_few in (True, False)]
    of_groups = [
        cast_config(*which, *kind, to=Target(columns=columns))
        for which in rows
        for kind in kinds
        for columns in BLOCKS_OF_GROUPS
        if columns and (which[-1] or not kind[-1])
    ]
    others = [[Target(columns=64)], [Target(columns=columns, packs=True) for columns in FP8.blocks]]
    others.append([Target(columns=columns, format=format) for format in (FP4, MXFP4) for columns in format.blocks])
    whole = [(kind, Target(1, 0)) for kind in kinds] + [(kinds[0], to) for to in (PER_TENSOR, AMAX_OF_TENSOR)]
    of_rows = [
        cast_config(*which, True, *kind, to=to, lanes=lanes)
        for *which, (kind, to), lanes in product(INPUTS, (True, False), whole, LANES)
    ]
    of_blocks = [cast_config(*which, to=to) for kinds_of_all in others for which in rows for to in kinds_of_all]
    unscaled = [cast_config(*which, to_routes=True, to=UNSCALED) for which in rows if which[-1]]
    # A product writes gate and up, in rows that are aligned to 16 bytes.
    unscaled += [cast_config(INPUTS[0], True, is_few, True, Groups.UNTIL, to=UNSCALED) for is_few in (False, True)]
    return of_groups + of_blocks + unscaled + of_rows


KERNEL: Kernel[CastConfig] = Kernel("cast_rows", "CastParams", reachable_cast)


class RowCast(NamedTuple):
    """The inputs and outputs of a cast. All tensors are on one device. The rows of x and of values are contiguous."""

    x: Tensor
    """`[m, k]`; with `gating`, `[m, 2 k]`: gate and up side by side."""
    values: Tensor
    """E4M3 or BF16 `[m, k]`; with `row_of`, `[rows of routes, k]`. E2M1 is bytes `[m, k / 2]`."""
    scales: Tensor | None
    """Scales for each row of values and `to.columns` columns, with any strides; `[groups, rows, blocks]` with `counts`.
    If `to.rows` is 0: the given scale, or memory for the largest magnitude of each team. None if values are BF16."""
    to: Target = PER_ROW
    """The format of a row's cast values, and how many of the row's columns share a scale."""
    gating: Gating | None = None
    """The activation of gate and up; None casts x itself."""
    row_weights: Tensor | None = None
    """FP32 `[m]`: factors of activated rows."""
    counts: Tensor | None = None
    """int32 `[groups]`: the number of rows to cast of each group. A group has m / groups rows."""
    ends: Tensor | None = None
    """int32 `[groups]`: the ends of groups. Each group begins at the aligned end of the previous group."""
    alignment: int = 1
    row_of: Tensor | None = None
    """int32 `[m, topk]`: the rows of `values` to which each row of x is cast; -1 for no row."""

    @property
    def k(self) -> int:
        """Number of columns that are cast. A byte of FP4 values has two columns."""
        return self.values.shape[1] * self.to.format.per_byte

    @property
    def sizes(self) -> Tensor | None:
        """The counts or the ends of groups, by the name of the kernel's parameter."""
        return self.ends if self.counts is None else self.counts


def run(p: RowCast, *, is_dependent: bool = False) -> None:
    """Cast on the GPU of x. `is_dependent`: as in `Kernel.run`."""
    if p.x.numel() == 0 or p.values.numel() == 0:
        return
    device = p.x.get_device()
    num_sms = num_sms_of(gpu_of(device).num_sms)
    config = config_of(p, num_sms)
    ctas = num_ctas(config, p.x.shape[0], p.k, num_sms)
    KERNEL.run(config, values_of(p), ctas, device, is_dependent=is_dependent)


def config_of(p: RowCast, num_sms: int) -> CastConfig:
    """Choose the configuration.

    Lanes load 16 bytes at once if x and values are aligned. Teams cast several rows at a time if all SMs still have
    work. A team for whole rows has the fewest lanes that can hold a row.
    """
    has_gaps = p.ends is not None and (p.alignment > 1 or p.ends.numel() == 0)
    of_ends = Groups.NONE if p.ends is None else Groups.ENDS if has_gaps else Groups.UNTIL
    choose = partial(
        cast_config,
        p.x.dtype,
        is_aligned(p.x, p.values, p.to.format.per_byte),
        activates=p.gating is not None,
        groups=of_ends if p.counts is None else Groups.COUNTS,
        to_routes=p.row_of is not None,
        to=replace(p.to, use_ue8m0=False, min_amax=0.0, mn_major=False),  # these are parameters of the launch
    )
    if not p.to.columns:
        whole = [choose(False, lanes=lanes) for lanes in LANES]
        return next((each for each in whole if p.k <= PIECES * each.lanes * max(each.vector, 4)), whole[-1])
    many, few = choose(False), choose(True)
    return many if num_units(many, p.x.shape[0], p.k) >= num_sms * many.ctas_per_sm * many.teams else few


def is_aligned(x: Tensor, values: Tensor, per_byte: int = 1) -> bool:
    """Tell whether a lane may load 16 bytes of x at once, and store the values of these elements at once."""
    elements = ADDRESS_ALIGNMENT // x.element_size()
    stored = elements // per_byte
    return (
        x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and values.data_ptr() % ADDRESS_ALIGNMENT == 0
        and values.shape[1] % stored == 0
        and (x.shape[0] == 1 or x.stride(0) % elements == 0)
        and (values.shape[0] == 1 or values.stride(0) % stored == 0)
    )


def block_reciprocal(k: int, block: int = SCALE_BLOCK) -> int:
    """Compute the reciprocal with which `BlockOfRows` of casts/cast/values.cuh divides by a row's number of blocks."""
    return min((1 << 32) // ceil_div(k, block), (1 << 32) - 1)


def values_of(p: RowCast) -> dict[str, Any]:
    """Return the values of the kernel's parameters by member."""
    (m, _), k, scales = p.x.shape, p.k, p.scales
    gating = p.gating or Gating()
    # The extra gap between groups: zero if the rows of all groups are evenly spaced, like the rows of one matrix.
    further = 0
    if scales is not None and scales.dim() == 3:
        further = pitch(scales, 0) - scales.shape[1] * pitch(scales, 1)
    return {
        **operands(KERNEL.params, p),
        "x_pitch": pitch(p.x, 0) if m != 1 else 0,
        "values_pitch": pitch(p.values, 0) if p.values.shape[0] > 1 else 0,
        "scales_stride_m": pitch(scales, -2),
        "scales_stride_k": pitch(scales, -1),
        "scales_stride_g": further,
        "m": m,
        "k": k,
        "block_reciprocal": block_reciprocal(k, p.to.columns or k),
        "num_groups": 0 if p.sizes is None else p.sizes.numel(),
        "alignment": p.alignment,
        "topk": 0 if p.row_of is None else p.row_of.shape[1],
        "min_amax": p.to.min_amax,
        **gating_values(gating, is_weighted=p.row_weights is not None),
        "rounds_up": int(p.to.use_ue8m0),
    }


def gating_values(gating: Gating, *, is_weighted: bool = False) -> dict[str, Any]:
    """Return the parameters of a kernel's activation by member. `is_weighted`: rows have weights."""
    return {
        "limit": math.inf if gating.limit is None else gating.limit,
        "alpha": gating.alpha,
        "beta": gating.beta or -0.0,  # adding -0.0 changes no number, not even a zero's sign
        "alpha_reciprocal": 1 / gating.alpha,
        "beta_reciprocal": 1 / gating.beta if gating.beta else 0.0,
        "gating": 2 if gating.name == "situ" else int(gating != Gating() or is_weighted),
    }
