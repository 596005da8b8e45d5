"""The kernel of cuda/return_sums.cuh: how it is compiled, and launched for the rows that came to a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..gpus import gpu_of
from .launch import OrdinaryKernel
from .meeting import FIELDS, STORAGE_BYTES, Node, Way
from .params import Field, Kind, Params

PARAMS = Params(
    "ReturnParams",
    Field("y", Kind.POINTER),
    Field("row_of", Kind.POINTER),
    Field("y_pitch", Kind.UINT64),
    Field("weights", Kind.UINT64),
    Field("sums", Kind.UINT64),
    Field("row_bytes", Kind.UINT32),
    Field("max_tokens", Kind.UINT32),
    Field("topk", Kind.UINT32),
    Field("n", Kind.UINT32),
    *FIELDS,
)
"""`ReturnParams` of cuda/return_sums.cuh."""


@dataclass(frozen=True)
class ReturnConfig:
    """The one configuration, but for the number of threads of a CTA, which sums up a row at a time."""

    num_threads: int = 256
    shared_bytes: ClassVar[int] = STORAGE_BYTES
    ctas_per_sm: ClassVar[int] = 2

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.num_threads} threads"

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return None if self.num_threads % 32 == 0 else "needs whole warps"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kNumThreads": self.num_threads,
            "kCtasPerSm": self.ctas_per_sm,
            "kSharedBytes": self.shared_bytes,
        }
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


CONFIG = ReturnConfig()
KERNEL: OrdinaryKernel[ReturnConfig] = OrdinaryKernel("return_sums", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan


def run(y: Tensor, row_of: Tensor, node: Node) -> None:
    """Send the sums of all rows that came to their tokens' ranks, and wait until all ranks have sent theirs.

    `y` is BF16 `[rows, hidden]`, and rows begin at multiples of 16 bytes; `row_of` is contiguous, `[slots, topk]`.
    """
    device = y.get_device()
    KERNEL.run(CONFIG, params_of(y, row_of, node), grid(CONFIG, node, gpu_of(device).num_sms), device)


def grid(config: ReturnConfig, node: Node, num_sms: int) -> int:
    """A CTA for each row that may come, but no more than run at once."""
    return min(node.room.slots, config.ctas_per_sm * num_sms)


def params_of(y: Tensor, row_of: Tensor, node: Node) -> bytes:
    """Give the kernel's parameters."""
    room = node.room
    return PARAMS.pack(
        {
            "y": y.data_ptr(),
            "row_of": row_of.data_ptr(),
            "y_pitch": y.stride(0),
            "weights": room.weights,
            "sums": room.sums,
            "row_bytes": room.row_bytes,
            "max_tokens": room.max_tokens,
            "topk": room.topk,
            "n": room.hidden,
            **node.meeting(Way.BACK),
        }
    )
