"""The `pack_rows` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deep_gemm.across import pack_rows
from deep_gemm.across.pack_rows import PackConfig
from deep_gemm.core.kernel import launch

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .simulate import Buffer, Simulation

POISON = -0x5A5A5A5A


def compile_config(config: PackConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(pack_rows.KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: PackConfig,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    row_of: Tensor | None,
    shape: tuple[int, int],
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> Tensor:
    """Pack tokens on simulated SMs: int32 rows of this shape. What the kernel leaves unwritten is poison."""
    rows = torch.full(shape, POISON, dtype=torch.int32)
    buffers = {
        "x": Buffer(flat_memory(x), is_dependent=True),
        "topk_ids": Buffer(topk_ids, alignment=topk_ids.element_size(), is_dependent=True),
        "topk_weights": Buffer(topk_weights, alignment=4, is_dependent=True),
        "rows": Buffer(rows, is_writable=True, is_dependent=True),
    }
    if row_of is not None:
        buffers["row_of"] = Buffer(row_of, alignment=4, is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    launcher = Launcher(
        simulation, kernel, pack_rows.PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    params = pack_rows.params_of(
        simulation.tensor("x", x),
        simulation.tensor("topk_ids", topk_ids),
        simulation.tensor("topk_weights", topk_weights),
        None if row_of is None else simulation.tensor("row_of", row_of),
        simulation.tensor("rows", rows),
    )
    slots = shape[0] if row_of is None else x.shape[0]
    launch(launcher, params, pack_rows.grid(config, slots, x.shape[1]), -1)  # type: ignore[arg-type]
    return torch.as_tensor(simulation.result().buffers["rows"])
