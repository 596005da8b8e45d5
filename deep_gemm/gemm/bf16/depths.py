"""Products of groups along k of BF16 on a GPU: which tile computes them, and the plans that launch it."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...core.gpu import gpu_of
from ...core.jit import driver
from ...core.settings import get_compile_mode, get_pdl, num_sms_of, settings
from ..kernel import K_PARTS_PARAMS, MOST_K_PARTS
from ..maps import output_map
from ..output import Groups, Output, output_into
from ..plan import A, B, C, D, Operands, Place, Plan, addresses_of
from .choose import select_bf16_depths
from .config import BLOCK_K, Bf16Config
from .kernel import KERNEL as BF16_GEMM
from .launch import NO_SCALES, grid, operand_map

P = TypeVar("P", bound=Operands)


class DepthsProblem(NamedTuple):
    """D[g] = C[g] + A_g.T @ B_g, with the groups' parts of A and B one after another."""

    a: Tensor
    """`[sum of ks, m]`"""
    b: Tensor
    """`[sum of ks, n]`"""
    d: Tensor
    c: Tensor | None
    ks: tuple[int, ...]
    """Depths, multiples of 64."""
    sfa: None = None
    sfb: None = None


class Outputs(Protocol):
    """The part of a problem that speaks of its output."""

    @property
    def d(self) -> Tensor:
        """`[groups, m, n]`"""

    @property
    def c(self) -> Tensor | None:
        """`[groups, m, n]`, of the type of D: D itself, or apart from it."""


def run(p: DepthsProblem, config: Bf16Config | None = None) -> list[Plan]:
    """Compute on the GPU that the tensors are on; give the plans, which together serve other calls of these depths."""
    return run_plans(p, output_of(p), plans_of, config)


def run_plans(
    p: P,
    output: Output,
    plans_of: Callable[[P, Bf16Config, int, driver.Launcher], list[Plan]],
    config: Bf16Config | None = None,
) -> list[Plan]:
    """Compute by the plans of a problem, of whatever kind; give them."""
    if 0 in p.d.shape:
        return []
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run_plans(p, output, plans_of, config)
    if p.a.shape[0] == 0:
        if get_compile_mode() == 0:
            p.d.zero_() if p.c is None else p.d.copy_(p.c)
        return []
    groups, m, n = p.d.shape
    if config is None:
        config = select_bf16_depths(groups, m, n, output, gpu_of(device))
    if settings().print_configs:
        print(f"deep_gemm: {groups} groups of {m} x {n} run {config.name}", file=sys.stderr)
    plans = plans_of(p, config, num_sms_of(gpu_of(device).num_sms), BF16_GEMM.launcher(config, device, get_pdl()))
    if get_compile_mode() == 1:
        return []
    for plan in plans:
        plan.launch(addresses_of(p))
    return plans


def output_of(p: Outputs) -> Output:
    """Give all that decides the kernel's code besides the tile."""
    return output_into(p.d, p.c, groups=Groups.DEPTHS)


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


def plans_of(p: DepthsProblem, config: Bf16Config, num_sms: int, launcher: driver.Launcher) -> list[Plan]:
    """Prepare a launch for each so many groups as one takes."""
    parts = parts_of(p.ks)
    return [
        _plan_of(p, config, num_sms, launcher, parts[first : first + MOST_K_PARTS])
        for first in range(0, len(parts), MOST_K_PARTS)
    ]


def _plan_of(
    p: DepthsProblem, config: Bf16Config, num_sms: int, launcher: driver.Launcher, parts: Sequence[Part]
) -> Plan:
    _, m, n = p.d.shape
    maps = {
        "map_a": operand_map(p.a.mT, config.box_rows_of_a, True),
        "map_b": operand_map(p.b.mT, config.block_n // config.cluster_m, True),
        "map_d": output_map(config, p.d),
    }
    places = [Place("map_a", A), Place("map_b", B), Place("map_d", D), Place("c", C), Place("d", D)]
    first_k_block, num_k_blocks, group = (
        struct.pack(f"<{len(parts)}I", *numbers) for numbers in zip(*parts, strict=True)
    )
    numbers: dict[str, int | bytes] = {
        **NO_SCALES,
        "c_pitch": 0 if p.c is None else p.c.stride(1),
        "d_pitch": p.d.stride(1),
        "m": m,
        "n": n,
        "k": 0,
        "parts.c_stride": 0 if p.c is None else p.c.stride(0),
        "parts.count": len(parts),
        "parts.first_k_block": first_k_block,
        "parts.num_k_blocks": num_k_blocks,
        "parts.group": group,
    }
    ctas = grid(config, len(parts), m, n, num_sms)
    return completed(Plan(p, K_PARTS_PARAMS, numbers, maps, places, launcher, ctas), p, config, output_of(p))


def completed(plan: Plan, p: Outputs, config: Bf16Config, output: Output) -> Plan:
    """Tell a plan of groups along k what calls of its kind have."""
    plan.config, plan.output, plan.n = config, output, p.d.shape[-1]
    if p.c is not None:
        plan.c_is_d = output.c_is_d
    return plan
