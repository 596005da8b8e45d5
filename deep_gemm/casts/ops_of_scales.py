"""The operator that lays scales out for products."""

from __future__ import annotations

from torch import Tensor

from ..core.check.layout import check_scales, empty_mn_major
from ..core.operators import operator
from .lay_scales import laid_out


def mn_major(sf: Tensor) -> Tensor:
    """Lay scales out, always in new memory: an operator's result is never what it was given."""
    check_scales(sf)
    return laid_out(sf)


def fake_mn_major(sf: Tensor) -> Tensor:
    """Stand for scales laid out."""
    check_scales(sf)
    return empty_mn_major(sf)


operator("get_mn_major_tma_aligned_tensor(Tensor sf) -> Tensor", mn_major, fake_mn_major)
