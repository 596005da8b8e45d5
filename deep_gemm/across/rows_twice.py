"""Compute both products of experts' rows in one kernel: gemm/work/rows_twice.cuh.

The kernel fetches rows from the rooms of a node's ranks, and sends results, while it multiplies. Rows, and the first
product's results, are in rings of blocks. Two launches, one for each product, give the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..casts.rules import empty_scales
from ..core.check.checks import Operand
from ..core.check.layout import SCALE_BLOCK, ceil_div
from ..core.check.memory import empty
from ..core.check.recipes import PER_64, PER_ROW
from ..core.gpu import gpu_of
from ..core.meeting import Node, Way
from ..core.settings import num_sms_of
from ..gemm import launch
from ..gemm.ask.silu import activated
from ..gemm.config.of_tile import tile_config
from ..gemm.config.tall import BLOCK_K, GemmConfig
from ..gemm.kernel import FP8_GEMM, params_of
from ..gemm.kinds.epilogues import SILU_IN_TURN_THEN_ROWS, SILU_THEN_ROWS
from ..gemm.kinds.output import Output
from ..gemm.kinds.works import TWICE
from ..gemm.problem import Problem
from ..moe.check import ExpertRows
from . import rows_to_addresses

OUTPUT = Output(work=TWICE, epilogue=SILU_THEN_ROWS)
OUTPUT_IN_TURN = Output(work=TWICE, epilogue=SILU_IN_TURN_THEN_ROWS, sfa=PER_64)
"""B of the first product has gate and up in turn, rows have weights, and scales of activations cover 64 columns."""
BLOCK_M, BLOCK_N = 128, 256
COUNTS, COUNTS_OF_BLOCK = 6, 3
"""Words of `Counts` in gemm/work/rows_twice.cuh, and words of counts for each block."""
SLOTS = 64
"""The most blocks of a ring."""
LAG = 132
"""Tiles of the first product that all CTAs may claim: one for each SM."""
SHARE = 0.75
"""Largest fraction of the CTAs in the first role. The other CTAs send results while the first product runs."""


@lru_cache(maxsize=256)
def config_for(k: int, k_of_second: int, output: Output = OUTPUT, band: int = TWICE.band) -> GemmConfig:
    """Return the configuration for two depths: runs have two k-blocks if both numbers of k-blocks are even.

    `band`: tiles along the rows that are taken before the raster moves on along columns.
    """
    is_odd = any(ceil_div(each, BLOCK_K) % 2 for each in (k, k_of_second))
    return replace(tile_config(BLOCK_M, BLOCK_N, output, k=BLOCK_K * (1 if is_odd else 2)), raster_group=band)


def blocks_for(rows: int, groups: int) -> int:
    """Count the most blocks that rows may have: the last block of each group may be short."""
    return min(groups, rows) + rows // BLOCK_M


def counts_for(rows: int, groups: int) -> int:
    """Count the words of counters that a call needs, which are zeros before and after it."""
    return COUNTS + COUNTS_OF_BLOCK * blocks_for(rows, groups)


def slots_for(rows: int, groups: int, most: int | None = SLOTS, band: int = TWICE.band) -> int:
    """Count the blocks of a ring: a power of two, up to `most`, or at least the number of all blocks.

    With fewer than two bands of the raster, or with a single CTA, the kernel could wait for a used slot for ever.
    """
    blocks = max(blocks_for(rows, groups), 1)
    wanted = blocks if most is None else min(blocks, max(most, 2 * band))
    return 1 << (wanted - 1).bit_length()


def bytes_of_rings(rows: int, groups: int, hidden: int, intermediate: int) -> int:
    """Count the bytes of the rows that a call of `decode` holds, and of their activations."""
    of_row = sum(columns + 4 * ceil_div(columns, SCALE_BLOCK) for columns in (hidden, intermediate))
    return slots_for(rows, groups) * BLOCK_M * of_row


def ring(slots: int, columns: int, like: Tensor, gran_k: int = SCALE_BLOCK) -> Operand:
    """Allocate blocks of rows in FP8, and their scales in the form that products load."""
    values = empty("activations", (slots * BLOCK_M, columns), like.dtype, like.device)
    return values, empty_scales((slots * BLOCK_M,), columns, values, mn_major=True, gran_k=gran_k)


def problems(
    output: Output, a: Operand, w1: Operand, middle: Operand, w2: Operand, ends: Tensor, to: Tensor, limit: float | None
) -> tuple[Problem, Problem]:
    """State both products, with a ring for the rows' weights. `to`: the addresses of the second product's rows."""
    apart = output.epilogue.gates_apart
    weights = None if apart else empty("weights of rows", a[0].shape[:1], torch.float32, a[0].device)
    first = activated(a, w1, middle, ends, weights, limit, gates_apart=apart)
    return first, rows_to_addresses.problem(middle, w2, to, ends, of_a=PER_ROW if apart else PER_64)


def rooms_of(node: Node, rows: ExpertRows, first: Problem, addresses: Tensor) -> dict[str, Any]:
    """Give the members of `Rooms` in gemm/work/fetch_rows.cuh, and of `Meeting`, for a ring that is A of `first`."""
    room = node.room
    of_rows = {"token_of": rows.token_of, "row_of": rows.row_of, "addresses": addresses}
    of_ring = {"values": first.a, "scales": first.sfa, "pitch": first.sfa.stride(-1), "weights": first.row_weights}
    of_room = {name: getattr(room, name) for name in ("results", "topk", "max_tokens", "row_bytes")}
    values = {**of_rows, **of_ring, **of_room, "scales_at": room.scales, "weights_at": room.weights}
    return {**{f"rooms.{name}": value for name, value in values.items()}, **node.meeting(Way.THERE)}


def start(
    first: Problem,
    second: Problem,
    config: GemmConfig,
    counts: Tensor,
    lag: int,
    num_sms: int,
    share: float,
    rooms: dict[str, Any],
) -> None:
    """Launch the kernel for two problems that are `prepared`. `counts`: int32 `[counts_for(...)]`, zeros.

    `share`: the largest fraction of the CTAs in the first role. `rooms`: where the first A's rows are (`rooms_of`).
    """
    slots, least = first.d.shape[0] // BLOCK_M, slots_for(second.d.shape[0], first.groups, 1, config.raster_group)
    if slots < least or slots & (slots - 1):
        raise ValueError(f"middle: expected rows of a power of two of blocks, at least {least}, got {slots} blocks")
    ctas = min(num_sms, first.groups * first.m * ceil_div(max(first.n, second.n), config.block_n))
    if slots < blocks_for(second.d.shape[0], first.groups):
        if ctas < 2:
            raise ValueError(f"middle: expected a slot for each block of rows, as a single CTA runs, got {slots} slots")
        lag = min(lag, (slots - config.raster_group + 1) * ceil_div(first.n, config.block_n))
    names = {each.name for each in params_of(config).fields}
    of_rooms = (name.rpartition(".")[2] for name in rooms if name != "meeting.limit")  # activations have a limit too
    own = dict.fromkeys(("blocks", "slots", "lag", "first_ctas", "second_sfb_stride", *of_rooms), 0)
    of_second = {f"second.{name}": value for name, value in launch.values_of(second, config, **own).items()}
    values = {
        **launch.values_of(first, config, **own),
        **{name: value for name, value in of_second.items() if name in names},
        "second_sfb_stride": of_second["second.groups.sfb_stride"],
        "counts": counts.data_ptr(),
        "blocks": (counts.numel() - COUNTS) // COUNTS_OF_BLOCK,
        "slots": slots,
        "lag": lag,
        "first_ctas": max(1, min(round(share * ctas), ctas - 1)),
        "groups.rows": second.d.shape[0],
        **rooms,
    }
    FP8_GEMM.run(config, values, ctas, first.d.get_device())


def run(node: Node, rows: ExpertRows, w1: Operand, w2: Operand, limit: float | None, output: Output = OUTPUT) -> None:
    """Multiply rows of a node's rooms by their experts' `w1`, activate, cast, multiply by `w2`, store in the rooms."""
    count, device = rows.token_of.shape[0], rows.token_of.device
    num_sms = num_sms_of(gpu_of(device.index).num_sms)
    slots = slots_for(count, node.experts, SLOTS if num_sms > 1 else None)
    like = empty("nothing", (0,), torch.float8_e4m3fn, device)
    a, middle = ring(slots, node.room.hidden, like), ring(slots, w2[0].shape[2], like, output.columns_of_a)
    addresses = empty("addresses of results", (count,), torch.int64, device)
    first, second = problems(output, a, w1, middle, w2, rows.ends, addresses, limit)
    config = config_for(first.k, second.k, output)
    first, second = launch.prepared(first, config), launch.prepared(second, config)
    start(first, second, config, node.counts, LAG, num_sms, SHARE, rooms_of(node, rows, first, addresses))
