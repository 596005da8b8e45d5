"""Both products of experts' rows by one kernel: gemm/work/rows_twice.cuh.

The second product of a block of rows follows its first one some tasks later, so that results leave for other GPUs while
first products are computed. The middle lies in a ring of blocks. The bits are those of two launches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from ..casts.rules import Rows, empty_scales
from ..core.check.checks import Operand
from ..core.check.layout import ceil_div
from ..core.check.memory import empty
from ..core.gpu import gpu_of
from ..core.meeting import Node
from ..core.settings import num_sms_of
from ..gemm import launch
from ..gemm.ask.silu import activated
from ..gemm.config.of_tile import tile_config
from ..gemm.config.tall import BLOCK_K, GemmConfig
from ..gemm.kernel import FP8_GEMM, params_of
from ..gemm.kinds.epilogues import SILU_THEN_ROWS
from ..gemm.kinds.output import Output
from ..gemm.kinds.works import TWICE
from ..gemm.packed import is_packed
from ..gemm.problem import Problem
from . import rows_to_addresses

OUTPUT = Output(work=TWICE, epilogue=SILU_THEN_ROWS)
BLOCK_M, BLOCK_N = 128, 256
COUNTS, COUNTS_OF_BLOCK = 3, 2
"""Words of `Counts` in gemm/work/rows_twice.cuh, and of a block."""
SLOTS = 64
"""Blocks of the ring."""
LAG = 132
"""Tiles of the first product before a CTA prefers the second: one for each SM."""
SHARE = 0.70
"""The part of CTAs that prefer the first product: on four H200 calls took least by it."""
IS_ON = True
"""Both products are one kernel; False takes two launches, to compare."""


@cache
def config_for(k: int, k_of_second: int, band: int = TWICE.band) -> GemmConfig:
    """Give the configuration for two depths: their blocks of k go in runs of two if both are even.

    `band`: tiles along the rows that are taken before the raster moves on along columns.
    """
    is_odd = any(ceil_div(each, BLOCK_K) % 2 for each in (k, k_of_second))
    return replace(tile_config(BLOCK_M, BLOCK_N, OUTPUT, k=BLOCK_K * (1 if is_odd else 2)), raster_group=band)


def blocks_for(rows: int, groups: int) -> int:
    """Count the blocks of rows that there may be: the last one of each group may be short."""
    return groups + rows // BLOCK_M


def counts_for(rows: int, groups: int) -> int:
    """Count the words that a call needs, zeros before and after."""
    return COUNTS + COUNTS_OF_BLOCK * blocks_for(rows, groups)


def slots_for(rows: int, groups: int, most: int | None = SLOTS, band: int = TWICE.band) -> int:
    """Count the blocks that the ring has room for: a power of two, up to `most`; None: as many as there may be.

    With fewer than two bands of the raster CTAs could wait for each other.
    """
    wanted = blocks_for(rows, groups) if most is None else min(blocks_for(rows, groups), most)
    return 1 << (max(wanted, 2 * band) - 1).bit_length()


def ring(slots: int, columns: int, like: Tensor) -> Operand:
    """Make room for blocks of rows in FP8, and for their scales as products load them."""
    values = empty("activations", (slots * BLOCK_M, columns), like.dtype, like.device)
    return values, empty_scales((slots * BLOCK_M,), columns, values, mn_major=True)


def problems(
    a: Operand, w1: Operand, middle: Operand, w2: Operand, ends: Tensor, addresses: Tensor, limit: float | None
) -> tuple[Problem, Problem]:
    """State both products."""
    first = activated(a, w1, middle, ends, None, limit, gates_apart=True)
    return first, rows_to_addresses.problem(middle, w2, addresses, ends)


def values_of(
    first: Problem, second: Problem, config: GemmConfig, counts: Tensor, lag: int, first_ctas: int
) -> dict[str, Any]:
    """Give the members of the kernel's parameters for two problems that are `prepared`."""
    names = {each.name for each in params_of(config).fields}
    of_second = {f"second.{name}": value for name, value in launch.values_of(second, config, **NOTHING).items()}
    return {
        **launch.values_of(first, config, **NOTHING),
        **{name: value for name, value in of_second.items() if name in names},
        "second_sfb_stride": of_second["second.groups.sfb_stride"],
        "counts": counts.data_ptr(),
        "blocks": (counts.numel() - COUNTS) // COUNTS_OF_BLOCK,
        "slots": first.d.shape[0] // BLOCK_M,
        "lag": lag,
        "first_ctas": first_ctas,
    }


NOTHING: dict[str, Any] = dict.fromkeys(("blocks", "slots", "lag", "first_ctas", "second_sfb_stride"), 0)


def start(
    first: Problem, second: Problem, config: GemmConfig, counts: Tensor, lag: int, num_sms: int, share: float
) -> None:
    """Launch the kernel for two problems that are `prepared`. `counts`: int32 `[counts_for(...)]`, zeros."""
    slots, least = first.d.shape[0] // BLOCK_M, 2 * config.raster_group
    if slots < least or slots & (slots - 1):
        raise ValueError(f"middle: expected a power of two of blocks, at least {least}, got {slots}")
    ctas = min(num_sms, first.groups * first.m * ceil_div(max(first.n, second.n), config.block_n))
    FP8_GEMM.run(config, values_of(first, second, config, counts, lag, round(share * ctas)), ctas, first.d.get_device())


def takes(node: Node, w2: Rows) -> bool:
    """Tell whether both products of these ranks, whose first one activates in any case, are one kernel."""
    return IS_ON and node.room.ranks >= rows_to_addresses.LEAST_RANKS and not is_packed(w2)


def run(
    a: Operand,
    w1: Operand,
    w2: Operand,
    ends: Tensor,
    addresses: Tensor,
    counts: Tensor,
    *,
    limit: float | None = None,
    lag: int = LAG,
    share: float = SHARE,
    slots: int | None = None,
    config: GemmConfig | None = None,
) -> None:
    """Multiply each row by its group's `w1`, activate, cast, multiply by `w2`; store the result at the row's address.

    `counts`: int32 `[counts_for(...)]`, zeros before and after. `slots`: blocks of the ring, by `slots_for`.
    """
    rows, intermediate = a[0].shape[0], w2[0].shape[2]
    middle = ring(slots_for(rows, w1[0].shape[0]) if slots is None else slots, intermediate, a[0])
    first, second = problems(a, w1, middle, w2, ends, addresses, limit)
    config = config or config_for(first.k, second.k)
    num_sms = num_sms_of(gpu_of(addresses.get_device()).num_sms)
    start(launch.prepared(first, config), launch.prepared(second, config), config, counts, lag, num_sms, share)
