"""Products of grouped rows that are activated and cast on their way out: gemm/epilogue/silu.cuh."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...casts.lay_scales import mn_major
from ...core.call import Key
from ...core.check.checks import Operand
from ...core.check.layout import ADDRESS_ALIGNMENT, byte_span
from ...core.check.recipes import PER_BLOCK
from ...core.jit import driver
from ...core.jit.tensor_map import MAP_BYTES, TensorMap
from ...core.settings import get_compile_mode, get_num_sms, get_pdl, in_force
from ..config import GemmConfig
from ..kernel import KERNEL as FP8_GEMM
from ..kernel import ROWS_SILU_PARAMS
from ..maps import row_pitch
from ..output import Groups, Output
from ..plan import PLANS, SCALE_BYTES, Addresses, Place, Plan, addresses_of
from .launch import GroupedProblem, chosen_tall, grid, numbers_of, operand_maps
from .silu_check import SiluRowsProblem

IN_TURN = Output(groups=Groups.ENDS, activates=True)
APART = Output(groups=Groups.ENDS, activates=True, gates_apart=True)
ROW_WEIGHTS, SCALES = 6, 7
"""Further operands, behind those of every plan."""


class SiluPlan(Plan):
    """A plan that has two operands more: row weights, and the output's scales."""

    span_weights = span_scales = 0

    def fits(self, at: Addresses) -> bool:
        """Tell whether a launch at these addresses is right, of all eight operands."""
        *_, at_d, _, at_weights, at_scales = at
        if at_scales % ADDRESS_ALIGNMENT or at_weights % SCALE_BYTES or not super().fits(at[:ROW_WEIGHTS]):
            return False
        rows, end_scales, end_weights = self.rows, at_scales + self.span_scales, at_weights + self.span_weights
        if at_weights < at_d + rows.span_d and at_d < end_weights:
            return False
        spans = (rows.span_a, rows.span_sfa, rows.span_b, rows.span_sfb, rows.span_d, rows.span_c, self.span_weights)
        return all(end_scales <= first or first + span <= at_scales for first, span in zip(at, spans, strict=False))


def again(
    a: Operand,
    b: Operand,
    d: Operand,
    ends: Tensor,
    row_weights: Tensor | None,
    limit: float | None,
    gates_apart: bool = False,
) -> bool:
    """Launch the plan of a call like one before, which nobody has checked; False if it wants to be."""
    try:
        p = SiluRowsProblem(*a, *b, *d, ends, row_weights, limit, gates_apart)
        plan = PLANS.plans.get(signature(p)) if p.d.is_cuda else None
        if plan is None or not plan.fits(at := addresses(p)):
            return False
    except (AttributeError, TypeError, RuntimeError):  # malformed: the checks say how
        return False
    plan.launch(at)
    return True


def signature(p: SiluRowsProblem) -> Key:
    """Everything that decides whether a call is right and what it launches, but for addresses."""
    tensors = (*p[:7], p.row_weights)
    lie = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors)
    return run, lie, p.limit, p.gates_apart, in_force.generation


def run(p: SiluRowsProblem, config: GemmConfig | None = None) -> None:
    """Multiply, activate and cast on the GPU that the tensors are on. The host does not wait for ends.

    `config` None leaves the choice to the heuristics.
    """
    if 0 in (p.a.shape[0], p.b.shape[1], p.b.shape[0]):
        return
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(p, config)
        return
    ready = prepared(p)
    plan = planned(ready, config)
    if get_compile_mode() == 1:
        return
    plan.launch(addresses(ready))
    if config is None and ready is p:  # others are copied anew by each call
        PLANS.keep(signature(p), plan)


def planned(p: SiluRowsProblem, config: GemmConfig | None = None) -> SiluPlan:
    """Choose a configuration if there is none, and prepare the launch of a problem that is `prepared`.

    Its device is the current one.
    """
    (m, k), (groups, n, _), device = p.a.shape, p.b.shape, p.d.get_device()
    config = chosen_tall(config, groups, m / groups, n, k, output_of(p), device)
    return plan_of(p, config, get_num_sms(), FP8_GEMM.launcher(config, device, get_pdl()))


def output_of(p: SiluRowsProblem) -> Output:
    """Give all that decides the kernel's code besides the tile."""
    return APART if p.gates_apart else IN_TURN


def prepared(p: SiluRowsProblem) -> SiluRowsProblem:
    """Lay scales out as the kernel loads them; the problem itself where they lie so."""
    sfa = mn_major(p.sfa)
    return p if sfa is p.sfa else p._replace(sfa=sfa)


def addresses(p: SiluRowsProblem) -> Addresses:
    """Give where the operands are, those of every plan first."""
    return (*addresses_of(p), 0 if p.row_weights is None else p.row_weights.data_ptr(), p.scales.data_ptr())


def plan_of(p: SiluRowsProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> SiluPlan:
    """Prepare the launch for a problem that is `prepared`."""
    numbers, maps, places = parameters_of(p, config)
    (m, _), (_, n, _) = p.a.shape, p.b.shape
    plan = SiluPlan(p, ROWS_SILU_PARAMS, numbers, maps, places, launcher, grid(config, 1, m, n, num_sms))
    plan.config, plan.output, plan.n, plan.k = config, output_of(p), n, p.b.shape[2]
    plan.c_is_d, plan.alignment_of_c = False, p.ends.element_size()  # the layout is not D
    plan.span_scales = byte_span(p.scales)
    plan.span_weights = 0 if p.row_weights is None else byte_span(p.row_weights)
    return plan


def parameters_of(
    p: SiluRowsProblem, config: GemmConfig
) -> tuple[dict[str, float | bytes], dict[str, TensorMap], list[Place]]:
    """Numbers, maps and places of addresses among the parameters of a problem that is `prepared`."""
    rows_of_group = p.a.shape[0] / p.b.shape[0]
    rows = GroupedProblem(
        p.a[None], p.sfa[None], p.b, p.sfb, p.d[None], p.ends, Groups.ENDS, PER_BLOCK, 1, False, rows_of_group
    )
    maps, places = operand_maps(rows, config)
    places += [Place("activation.row_weights", ROW_WEIGHTS), Place("activation.scales", SCALES)]
    numbers: dict[str, float | bytes] = {
        **numbers_of(rows, row_pitch(p.d)),
        "map_d": bytes(MAP_BYTES),  # D is stored without TMA
        "map_whole_d": bytes(MAP_BYTES),
        "activation.scales_pitch": p.scales.stride(1),
        "activation.limit": math.inf if p.limit is None else p.limit,
    }
    return numbers, maps, places
