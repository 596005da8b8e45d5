"""Products of grouped rows that are activated and cast on their way out: the plan that launches them."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ..choose.config import BLOCK_K, GemmConfig
from ..choose.output import Groups, Output
from ..choose.rows import select_grouped
from ..gpus import gpu_of
from ..jit import driver
from ..jit.tensor_map import ElementType
from ..problem import SiluRowsProblem
from ..problem.layout import ADDRESS_ALIGNMENT
from ..settings import get_compile_mode, get_num_sms, get_pdl, in_force, settings
from . import fp8_gemm
from .fp8_gemm import ROWS_SILU_PARAMS
from .lay_scales import mn_major
from .maps import clipped_map, plane_map, row_pitch
from .plan import PLANS, SFA, SFB, A, Addresses, B, C, D, Key, Place, Plan, addresses_of, refuse_if
from .rows import grid

OUTPUT = Output(groups=Groups.IDS, activates=True)
ROW_WEIGHTS, SCALES = 6, 7
"""Further operands, behind those of every plan."""


def run(p: SiluRowsProblem, config: GemmConfig | None = None) -> None:
    """Multiply, activate and cast on the GPU that the tensors are on. The host does not wait for ids.

    `config` None leaves the choice to the heuristics.
    """
    (m, k), (groups, n, _) = p.a.shape, p.b.shape
    if 0 in (m, n, groups):
        return
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(p, config)
        return
    ready = prepared(p)
    key = _key(ready, config)
    plan = PLANS.plans.get(key)
    if plan is None:
        if config is None:
            config = select_grouped(groups, m / groups, n, k, OUTPUT, gpu_of(device))
        else:
            refuse_if(config.name, fp8_gemm.why_unfit(config, k, OUTPUT))
        if settings().print_configs:
            print(f"deep_gemm: {groups} groups of {n} x {k} run {config.name}", file=sys.stderr)
        plan = plan_of(ready, config, get_num_sms(), fp8_gemm.launcher(config, device, get_pdl()))
        PLANS.keep(key, plan)
    if get_compile_mode() == 0:
        plan.launch(addresses(ready))


def prepared(p: SiluRowsProblem) -> SiluRowsProblem:
    """Lay scales, and ids, out as the kernel loads them; the problem itself where they lie so."""
    sfa = mn_major(p.sfa)
    ids = p.ids.clone() if p.ids.data_ptr() % ADDRESS_ALIGNMENT else p.ids
    return p if sfa is p.sfa and ids is p.ids else p._replace(sfa=sfa, ids=ids)


def addresses(p: SiluRowsProblem) -> Addresses:
    """Where the operands are, those of every plan first."""
    return (*addresses_of(p), 0 if p.row_weights is None else p.row_weights.data_ptr(), p.scales.data_ptr())


def _key(p: SiluRowsProblem, config: GemmConfig | None) -> Key:
    """Everything that decides what is launched, but for addresses."""
    tensors = (p.a, p.sfa, p.b, p.sfb, p.d, p.scales)
    strides = tuple((x.shape, x.stride()) for x in tensors)
    return run, strides, p.limit, config, p.d.get_device(), in_force.generation


def plan_of(p: SiluRowsProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch for a problem that is `prepared`."""
    (m, k), (groups, n, _) = p.a.shape, p.b.shape
    a, sfa = p.a[None], p.sfa[None]
    maps = {
        "map_a": clipped_map(ElementType.UINT8, a, (config.box_rows_of_a, BLOCK_K), 128),
        "map_b": plane_map(ElementType.UINT8, p.b, (config.box_rows_of_b, BLOCK_K), 128),
        "map_sfa": plane_map(ElementType.FLOAT32, sfa.mT, (config.scale_parts, config.scale_rows), 0),
    }
    places = [
        # It begins a box before its tensor: "Rows that are not the group's", cuda/work/rows.cuh.
        Place("map_a", A, config.box_rows_of_a * row_pitch(a)),
        Place("map_b", B),
        Place("map_sfa", SFA),
        Place("sfb", SFB),
        Place("d", D),
        Place("groups.layout", C),
        Place("activation.row_weights", ROW_WEIGHTS),
        Place("activation.scales", SCALES),
    ]
    numbers: dict[str, Any] = {
        "map_d": b"",  # stored without TMA
        "map_whole_d": b"",
        "c": 0,
        "c_pitch": 0,
        "d_pitch": row_pitch(p.d),
        "sfb_stride_n": p.sfb.stride(1),
        "sfb_stride_k": p.sfb.stride(2),
        "m": m,
        "n": n,
        "k": k,
        "groups.sfb_stride": p.sfb.stride(0),
        "groups.count": groups,
        "groups.rows": m,
        "groups.alignment": 1,
        "groups.zeroes_padding": 0,
        "activation.scales_pitch": p.scales.stride(1),
        "activation.limit": math.inf if p.limit is None else p.limit,
    }
    plan = Plan(p, ROWS_SILU_PARAMS, numbers, maps, places, launcher, grid(config, 1, m, n, num_sms))
    plan.config, plan.output, plan.n, plan.k = config, OUTPUT, n, k
    return plan
