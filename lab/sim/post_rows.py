"""The `post_rows` kernel in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from deep_gemm.across import post_rows
from deep_gemm.across.post_rows import PostConfig
from deep_gemm.core.meeting import Node

from .library import HostKernel, compile_for_host
from .simulate import KernelLaunch


def compile_config(config: PostConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(post_rows.KERNEL, config, edits)


def launch_of(
    kernel: HostKernel,
    config: PostConfig,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    row_of: Tensor,
    node: Node,
    num_sms: int,
    sf: Tensor | None = None,
) -> KernelLaunch:
    """Give the launch by which a rank sends its tokens. All tensors lie in the simulator's memory."""
    params = post_rows.params_of(x, topk_ids, topk_weights, row_of, node, sf)
    grid = post_rows.grid(config, node, num_sms)
    return KernelLaunch(kernel, [params], config.num_threads, config.shared_bytes, grid)
