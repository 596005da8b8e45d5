"""The `meet_ranks` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

from deep_gemm.across import meet_ranks
from deep_gemm.core.meeting import Node

from .library import HostKernel, compile_for_host
from .simulate import KernelLaunch


def compile_config(edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(meet_ranks.KERNEL, meet_ranks.CONFIG, edits)


def launch_of(kernel: HostKernel, node: Node) -> KernelLaunch:
    """Give the launch by which a rank meets the others."""
    config = meet_ranks.CONFIG
    return KernelLaunch(kernel, [meet_ranks.params_of(node)], config.num_threads, config.shared_bytes, 1)
