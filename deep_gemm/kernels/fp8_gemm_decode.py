"""The kernel of cuda/fp8_gemm_decode.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

import struct
from functools import cache

from .. import jit
from ..config import BLOCK_K, WARPGROUP_THREADS, WGMMA_K, Output
from ..config_decode import DecodeConfig
from ..gates import CodePlan
from ..jit import driver
from ..layout import ceil_div
from ..problem import DenseProblem
from ..tensor_map import ElementType, TensorMap
from . import plan
from .plan import AddressWords, matrix_map
from .sources import cuda_sources
from .wgmma_header import wgmma_header

SOURCE = '#include "fp8_gemm_decode.cuh"\n'
NAME = "fp8_gemm_decode"


def headers(config: DecodeConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {
        **cuda_sources(),
        "config.cuh": config.header(),
        "wgmma_shapes.cuh": wgmma_header([config.block_tokens]),
    }


def build(config: DecodeConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    passes = jit.passes_for(config.num_threads * config.ctas_per_sm)
    return jit.build(SOURCE, headers(config), name=NAME, passes=passes)


def code_plan(config: DecodeConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of. It writes D by ordinary stores."""
    return CodePlan(
        roles=((32, None), (WARPGROUP_THREADS * config.num_math_warpgroups, None)),
        shared_bytes=config.shared_bytes,
        qgmma=BLOCK_K // WGMMA_K,
        tma_loads=2,  # A and B
        multicast_loads=0,
        ctas_per_sm=config.ctas_per_sm,
    )


class Plan(plan.Plan):
    """A launch of this kernel, prepared."""

    # Words of Params in cuda/fp8_gemm_decode.cuh: two tensor maps, and four pointers.
    _WORDS = AddressWords(a=0, b=16, sfa=32, sfb=33, d=34, c=35)

    def __init__(self, p: DenseProblem, config: DecodeConfig) -> None:
        self.config = config
        super().__init__(
            p,
            maps=tensor_maps(config, p),
            tail=scalars(config, p),
            words=self._WORDS,
            kernel=loaded(config, p.d.get_device()),
            grid=grid(config, p),
            threads=config.num_threads,
            cluster=config.cluster_k,
        )


def why_unfit(config: DecodeConfig, output: Output) -> str | None:
    """Say why a configuration would compute something else than a product with this output; None if it computes it."""
    if output.sfb_is_per_row:
        return "is for one scale for each 128x128 block of B"
    if (config.output_is_fp32, config.with_c) != (output.is_fp32, output.with_c or output.adds_to_d):
        return "is for another type of D, or another C"
    return None


def grid(config: DecodeConfig, p: DenseProblem) -> int:
    """A cluster for each tile of D."""
    return ceil_div(p.m, config.block_tokens) * ceil_div(p.n, config.block_n) * config.cluster_k


@cache
def loaded(config: DecodeConfig, device: int) -> driver.Kernel:
    """Get the kernel of a configuration on a device, compiled and loaded at first need."""
    return driver.Kernel(build(config), config.shared_bytes)


def tensor_maps(config: DecodeConfig, p: DenseProblem) -> dict[str, TensorMap]:
    """What TMA is told of A and B. A box has no rows that are never there."""
    rows_a, rows_b = _box_rows(config, p)
    return {
        "a": matrix_map(ElementType.UINT8, p.a, (rows_a, BLOCK_K), 128),
        "b": matrix_map(ElementType.UINT8, p.b, (rows_b, BLOCK_K), 128),
    }


def scalars(config: DecodeConfig, p: DenseProblem) -> bytes:
    """Pack what follows the tensor maps in `Params` of cuda/fp8_gemm_decode.cuh."""
    return struct.pack("<6Q8I", *pointers(p), *pitches(p), *numbers(config, p))


def pointers(p: DenseProblem) -> tuple[int, int, int, int]:
    """Addresses of the scales, D and C."""
    return p.sfa.data_ptr(), p.sfb.data_ptr(), p.d.data_ptr(), 0 if p.c is None else p.c.data_ptr()


def pitches(p: DenseProblem) -> tuple[int, int]:
    """Elements from one row of D, and of C, to the next."""
    return p.d.stride(0), 0 if p.c is None else p.c.stride(0)


def numbers(config: DecodeConfig, p: DenseProblem) -> tuple[int, ...]:
    """The 32-bit fields that end `Params`."""
    slot_bytes = sum(_box_rows(config, p)) * BLOCK_K
    return (*p.sfa.stride(), *p.sfb.stride(), p.m, p.n, p.k, slot_bytes)


def _box_rows(config: DecodeConfig, p: DenseProblem) -> tuple[int, int]:
    return min(config.block_tokens, p.m), min(config.block_n, p.n)
