"""The kernel of gemm/bf16_gemm.cuh: what its machine code consists of, and which configurations there are."""

from __future__ import annotations

from ...core.code_plan import CodePlan
from ...core.kernel import Kernel
from ...core.sm90 import WARPGROUP_THREADS
from ...core.wgmma_header import wgmma_bf16_header
from ..kernel import params_of
from ..output import Groups
from .choose import reachable_bf16, reachable_bf16_depths, reachable_bf16_rows, reachable_bf16_sum
from .config import Bf16Config

PRODUCTS_OF_BLOCK = 4
"""WGMMAs, 16 deep each, of one unit for a k-block."""


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
        bulk_copies=int(config.groups == Groups.IDS),  # zeros of padding
    )


def reachable() -> list[Bf16Config]:
    """Every configuration that the choice for any kind of work can give."""
    ways = reachable_bf16, reachable_bf16_rows, reachable_bf16_depths, reachable_bf16_sum
    return list(dict.fromkeys(config for way in ways for config in way()))


KERNEL: Kernel[Bf16Config] = Kernel(
    "bf16_gemm",
    params_of,
    reachable,
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_bf16_header([config.unit_n or config.block_n], *config.majors)},
)
