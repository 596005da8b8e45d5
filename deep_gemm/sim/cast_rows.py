"""The `cast_rows` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..choose.config_cast import CastConfig, num_ctas
from ..kernels import cast_rows
from ..kernels.launch import launch
from ..quantize import Quantized
from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_kernel
from .simulate import Buffer, Simulation

POISON = 0xA5


def compile_config(config: CastConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    headers = {**cast_rows.headers(config), **(edits or {})}
    return compile_kernel(cast_rows.SOURCE, headers, name=cast_rows.NAME)


def run(
    kernel: HostKernel,
    config: CastConfig,
    x: Tensor,
    scales_strides: tuple[int, int],
    *,
    min_amax: float = 0.0,
    rounds_up: bool = False,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> Quantized:
    """Cast `x` `[m, k]` on simulated SMs. What the kernel leaves unwritten is poison."""
    m, k = x.shape
    blocks = -(-k // 128)
    values = torch.full((m * k,), POISON, dtype=torch.uint8)
    extent = (m - 1) * scales_strides[0] + (blocks - 1) * scales_strides[1] + 1
    scales = torch.full((extent,), float("nan"))
    itemsize = x.element_size()
    buffers = {
        "x": Buffer(flat_memory(x), alignment=16 if config.vector > 1 else itemsize, is_dependent=True),
        "values": Buffer(values, is_writable=True, alignment=16 if config.vector > 1 else 1, is_dependent=True),
        "scales": Buffer(scales, is_writable=True, alignment=4, is_dependent=True),
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, cast_rows.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    placed_x = simulation.tensor("x", x)
    placed_values = simulation.tensor("values", values).view(m, k)
    placed_scales = simulation.tensor("scales", scales).as_strided((m, blocks), scales_strides)
    params = cast_rows.params_of(placed_x, placed_values, placed_scales, min_amax, rounds_up=rounds_up)
    launch(launcher, params, num_ctas(config, m, k), -1)  # type: ignore[arg-type]
    found = simulation.result().buffers
    of_values, of_scales = found["values"], found["scales"]
    assert isinstance(of_values, Tensor)
    assert isinstance(of_scales, Tensor)
    return of_values.view(torch.float8_e4m3fn).view(m, k), of_scales.as_strided((m, blocks), scales_strides)
