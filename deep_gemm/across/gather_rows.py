"""The kernel of across/gather_rows.cuh: how it is compiled, and launched for rows that arrived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..core.check.layout import SCALE_BLOCK, ceil_div
from ..core.kernel import Config, Kernel
from ..core.meeting import MAX_RANKS, MAX_ROW_BYTES, Node, Way, alone
from ..moe.check import ExpertRows

MAX_BLOCKS = MAX_ROW_BYTES // SCALE_BLOCK
ALL_TOKENS = (1 << 32) - 1
"""The `max_tokens` that makes all slots of one memory, however many they are, slots of one rank."""


class Slots(NamedTuple):
    """Rows as they came: each has its FP8 values first, and its scales from byte `scales_at` on."""

    memory: Tensor
    """`[slots, ...]` of any type, from the first slot's first byte on; slots begin at multiples of 16 bytes."""
    scales_at: int


class Gathered(NamedTuple):
    """The rows that the products of experts read."""

    values: Tensor
    """`[rows, hidden]`, contiguous."""
    sfa: Tensor
    """FP32 `[rows, blocks]`, beside each other along the rows."""
    weights: Tensor | None = None
    """FP32 `[rows]`: the weight of each row's route."""
    addresses: Tensor | None = None
    """int64 `[rows]`: where the result of each row goes."""
    zeros: Tensor | None = None
    """int32, of any length: becomes zeros."""


@dataclass(frozen=True)
class GatherRowsConfig(Config):
    """The configuration: there is one. A warp copies `columns` values of a slot, a CTA lays scales of `rows` rows."""

    num_threads: int = 256
    ctas_per_sm: int = 4
    rows: int = 32
    columns: int = 4096
    """Columns of a warp: all of them are on their way before the first is stored."""
    max_blocks = MAX_BLOCKS
    taken = "num_threads", "ctas_per_sm", "columns", "shared_bytes", "max_blocks"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in across/gather_rows.cuh, which asserts that it is the same."""
        return self.rows * (MAX_BLOCKS + 1) * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.num_threads % 32 == 0, "whole warps"


CONFIG = GatherRowsConfig()
KERNEL: Kernel[GatherRowsConfig] = Kernel(
    "gather_rows", "GatherRowsParams", lambda: [CONFIG], lengths={"kMaxRanks": MAX_RANKS}
)


def run(source: Slots | Node, rows: ExpertRows, to: Gathered) -> None:
    """Copy rows that came, or that lie ready in the rooms of a node's ranks, to the rows of their experts.

    Results have addresses only in a node.
    """
    if to.values.shape[0] > 0:
        ctas = grid(CONFIG, rows.row_of.shape[0], *to.values.shape)
        KERNEL.run(CONFIG, values_of(source, rows, to), ctas, to.values.get_device())


def grid(config: GatherRowsConfig, slots: int, rows: int, hidden: int) -> int:
    """CTAs that copy values, and CTAs that lay scales."""
    stretches = ceil_div(hidden, config.columns)
    return ceil_div(slots * stretches, config.num_threads // 32) + ceil_div(rows, config.rows)


def values_of(source: Slots | Node, rows: ExpertRows, to: Gathered) -> dict[str, Any]:
    """Give the members of the kernel's parameters."""
    slots, topk = rows.row_of.shape
    return {
        "token_of": rows.token_of,
        "row_of": rows.row_of,
        "values": to.values,
        "sfa": to.sfa,
        "weights": to.weights,
        "addresses": to.addresses,
        "zeros": to.zeros,
        "num_zeros": 0 if to.zeros is None else to.zeros.shape[0],
        "num_slots": slots,
        "rows": to.values.shape[0],
        "hidden": to.values.shape[1],
        "topk": topk,
        "pitch": to.sfa.stride(1),
        **(_in_rooms(source) if isinstance(source, Node) else _in_memory(source)),
    }


def _in_rooms(node: Node) -> dict[str, Any]:
    room = node.room
    return {
        "scales_at": room.scales,
        "weights_at": room.weights,
        "max_tokens": room.max_tokens,
        "slot_bytes": room.row_bytes,
        "results": room.results,
        **node.meeting(Way.THERE),
    }


def _in_memory(slots: Slots) -> dict[str, Any]:
    memory = slots.memory
    return {
        "scales_at": slots.scales_at,
        "weights_at": 0,
        "max_tokens": ALL_TOKENS,
        "slot_bytes": memory.stride(0) * memory.element_size(),
        "results": 0,
        **alone(memory),
    }
