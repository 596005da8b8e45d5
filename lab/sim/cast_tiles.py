"""The `cast_tiles` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts import cast_tiles
from deep_gemm.casts.cast_tiles import Grain, TileCast, TileCastConfig, num_tiles
from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_channel_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.layout import align, ceil_div

from ..casts import assert_same_bits, hard_quotients, wild
from .launcher import How, Stage
from .library import HostKernel
from .trial import Trial

POISON = 0xA5
OUTPUTS = ("values", "scales", "columns", "column_scales")


class Casts(NamedTuple):
    """The casts that the kernel wrote."""

    values: Quantized | None
    """Values that lie as x does."""
    columns: Quantized | None
    """The transposed values `[k, m]`, and their scales `[k, ceil(m / 128)]`."""


def scales_shape(grain: Grain, m: int, k: int) -> tuple[int, int]:
    """Rows and columns of the scales of values that lie as x does."""
    return (m if grain == Grain.ROWS else ceil_div(m, 128)), (k if grain == Grain.CHANNELS else ceil_div(k, 128))


def run(
    kernel: HostKernel,
    config: TileCastConfig,
    x: Tensor,
    *,
    is_m_major: bool = True,
    padding: int = 0,
    min_amax: float = 0.0,
    rounds_up: bool = False,
    **how: Unpack[How],
) -> Casts:
    """Cast `x` `[m, k]` on simulated SMs. What the kernel leaves unwritten is poison.

    Rows of the values, transposed ones too, lie `padding` elements apart; a ValueError says that those were written.
    `is_m_major`: scales lie as products load them.
    """
    m, k = x.shape
    values = scales = columns = column_scales = None
    if config.grain is not None:
        values = _poisoned(m, k, padding)
        scales = _empty_scales(*scales_shape(config.grain, m, k), is_m_major=is_m_major)
    if config.column_bytes:
        columns = _poisoned(k, m, padding)
        column_scales = _empty_scales(k, ceil_div(m, 128), is_m_major=is_m_major)
    p = TileCast(x, config.grain, values, scales, columns, column_scales, min_amax, rounds_up)
    run_cast(kernel, config, p, **how)
    for name, written in (("values", values), ("columns", columns)):
        if written is not None and padding:
            rows, pitch = written.shape[0] - 1, written.stride(0)
            beyond = written.view(torch.uint8).as_strided((rows, padding), (pitch, 1), pitch - padding)
            if not bool((beyond == POISON).all()):
                raise ValueError(f"{name}: written beyond a row's end")
    return Casts(
        None if values is None or scales is None else (values.contiguous(), scales),
        None if columns is None or column_scales is None else (columns.contiguous(), column_scales),
    )


def run_cast(kernel: HostKernel, config: TileCastConfig, p: TileCast, **how: Unpack[How]) -> None:
    """Cast as `casts.cast_tiles.run` does, into the outputs of `p`, on simulated SMs."""
    aligned = {"columns": config.column_bytes} | (dict.fromkeys(("x", "values"), 16) if config.vector > 1 else {})
    stage = Stage(config, {"x": p.x}, {name: getattr(p, name) for name in OUTPUTS}, aligned, **how)
    stage.run(
        cast_tiles.KERNEL,
        kernel,
        config,
        lambda _, at: cast_tiles.params_of(p._replace(**at)),
        num_tiles(*p.x.shape),
    )


def _poisoned(rows: int, columns: int, padding: int) -> Tensor:
    """Make room for FP8 values in rows that lie `padding` elements apart."""
    pitch = columns + padding
    memory = torch.full(((rows - 1) * pitch + columns,), POISON, dtype=torch.uint8)
    return memory.view(torch.float8_e4m3fn).as_strided((rows, columns), (pitch, 1))


def _empty_scales(rows: int, columns: int, *, is_m_major: bool) -> Tensor:
    strides = (1, align(rows, 4)) if is_m_major else (columns, 1)
    return torch.full(((rows - 1) * strides[0] + (columns - 1) * strides[1] + 1,), float("nan")).as_strided(
        (rows, columns), strides
    )


RIGHT: dict[Grain, Callable[[Tensor, bool, float], Quantized]] = {
    Grain.ROWS: lambda x, rounds_up, min_amax: per_token_cast_to_fp8(x, rounds_up, min_amax=min_amax),
    Grain.CHANNELS: lambda x, rounds_up, _: per_channel_cast_to_fp8(x, rounds_up),
    Grain.BLOCKS: lambda x, rounds_up, _: per_block_cast_to_fp8(x, rounds_up),
}


def check(
    kernel: HostKernel,
    config: TileCastConfig,
    x: Tensor,
    *,
    is_m_major: bool = True,
    padding: int = 0,
    min_amax: float = 0.0,
    rounds_up: bool = False,
    **how: Unpack[How],
) -> None:
    """Compare the casts of `x` with the reference's, to the bit."""
    found = run(
        kernel,
        config,
        x,
        is_m_major=is_m_major,
        padding=padding,
        min_amax=min_amax,
        rounds_up=rounds_up,
        **how,
    )
    if found.values is not None and config.grain is not None:
        assert_same_bits(found.values, RIGHT[config.grain](x, rounds_up, min_amax))
    if found.columns is not None:
        assert_same_bits(found.columns, RIGHT[Grain.ROWS](x.t(), rounds_up, min_amax))


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
        )

    def check(self, kernel: HostKernel) -> float:
        """Compare values and scales with the reference's, to the bit."""
        x = matrix(self)
        # Rows of a wider matrix: a pitch of its own.
        x = torch.cat([x, torch.full((len(x), 32), 3.0, dtype=x.dtype)], dim=1)[:, : x.shape[1]]
        check(
            kernel,
            self.config,
            x,
            is_m_major=self.is_m_major,
            padding=self.padding,
            rounds_up=self.rounds_up,
            seed=self.seed,
            schedule=self.schedule,
        )
        return 0.0


def matrix(trial: TileTrial) -> Tensor:
    """Columns of the first block are ordinary, those of the third tiny, those of others of any size."""
    (m, k), dtype = trial.shape, trial.config.dtype
    x = wild(m, k, dtype, trial.seed, block_rows=32)
    ordinary = torch.randn(m, min(k, 128), generator=torch.Generator().manual_seed(trial.seed)) * 3
    x[:, :128] = ordinary.to(dtype)
    x[:, 256:384] = ordinary[:, : max(min(k - 256, 128), 0)] * 2.0**-115
    if dtype == torch.float32 and k > 128:  # quotients that only the last step gets right, by tiny scales too
        hard = hard_quotients()
        rows = torch.arange(m) % len(hard)
        x[:, 128:256] = hard[rows][:, : k - 128] * 2.0 ** torch.tensor([0, -117])[torch.arange(m) // 32 % 2][:, None]
    return x
