"""Products of groups along k of BF16 on a GPU: whole k-blocks that the host knows, or any depths, by several launches.

A launch takes a limited number of groups. Depths that the host lacks are read by the GPU alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.settings import get_compile_mode, get_pdl, num_sms_of
from .config.bf16 import BLOCK_K, Bf16Config
from .kernel import BF16_GEMM
from .kinds.works import COUNTED, MOST_COUNTED, MOST_INLINE_COUNTS, MOST_K_PARTS
from .launch import fitting
from .launch import plan_of as plan_of_product
from .plan import SFA, Place, Plan, addresses_of
from .problem import Problem, write_without_depth


def run(p: Problem) -> Plan | None:
    """Compute on the GPU that the tensors are on; give the plan if it serves other calls. The host waits for no depth.

    Rows behind the last group's are not read.
    """
    if p.ks is not None and not any(k % BLOCK_K for k in p.ks):
        rows = sum(p.ks)
        plans = run_plans(p._replace(a=p.a[:, :rows], b=p.b[:, :rows]))
        return plans[0] if len(plans) == 1 else None
    counted = of_any_depths(p)
    plans = run_plans(counted)
    # Another call has depths of its own where this one's were made of something else.
    is_callers = counted.sfa is None or counted.sfa is p.layout
    return plans[0] if len(plans) == 1 and is_callers else None


def of_any_depths(p: Problem) -> Problem:
    """Let the kernel read the groups' depths: up to `MOST_INLINE_COUNTS` from its parameters, else from a tensor."""
    if p.ks is not None and len(p.ks) <= MOST_INLINE_COUNTS:
        return p._replace(work=COUNTED, sfa=None)
    counts = p.ks_tensor
    if counts is None:  # more than fit a kernel's parameters; to capture such a call in a graph, pass a tensor
        counts = torch.tensor(p.ks, dtype=torch.int32, device="cpu").pin_memory().to(p.d.device, non_blocking=True)
    return p._replace(work=COUNTED, sfa=counts, ks=None)


def run_plans(p: Problem, config: Bf16Config | None = None) -> list[Plan]:
    """Compute by the plans of a problem; give them."""
    if 0 in p.d.shape:
        return []
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run_plans(p, config)
    if p.k == 0:
        write_without_depth(p)
        return []
    config = fitting(config, p, gpu_of(device))
    plans = plans_of(p, config, num_sms_of(gpu_of(device).num_sms), BF16_GEMM.launcher(config, device, get_pdl()))
    if get_compile_mode() == 1:
        return []
    for plan in plans:
        plan.launch(addresses_of(p))
    return plans


class Part(NamedTuple):
    """A group's part of k, in blocks of 64."""

    first: int
    blocks: int
    group: int


def parts_of(ks: Sequence[int]) -> list[Part]:
    """Every group's part, the deepest first."""
    parts, first = [], 0
    for group, k in enumerate(ks):
        parts.append(Part(first, k // BLOCK_K, group))
        first += k // BLOCK_K
    return sorted(parts, key=lambda part: -part.blocks)


def plans_of(p: Problem, config: Bf16Config, num_sms: int, launcher: driver.Launcher) -> list[Plan]:
    """Prepare the launches: each takes as many groups as fit its parameters, the deepest first."""
    if p.work is COUNTED:
        inline = b"" if p.ks is None else struct.pack(f"<{p.groups}i", *p.ks)
        places = [] if p.sfa is None else [Place("depths.counts", SFA)]

        def counted(first: int) -> Plan:
            count = min(p.groups - first, MOST_COUNTED)
            numbers = {"first": first, "count": count, "groups": p.groups, "rows": p.k, "counts": 0}
            of_depths: dict[str, Any] = {f"depths.{name}": number for name, number in numbers.items()}
            of_depths["depths.inline_counts"] = inline
            return plan_of_product(p, config, num_sms, launcher, numbers=of_depths, places=places, count=count)

        return [counted(first) for first in range(0, p.groups, MOST_COUNTED)]
    assert p.ks is not None
    parts = parts_of(p.ks)

    def of_parts(parts: Sequence[Part]) -> Plan:
        arrays = (struct.pack(f"<{len(parts)}I", *numbers) for numbers in zip(*parts, strict=True))
        names = "first_k_block", "num_k_blocks", "group"
        numbers: dict[str, Any] = {f"parts.{name}": packed for name, packed in zip(names, arrays, strict=True)}
        numbers["parts.count"] = len(parts)
        return plan_of_product(p, config, num_sms, launcher, numbers=numbers, count=len(parts))

    return [of_parts(parts[first : first + MOST_K_PARTS]) for first in range(0, len(parts), MOST_K_PARTS)]
