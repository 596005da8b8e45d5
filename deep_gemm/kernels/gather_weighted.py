"""The kernel of cuda/gather_weighted.cuh: how it is compiled, and launched for the rows of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..problem.layout import ceil_div
from .launch import OrdinaryKernel
from .params import Field, Kind, Params

PARAMS = Params(
    "GatherParams",
    Field("y", Kind.POINTER),
    Field("row_of", Kind.POINTER),
    Field("weights", Kind.POINTER),
    Field("out", Kind.POINTER),
    Field("y_pitch", Kind.UINT64),
    Field("weights_pitch", Kind.UINT64),
    Field("out_pitch", Kind.UINT64),
    Field("tokens", Kind.UINT32),
    Field("topk", Kind.UINT32),
    Field("n", Kind.UINT32),
)
"""`GatherParams` of cuda/gather_weighted.cuh."""
COLUMNS = 8
"""Columns of a thread: 16 bytes, at a multiple of which rows of y and of the output begin."""
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, None)
"""None: rows are summed up as they are."""


@dataclass(frozen=True)
class GatherConfig:
    """One configuration."""

    weights: torch.dtype | None
    num_threads: int = 64
    shared_bytes: ClassVar[int] = 0
    ctas_per_sm: ClassVar[int] = 8

    @property
    def name(self) -> str:
        """Short, for people."""
        return "no weights" if self.weights is None else f"weights in {str(self.weights).removeprefix('torch.')}"

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return None if self.weights in WEIGHTS else "needs weights in FP32, BF16 or FP16, or none"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        return "\n".join(
            [
                "#pragma once",
                '#include "types.cuh"',
                f"constexpr uint32_t kWeightBytes = {0 if self.weights is None else self.weights.itemsize};",
                f"constexpr bool kWeightIsFp16 = {str(self.weights == torch.float16).lower()};",
                f"constexpr uint32_t kNumThreads = {self.num_threads};",
                "",
            ]
        )


KERNEL: OrdinaryKernel[GatherConfig] = OrdinaryKernel("gather_weighted", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan


def run(y: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Sum up each token's rows on the GPU that they are on. `row_of` is contiguous, and so are rows of `weights`."""
    if out.numel() > 0:
        config = config_of(None if weights is None else weights.dtype)
        KERNEL.run(config, params_of(y, row_of, weights, out), grid(config, *out.shape), y.get_device())


@cache
def config_of(weights: torch.dtype | None) -> GatherConfig:
    """The configuration for weights of this type."""
    return GatherConfig(weights)


def reachable_gather() -> list[GatherConfig]:
    """Every configuration that `run` can take."""
    return [GatherConfig(dtype) for dtype in WEIGHTS]


def grid(config: GatherConfig, tokens: int, n: int) -> int:
    """As many CTAs for each token as its columns need."""
    return tokens * ceil_div(n // COLUMNS, config.num_threads)


def params_of(y: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor) -> bytes:
    """Give the kernel's parameters."""
    return PARAMS.pack(
        {
            "y": y.data_ptr(),
            "row_of": row_of.data_ptr(),
            "weights": 0 if weights is None else weights.data_ptr(),
            "out": out.data_ptr(),
            "y_pitch": y.stride(0),
            "weights_pitch": 0 if weights is None else weights.stride(0),
            "out_pitch": out.stride(0),
            "tokens": out.shape[0],
            "topk": row_of.shape[1],
            "n": out.shape[1],
        }
    )
