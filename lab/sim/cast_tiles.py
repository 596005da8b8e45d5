"""The `cast_tiles` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deep_gemm.casts import cast_tiles
from deep_gemm.casts.cast_tiles import Grain, TileCast, TileCastConfig, num_tiles
from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.layout import align, ceil_div
from deep_gemm.core.kernel import launch

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation

POISON = 0xA5
OUTPUTS = ("values", "scales", "columns", "column_scales")


class Casts(NamedTuple):
    """The casts that the kernel wrote."""

    values: Quantized | None
    """Values that lie as x does."""
    columns: Quantized | None
    """The transposed values `[k, m]`, and their scales `[k, ceil(m / 128)]`."""


def compile_config(config: TileCastConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(cast_tiles.KERNEL, config, edits)


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
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
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
    run_cast(kernel, config, p, num_sms=num_sms, seed=seed, schedule=schedule)
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


def run_cast(
    kernel: HostKernel,
    config: TileCastConfig,
    p: TileCast,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> None:
    """Cast as `kernels.cast_tiles.run` does, into the outputs of `p`, on simulated SMs."""
    outputs = {name: getattr(p, name) for name in OUTPUTS if getattr(p, name) is not None}
    alignments = {
        "values": 16 if config.vector > 1 else 1,
        "columns": config.column_bytes,
        "scales": 4,
        "column_scales": 4,
    }
    x_alignment = 16 if config.vector > 1 else p.x.element_size()
    buffers = {"x": Buffer(flat_memory(p.x), alignment=x_alignment, is_dependent=True)}
    for name, tensor in outputs.items():
        buffers[name] = Buffer(flat_memory(tensor), is_writable=True, alignment=alignments[name], is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, cast_tiles.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    placed: Any = {name: simulation.tensor(name, tensor) for name, tensor in outputs.items()}
    params = cast_tiles.params_of(p._replace(x=simulation.tensor("x", p.x), **placed))
    launch(launcher, params, num_tiles(*p.x.shape), -1)  # type: ignore[arg-type]
    found = simulation.result().buffers
    for name, tensor in outputs.items():
        written = found[name]
        assert isinstance(written, Tensor)
        flat_memory(tensor).view(torch.uint8).copy_(written.view(torch.uint8))


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
