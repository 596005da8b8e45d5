"""All kernels of the package, of every family, for those who look at each: tools and tests."""

from __future__ import annotations

from typing import Any

from . import across, casts, gemm, hyper, indexer, moe
from .core.kernel import Kernel
from .gemm import sum_slices
from .indexer import plan_paged_contexts
from .linear import KERNELS as OF_LINEAR

KERNELS: tuple[Kernel[Any], ...] = (
    *gemm.KERNELS,
    *casts.KERNELS,
    *OF_LINEAR,
    *moe.KERNELS,
    *indexer.KERNELS,
    *hyper.KERNELS,
    *across.KERNELS,
)
ORDINARY: tuple[Kernel[Any], ...] = (
    *casts.KERNELS,
    *moe.KERNELS,
    *across.KERNELS,
    plan_paged_contexts.KERNEL,
    sum_slices.KERNEL,
)
"""Kernels of ordinary loads and stores, whose configurations do not depend on a model's shapes."""
