"""Hyper-connections: the product ahead of their norm."""

from . import kernel, kernel_few

KERNELS = (kernel.KERNEL, kernel_few.KERNEL)
