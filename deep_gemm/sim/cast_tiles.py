"""The `cast_tiles` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..choose.config_cast import Grain, TileCastConfig, num_tiles
from ..kernels import cast_tiles
from ..kernels.cast_tiles import TileCast
from ..kernels.launch import launch
from ..problem.layout import align, ceil_div
from ..quantize import Quantized
from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_kernel
from .simulate import Buffer, Simulation

POISON = 0xA5


class Casts(NamedTuple):
    """What the kernel wrote."""

    values: Quantized | None
    """Those that lie as x does."""
    columns: Quantized | None
    """The transposed values `[k, m]`, and their scales `[k, ceil(m / 128)]`."""


def compile_config(config: TileCastConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    headers = {**cast_tiles.headers(config), **(edits or {})}
    return compile_kernel(cast_tiles.SOURCE, headers, name=cast_tiles.NAME)


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

    Rows of the values, transposed ones too, lie `padding` elements apart, which a ValueError says were written.
    `is_m_major`: scales lie as products load them.
    """
    m, k = x.shape
    vector_bytes = 16 if config.vector > 1 else 1
    memory = {"x": Buffer(flat_memory(x), alignment=16 if config.vector > 1 else x.element_size(), is_dependent=True)}
    outputs: dict[str, Tensor] = {}

    def add(values: str, scales: str, rows: int, columns: int, shape: tuple[int, int], alignment: int) -> None:
        strides = (1, align(shape[0], 4)) if is_m_major else (shape[1], 1)
        extent = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + 1
        flat_values = torch.full(((rows - 1) * (columns + padding) + columns,), POISON, dtype=torch.uint8)
        flat_scales = torch.full((extent,), float("nan"))
        memory[values] = Buffer(flat_values, is_writable=True, alignment=alignment, is_dependent=True)
        memory[scales] = Buffer(flat_scales, is_writable=True, alignment=4, is_dependent=True)
        outputs[values] = flat_values.as_strided((rows, columns), (columns + padding, 1))
        outputs[scales] = flat_scales.as_strided(shape, strides)

    if config.grain is not None:
        add("values", "scales", m, k, scales_shape(config.grain, m, k), vector_bytes)
    if config.column_bytes:
        add("columns", "column_scales", k, m, (k, ceil_div(m, 128)), config.column_bytes)

    simulation = Simulation(memory, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, cast_tiles.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    placed = {name: simulation.tensor(name, tensor) for name, tensor in outputs.items()}
    p = TileCast(
        simulation.tensor("x", x),
        config.grain,
        placed.get("values"),
        placed.get("scales"),
        placed.get("columns"),
        placed.get("column_scales"),
        min_amax,
        rounds_up,
    )
    launch(launcher, cast_tiles.params_of(p), num_tiles(m, k), -1)  # type: ignore[arg-type]
    found = simulation.result().buffers

    def result(values: str, scales: str) -> Quantized | None:
        if values not in outputs:
            return None
        of_values, of_scales = found[values], found[scales]
        assert isinstance(of_values, Tensor)
        assert isinstance(of_scales, Tensor)
        rows, columns = outputs[values].shape
        whole = torch.cat([of_values, torch.full((padding,), POISON, dtype=torch.uint8)]).view(rows, -1)
        if not bool((whole[:, columns:] == POISON).all()):
            raise ValueError(f"{values}: written beyond a row's end")
        return whole[:, :columns].contiguous().view(torch.float8_e4m3fn), of_scales.as_strided(
            outputs[scales].shape, outputs[scales].stride()
        )

    return Casts(result("values", "scales"), result("columns", "column_scales"))
