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
"""A `max_tokens` so large that any number of slots belongs to one rank: for slots of one memory."""


class Slots(NamedTuple):
    """Received rows: a row begins with its values; scales of FP8 begin at its byte `scales_at`."""

    memory: Tensor
    """`[slots, ...]` of any type, from the first slot's first byte on; slots begin at multiples of 16 bytes."""
    scales_at: int


class Gathered(NamedTuple):
    """The rows that the products of experts read."""

    values: Tensor
    """`[rows, hidden]`, contiguous."""
    sfa: Tensor | None
    """FP32 `[rows, blocks]`; the scales of all rows for one block are contiguous. None beside BF16."""
    weights: Tensor | None = None
    """FP32 `[rows]`: the weight of each row's route."""
    addresses: Tensor | None = None
    """int64 `[rows]`: the address of each row's result."""


@dataclass(frozen=True)
class GatherRowsConfig(Config):
    """One configuration. A warp copies `columns` bytes of a slot; a CTA lays out the scales of `rows` rows."""

    num_threads: int = 256
    ctas_per_sm: int = 4
    rows: int = 32
    columns: int = 4096
    """Bytes that a warp copies; it starts all loads before it stores the first piece."""
    value_bytes: int = 1
    """Bytes of a value: 2 of BF16, which has no scales."""
    max_blocks = MAX_BLOCKS
    taken = "num_threads", "ctas_per_sm", "columns", "value_bytes", "shared_bytes", "max_blocks"

    @property
    def name(self) -> str:
        """Short, for people."""
        return super().name + ("" if self.value_bytes == 1 else " bf16")

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in across/gather_rows.cuh, which asserts that it is the same."""
        return self.rows * (MAX_BLOCKS + 1) * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.num_threads % 32 == 0, "whole warps"


CONFIGS = {value_bytes: GatherRowsConfig(value_bytes=value_bytes) for value_bytes in (1, 2)}
KERNEL = Kernel("gather_rows", "GatherRowsParams", lambda: [*CONFIGS.values()], lengths={"kMaxRanks": MAX_RANKS})


def run(source: Slots | Node, rows: ExpertRows, to: Gathered) -> None:
    """Copy received rows, or rows in the rooms of a node's ranks, to the rows of their experts.

    Results have addresses only in a node.
    """
    if to.values.shape[0] > 0:
        config = CONFIGS[to.values.element_size()]
        ctas = grid(config, rows.row_of.shape[0], *to.values.shape)
        KERNEL.run(config, values_of(source, rows, to), ctas, to.values.get_device())


def grid(config: GatherRowsConfig, slots: int, rows: int, hidden: int) -> int:
    """Count the CTAs that copy values, and the CTAs that lay out scales."""
    stretches = ceil_div(hidden * config.value_bytes, config.columns)
    of_scales = ceil_div(rows, config.rows) if config.value_bytes == 1 else 0
    return ceil_div(slots * stretches, config.num_threads // 32) + of_scales


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
        "num_slots": slots,
        "rows": to.values.shape[0],
        "hidden": to.values.shape[1] * to.values.element_size(),
        "topk": topk,
        "pitch": 0 if to.sfa is None else to.sfa.stride(1),
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
