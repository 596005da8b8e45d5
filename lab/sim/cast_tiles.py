"""The `cast_tiles` kernel in the simulator, with the source and parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts import cast_tiles
from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.cast_tiles import Grain, TileCast, TileCastConfig, turns_blocks
from deep_gemm.casts.rules import Quantized, Target
from deep_gemm.core.check.layout import SCALE_BLOCK, align

from ..casts import assert_same_bits, hard_quotients, wider, wild
from .cast_rows import POISON, poison, run_kernel, strided
from .launcher import How, flat_memory
from .library import HostKernel
from .trial import Trial

OUTPUTS = ("values", "scales", "columns", "column_scales")
FP8 = torch.float8_e4m3fn


def run_cast(kernel: HostKernel | None, config: TileCastConfig, p: TileCast, **how: Unpack[How]) -> None:
    """Cast like `casts.cast_tiles.run`, into the outputs of `p`, on simulated SMs."""
    aligned = {"columns": config.column_bytes} | (dict.fromkeys(("x", "values"), 16) if config.vector > 1 else {})
    run_kernel(cast_tiles, kernel, config, p, OUTPUTS, aligned, lambda _: cast_tiles.grid(p), **how)


def check(
    kernel: HostKernel | None,
    config: TileCastConfig,
    x: Tensor,
    *,
    is_m_major: bool = True,
    padding: int = 0,
    min_amax: float = 0.0,
    rounds_up: bool = False,
    is_whole: bool = False,
    **how: Unpack[How],
) -> None:
    """Compare the casts of `x` `[m, k]` with the reference's, bit for bit: values `[m, k]`, and `[k, m]`.

    `padding` elements between rows of values must stay unchanged. `is_m_major`: scales have the layout that
    products load. `is_whole`: the kernel gets the largest magnitude of each column of x, which then has one scale.
    """
    of_columns = Target(1, config.block, rounds_up, min_amax)
    block = {Grain.CHANNELS: (config.block, 1), Grain.BLOCKS: (config.block, config.block)}
    to = of_columns if config.grain in (None, Grain.ROWS) else Target(*block[config.grain], rounds_up, min_amax)
    rows = None if config.grain is None else cast_blocks(x, to)
    columns = (
        cast_blocks(x.t(), replace(of_columns, columns=0) if is_whole else of_columns) if config.column_bytes else None
    )
    rooms = [_room_for(right, is_m_major, padding) for right in (rows, columns)]
    p = TileCast(x, to, *rooms[0], *rooms[1])
    if is_whole:
        p = p._replace(column_amaxes=x.float().abs().amax(0))
    run_cast(kernel, config, p, **how)
    for right, (values, scales) in zip((rows, columns), rooms, strict=True):
        if right is not None and values is not None and scales is not None:
            assert_same_bits((values, scales), right)
            values.view(torch.uint8).fill_(POISON)
            if not bool((flat_memory(values).view(torch.uint8) == POISON).all()):
                raise ValueError("values: expected unchanged memory after each row")


def _room_for(right: Quantized | None, is_m_major: bool, padding: int) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the outputs of a cast, filled with poison and NaN."""
    if right is None:
        return None, None
    shape = right[1].shape
    strides = (1, align(shape[0], 4)) if is_m_major else (shape[1], 1)
    return wider(poison(*right[0].shape), padding, POISON).view(FP8), strided(shape, strides)


@dataclass(frozen=True)
class TileTrial(Trial):
    """One configuration, matrix, seed and schedule."""

    kernel = cast_tiles.KERNEL
    config: TileCastConfig
    shape: tuple[int, int] = (144, 136)
    seed: int = 0
    schedule: str | None = None
    is_m_major: bool = True
    padding: int = 0
    rounds_up: bool = False
    is_whole: bool = False
    """True: the kernel gets the largest magnitude of each column. Then all numbers are finite."""

    @classmethod
    def takes(cls, config: TileCastConfig) -> bool:
        """Accept configurations that cast one matrix; `TurnedTrial` runs the others."""
        return not turns_blocks(config)

    @classmethod
    def drawn(cls, config: TileCastConfig, seed: int) -> TileTrial:
        """Draw sizes, pitches and a schedule."""
        draw = random.Random(seed)
        rows, columns = max(config.column_bytes, 1), 8 if config.vector > 1 else 1
        return cls(
            config,
            (draw.randint(1, 300 // rows) * rows, draw.randint(1, 300 // columns) * columns),
            seed,
            is_m_major=draw.random() < 0.5,
            padding=draw.choice((0, 16)),
            rounds_up=draw.random() < 0.5,
            is_whole=config.grain is None and config.block == SCALE_BLOCK and draw.random() < 0.5,
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare values and scales with the reference's, bit for bit."""
        x = matrix(self)
        x = wider(x.nan_to_num(1.0, 2.0, -2.0) if self.is_whole else x, 32, 3.0)  # x has another pitch than the outputs
        said: dict[str, Any] = {"is_m_major": self.is_m_major, "padding": self.padding, "rounds_up": self.rounds_up}
        said["is_whole"] = self.is_whole
        check(kernel, self.config, x, **said, **self.how)
        return 0.0


@dataclass(frozen=True)
class TurnedTrial(Trial):
    """Casts of matrices that transpose blocks: one configuration, sizes, seed and schedule."""

    kernel = cast_tiles.KERNEL
    config: TileCastConfig
    shape: tuple[int, int, int] = (3, 144, 136)
    """The number of matrices, then the rows and columns of each."""
    seed: int = 0
    schedule: str | None = None
    rounds_up: bool = False
    both_ways: bool = False
    """True: the kernel also writes values in x's order."""

    @classmethod
    def takes(cls, config: TileCastConfig) -> bool:
        """Accept configurations that transpose blocks."""
        return turns_blocks(config)

    @classmethod
    def drawn(cls, config: TileCastConfig, seed: int) -> TurnedTrial:
        """Draw sizes."""
        draw = random.Random(seed)
        shape = draw.randint(1, 4), draw.randint(1, 18) * 16, draw.randint(1, 35) * 8
        return cls(config, shape, seed, rounds_up=draw.random() < 0.5, both_ways=draw.random() < 0.5)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare values and scales with the reference's, bit for bit."""
        matrices, m, k = self.shape
        x = wider(matrix(TileTrial(self.config, (matrices * m, k), self.seed)), 32, 3.0)
        to = Target(SCALE_BLOCK, SCALE_BLOCK, self.rounds_up)
        values, scales = cast_blocks(x.view(matrices, m, k), to)
        columns, room = poison(matrices, k, m).view(FP8), torch.full(scales.shape, torch.nan, dtype=torch.float32)
        in_order = poison(*x.shape).view(FP8) if self.both_ways else None
        run_cast(kernel, self.config, TileCast(x, to, in_order, room.view(-1, room.shape[-1]), columns), **self.how)
        assert_same_bits((columns, room), (values.mT.contiguous(), scales))
        if in_order is not None:
            assert_same_bits((in_order.view(values.shape), room), (values, scales))
        return 0.0


def matrix(trial: TileTrial) -> Tensor:
    """Make a matrix: the first 128 columns are ordinary, the third 128 are tiny, and all others have any magnitude."""
    (m, k), dtype = trial.shape, trial.config.dtype
    x = wild(m, k, dtype, trial.seed, block_rows=32)
    ordinary = torch.randn(m, min(k, 128), generator=torch.Generator().manual_seed(trial.seed), dtype=torch.float32) * 3
    x[:, :128] = ordinary.to(dtype)
    x[:, 256:384] = ordinary[:, : max(min(k - 256, 128), 0)] * 2.0**-115
    if dtype == torch.float32 and k > 128:  # quotients that need the division's last step, also with tiny scales
        hard = hard_quotients()
        rows = torch.arange(m) % len(hard)
        x[:, 128:256] = (
            hard[rows][:, : k - 128]
            * 2.0 ** torch.tensor([0, -117], dtype=torch.int64)[torch.arange(m) // 32 % 2][:, None]
        )
    return x
