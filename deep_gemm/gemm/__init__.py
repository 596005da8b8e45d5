"""Products of FP8 and BF16: dense, grouped, of heads."""

from typing import Any

from ..core.kernel import Kernel
from . import k_group_maps, sum_slices
from .kernel import BF16_GEMM, FP8_GEMM, FP8_GEMM_DECODE

KERNELS: tuple[Kernel[Any], ...] = (
    FP8_GEMM,
    BF16_GEMM,
    FP8_GEMM_DECODE,
    k_group_maps.KERNEL,
    sum_slices.KERNEL,
)
