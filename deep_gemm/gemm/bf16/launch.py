"""Products of BF16 on a GPU, one or several of a shape: which tile computes them, and the plan of the launch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.check.layout import byte_span, ceil_div
from ...core.gpu import gpu_of
from ...core.jit import driver
from ...core.jit.tensor_map import ElementType, TensorMap
from ...core.settings import get_compile_mode, get_pdl, num_sms_of, settings
from ...core.sm90 import WGMMA_ROWS
from ..kernel import params_of
from ..maps import matrix_map, output_map, plane_map
from ..output import Groups, Output, output_into
from ..plan import A, B, C, D, Plan, Resized, Rows, addresses_of, derived_for_rows, places_of, refuse_if
from .choose import select_bf16
from .config import BLOCK_K, Bf16Config, Majors
from .kernel import KERNEL as BF16_GEMM


class Asked(Protocol):
    """The request: one product, or several if all have a dimension more, in front."""

    @property
    def a(self) -> Tensor:
        """`[m, k]`, with either dimension contiguous."""

    @property
    def b(self) -> Tensor:
        """`[n, k]`, with either dimension contiguous."""

    @property
    def d(self) -> Tensor:
        """`[m, n]`"""

    @property
    def c(self) -> Tensor | None:
        """`[m, n]`, of the type of D: D itself, or apart from it."""


class Operands(NamedTuple):
    """The same as a plan takes it."""

    a: Tensor
    b: Tensor
    d: Tensor
    c: Tensor | None
    sfa: None = None
    sfb: None = None


def run(p: Asked, config: Bf16Config | None = None) -> Plan | None:
    """Compute on the GPU that the tensors are on, and give the plan, which serves other calls.

    `config` None leaves the choice to the heuristics.
    """
    if 0 in p.d.shape:
        return None
    if p.a.shape[-1] == 0:
        if get_compile_mode() == 0:
            p.d.zero_() if p.c is None else p.d.copy_(p.c)
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(p, config)
    m, n, k = p.a.shape[-2], p.b.shape[-2], p.a.shape[-1]
    planes = p.d.shape[0] if p.d.dim() == 3 else 1
    num_sms = num_sms_of(gpu_of(device).num_sms)
    if config is None:
        config = select_bf16(m, n, k, output_of(p), majors_of(p), gpu_of(device), planes)
    else:
        refuse_if(config.name, why_unfit(config, p))
    _print_if_asked(planes, m, n, k, config)
    plan = plan_of(p, config, num_sms, BF16_GEMM.launcher(config, device, get_pdl()))
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(Operands(p.a, p.b, p.d, p.c)))
    return plan


def derive(templates: dict[Bf16Config, Plan], operands: Sequence[Any]) -> Plan | None:
    """Make a plan for other rows of a weight, of operands that nobody has checked; None if they want the checks."""
    like, (a, _, _, _, d, c) = next(iter(templates.values())), operands
    m, gpu = a.shape[0], gpu_of(like.device)
    if m < 2 or any(each is not None and each.shape[0] != m for each in (d, c)):
        return None
    n, k, before = like.n, like.k, like.rows
    config = select_bf16(m, n, k, like.output, next(iter(templates)).majors, gpu)
    if config not in templates:
        return None
    _print_if_asked(1, m, n, k, config)
    ctas = grid(config, 1, m, n, num_sms_of(gpu.num_sms))
    span_d = m * n * like.dtype.itemsize if d is None else byte_span(d)
    rows = Rows((m, n), byte_span(a), 0, before.span_b, 0, span_d, 0 if c is None else byte_span(c))

    def changed() -> tuple[dict[str, int], Sequence[Resized]]:
        return {"m": m}, (
            Resized("map_a", 1, m, box=(BLOCK_K, min(config.box_rows_of_a, m))),
            Resized("map_d", 2 if config.has_wide_panels else 1, m),
        )

    return derived_for_rows(templates, config, m, 0, (rows, ctas), changed, are_whole=m >= config.block_m)


def _print_if_asked(planes: int, m: int, n: int, k: int, config: Bf16Config) -> None:
    if settings().print_configs:
        print(f"deep_gemm: {planes} x {m} x {n} x {k} runs {config.name}", file=sys.stderr)


def majors_of(p: Asked) -> Majors:
    """Say which operands have m or n contiguous, not k."""
    return Majors(p.a.stride(-1) != 1, p.b.stride(-1) != 1)


def output_of(p: Asked) -> Output:
    """Give all that decides the kernel's code besides tile and majors: the type of D, and how C takes part."""
    return output_into(p.d, p.c, groups=Groups.HEADS if p.d.dim() == 3 else Groups.NONE)


def why_unfit(config: Bf16Config, p: Asked) -> str | None:
    """Say why a configuration would compute something else than this; None if it computes it."""
    output = output_of(p)
    of_output = (config.is_fp32, config.with_c or config.adds_to_d, config.groups)
    if of_output != (output.is_fp32, output.with_c or output.adds_to_d, output.groups):
        return "is for another type of D, another C, or for operands of another rank"
    if config.majors != majors_of(p):
        return f"is for operands that lie otherwise: {config.majors.name}, not {majors_of(p).name}"
    if config.adds_to_d and not output.adds_to_d:
        return "adds to D, which is not C"
    if config.slices > ceil_div(p.a.shape[-1], BLOCK_K):
        return f"cuts k into {config.slices} slices, more than there are blocks of {BLOCK_K}"
    return None


NO_SCALES: Mapping[str, int | bytes] = {
    "map_sfa": b"",
    "map_sfb": b"",
    "sfb": 0,
    "sfb_stride_n": 0,
    "sfb_stride_k": 0,
    "words": 0,
}
"""Members of Params that only products with scales use."""


def plan_of(p: Asked, config: Bf16Config, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch."""
    m, n, k = p.a.shape[-2], p.b.shape[-2], p.a.shape[-1]
    planes = p.d.shape[0] if p.d.dim() == 3 else 1
    maps = {
        # Boxes of A have no rows that are never there.
        "map_a": operand_map(p.a, min(config.box_rows_of_a, m), config.majors.a_is_mn),
        "map_b": operand_map(p.b, config.block_n // config.cluster_m, config.majors.b_is_mn),
        "map_d": output_map(config, p.d),
    }
    places = places_of(map_a=A, map_b=B, map_d=D, c=C, d=D)
    numbers: dict[str, int | bytes] = {
        **NO_SCALES,
        "c_pitch": 0 if p.c is None else p.c.stride(-2),
        "d_pitch": p.d.stride(-2),
        "m": m,
        "n": n,
        "k": k,
    }
    if config.groups == Groups.HEADS:
        c_stride = 0 if p.c is None else p.c.stride(0)
        numbers |= {"heads.sfb_stride": 0, "heads.c_stride": c_stride, "heads.count": planes}
    operands = Operands(p.a, p.b, p.d, p.c)
    plan = Plan(operands, params_of(config), numbers, maps, places, launcher, grid(config, planes, m, n, num_sms))
    plan.config, plan.output, plan.n, plan.k = config, output_of(p), n, k
    if p.c is not None:
        plan.c_is_d = plan.output.c_is_d
    return plan


def operand_map(x: Tensor, rows: int, is_mn_major: bool) -> TensorMap:
    """An operand, or several, in boxes of so many rows and a k-block; of 64 rows if these are contiguous."""
    of_x = matrix_map if x.dim() == 2 else plane_map
    if is_mn_major:
        return of_x(ElementType.BFLOAT16, x.mT, (BLOCK_K, WGMMA_ROWS), 128)
    return of_x(ElementType.BFLOAT16, x, (rows, BLOCK_K), 128)


def grid(config: Bf16Config, planes: int, m: int, n: int, num_sms: int) -> int:
    """One CTA for each SM, but no more clusters than tiles to share out; where k is split, a cluster for each tile."""
    tiles_m, tiles_n = ceil_div(m, config.block_m), ceil_div(n, config.block_n)
    cluster_tiles = planes * ceil_div(tiles_m, config.cluster_m) * ceil_div(tiles_n, config.cluster_n)
    if config.cluster_k > 1:
        return cluster_tiles * config.cluster_k
    return min(max(num_sms // config.cluster_size, 1), cluster_tiles) * config.cluster_size
