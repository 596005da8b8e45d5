"""The kernel of cuda/gather_rows.cuh: how it is compiled, and launched for rows that arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..problem import ExpertRows
from ..problem.layout import SCALE_BLOCK, ceil_div
from .launch import OrdinaryKernel
from .meeting import FIELDS, MAX_ROW_BYTES, Node, Way, no_meeting
from .params import Field, Kind, Params

PARAMS = Params(
    "GatherRowsParams",
    Field("slots", Kind.POINTER),
    Field("token_of", Kind.POINTER),
    Field("row_of", Kind.POINTER),
    Field("values", Kind.POINTER),
    Field("sfa", Kind.POINTER),
    Field("weights", Kind.POINTER),
    Field("addresses", Kind.POINTER),
    Field("results", Kind.UINT64),
    Field("num_slots", Kind.UINT32),
    Field("rows", Kind.UINT32),
    Field("hidden", Kind.UINT32),
    Field("topk", Kind.UINT32),
    Field("slot_bytes", Kind.UINT32),
    Field("scales_at", Kind.UINT32),
    Field("weights_at", Kind.UINT32),
    Field("pitch", Kind.UINT32),
    Field("max_tokens", Kind.UINT32),
    *FIELDS,
)
"""`GatherRowsParams` of cuda/gather_rows.cuh."""
MAX_BLOCKS = MAX_ROW_BYTES // SCALE_BLOCK


class Slots(NamedTuple):
    """Rows as they came: FP8 values first, then what lies at these bytes of each."""

    memory: Tensor
    """`[slots, ...]` of any type, from the first slot's first byte on; slots begin at multiples of 16 bytes."""
    hidden: int
    scales_at: int
    weights_at: int


class Gathered(NamedTuple):
    """Where rows go: what the products of experts read."""

    values: Tensor
    """`[rows, hidden]`, contiguous."""
    sfa: Tensor
    """FP32 `[rows, blocks]`, beside each other along the rows."""
    weights: Tensor | None = None
    """FP32 `[rows]`: the weight of each row's route."""
    addresses: Tensor | None = None
    """int64 `[rows]`: where the result of each row goes."""


@dataclass(frozen=True)
class GatherRowsConfig:
    """The configuration: there is one. A CTA copies values, of a slot for each warp, or lays scales of `rows` rows."""

    num_threads: int = 256
    ctas_per_sm: ClassVar[int] = 4
    rows: ClassVar[int] = 32

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.num_threads} threads"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/gather_rows.cuh, which asserts that it is the same."""
        return self.rows * (MAX_BLOCKS + 1) * 4

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return None if self.num_threads % 32 == 0 else "needs whole warps"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kNumThreads": self.num_threads,
            "kCtasPerSm": self.ctas_per_sm,
            "kMaxBlocks": MAX_BLOCKS,
            "kSharedBytes": self.shared_bytes,
        }
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


CONFIG = GatherRowsConfig()
KERNEL: OrdinaryKernel[GatherRowsConfig] = OrdinaryKernel("gather_rows", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan


def run(slots: Slots, rows: ExpertRows, to: Gathered, node: Node | None = None) -> None:
    """Copy rows to those of their experts. `node` is where results go, if there are addresses of them."""
    if to.values.shape[0] > 0:
        ctas = grid(CONFIG, slots.memory.shape[0], to.values.shape[0])
        KERNEL.run(CONFIG, params_of(slots, rows, to, node), ctas, to.values.get_device())


def grid(config: GatherRowsConfig, slots: int, rows: int) -> int:
    """CTAs that copy values, and CTAs that lay scales."""
    return ceil_div(slots, config.num_threads // 32) + ceil_div(rows, config.rows)


def params_of(slots: Slots, rows: ExpertRows, to: Gathered, node: Node | None) -> bytes:
    """Give the kernel's parameters."""
    memory = slots.memory
    return PARAMS.pack(
        {
            "slots": memory.data_ptr(),
            "token_of": rows.token_of.data_ptr(),
            "row_of": rows.row_of.data_ptr(),
            "values": to.values.data_ptr(),
            "sfa": to.sfa.data_ptr(),
            "weights": 0 if to.weights is None else to.weights.data_ptr(),
            "addresses": 0 if to.addresses is None else to.addresses.data_ptr(),
            "results": 0 if node is None else node.room.results,
            "num_slots": memory.shape[0],
            "rows": to.values.shape[0],
            "hidden": slots.hidden,
            "topk": rows.row_of.shape[1],
            "slot_bytes": memory.stride(0) * memory.element_size(),
            "scales_at": slots.scales_at,
            "weights_at": slots.weights_at,
            "pitch": to.sfa.stride(1),
            "max_tokens": 1 if node is None else node.room.max_tokens,
            **(no_meeting() if node is None else node.meeting(Way.THERE)),
        }
    )
