"""Programs of 2025 import layouts and settings from here."""

from ..casts.scales import get_col_major_tma_aligned_tensor as get_col_major_tma_aligned_tensor
from ..core.check.layout import ceil_div as ceil_div, get_tma_aligned_size as get_tma_aligned_size
from ..core.settings import (
    get_m_alignment_for_contiguous_layout as get_m_alignment_for_contiguous_layout,
    get_num_sms as get_num_sms,
    set_num_sms as set_num_sms,
)

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # for `help`, but not for checkers
