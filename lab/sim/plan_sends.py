"""The `plan_sends` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deep_gemm.across import plan_sends
from deep_gemm.across.plan_sends import NUM_FACTS, PlanSendsConfig
from deep_gemm.core.kernel import launch

from .launcher import Launcher
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation

POISON = -0x5A5A5A5A


def compile_config(config: PlanSendsConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(plan_sends.KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: PlanSendsConfig,
    topk_ids: Tensor,
    facts: Sequence[int],
    experts_here: int,
    ranks: int,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Plan on simulated SMs: `row_of`, and what is told. What the kernel leaves unwritten is poison."""
    tokens, topk = topk_ids.shape
    row_of = torch.full((max(tokens, 1), topk), POISON, dtype=torch.int32)  # no buffer is empty
    told = torch.full((NUM_FACTS + 2 * ranks,), POISON, dtype=torch.int64)
    tensors = {"topk_ids": topk_ids if tokens else row_of.to(topk_ids.dtype), "row_of": row_of, "told": told}
    buffers = {
        name: Buffer(x, is_writable=name != "topk_ids", alignment=x.element_size(), is_dependent=True)
        for name, x in tensors.items()
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, plan_sends.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    ids, rows, numbers = (simulation.tensor(name, x) for name, x in tensors.items())
    params = plan_sends.params_of(ids[:tokens], facts, rows, numbers, experts_here, ranks)
    launch(launcher, params, plan_sends.grid(config, tokens), -1)  # type: ignore[arg-type]
    found = simulation.result().buffers
    return torch.as_tensor(found["row_of"])[:tokens], torch.as_tensor(found["told"])
