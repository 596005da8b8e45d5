"""The kernel of gemm/bf16_gemm.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

from functools import cache

from ...core import jit
from ...core.code_plan import CodePlan
from ...core.jit import driver
from ...core.sm90 import WARPGROUP_THREADS
from ...core.sources import cuda_sources, generated
from ...core.wgmma_header import wgmma_bf16_header
from ..kernel import params_of
from .config import Bf16Config

SOURCE = '#include "bf16_gemm.cuh"\n'
PRODUCTS_OF_BLOCK = 4
"""WGMMAs, 16 deep each, of one unit for a k-block."""


def headers(config: Bf16Config) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {
        **cuda_sources(),
        "config.cuh": generated(config.header()),
        "params_layout.cuh": params_of(config).layout_header(),
        "wgmma_shapes.cuh": wgmma_bf16_header([config.unit_n or config.block_n], *config.majors),
    }


def build(config: Bf16Config) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    return jit.build(SOURCE, headers(config), name=config.kernel_name)


def code_plan(config: Bf16Config) -> CodePlan:
    """Derive what the kernel's machine code must consist of: one loop over k-blocks, and one for parts of tiles."""
    producer_registers, math_registers = config.registers
    units = config.units_per_warpgroup + config.units_of_part
    stores = units * (config.unit_n or config.block_n) // config.panel_columns
    boxes_of_a = config.block_m // config.box_rows_of_a if config.rows_are_grouped else 1
    boxes_of_b = config.block_n // config.box_rows_of_b
    if config.majors.a_is_mn:
        boxes_of_a = config.box_rows_of_a // 64
    if config.majors.b_is_mn:
        boxes_of_b = config.block_n // config.cluster_m // 64
    shares_a, shares_b = config.cluster_n > 1, config.cluster_m > 1
    splits = config.cluster_k > 1
    return CodePlan(
        roles=(
            (WARPGROUP_THREADS, producer_registers),
            (WARPGROUP_THREADS * config.num_math_warpgroups, math_registers),
        ),
        shared_bytes=config.shared_bytes,
        qgmma=0,
        hgmma=units * PRODUCTS_OF_BLOCK,
        tma_loads=boxes_of_a + boxes_of_b,
        multicast_loads=boxes_of_a * shares_a + boxes_of_b * shares_b,
        tma_stores=0 if config.adds_to_d or splits else stores * (1 + config.rows_are_grouped),
        tma_reduces=stores if config.adds_to_d else 0,
    )


@cache
def loaded(config: Bf16Config, device: int) -> driver.Kernel:
    """Get the kernel of a configuration on a device, compiled and loaded at first need."""
    return driver.Kernel(build(config), config.shared_bytes)


@cache
def launcher(config: Bf16Config, device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way a configuration is launched on a device."""
    kernel = loaded(config, device)
    size = params_of(config).size
    return driver.Launcher(kernel, size, config.num_threads, config.cluster_size, is_dependent=is_dependent)
