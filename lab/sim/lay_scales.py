"""The `lay_scales` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deep_gemm.casts import lay_scales
from deep_gemm.casts.lay_scales import ScalesConfig
from deep_gemm.core.kernel import launch

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation


def compile_config(config: ScalesConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(lay_scales.KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: ScalesConfig,
    sf: Tensor,
    out: Tensor,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> None:
    """Copy scales as `kernels.lay_scales.run` does, on simulated SMs. What the kernel leaves unwritten stays."""
    buffers = {
        "sf": Buffer(flat_memory(sf), alignment=4, is_dependent=True),
        "out": Buffer(flat_memory(out), is_writable=True, alignment=4, is_dependent=True),
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, lay_scales.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    params = lay_scales.params_of(simulation.tensor("sf", sf), simulation.tensor("out", out))
    launch(launcher, params, lay_scales.grid(config, sf), -1)  # type: ignore[arg-type]
    flat_memory(out).copy_(torch.as_tensor(simulation.result().buffers["out"]))
