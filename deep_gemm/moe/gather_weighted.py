"""The kernels of moe/gather_weighted.cuh and moe/gather_weighted_many.cuh, for few tokens and for many: their
configurations, and their launches for the rows of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.gpu import SHARED_BYTES_LIMIT, gpu_of
from ..core.kernel import Config, Kernel
from ..core.settings import num_sms_of

COLUMNS = 8
"""Columns of a thread: 16 bytes. Rows of y and of the output begin at multiples of 16 bytes."""
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, None)
"""Types of the rows' weights. None: rows are added up without weights."""
MANY_UNITS = 4
"""The ring is faster if each CTA has at least this number of units; else some CTAs have twice the units of others."""


@dataclass(frozen=True)
class WeightsConfig(Config):
    """The common part of both kernels' configurations: the weights of rows."""

    weights: torch.dtype | None

    @property
    def name(self) -> str:
        """Return a short name for people."""
        return "no weights" if self.weights is None else f"weights in {str(self.weights).removeprefix('torch.')}"

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.weights in WEIGHTS, "weights in FP32, BF16 or FP16, or none"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source needs."""
        weight_bytes = 0 if self.weights is None else self.weights.itemsize
        return {"kWeightBytes": weight_bytes, "kWeightIsFp16": self.weights == torch.float16, **super().constants()}


@dataclass(frozen=True)
class GatherConfig(WeightsConfig):
    """One configuration of gather_weighted."""

    num_threads: ClassVar[int] = 64
    taken = "num_threads", "ctas_per_sm"

    @property
    def ctas_per_sm(self) -> int:
        """Count the CTAs that share an SM: the most that registers allow without a stack."""
        return 10 if self.weights in (torch.bfloat16, torch.float16) else 11


@dataclass(frozen=True)
class ManyConfig(WeightsConfig):
    """One configuration of gather_weighted_many: a producer, and math warps; a thread sums 8 columns of each panel."""

    num_stages: int = 6
    panels: int = 2
    num_math_warps: int = 8
    ctas_per_sm: int = 2
    multicast_ctas = 1
    taken = "num_stages", "panels", "num_math_warps", "num_threads", "ctas_per_sm", "shared_bytes", "multicast_ctas"

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return self.num_math_warps * 32 + 32

    @property
    def piece(self) -> int:
        """Columns of a unit, and of a slot of the ring."""
        return self.panels * self.num_math_warps * 32 * COLUMNS

    @property
    def shared_bytes(self) -> int:
        """Return the size of `SharedStorage` in moe/gather_weighted_many.cuh, which asserts the same size."""
        return self.num_stages * (self.piece * 2 + 2 * 8)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        shared = f"{self.shared_bytes} bytes of shared memory, more than {SHARED_BYTES_LIMIT}"
        yield self.shared_bytes <= SHARED_BYTES_LIMIT, shared
        yield from super().rules()


KERNEL = Kernel("gather_weighted", "GatherParams", lambda: [GatherConfig(dtype) for dtype in WEIGHTS])
MANY = Kernel("gather_weighted_many", "GatherParams", lambda: [ManyConfig(dtype) for dtype in WEIGHTS], bulk_copies=1)


def run(y: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor, *, is_dependent: bool = False) -> None:
    """Sum up each token's rows on their GPU. `row_of` and each row of `weights` are contiguous."""
    if out.numel() == 0:
        return
    device, (tokens, n) = y.get_device(), out.shape
    num_sms = num_sms_of(gpu_of(device).num_sms)
    config = config_of(None if weights is None else weights.dtype, tokens, n, num_sms)
    values = values_of(y, row_of, weights, out)
    if isinstance(config, GatherConfig):
        KERNEL.run(config, values, grid(config, tokens, n), device, is_dependent=is_dependent)
    else:
        MANY.run(config, values, config.ctas_per_sm * num_sms, device, is_dependent=is_dependent)


def config_of(weights: torch.dtype | None, tokens: int, n: int, num_sms: int) -> GatherConfig | ManyConfig:
    """Choose the configuration for weights of this type: the ring if each CTA gets at least `MANY_UNITS` units."""
    many = many_of(weights)
    is_many = tokens * ceil_div(n, many.piece) >= MANY_UNITS * many.ctas_per_sm * num_sms
    return many if is_many else few_of(weights)


few_of, many_of = cache(GatherConfig), cache(ManyConfig)


def grid(config: GatherConfig, tokens: int, n: int) -> int:
    """Count the CTAs: each token has the number that its columns need."""
    return tokens * ceil_div(n // COLUMNS, config.num_threads)


def values_of(y: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor) -> dict[str, Any]:
    """Return the members of the parameters, which are the same for both kernels."""
    return {
        "y": y,
        "row_of": row_of,
        "weights": weights,
        "out": out,
        "y_pitch": y.stride(0),
        "weights_pitch": 0 if weights is None else weights.stride(0),
        "out_pitch": out.stride(0),
        "tokens": out.shape[0],
        "topk": row_of.shape[1],
        "n": out.shape[1],
    }
