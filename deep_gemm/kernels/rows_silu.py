"""Products of grouped rows that are activated and cast on their way out: cuda/epilogue/silu.cuh."""

from __future__ import annotations

import math
import sys

import torch

from ..choose.config import GemmConfig
from ..choose.output import Groups, Output
from ..choose.rows import select_grouped
from ..gpus import gpu_of
from ..jit import driver
from ..jit.tensor_map import MAP_BYTES
from ..problem import SiluRowsProblem
from ..problem.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK
from ..settings import get_compile_mode, get_num_sms, get_pdl, in_force, settings
from . import fp8_gemm
from .fp8_gemm import ROWS_SILU_PARAMS
from .lay_scales import mn_major
from .maps import row_pitch
from .plan import PLANS, Addresses, Key, Place, Plan, addresses_of, refuse_if
from .rows import GroupedProblem, grid, numbers_of, operand_maps

OUTPUT = Output(groups=Groups.IDS, activates=True)
APART = Output(groups=Groups.IDS, activates=True, gates_apart=True)
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
        output = output_of(p)
        if config is None:
            config = select_grouped(groups, m / groups, n, k, output, gpu_of(device))
        else:
            refuse_if(config.name, fp8_gemm.why_unfit(config, k, output))
        if settings().print_configs:
            print(f"deep_gemm: {groups} groups of {n} x {k} run {config.name}", file=sys.stderr)
        plan = plan_of(ready, config, get_num_sms(), fp8_gemm.launcher(config, device, get_pdl()))
        PLANS.keep(key, plan)
    if get_compile_mode() == 0:
        plan.launch(addresses(ready))


def output_of(p: SiluRowsProblem) -> Output:
    """What decides the kernel's code besides the tile."""
    return APART if p.gates_apart else OUTPUT


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
    lie = tuple((x.shape, x.stride()) for x in (p.a, p.sfa, p.b, p.sfb, p.d, p.scales))
    return run, lie, p.limit, p.gates_apart, config, p.d.get_device(), in_force.generation


def plan_of(p: SiluRowsProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch for a problem that is `prepared`."""
    (m, k), (groups, n, _) = p.a.shape, p.b.shape
    rows = GroupedProblem(
        p.a[None], p.sfa[None], p.b, p.sfb, p.d[None], p.ids, Groups.IDS, SCALE_BLOCK, 1, False, m / groups
    )
    maps, places = operand_maps(rows, config)
    places += [Place("activation.row_weights", ROW_WEIGHTS), Place("activation.scales", SCALES)]
    numbers = {
        **numbers_of(rows, row_pitch(p.d)),
        "map_d": bytes(MAP_BYTES),  # D is stored without TMA
        "map_whole_d": bytes(MAP_BYTES),
        "activation.scales_pitch": p.scales.stride(1),
        "activation.limit": math.inf if p.limit is None else p.limit,
    }
    plan = Plan(p, ROWS_SILU_PARAMS, numbers, maps, places, launcher, grid(config, 1, m, n, num_sms))
    plan.config, plan.output, plan.n, plan.k = config, output_of(p), n, k
    return plan
