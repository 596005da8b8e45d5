"""The `fp8_mqa_logits` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.core.kernel import launch
from deep_gemm.indexer.check import MqaLogits
from deep_gemm.indexer.kernel import KERNEL, PARAMS, MqaConfig, grid, params_of

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation


def compile_config(config: MqaConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: MqaConfig,
    p: MqaLogits,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
) -> Tensor:
    """Compute the logits on simulated SMs. What the kernel leaves unwritten is NaN."""
    tokens, columns = p.logits.shape
    whole = torch.full((tokens, p.logits.stride(0)), torch.nan, dtype=p.logits.dtype)
    given = {"q": p.q, "keys": p.keys, "scales": p.scales, "weights": p.weights, "starts": p.starts, "ends": p.ends}
    buffers = {
        name: Buffer(flat_memory(x), alignment=16 if name in ("q", "keys", "scales") else 4, is_dependent=True)
        for name, x in given.items()
    }
    buffers["logits"] = Buffer(whole, is_writable=True, is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    launcher: Any = Launcher(simulation, kernel, PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes)
    placed = [simulation.tensor(name, x) for name, x in given.items()]
    logits = simulation.tensor("logits", whole)[:, :columns]
    params = params_of(config, launcher, MqaLogits._make([*placed, logits, *p[-2:]]))
    launch(launcher, params, grid(config, tokens, p.keys.shape[0], num_sms), -1)
    return torch.as_tensor(simulation.result().buffers["logits"])[:, :columns]
