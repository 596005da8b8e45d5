"""The indexer of sparse attention: logits by which each token chooses the keys that it attends to."""

from . import kernel, paged_kernel, plan_paged_contexts
from .paged import fp8_fp4_paged_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from .prefill import fp8_fp4_mqa_logits, fp8_mqa_logits

KERNELS = (kernel.KERNEL, paged_kernel.KERNEL, plan_paged_contexts.KERNEL)

__all__ = [
    "KERNELS",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]
