"""The indexer of sparse attention: logits by which each token chooses the keys that it attends to."""

from . import kernel, plan_paged_contexts
from .api import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
)

KERNELS = (kernel.IN_ROWS, kernel.IN_PAGES, plan_paged_contexts.KERNEL)

__all__ = [
    "KERNELS",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]
