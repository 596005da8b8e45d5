"""Names of `deep_gemm.layout` and the alignment getters, where programs of this family import them from."""

from .. import unavailable as _unavailable
from ..layout import (
    get_col_major_tma_aligned_tensor,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    transform_sf_into_required_layout,
)
from ..settings import (
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_theoretical_mk_alignment_for_contiguous_layout,
    set_mk_alignment_for_contiguous_layout,
)

_PACKED = (
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
)
globals().update({name: getattr(_unavailable, name) for name in _PACKED})

__all__ = [  # noqa: PLE0604
    "get_col_major_tma_aligned_tensor",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
    *_PACKED,
]
