"""All kernels of the package, found in the modules of their families, for tools and tests that loop over kernels."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from . import across, casts, gemm, hyper, indexer, moe
from .core.kernel import Kernel
from .gemm import softmax_piece, sum_slices
from .indexer import plan_paged_contexts
from .linear import __path__ as of_linear  # deep_gemm.linear is the function


def kernels_of(*folders: str) -> tuple[Kernel[Any], ...]:
    """Find kernels in folders of families: in modules named kernel*, then in modules with a source of the same name."""
    found: dict[str, Kernel[Any]] = {}
    for paths in (sorted(Path(folder).glob("*.py")) for folder in folders):
        named = [path for path in paths if path.stem.startswith("kernel")]
        for path in (*named, *(path for path in paths if path.with_suffix(".cuh").exists())):
            module = import_module(f"{__package__}.{path.parent.name}.{path.stem}")
            found |= {each.name: each for each in vars(module).values() if isinstance(each, Kernel)}
    return tuple(found.values())


KERNELS = kernels_of(
    *gemm.__path__, *casts.__path__, *of_linear, *moe.__path__, *indexer.__path__, *hyper.__path__, *across.__path__
)
ORDINARY: tuple[Kernel[Any], ...] = (
    *kernels_of(*casts.__path__, *moe.__path__, *across.__path__),
    plan_paged_contexts.KERNEL,
    sum_slices.KERNEL,
    softmax_piece.KERNEL,
)
"""Kernels with ordinary loads and stores, whose configurations do not depend on a model's shapes."""
