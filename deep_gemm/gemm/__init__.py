"""Products of FP8 and BF16: dense, grouped, of heads."""

from typing import Any

from ..core.kernel import Kernel
from . import kernel, kernel_decode
from .bf16 import kernel as bf16_kernel
from .bf16 import sum_slices
from .depths import maps_kernel

KERNELS: tuple[Kernel[Any], ...] = (
    kernel.KERNEL,
    bf16_kernel.KERNEL,
    kernel_decode.KERNEL,
    maps_kernel.KERNEL,
    sum_slices.KERNEL,
)
