"""The `gather_rows` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

from deep_gemm.across import gather_rows
from deep_gemm.across.gather_rows import Gathered, GatherRowsConfig, Slots
from deep_gemm.core.meeting import Node
from deep_gemm.moe.check import ExpertRows

from .library import HostKernel, compile_for_host
from .simulate import KernelLaunch


def compile_config(config: GatherRowsConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(gather_rows.KERNEL, config, edits)


def launch_of(
    kernel: HostKernel, config: GatherRowsConfig, source: Slots | Node, rows: ExpertRows, to: Gathered
) -> KernelLaunch:
    """Give the launch by which a rank gathers what came. All tensors lie in the simulator's memory."""
    params = gather_rows.params_of(source, rows, to)
    grid = gather_rows.grid(config, len(rows.row_of), *to.values.shape)
    return KernelLaunch(kernel, [params], config.num_threads, config.shared_bytes, grid)
