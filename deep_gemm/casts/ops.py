"""Operators of casts. A fake kernel has all arguments of its cast, and uses some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.check.layout import SCALE_BLOCK, ceil_div, check_scales, empty_mn_major
from ..core.operators import operators
from . import fp8
from .lay_scales import laid_out
from .rules import Quantized, Target, check_groups, check_matrix, check_rows, checked_tensor, empty_scales, empty_values


def fake_cast(x: Tensor, to: Target, masked_m: Tensor | None = None) -> Quantized:
    """Check a cast and return fake results."""
    check_rows(x, to.mn_major, masked_m)
    return to.checked(x).empty(x.shape, x)  # type: ignore[no-any-return]


def fake_of(cast: Callable[..., Target]) -> Callable[..., Quantized]:
    """Make the fake kernel of a cast of any tensor."""
    return lambda x, masked_m=None, **said: fake_cast(x, cast(**said), masked_m)


def both(x: Tensor, use_ue8m0: bool, min_amax: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix and its transpose."""
    of_rows, of_columns = fp8.cast_both_to_fp8(x, use_ue8m0, min_amax=min_amax)
    return *of_rows, *of_columns


def fake_tensor(x: Tensor, scale: Tensor | None, use_ue8m0: bool, min_amax: float) -> list[Tensor]:
    """Check a cast with one scale for a whole tensor and return fake results."""
    checked_tensor(x, scale, use_ue8m0, min_amax)
    return [empty_values(x.shape, x), x.new_empty(1, dtype=torch.float32)][: 1 + (scale is None)]


def fake_both(x: Tensor, **said: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check a cast of a matrix and its transpose and return fake results."""
    check_matrix(x)
    to = fp8.per_rows(**said, mn_major=True)
    return *fake_cast(x, to), *fake_cast(x.t(), to)


def fake_groups(x: Tensor, ks: Sequence[int], min_amax: float, mn_major: bool, **_: object) -> Quantized:
    """Check a cast of groups of columns and return fake results."""
    check_groups(x, ks, min_amax)
    m = x.shape[0]
    blocks = sum(ceil_div(k, SCALE_BLOCK) for k in ks)
    return empty_values((x.numel(),), x), empty_scales((m,), blocks, x, mn_major=mn_major, gran_k=1)


def lay(sf: Tensor) -> Tensor:
    """Copy scales to TMA's layout, always to new memory, because an operator must not return its input."""
    check_scales(sf)
    return laid_out(sf)


def fake_lay(sf: Tensor) -> Tensor:
    """Check scales and return fake scales in TMA's layout."""
    check_scales(sf)
    return empty_mn_major(sf)


SAID = "bool use_ue8m0=False, int gran_k=128, float min_amax=0.0"
PAIR = "-> (Tensor, Tensor)"
ROWS, GROUPS = f"{SAID}, bool mn_major=False, Tensor? masked_m=None", SAID.replace("int gran_k=128, ", "")
for schema, real, fake in (
    (f"per_token_cast_to_fp8(Tensor x, {ROWS}) {PAIR}", fp8.per_token_cast_to_fp8, fake_of(fp8.per_rows)),
    (
        f"per_tensor_cast_to_fp8(Tensor x, Tensor? scale=None, {GROUPS}) -> Tensor[]",
        lambda x, scale, **said: [*fp8.per_tensor_cast_to_fp8(x, scale, **said)][: 1 + (scale is None)],
        fake_tensor,
    ),
    (f"per_channel_cast_to_fp8(Tensor x, {SAID}) {PAIR}", fp8.per_channel_cast_to_fp8, fake_of(fp8.per_channels)),
    (f"per_block_cast_to_fp8(Tensor x, {SAID}) {PAIR}", fp8.per_block_cast_to_fp8, fake_of(fp8.per_blocks)),
    (f"cast_both_to_fp8(Tensor x, {GROUPS}) -> (Tensor, Tensor, Tensor, Tensor)", both, fake_both),
    (
        f"k_grouped_cast_to_fp8(Tensor x, SymInt[] ks, {GROUPS}, bool mn_major=False) {PAIR}",
        fp8.k_grouped_cast_to_fp8,
        fake_groups,
    ),
    ("get_mn_major_tma_aligned_tensor(Tensor sf) -> Tensor", lay, fake_lay),
):
    operators(schema, real, fake)
