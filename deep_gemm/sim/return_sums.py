"""The `return_sums` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..kernels import return_sums
from ..kernels.meeting import Node
from ..kernels.return_sums import ReturnConfig
from .library import HostKernel, compile_kernel
from .simulate import KernelLaunch


def compile_config(config: ReturnConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    headers = {**return_sums.headers(config), **(edits or {})}
    return compile_kernel(return_sums.SOURCE, headers, name=return_sums.NAME)


def launch_of(
    kernel: HostKernel, config: ReturnConfig, y: Tensor, row_of: Tensor, node: Node, num_sms: int
) -> KernelLaunch:
    """Give the launch by which a rank sends its sums back. All tensors lie in the simulator's memory."""
    params = return_sums.params_of(y, row_of, node)
    grid = return_sums.grid(config, node, num_sms)
    return KernelLaunch(kernel, [params], config.num_threads, config.shared_bytes, grid)
