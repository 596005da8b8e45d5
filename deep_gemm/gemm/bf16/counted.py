"""Products of groups along k of BF16 on a GPU that alone may know their depths: plans that serve any depths."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.jit import driver
from ...core.jit.tensor_map import ElementType, TensorMap
from ...core.sm90 import WGMMA_ROWS
from ..kernel import K_COUNTED_PARAMS, MOST_INLINE_COUNTS
from ..maps import late_map, output_map
from ..output import Groups, Output
from ..plan import SFA, A, B, C, D, Place, Plan
from . import depths as bf16_depths
from .config import BLOCK_K, MOST_COUNTED, Bf16Config
from .launch import NO_SCALES, grid


class CountedProblem(NamedTuple):
    """D[g] = C[g] + A_g.T @ B_g, with the groups' rows of A and B one after another."""

    a: Tensor
    """`[rows, m]`, of which the groups have the first ones."""
    b: Tensor
    """`[rows, n]`"""
    d: Tensor
    c: Tensor | None
    sfa: Tensor | None
    """No scales: the groups' depths, in their place among the operands. None: they are `ks`."""
    ks: tuple[int, ...] | None
    """Depths from the host, at most `MOST_INLINE_COUNTS`."""
    sfb: None = None


def problem(
    a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, ks: tuple[int, ...] | None, counts: Tensor | None
) -> CountedProblem:
    """State a problem whose depths the host has, or a tensor on the GPU. The host waits for neither."""
    if ks is not None and len(ks) <= MOST_INLINE_COUNTS:
        return CountedProblem(a, b, d, c, None, ks)
    if counts is None:  # more than fit a kernel's parameters; to capture such a call in a graph, pass a tensor
        counts = torch.tensor(ks, dtype=torch.int32, device="cpu").pin_memory().to(d.device, non_blocking=True)
    return CountedProblem(a, b, d, c, counts, None)


def run(p: CountedProblem, config: Bf16Config | None = None) -> list[Plan]:
    """Compute on the GPU that the tensors are on; give the plans, which together serve other calls."""
    return bf16_depths.run_plans(p, output_of(p), plans_of, config)


def output_of(p: CountedProblem) -> Output:
    """Give all that decides the kernel's code besides the tile."""
    return replace(bf16_depths.output_of(p), groups=Groups.COUNTED_DEPTHS)


def plans_of(p: CountedProblem, config: Bf16Config, num_sms: int, launcher: driver.Launcher) -> list[Plan]:
    """Prepare a launch for each so many groups as one takes, the deepest ones first."""
    return [_plan_of(p, config, num_sms, launcher, first) for first in range(0, p.d.shape[0], MOST_COUNTED)]


def _plan_of(p: CountedProblem, config: Bf16Config, num_sms: int, launcher: driver.Launcher, first: int) -> Plan:
    groups, m, n = p.d.shape
    count = min(groups - first, MOST_COUNTED)
    maps = {"map_a": _rows_map(p.a), "map_b": _rows_map(p.b), "map_d": output_map(config, p.d)}
    places = [Place("map_a", A), Place("map_b", B), Place("map_d", D), Place("c", C), Place("d", D)]
    numbers: dict[str, int | bytes] = {
        **NO_SCALES,
        "c_pitch": 0 if p.c is None else p.c.stride(1),
        "d_pitch": p.d.stride(1),
        "m": m,
        "n": n,
        "k": 0,
        "depths.c_stride": 0 if p.c is None else p.c.stride(0),
        "depths.groups": groups,
        "depths.rows": p.a.shape[0],
        "depths.first": first,
        "depths.count": count,
        "depths.inline_counts": b"" if p.ks is None else struct.pack(f"<{groups}i", *p.ks),
    }
    if p.sfa is not None:
        places.append(Place("depths.counts", SFA))
    else:
        numbers["depths.counts"] = 0
    plan = Plan(p, K_COUNTED_PARAMS, numbers, maps, places, launcher, grid(config, count, m, n, num_sms))
    return bf16_depths.completed(plan, p, config, output_of(p))


def _rows_map(x: Tensor) -> TensorMap:
    """Rows in boxes of a k-block, which may begin with zeros, and of 64 columns."""
    return late_map(ElementType.BFLOAT16, x, (BLOCK_K, WGMMA_ROWS), 128)
