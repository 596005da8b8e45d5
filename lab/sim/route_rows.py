"""The `route_rows` kernel, and `count_routes` ahead of it, in the simulator, with a GPU's source and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deep_gemm.core.kernel import launch
from deep_gemm.moe import route_rows
from deep_gemm.moe.route_rows import COUNTER, CountConfig, RouteConfig, RouteProblem, Totals

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_kernel
from .simulate import Buffer, Simulation

POISON = -0x5A5A5A5A
OUTPUTS = ("counts", "ends", "row_of", "token_of", "ids", "arrivals")


class Kernels(NamedTuple):
    """The kernels of a configuration of `route_rows`."""

    counter: HostKernel | None
    router: HostKernel


def compile_config(config: RouteConfig, edits: Mapping[str, str] | None = None) -> Kernels:
    """Compile both kernels for the host; `edits` replaces sources by name, for mutations of either."""
    edits = edits or {}
    router = {**route_rows.KERNEL.headers(config), **edits}
    counter = None
    if config.totals == Totals.OF_PARTS:
        own = COUNTER.headers(CountConfig(config.id_bytes))
        headers = {**own, **edits, "config.cuh": own["config.cuh"]}
        counter = compile_kernel(COUNTER.source, headers, name=COUNTER.kernel_name)
    return Kernels(counter, compile_kernel(route_rows.KERNEL.source, router, name=route_rows.KERNEL.kernel_name))


def run(
    kernels: Kernels,
    config: RouteConfig,
    topk_ids: Tensor,
    num_experts: int,
    *,
    first: int = 0,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> dict[str, Tensor]:
    """Give routes their rows on simulated SMs: the outputs by name. What the kernels leave unwritten is poison."""
    arrivals = torch.empty(route_rows.num_arrivals(topk_ids.numel()), dtype=torch.int32)
    p = RouteProblem(topk_ids, num_experts, first, arrivals)
    grid = route_rows.grid(topk_ids.numel())
    buffers = {"topk_ids": Buffer(flat_memory(topk_ids), alignment=topk_ids.element_size(), is_dependent=True)}
    for name in OUTPUTS:
        poisoned = getattr(p, name).fill_(POISON)
        buffers[name] = Buffer(poisoned, is_writable=True, alignment=4, is_dependent=True)
    of_parts = torch.full((grid, num_experts), POISON, dtype=torch.int32)
    if kernels.counter is not None:
        buffers["of_parts"] = Buffer(of_parts, is_writable=True, alignment=4, is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    for name in ("topk_ids", *OUTPUTS):
        setattr(p, name, simulation.tensor(name, getattr(p, name)))

    def start(kernel: HostKernel, config: RouteConfig | CountConfig, params: bytes, inputs: frozenset[str]) -> None:
        threads, shared_bytes = config.num_threads, config.shared_bytes
        launcher = Launcher(
            simulation, kernel, route_rows.PARAMS, threads=threads, shared_bytes=shared_bytes, inputs=inputs
        )
        launch(launcher, params, grid, -1)  # type: ignore[arg-type]

    params = route_rows.params_of(p)
    if kernels.counter is not None:
        params = route_rows.params_of(p, simulation.address("of_parts"))
        start(kernels.counter, CountConfig(config.id_bytes), params, frozenset(OUTPUTS))
    start(kernels.router, config, params, frozenset({"of_parts"}))
    found = simulation.result().buffers
    return {name: torch.as_tensor(found[name]) for name in OUTPUTS}
