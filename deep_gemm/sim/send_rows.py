"""The `send_rows` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..kernels import send_rows
from ..kernels.meeting import Node
from ..kernels.send_rows import SendConfig
from .library import HostKernel, compile_kernel
from .simulate import KernelLaunch


def compile_config(config: SendConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    headers = {**send_rows.headers(config), **(edits or {})}
    return compile_kernel(send_rows.SOURCE, headers, name=send_rows.NAME)


def launch_of(
    kernel: HostKernel,
    config: SendConfig,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    row_of: Tensor,
    experts_here: int,
    node: Node,
    num_sms: int,
    sf: Tensor | None = None,
) -> KernelLaunch:
    """Give the launch by which a rank sends its tokens. All tensors lie in the simulator's memory."""
    params = send_rows.params_of(x, topk_ids, topk_weights, row_of, experts_here, node, sf)
    grid = send_rows.grid(config, node, num_sms)
    return KernelLaunch(kernel, [params], config.num_threads, config.shared_bytes, grid)
