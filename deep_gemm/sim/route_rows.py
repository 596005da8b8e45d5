"""The `route_rows` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels import route_rows
from ..kernels.launch import launch
from ..kernels.route_rows import RouteConfig, RouteProblem
from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_kernel
from .simulate import Buffer, Simulation

POISON = -0x5A5A5A5A
OUTPUTS = ("counts", "ends", "row_of", "token_of", "ids")


def compile_config(config: RouteConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    headers = {**route_rows.headers(config), **(edits or {})}
    return compile_kernel(route_rows.SOURCE, headers, name=route_rows.NAME)


def run(
    kernel: HostKernel,
    config: RouteConfig,
    topk_ids: Tensor,
    num_experts: int,
    *,
    first: int = 0,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> dict[str, Tensor]:
    """Give routes their rows on simulated SMs: the outputs by name. What the kernel leaves unwritten is poison."""
    p = RouteProblem(topk_ids, num_experts, first)
    buffers = {"topk_ids": Buffer(flat_memory(topk_ids), alignment=topk_ids.element_size(), is_dependent=True)}
    for name in OUTPUTS:
        poisoned = getattr(p, name).fill_(POISON)
        buffers[name] = Buffer(poisoned, is_writable=True, alignment=4, is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, route_rows.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    for name in ("topk_ids", *OUTPUTS):
        setattr(p, name, simulation.tensor(name, getattr(p, name)))
    launch(launcher, route_rows.params_of(p), route_rows.grid(config, topk_ids.numel()), -1)  # type: ignore[arg-type]
    found = simulation.result().buffers
    return {name: torch.as_tensor(found[name]) for name in OUTPUTS}
