"""The kernel of linear/linear_decode.cuh, for few rows: the CTAs that multiply rows also cast them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..casts.config import cast_constants
from ..core import settings
from ..core.check.checks import Operand
from ..core.check.layout import ADDRESS_ALIGNMENT, align, ceil_div
from ..core.check.recipes import WHOLE
from ..core.gpu import SHARED_BYTES_LIMIT, WARPGROUP_THREADS, WGMMA_K, gpu_of, is_hopper
from ..core.kernel import CodePlan, Config, Kernel
from ..core.shadow import Mapped, plain
from ..core.wgmma_header import wgmma_header
from ..gemm.choose.fp8 import choose, reachable
from ..gemm.config.decode import (
    BLOCK_TOKENS,
    MAX_STAGES,
    OTHER_REGISTERS,
    RESERVED_SHARED_BYTES,
    SHARED_BYTES_PER_SM,
    DecodeConfig,
    registers_of,
)
from ..gemm.config.tall import BLOCK_K, MAX_CLUSTER
from ..gemm.kinds.epilogues import TO_D
from ..gemm.kinds.output import USUAL_OPERANDS, Operands, Output, Sizes, output_into
from ..gemm.kinds.works import DENSE
from ..gemm.launch import let_serve_band
from ..gemm.maps import operand_map

CASTERS = 2 * WARPGROUP_THREADS
"""Number of threads of a CTA that cast. The CTA's other threads load and multiply.

With half as many threads the cast of 16 rows would take longer than the loads of B.
"""
LANES = 16
"""Casters that share a block (128 columns of a token): 8 columns each."""
ROOMS = 2
"""Buffers for groups of A in shared memory: a group is cast while the previous group is multiplied."""
GROUP_BLOCKS = 128
MAX_BLOCKS_OF_TEAM = 4
"""The most blocks of a team at a time. With more, a CTA takes fewer steps, but starts to multiply later."""
CASTING_REGISTERS = 40
"""A caster's registers for addresses, counters, keys and quotients. The blocks that it holds need more registers."""
MIN_STAGES = 2
MAX_ROWS = 16
"""The most rows. With more, sending casts to other CTAs takes longer than a second launch and a way through memory."""
FEW_BLOCKS = 32
"""A CTA casts up to this many blocks alone: sending them to others costs more than casting them."""
MAX_CLUSTER_N = 4
MOST_BLOCKS, MOST_ROWS = 128, 8
"""The kernel runs if each CTA casts at most MOST_BLOCKS blocks, or if m is at most MOST_ROWS for each CTA of a cast.

A larger cast would take longer than the loads of B.
"""
MOST_SEARCHED = 16384
"""The most elements of x that a CTA may search for the largest magnitudes of whole rows, before it casts.

A search in more elements takes longer than the loads of B.
"""
MAX_CHOICES = 4096
PITCH_LIMIT = 1 << 32
"""Kernels count the bytes between rows of x in 32 bits."""


@dataclass(frozen=True)
class LinearDecodeConfig(Config):
    """One configuration: it computes `tile` like `fp8_gemm_decode`, but its stages hold B alone."""

    tile: DecodeConfig
    cluster_n: int
    """CTAs with adjacent tiles. They share out the cast of the rows that they all multiply."""
    dtype: ClassVar = torch.bfloat16
    vector: ClassVar = BLOCK_K // LANES

    @property
    def name(self) -> str:
        """Return a short name for people."""
        return f"{self.tile.name} casting/n{self.cluster_n}"

    @property
    def cluster_size(self) -> int:
        """Count the CTAs of a cluster."""
        return self.cluster_n * self.tile.cluster_k

    @property
    def num_threads(self) -> int:
        """Count the threads of a CTA: the tile's, and the casters."""
        return self.tile.num_threads + CASTERS

    @property
    def ctas_per_sm(self) -> int:
        """Count the CTAs that share an SM."""
        return self.tile.ctas_per_sm

    registers_limit = property(registers_of)

    @property
    def blocks_of_team(self) -> int:
        """Count the blocks that a team of casters holds at a time."""
        return min(GROUP_BLOCKS // (CASTERS // LANES * self.cluster_n), MAX_BLOCKS_OF_TEAM)

    @property
    def group_blocks(self) -> int:
        """Count the blocks in a group: a cluster casts a group for a part of k, and then multiplies it."""
        return self.blocks_of_team * (CASTERS // LANES) * self.cluster_n

    @property
    def shared_bytes(self) -> int:
        """Return the size of `SharedStorage` in linear/linear_decode.cuh, which asserts the same size."""
        ring = self.tile.num_stages * self.tile.block_n * BLOCK_K
        a, scales = (ROOMS * self.group_blocks * size for size in (BLOCK_K, 4))
        barriers = (self.tile.num_stages * 2 + 2 + ROOMS * 2) * 8
        return align(ring + a + self.tile.exchange_bytes + scales + barriers, 1024)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        tile = self.tile
        yield not tile.is_fp32, "BF16 output"
        yield not (tile.is_fine or tile.is_fp4), "FP8 with scales of 1x128 and 128x128, or of whole rows"
        yield 2 <= self.cluster_size <= MAX_CLUSTER, f"clusters of 2 to {MAX_CLUSTER}"
        yield (
            self.blocks_of_team * self.cluster_n <= LANES and GROUP_BLOCKS % self.cluster_n == 0,
            f"1, 2, 4 or 8 CTAs that share out a cast of {GROUP_BLOCKS} blocks",
        )
        yield self.group_blocks % tile.block_tokens == 0, f"a divisor of {self.group_blocks} tokens"
        yield tile.num_stages >= MIN_STAGES, f"at least {MIN_STAGES} stages"
        tile_bytes = tile.block_tokens * tile.block_n * 4
        yield (
            tile.cluster_k > 1 or tile.num_stages * tile.block_n * BLOCK_K >= tile_bytes,
            "a ring that holds a tile of FP32, which is transposed there",
        )
        # A math thread holds totals, partial sums and scales for a k-block; a caster holds blocks before their cast.
        registers = max(
            tile.block_tokens + tile.block_tokens // 4 + OTHER_REGISTERS, 4 * self.blocks_of_team + CASTING_REGISTERS
        )
        yield registers <= self.registers_limit, f"{registers} of {self.registers_limit} registers"
        limit = min(SHARED_BYTES_PER_SM // self.ctas_per_sm - RESERVED_SHARED_BYTES, SHARED_BYTES_LIMIT)
        yield self.shared_bytes <= limit, f"{self.shared_bytes} of {limit} bytes shared"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source needs."""
        return {
            **self.tile.constants(),
            **cast_constants(self, "cluster_n", "blocks_of_team", "shared_bytes"),
            "kWholeRows": self.tile.sfa == WHOLE,
        }


def serving(m: int, k: int, product: DecodeConfig) -> LinearDecodeConfig | None:
    """Configure the kernel for a product with this tile; return None if a separate cast is faster."""
    k_blocks = ceil_div(k, BLOCK_K)
    blocks = m * ceil_div(k_blocks, product.cluster_k)
    cluster_n = 1 if product.cluster_k > 1 else 2
    most = min(MAX_CLUSTER_N, MAX_CLUSTER // product.cluster_k)
    while cluster_n * 2 <= most and blocks > FEW_BLOCKS * cluster_n:
        cluster_n *= 2
    if m > MAX_ROWS or (blocks > MOST_BLOCKS * cluster_n and m > MOST_ROWS * cluster_n):
        return None
    # Each CTA of a cluster searches a share of x for the scales of whole rows, so each needs at least one k-block.
    searchers = product.cluster_k * cluster_n
    if product.sfa == WHOLE and (m * k > MOST_SEARCHED * searchers or k_blocks < product.cluster_k):
        return None
    tokens = next(size for size in BLOCK_TOKENS if size >= m)
    return linear_decode_config(replace(product, block_tokens=tokens), cluster_n)


@cache
def linear_decode_config(product: DecodeConfig, cluster_n: int) -> LinearDecodeConfig | None:
    """Configure the kernel for a product's tile, with all stages that fit; return None if it cannot be built."""
    depths = range(MAX_STAGES, MIN_STAGES - 1, -1)
    deepest_first = (LinearDecodeConfig(replace(product, num_stages=depth), cluster_n) for depth in depths)
    return next((config for config in deepest_first if config.why_illegal() is None), None)


def run(x: Tensor, w: Operand, d: Tensor, c: Tensor | None, operands: Operands = USUAL_OPERANDS) -> bool:
    """Compute D = C + cast(x) @ w.T in one launch and return True; return False if the kernel does not serve the call.

    All arguments were checked. C is BF16, D itself or disjoint from it, or FP32; a stride of zero makes one row of C
    serve all rows. `operands`: the types of w's values, and how cast(x) and w are scaled.
    """
    if not serves(x, d):
        return False
    device, (m, n), k = x.get_device(), d.shape, x.shape[1]
    product = config_of(plain(m), n, k, output_into(d, c, operands), device, settings.in_force.generation)
    let_serve_band(m, gpu_of(device))
    config = serving(m, k, product) if isinstance(product, DecodeConfig) else None
    if config is None:
        return False
    KERNEL.run(config, values_of(config, x, w, d, c), grid(config, m, n), device)
    return True


def serves(x: Tensor, d: Tensor) -> bool:
    """Tell whether the kernel can cast these rows: a few in BF16, at multiples of 16 bytes."""
    (m, k), pitch = x.shape, x.stride(0) * x.element_size()
    return (
        0 < m <= MAX_ROWS
        and k > 0
        and x.dtype == d.dtype == torch.bfloat16
        and d.shape[1] > 0
        and x.is_cuda
        and is_hopper(x.get_device())
        and x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and x.stride(1) == 1
        and (m == 1 or (pitch % ADDRESS_ALIGNMENT == 0 and 0 <= pitch < PITCH_LIMIT))
    )


@lru_cache(MAX_CHOICES)
def config_of(m: int, n: int, k: int, output: Output, device: int, generation: int) -> Any:
    """Return the configuration of the product alone: this kernel splits k in the same way, to add in the same order.

    `generation` numbers the settings in force.
    """
    return choose(Sizes(m, n, k), output, gpu_of(device))


def reachable_linear() -> list[LinearDecodeConfig]:
    """List every configuration that `serving` can return."""
    tiles = [
        replace(tile, block_tokens=tokens)
        for tile in reachable()
        if isinstance(tile, DecodeConfig) and tile.work is DENSE and tile.epilogue == TO_D
        for tokens in BLOCK_TOKENS
        if tokens <= MAX_ROWS
    ]
    found = [linear_decode_config(tile, cluster_n) for tile in tiles for cluster_n in (1, 2, MAX_CLUSTER_N)]
    return list(dict.fromkeys(config for config in found if config is not None))


def grid(config: LinearDecodeConfig, m: int, n: int) -> int:
    """Count the CTAs: a cluster for each tile of D, or for the adjacent tiles that share a cast."""
    return align(config.tile.ctas(m, n), config.cluster_size)


def values_of(config: LinearDecodeConfig, x: Tensor, w: Operand, d: Tensor, c: Tensor | None) -> dict[str, Any]:
    """Return the members of the kernel's parameters."""
    (m, n), k, (values, scales) = d.shape, x.shape[1], w
    rows = min(config.tile.block_n, n)
    return {
        "map_b": Mapped(operand_map(values, rows, BLOCK_K), values),
        "x": x,
        "sfb": scales,
        "d": d,
        "c": c,
        "x_pitch": x.stride(0) * x.element_size() if m > 1 else 0,
        "d_pitch": d.stride(0),
        "c_pitch": 0 if c is None else c.stride(0),
        "sfb_stride_n": scales.stride(0),
        "sfb_stride_k": scales.stride(1),
        "m": m,
        "n": n,
        "k": k,
        "slot_bytes": rows * BLOCK_K,
    }


def code_plan(config: LinearDecodeConfig) -> CodePlan:
    """Derive the plan that the kernel's machine code must match. The kernel writes D by ordinary stores."""
    return CodePlan(
        roles=((32, None), (WARPGROUP_THREADS * config.tile.num_math_warpgroups, None), (CASTERS, None)),
        shared_bytes=config.shared_bytes,
        qgmma=BLOCK_K // WGMMA_K,
        tma_loads=1,  # B
        ctas_per_sm=config.ctas_per_sm,
    )


KERNEL: Kernel[LinearDecodeConfig] = Kernel(
    "linear_decode",
    "LinearParams",
    reachable_linear,
    name="fp8_gemm_linear_decode",
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.tile.block_tokens])},
    promotes=True,
)
