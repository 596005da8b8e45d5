"""Operators of casts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import casts as quantize
from ..core.check.layout import SCALE_BLOCK, ceil_div, check_scales, empty_mn_major
from ..core.operators import operator
from .lay_scales import laid_out
from .rules import Quantized, check_blocks, check_groups, check_matrix, check_rows, empty_scales, empty_values


def rows(
    x: Tensor,
    use_ue8m0: bool = False,
    gran_k: int = SCALE_BLOCK,
    min_amax: float = 0.0,
    mn_major: bool = False,
    masked_m: Tensor | None = None,
) -> Quantized:
    """Cast rows."""
    return quantize.per_token_cast_to_fp8(x, use_ue8m0, gran_k, min_amax=min_amax, mn_major=mn_major, masked_m=masked_m)


def fake_rows(
    x: Tensor,
    use_ue8m0: bool = False,
    gran_k: int = SCALE_BLOCK,
    min_amax: float = 0.0,
    mn_major: bool = False,
    masked_m: Tensor | None = None,
) -> Quantized:
    """Stand for a cast of rows."""
    check_rows(x, mn_major, masked_m)
    check_blocks(x, 1, gran_k, min_amax)
    *rows, k = x.shape
    return empty_values(x.shape, x), empty_scales(rows, k, x, mn_major=mn_major, gran_k=gran_k)


operator(
    "per_token_cast_to_fp8(Tensor x, bool use_ue8m0=False, int gran_k=128, float min_amax=0.0, bool mn_major=False, "
    "Tensor? masked_m=None) -> (Tensor, Tensor)",
    rows,
    fake_rows,
)


def channels(x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, min_amax: float = 0.0) -> Quantized:
    """Cast columns."""
    return quantize.per_channel_cast_to_fp8(x, use_ue8m0, gran_k, min_amax=min_amax)


def fake_channels(x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, min_amax: float = 0.0) -> Quantized:
    """Stand for a cast of columns."""
    check_blocks(x, gran_k, 1, min_amax)
    *batch, k, n = x.shape
    return empty_values(x.shape, x), empty_scales((*batch, ceil_div(k, gran_k)), n, x, mn_major=False, gran_k=1)


def blocks(x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, min_amax: float = 0.0) -> Quantized:
    """Cast blocks."""
    return quantize.per_block_cast_to_fp8(x, use_ue8m0, gran_k, min_amax=min_amax)


def fake_blocks(x: Tensor, use_ue8m0: bool = False, gran_k: int = SCALE_BLOCK, min_amax: float = 0.0) -> Quantized:
    """Stand for a cast of blocks."""
    check_blocks(x, gran_k, gran_k, min_amax)
    *batch, n, k = x.shape
    return empty_values(x.shape, x), empty_scales((*batch, ceil_div(n, gran_k)), k, x, mn_major=False, gran_k=gran_k)


SAID = "Tensor x, bool use_ue8m0=False, int gran_k=128, float min_amax=0.0"
operator(f"per_channel_cast_to_fp8({SAID}) -> (Tensor, Tensor)", channels, fake_channels)
operator(f"per_block_cast_to_fp8({SAID}) -> (Tensor, Tensor)", blocks, fake_blocks)


def both(x: Tensor, use_ue8m0: bool = False, min_amax: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix and its transpose."""
    of_rows, of_columns = quantize.cast_both_to_fp8(x, use_ue8m0, min_amax=min_amax)
    return *of_rows, *of_columns


def fake_both(x: Tensor, use_ue8m0: bool = False, min_amax: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stand for a cast of a matrix and its transpose."""
    check_matrix(x)
    return *fake_rows(x, min_amax=min_amax, mn_major=True), *fake_rows(x.t(), mn_major=True)


operator(
    "cast_both_to_fp8(Tensor x, bool use_ue8m0=False, float min_amax=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
    both,
    fake_both,
)


def groups(
    x: Tensor, ks: Sequence[int], use_ue8m0: bool = False, min_amax: float = 0.0, mn_major: bool = False
) -> Quantized:
    """Cast groups of columns."""
    return quantize.k_grouped_cast_to_fp8(x, ks, use_ue8m0, min_amax=min_amax, mn_major=mn_major)


def fake_groups(
    x: Tensor, ks: Sequence[int], use_ue8m0: bool = False, min_amax: float = 0.0, mn_major: bool = False
) -> Quantized:
    """Stand for a cast of groups of columns."""
    check_groups(x, ks, min_amax)
    m = x.shape[0]
    blocks = sum(ceil_div(k, SCALE_BLOCK) for k in ks)
    return empty_values((x.numel(),), x), empty_scales((m,), blocks, x, mn_major=mn_major, gran_k=1)


operator(
    "k_grouped_cast_to_fp8(Tensor x, SymInt[] ks, bool use_ue8m0=False, float min_amax=0.0, bool mn_major=False) "
    "-> (Tensor, Tensor)",
    groups,
    fake_groups,
)


def lay(sf: Tensor) -> Tensor:
    """Lay scales out, always in new memory: an operator's result is never what it was given."""
    check_scales(sf)
    return laid_out(sf)


def fake_lay(sf: Tensor) -> Tensor:
    """Stand for scales laid out."""
    check_scales(sf)
    return empty_mn_major(sf)


operator("get_mn_major_tma_aligned_tensor(Tensor sf) -> Tensor", lay, fake_lay)
