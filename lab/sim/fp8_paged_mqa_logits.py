"""The kernels of paged logits in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deep_gemm.core.kernel import launch
from deep_gemm.indexer import plan_paged_contexts
from deep_gemm.indexer.paged_check import PagedLogits
from deep_gemm.indexer.paged_kernel import KERNEL, PARAMS, PagedConfig, grid, params_of, splits_of
from deep_gemm.indexer.plan_paged_contexts import PlanConfig

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host, compile_kernel
from .simulate import Buffer, Simulation

POISON = -0x5A5A5A5A
TMA_ALIGNED = ("q", "cache")


def compile_config(config: PagedConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: PagedConfig,
    p: PagedLogits,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    hidden_blocks: int = 0,
) -> Tensor:
    """Compute the logits on simulated SMs. What the kernel leaves unwritten is NaN.

    So many of the cache's last blocks are not in memory: whoever reads one is found out.
    """
    columns = p.logits.shape[1]
    whole = torch.full((p.logits.shape[0], p.logits.stride(0)), torch.nan, dtype=p.logits.dtype)
    given = dict(zip(p._fields[:-1], p[:-1], strict=True))
    given["cache"] = p.cache[: len(p.cache) - hidden_blocks]
    buffers = {
        name: Buffer(
            flat_memory(x),
            alignment=16 if name in TMA_ALIGNED else 8 if name == "schedule" else 4,
            is_dependent=True,
        )
        for name, x in given.items()
    }
    buffers["logits"] = Buffer(whole, is_writable=True, is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    launcher: Any = Launcher(simulation, kernel, PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes)
    placed: dict[str, Any] = {name: simulation.tensor(name, x) for name, x in given.items()}
    memory = placed["cache"]
    placed["cache"] = SimpleNamespace(data_ptr=memory.data_ptr, stride=memory.stride, shape=p.cache.shape)
    problem = PagedLogits(**placed, logits=simulation.tensor("logits", whole)[:, :columns])
    splits = splits_of(p, num_sms)
    params = params_of(config, launcher, problem, splits)
    launch(launcher, params, grid(p, splits), -1)
    return torch.as_tensor(simulation.result().buffers["logits"])[:, :columns]


def compile_plan(config: PlanConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel that plans for the host."""
    planner = plan_paged_contexts.KERNEL
    return compile_kernel(planner.source, {**planner.headers(config), **(edits or {})}, name=planner.kernel_name)


def plan(
    kernel: HostKernel, config: PlanConfig, contexts: Tensor, shares: int, *, seed: int = 0, schedule: str | None = None
) -> Tensor:
    """Make a schedule on a simulated SM. What the kernel leaves unwritten is poison."""
    poisoned = torch.full((shares + 1, 2), POISON, dtype=torch.int32)
    buffers = {
        "contexts": Buffer(contexts, alignment=4, is_dependent=True),
        "out": Buffer(poisoned, is_writable=True, alignment=8, is_dependent=True),
    }
    simulation = Simulation(buffers, num_sms=1, seed=seed, schedule=schedule)
    launcher: Any = Launcher(
        simulation, kernel, plan_paged_contexts.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    params = plan_paged_contexts.params_of(simulation.tensor("contexts", contexts), simulation.tensor("out", poisoned))
    launch(launcher, params, 1, -1)
    return torch.as_tensor(simulation.result().buffers["out"])
