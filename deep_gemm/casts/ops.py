"""Operators of casts. A fake kernel takes all that its cast takes, and looks at some of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import casts as quantize
from ..core.check.layout import SCALE_BLOCK, ceil_div, check_scales, empty_mn_major
from ..core.operators import operators
from .lay_scales import laid_out
from .rules import Quantized, check_blocks, check_groups, check_matrix, check_rows, empty_scales, empty_values


def fake_rows(
    x: Tensor,
    gran_k: int = SCALE_BLOCK,
    min_amax: float = 0.0,
    mn_major: bool = False,
    masked_m: Tensor | None = None,
    **_: object,
) -> Quantized:
    """Stand for a cast of rows."""
    check_rows(x, mn_major, masked_m)
    check_blocks(x, 1, gran_k, min_amax)
    *rows, k = x.shape
    return empty_values(x.shape, x), empty_scales(rows, k, x, mn_major=mn_major, gran_k=gran_k)


def fake_channels(x: Tensor, gran_k: int, min_amax: float, **_: object) -> Quantized:
    """Stand for a cast of columns."""
    check_blocks(x, gran_k, 1, min_amax)
    *batch, k, n = x.shape
    return empty_values(x.shape, x), empty_scales((*batch, ceil_div(k, gran_k)), n, x, mn_major=False, gran_k=1)


def fake_blocks(x: Tensor, gran_k: int, min_amax: float, **_: object) -> Quantized:
    """Stand for a cast of blocks."""
    check_blocks(x, gran_k, gran_k, min_amax)
    *batch, n, k = x.shape
    return empty_values(x.shape, x), empty_scales((*batch, ceil_div(n, gran_k)), k, x, mn_major=False, gran_k=gran_k)


def both(x: Tensor, use_ue8m0: bool, min_amax: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix and its transpose."""
    of_rows, of_columns = quantize.cast_both_to_fp8(x, use_ue8m0, min_amax=min_amax)
    return *of_rows, *of_columns


def fake_both(x: Tensor, min_amax: float, **_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stand for a cast of a matrix and its transpose."""
    check_matrix(x)
    return *fake_rows(x, min_amax=min_amax, mn_major=True), *fake_rows(x.t(), mn_major=True)


def fake_groups(x: Tensor, ks: Sequence[int], min_amax: float, mn_major: bool, **_: object) -> Quantized:
    """Stand for a cast of groups of columns."""
    check_groups(x, ks, min_amax)
    m = x.shape[0]
    blocks = sum(ceil_div(k, SCALE_BLOCK) for k in ks)
    return empty_values((x.numel(),), x), empty_scales((m,), blocks, x, mn_major=mn_major, gran_k=1)


def lay(sf: Tensor) -> Tensor:
    """Lay scales out, always in new memory: an operator's result is never what it was given."""
    check_scales(sf)
    return laid_out(sf)


def fake_lay(sf: Tensor) -> Tensor:
    """Stand for scales laid out."""
    check_scales(sf)
    return empty_mn_major(sf)


SAID = "bool use_ue8m0=False, int gran_k=128, float min_amax=0.0"
for schema, real, fake in (
    (
        f"per_token_cast_to_fp8(Tensor x, {SAID}, bool mn_major=False, Tensor? masked_m=None) -> (Tensor, Tensor)",
        quantize.per_token_cast_to_fp8,
        fake_rows,
    ),
    (f"per_channel_cast_to_fp8(Tensor x, {SAID}) -> (Tensor, Tensor)", quantize.per_channel_cast_to_fp8, fake_channels),
    (f"per_block_cast_to_fp8(Tensor x, {SAID}) -> (Tensor, Tensor)", quantize.per_block_cast_to_fp8, fake_blocks),
    (
        "cast_both_to_fp8(Tensor x, bool use_ue8m0=False, float min_amax=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
        both,
        fake_both,
    ),
    (
        "k_grouped_cast_to_fp8(Tensor x, SymInt[] ks, bool use_ue8m0=False, float min_amax=0.0, bool mn_major=False) "
        "-> (Tensor, Tensor)",
        quantize.k_grouped_cast_to_fp8,
        fake_groups,
    ),
    ("get_mn_major_tma_aligned_tensor(Tensor sf) -> Tensor", lay, fake_lay),
):
    operators(schema, real, fake)
