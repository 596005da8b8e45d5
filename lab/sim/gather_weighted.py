"""The kernels `gather_weighted` and `gather_weighted_many` in the simulator, with a GPU's source and parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deep_gemm.core.kernel import launch
from deep_gemm.moe import gather_weighted
from deep_gemm.moe.gather_weighted import KERNEL, MANY, GatherConfig, ManyConfig

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation


def compile_config(config: GatherConfig | ManyConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(MANY if isinstance(config, ManyConfig) else KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: GatherConfig | ManyConfig,
    y: Tensor,
    row_of: Tensor,
    weights: Tensor | None,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> Tensor:
    """Sum up each token's rows on simulated SMs. What the kernel leaves unwritten is NaN."""
    out = torch.full((row_of.shape[0], y.shape[1]), float("nan"), dtype=torch.bfloat16)
    buffers = {
        "y": Buffer(flat_memory(y), is_dependent=True),
        "row_of": Buffer(row_of, alignment=4, is_dependent=True),
        "out": Buffer(out, is_writable=True, is_dependent=True),
    }
    if weights is not None:
        buffers["weights"] = Buffer(flat_memory(weights), alignment=weights.element_size(), is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    threads, shared_bytes = config.num_threads, config.shared_bytes
    launcher = Launcher(simulation, kernel, gather_weighted.PARAMS, threads=threads, shared_bytes=shared_bytes)
    placed_y, placed_rows, placed_out = (
        simulation.tensor(name, x) for name, x in (("y", y), ("row_of", row_of), ("out", out))
    )
    placed_weights = None if weights is None else simulation.tensor("weights", weights)
    grid = num_sms if isinstance(config, ManyConfig) else gather_weighted.grid(config, *out.shape)
    params = gather_weighted.params_of(placed_y, placed_rows, placed_weights, placed_out)
    launch(launcher, params, grid, -1)  # type: ignore[arg-type]
    return torch.as_tensor(simulation.result().buffers["out"])
