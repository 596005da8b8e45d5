"""The kernel of cuda/fp8_gemm.cuh: how it is compiled for a configuration."""

from __future__ import annotations

from .. import jit
from ..config import GemmConfig
from .sources import cuda_sources
from .wgmma_header import wgmma_header

SOURCE = '#include "fp8_gemm.cuh"\n'
NAME = "fp8_gemm_kernel"


def headers(config: GemmConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {
        **cuda_sources(),
        "config.cuh": config.header(),
        "wgmma_shapes.cuh": wgmma_header([config.unit_n or config.block_n]),
    }


def build(config: GemmConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    return jit.build(SOURCE, headers(config), name=NAME)
