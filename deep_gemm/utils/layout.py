"""Functions for layouts and alignment, under the module path from which programs for DeepGEMM import them."""

from functools import partial as _partial

from ..casts.scales import (
    get_col_major_tma_aligned_tensor as get_col_major_tma_aligned_tensor,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor as get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor as get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor as get_mn_major_tma_aligned_tensor,
    transform_sf_into_required_layout as transform_sf_into_required_layout,
)
from ..compat.absent import refuse as _refuse
from ..core.check.layout import get_tma_aligned_size as get_tma_aligned_size
from ..core.settings import (
    get_k_alignment_for_contiguous_layout as get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout as get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout as get_mk_alignment_for_contiguous_layout,
    get_theoretical_mk_alignment_for_contiguous_layout as get_theoretical_mk_alignment_for_contiguous_layout,
    set_mk_alignment_for_contiguous_layout as set_mk_alignment_for_contiguous_layout,
)

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # shown in `help`, not to type checkers
__getattr__ = _partial(_refuse, __name__)
