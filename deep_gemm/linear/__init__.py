"""A linear layer."""

from . import kernel

KERNELS = (kernel.KERNEL,)
