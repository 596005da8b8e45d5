"""Products of groups along k on a GPU: two launches, one that makes the groups' tensor maps and one that multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.call import FREE_ROWS
from ..core.check.layout import ceil_div
from ..core.check.memory import empty
from ..core.gpu import gpu_of
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.settings import get_num_sms
from ..core.shadow import Mapped
from .ask.depths import k_grouped_problem
from .config.tall import BLOCK_K, GemmConfig
from .kernel import K_GROUP_MAPS, MAPS, MAX_INLINE_KS
from .launch import fitting, prepared, start
from .problem import Problem, write_without_depth
from .product import Product, by_operator

GROUP_BYTES, COUNTER_BYTES = 320, 4
"""Bytes that `k_group_maps` writes: a `KGroup` for each group, and after all groups a counter of tiles."""


def run_on_gpu(p: Problem, config: GemmConfig | None = None) -> None:
    """Compute a product of groups along k on the GPU of its tensors. The host reads no depths from the GPU.

    If `config` is None, the heuristics choose it.
    """
    if 0 in (p.groups, p.m, p.n):
        return
    if p.a.numel() == 0:  # all groups have depth 0
        write_without_depth(p)
        return
    config = fitting(config, p, gpu_of(p.d.get_device()))
    room = empty("maps of groups along k", (room_bytes(p.groups),), torch.uint8, p.d.device)
    launch(prepared(p, config), config, get_num_sms(), depths_of(p.ks, p.ks_tensor, p.d.device), room)


def room_bytes(num_groups: int) -> int:
    """Count the bytes that `k_group_maps` writes for the kernel that multiplies."""
    return num_groups * GROUP_BYTES + COUNTER_BYTES


def launch(p: Problem, config: GemmConfig, num_sms: int, depths: Any, room: Tensor) -> None:
    """Launch both kernels for a `prepared` problem; the first writes `room`, and the second reads it."""
    device, ctas = p.d.get_device(), ceil_div(p.groups, MAPS.num_threads)
    K_GROUP_MAPS.run(MAPS, values_of_maps(p, config, room, depths), ctas, device)
    # The kernel that multiplies starts while the maps are made, and waits for them itself.
    start(p, config, num_sms, p.groups, is_dependent=True, by_depth=room)


def values_of_maps(p: Problem, config: GemmConfig, room: Tensor, depths: Any) -> dict[str, Any]:
    """Return the parameters of the kernel that makes the maps, by member."""
    # These maps serve as templates: the kernel writes each group's own address, size and stride along k into copies.
    maps = {
        member: Mapped(TensorMap(ElementType.UINT8, (BLOCK_K, rows), (BLOCK_K,), (BLOCK_K, block), 128), x)
        for member, x, rows, block in (("map_a", p.a, p.m, config.box_rows_of_a), ("map_b", p.b, p.n, config.block_n))
    }
    are_inline = isinstance(depths, tuple)
    return {
        **maps,
        **{"a": p.a, "b": p.b, "k_groups": room, "ks": None if are_inline else depths},
        **{"m": p.m, "n": p.n, "count": p.groups, "sum_k": p.a.numel() // p.m, "num_k_blocks": p.sfa.shape[1]},
        "inline_ks": depths if are_inline else b"",
    }


def product(k_major_scales: bool) -> Product:
    """Make the `Product` of groups along k, with scales whose k is contiguous or not."""
    scales = ((1 if k_major_scales else 0,), ())
    return Product(
        "k_grouped_fp8_gemm_nt_contiguous",
        partial(k_grouped_problem, k_major_scales=k_major_scales),
        ("recipe",),
        ("c", "ks_tensor", "ks"),
        partial(by_operator, k_major_scales=k_major_scales),
        run_on_gpu,
        free=(FREE_ROWS, scales, FREE_ROWS, scales),
    )


def depths_of(ks: Sequence[int] | None, ks_tensor: Tensor | None, device: torch.device) -> Any:
    """Return the groups' k: a tensor on the GPU, or numbers that fit in a launch's parameters. The host never waits."""
    if ks_tensor is not None:
        return ks_tensor
    ks = tuple(ks or ())
    if len(ks) <= MAX_INLINE_KS:
        return ks
    # Too many depths for a kernel's parameters; to capture such a call in a graph, pass `ks_tensor`.
    return torch.tensor(ks, dtype=torch.int32, device="cpu").pin_memory().to(device, non_blocking=True)


ALONG_K, BY_ROW = product(k_major_scales=True), product(k_major_scales=False)
