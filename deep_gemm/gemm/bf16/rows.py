"""Products of grouped rows of BF16 on a GPU: which tile computes them, and the plan that launches it."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.check.layout import ADDRESS_ALIGNMENT, ceil_div
from ...core.gpu import gpu_of
from ...core.jit import driver
from ...core.jit.tensor_map import ElementType
from ...core.settings import get_compile_mode, get_num_sms, get_pdl, settings
from ...core.sm90 import WGMMA_ROWS
from ..kernel import ROWS_PARAMS
from ..maps import clipped_map, output_map, row_pitch
from ..output import Groups, Output
from ..plan import A, B, C, D, Place, Plan, addresses_of, refuse_if
from .choose import select_bf16_rows
from .config import BLOCK_K, Bf16Config, Majors
from .kernel import KERNEL as BF16_GEMM
from .launch import operand_map


class RowsProblem(NamedTuple):
    """Grouped rows as the kernel sees them: planes of rows. Stacked rows are those of one plane."""

    a: Tensor
    """`[planes, rows, k]`, k contiguous; D `[planes, rows, n]`."""
    b: Tensor
    """`[groups, n, k]`, with n or k contiguous."""
    d: Tensor
    c: Tensor
    """The layout, in the place of a C, which no grouped product has, among the operands."""
    groups: Groups
    expected_m: float
    """Rows of a group, about."""
    alignment: int = 128
    zero_padding: bool = False
    sfa: None = None
    sfb: None = None


def run(p: RowsProblem, config: Bf16Config | None = None) -> Plan | None:
    """Compute a product of grouped rows on the GPU that its tensors are on; give the plan, which serves other calls.

    The host does not wait for the layout. `config` None leaves the choice to the heuristics. k is not 0.
    """
    (planes, m, k), (groups, n, _) = p.a.shape, p.b.shape
    if 0 in (planes, m, n, groups):
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(p, config)
    output = output_of(p)
    if config is None:
        config = select_bf16_rows(groups, p.expected_m, n, k, output, majors_of(p).b_is_mn, gpu_of(device))
    else:
        refuse_if(config.name, why_unfit(config, p))
    if settings().print_configs:
        print(f"deep_gemm: {groups} groups of {n} x {k} run {config.name}", file=sys.stderr)
    ready = prepared(p)
    plan = plan_of(ready, config, get_num_sms(), BF16_GEMM.launcher(config, device, get_pdl()))
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(ready))
    return plan


def majors_of(p: RowsProblem) -> Majors:
    """Say which operands have m or n contiguous, not k: B perhaps."""
    return Majors(b_is_mn=p.b.stride(-1) != 1)


def output_of(p: RowsProblem) -> Output:
    """Give all that decides the kernel's code besides tile and majors."""
    return Output(is_fp32=p.d.dtype == torch.float32, groups=p.groups)


def why_unfit(config: Bf16Config, p: RowsProblem) -> str | None:
    """Say why a configuration would compute something else than this; None if it computes it."""
    if (config.is_fp32, config.groups) != (p.d.dtype == torch.float32, p.groups):
        return "is for another type of D, or for rows that are grouped otherwise"
    return None if config.majors == majors_of(p) else "is for a B that lies otherwise"


def prepared(p: RowsProblem) -> RowsProblem:
    """Lay the layout out as the kernel loads it; the problem itself where it lies so."""
    return p._replace(c=p.c.clone()) if p.groups == Groups.IDS and p.c.data_ptr() % ADDRESS_ALIGNMENT else p


def plan_of(p: RowsProblem, config: Bf16Config, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch for a problem that is `prepared`."""
    (planes, m, k), (groups, n, _) = p.a.shape, p.b.shape
    element = ElementType.FLOAT32 if config.is_fp32 else ElementType.BFLOAT16
    swizzle = config.panel_columns * config.output_bytes
    maps = {
        "map_a": clipped_map(ElementType.BFLOAT16, p.a, (config.box_rows_of_a, BLOCK_K), 128),
        "map_b": operand_map(p.b, config.box_rows_of_b, config.majors.b_is_mn),
        "map_d": clipped_map(element, p.d, (WGMMA_ROWS, config.panel_columns), swizzle),
        "map_whole_d": output_map(config, p.d),
    }
    places = [
        # Maps that cut boxes off begin a box before their tensor: "Rows that are not the group's", gemm/work/rows.cuh.
        Place("map_a", A, config.box_rows_of_a * row_pitch(p.a) * p.a.element_size()),
        Place("map_b", B),
        Place("map_d", D, WGMMA_ROWS * row_pitch(p.d) * p.d.element_size()),
        Place("map_whole_d", D),
        Place("d", D),
        Place("groups.layout", C),
    ]
    numbers: dict[str, int | bytes] = {
        "map_sfa": b"",
        "sfb": 0,
        "c": 0,
        "c_pitch": 0,
        "d_pitch": row_pitch(p.d),
        "sfb_stride_n": 0,
        "sfb_stride_k": 0,
        "words": 0,
        "m": m,
        "n": n,
        "k": k,
        "groups.sfb_stride": 0,
        "groups.count": groups,
        "groups.rows": m,
        "groups.alignment": p.alignment,
        "groups.zeroes_padding": int(p.zero_padding),
    }
    ctas = min(num_sms, planes * m * ceil_div(n, config.block_n))
    plan = Plan(p, ROWS_PARAMS, numbers, maps, places, launcher, ctas)
    plan.config, plan.output, plan.n, plan.k = config, output_of(p), n, k
    plan.c_is_d, plan.needs_c = False, True
    plan.alignment_of_c = ADDRESS_ALIGNMENT if p.groups == Groups.IDS else 4
    if p.groups != Groups.COUNTS:
        plan.rows = plan.rows._replace(shape=plan.rows.shape[1:])
    return plan
