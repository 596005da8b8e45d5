"""The `cast_rows` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.casts import cast_rows
from deep_gemm.casts.cast_rows import CastConfig, RowCast, num_ctas
from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.kernel import launch

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation

POISON = 0xA5
OUTPUTS = ("values", "scales")
TENSORS = ("x", *OUTPUTS, "row_weights", "counts", "ends", "row_of")


def compile_config(config: CastConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(cast_rows.KERNEL, config, edits)


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
    p = RowCast(x, empty_values(m, k), empty_scales(m, k, scales_strides), min_amax, rounds_up)
    run_cast(kernel, config, p, num_sms=num_sms, seed=seed, schedule=schedule)
    return p.values, p.scales


def empty_values(m: int, k: int) -> Tensor:
    """Make room for FP8 values, full of poison."""
    return torch.full((m, k), POISON, dtype=torch.uint8).view(torch.float8_e4m3fn)


def empty_scales(m: int, k: int, strides: tuple[int, int]) -> Tensor:
    """Make room for the scales of rows, full of NaN."""
    blocks = ceil_div(k, 128)
    extent = (m - 1) * strides[0] + (blocks - 1) * strides[1] + 1
    return torch.full((extent,), float("nan")).as_strided((m, blocks), strides)


def run_cast(
    kernel: HostKernel,
    config: CastConfig,
    p: RowCast,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> None:
    """Cast as `kernels.cast_rows.run` does, into the outputs of `p`, on simulated SMs."""
    alignment, itemsize = (16, p.x.element_size())
    tensors = {name: getattr(p, name) for name in TENSORS if getattr(p, name) is not None}
    alignments = {"x": alignment if config.vector > 1 else itemsize, "values": alignment if config.vector > 1 else 1}
    buffers = {
        name: Buffer(
            flat_memory(tensor), is_writable=name in OUTPUTS, alignment=alignments.get(name, 4), is_dependent=True
        )
        for name, tensor in tensors.items()
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, cast_rows.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    placed: Any = {name: simulation.tensor(name, tensor) for name, tensor in tensors.items()}
    grid = num_ctas(config, p.x.shape[0], p.values.shape[1], num_sms)
    launch(launcher, cast_rows.params_of(p._replace(**placed)), grid, -1)  # type: ignore[arg-type]
    found = simulation.result().buffers
    for name in OUTPUTS:
        written = found[name]
        assert isinstance(written, Tensor)
        flat_memory(tensors[name]).view(torch.uint8).copy_(written.view(torch.uint8))
