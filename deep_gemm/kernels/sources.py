"""The CUDA C++ sources of the package, as the in-memory headers of a compilation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CUDA_DIRECTORY = Path(__file__).resolve().parents[1] / "cuda"


@cache
def cuda_sources() -> dict[str, str]:
    """Every source under `cuda/`, by the name by which others include it."""
    return {
        path.relative_to(CUDA_DIRECTORY).as_posix(): path.read_text() for path in sorted(CUDA_DIRECTORY.rglob("*.cuh"))
    }
