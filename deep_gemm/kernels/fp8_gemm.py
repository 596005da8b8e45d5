"""The kernel of cuda/fp8_gemm.cuh: how it is compiled for a configuration."""

from __future__ import annotations

import struct

from torch import Tensor

from .. import jit
from ..config import BLOCK_K, WGMMA_ROWS, GemmConfig
from ..layout import align
from ..problem import DenseProblem
from ..tensor_map import ADDRESS_ALIGNMENT, ElementType, TensorMap
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


def tensor_maps(config: GemmConfig, p: DenseProblem, sfa: Tensor) -> tuple[TensorMap, TensorMap, TensorMap, TensorMap]:
    """What TMA is told of A, B, the scales of A (m-major) and D."""
    output = ElementType.FLOAT32 if config.output_is_fp32 else ElementType.BFLOAT16
    return (
        _matrix(ElementType.UINT8, p.a, (config.block_m // config.cluster_n, BLOCK_K), 128),
        _matrix(ElementType.UINT8, p.b, (config.block_n // config.cluster_m, BLOCK_K), 128),
        _matrix(ElementType.FLOAT32, sfa.t(), (1, config.block_m), 0),
        _matrix(output, p.d, (WGMMA_ROWS, config.panel_columns), config.panel_columns * config.output_bytes),
    )


def _matrix(element: ElementType, x: Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """A row-major matrix. The stride of a single row is nowhere used, but TMA still demands a multiple of 16 bytes."""
    rows, columns = x.shape
    pitch = x.stride(0) if rows > 1 else align(columns, ADDRESS_ALIGNMENT)
    return TensorMap(element, (columns, rows), (pitch * element.value,), (box[1], box[0]), swizzle)


def scalars(p: DenseProblem) -> bytes:
    """Pack what follows the tensor maps in `Params` of cuda/fp8_gemm.cuh."""
    c_address, c_pitch = (p.c.data_ptr(), p.c.stride(0)) if p.c is not None else (0, 0)
    return struct.pack(
        "<QQQIIIII", p.sfb.data_ptr(), c_address, c_pitch, p.sfb.stride(0), p.sfb.stride(1), p.m, p.n, p.k
    )
