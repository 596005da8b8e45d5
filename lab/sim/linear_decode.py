"""The `linear_decode` kernel in the simulator, with the source, tensor map and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.core.check.checks import Operand
from deep_gemm.core.kernel import launch
from deep_gemm.linear.kernel import KERNEL, PARAMS, LinearDecodeConfig, grid, params_of

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation


def compile_config(config: LinearDecodeConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: LinearDecodeConfig,
    x: Tensor,
    w: Operand,
    c: Tensor | None = None,
    *,
    num_sms: int | None = None,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    is_dependent: bool = True,
) -> Tensor:
    """Compute C + cast(x) @ w.T on simulated SMs. C may have a stride of 0.

    `is_dependent`: the kernel ahead may still run.
    """
    values, scales = w
    d = torch.full((len(x), len(values)), float("nan"), dtype=torch.bfloat16)
    given = {"x": x, "values": values, "scales": scales} | ({} if c is None else {"c": c})
    buffers = {
        name: Buffer(flat_memory(tensor), alignment=4 if name == "scales" else 16, is_dependent=is_dependent)
        for name, tensor in given.items()
    }
    buffers["d"] = Buffer(d, is_writable=True, is_dependent=is_dependent)
    num_sms = num_sms or 2 * config.cluster_size
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    launcher: Any = Launcher(
        simulation,
        kernel,
        PARAMS,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster_size,
    )
    placed = {name: simulation.tensor(name, tensor) for name, tensor in given.items()}
    of_d = simulation.tensor("d", d)
    params = params_of(config, launcher, placed["x"], placed["values"], placed["scales"], of_d, placed.get("c"))
    launch(launcher, params, grid(config, *d.shape), -1)
    found = simulation.result().buffers["d"]
    assert isinstance(found, Tensor)
    return found
