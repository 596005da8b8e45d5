"""The `hc_prenorm` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..choose.config_hc_prenorm import HcConfig, grid
from ..kernels import hc_prenorm
from ..kernels.launch import launch
from ..problem.hyper_connections import HcProblem
from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_kernel
from .simulate import Buffer, Simulation


def compile_config(config: HcConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    headers = {**hc_prenorm.headers(config), **(edits or {})}
    return compile_kernel(hc_prenorm.SOURCE, headers, name=hc_prenorm.NAME)


def run(
    kernel: HostKernel,
    config: HcConfig,
    a: Tensor,
    b: Tensor,
    splits: int = 1,
    *,
    num_sms: int | None = None,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute D `[splits, m, n]` and sqr_sum `[splits, m]` on simulated SMs. What is left unwritten is NaN."""
    m, n = len(a), len(b)
    d, sqr_sum = torch.full((splits, m, n), torch.nan), torch.full((splits, m), torch.nan)
    buffers = {
        "a": Buffer(flat_memory(a), is_dependent=True),
        "b": Buffer(flat_memory(b), is_dependent=True),
        "d": Buffer(d, is_writable=True, is_dependent=True, alignment=4),
        "sqr_sum": Buffer(sqr_sum, is_writable=True, is_dependent=True, alignment=4),
    }
    num_sms = num_sms or 2 * config.cluster
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    launcher: Any = Launcher(
        simulation,
        kernel,
        hc_prenorm.PARAMS,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster,
    )
    placed = (simulation.tensor(name, x) for name, x in (("a", a), ("b", b), ("d", d), ("sqr_sum", sqr_sum)))
    params = hc_prenorm.params_of(config, launcher, HcProblem(*placed))
    launch(launcher, params, grid(config, m, n, splits, num_sms), -1)
    found = simulation.result().buffers
    return torch.as_tensor(found["d"]), torch.as_tensor(found["sqr_sum"])
