"""Products of grouped rows on a GPU: how high their tiles are, and the plan that launches them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.check.layout import ADDRESS_ALIGNMENT, ceil_div
from ...core.check.recipes import PER_ROW, Scales
from ...core.check.ue8m0 import Words, sides_in_words
from ...core.gpu import gpu_of
from ...core.jit import driver
from ...core.jit.tensor_map import ElementType, TensorMap
from ...core.settings import get_batch_invariant, get_compile_mode, get_num_sms, get_pdl, num_sms_of, settings
from ...core.sm90 import WGMMA_ROWS
from .. import kernel_decode as fp8_gemm_decode
from ..config import BLOCK_K, GemmConfig
from ..config_decode import DecodeConfig
from ..kernel import params_of
from ..maps import clipped_map, output_map, plane_map, row_pitch
from ..output import Groups, Output, values_of
from ..plan import (
    SCALE_BYTES,
    SFA,
    SFB,
    A,
    B,
    C,
    D,
    Place,
    Plan,
    Resized,
    addresses_of,
    derived_for_rows,
    other_rows,
    refuse_if,
)
from ..reference import padding_rows
from .check import ContiguousProblem, MaskedProblem
from .choose import select_grouped

Config = GemmConfig | DecodeConfig
COUNTS = ("m", "groups.rows")
"""Parameters that count the rows of a product."""
PLACES = (Place("sfb", SFB), Place("d", D), Place("groups.layout", C))
"""Addresses that no map has."""


class GroupedProblem(NamedTuple):
    """Both kinds of grouped rows as the kernel sees them: planes of rows. Stacked rows are those of one plane."""

    a: Tensor
    """`[planes, rows, k]`; so are its scales and D."""
    sfa: Tensor
    b: Tensor
    """`[groups, n, k]`"""
    sfb: Tensor
    d: Tensor
    c: Tensor
    """The layout, in the place of a C, which no grouped product has, among the operands."""
    groups: Groups
    of_b: Scales
    alignment: int
    zero_padding: bool
    expected_m: float
    """Rows of a group, about."""
    of_a: Scales = PER_ROW

    @property
    def planes(self) -> int:
        """Matrices of rows: one, or one for each group."""
        return self.a.shape[0]

    @property
    def m(self) -> int:
        """Rows of a plane."""
        return self.a.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups, each with its B."""
        return self.b.shape[0]

    @property
    def n(self) -> int:
        """Columns of D."""
        return self.b.shape[1]

    @property
    def k(self) -> int:
        """Depth of the product."""
        return self.a.shape[2]


def grouped_problem(p: ContiguousProblem | MaskedProblem) -> GroupedProblem:
    """Take either kind of problem for what they have in common."""
    if isinstance(p, MaskedProblem):
        of_rows = Groups.COUNTS, p.of_b, 1, False, p.expected_m, p.of_a
        return GroupedProblem(p.a, p.sfa, p.b, p.sfb, p.d, p.masked_m, *of_rows)
    groups = Groups.ENDS if p.layout_is_ends else Groups.IDS
    a, sfa, d = p.a[None], p.sfa[None], p.d[None]
    rows_of_a_group = p.m / max(p.num_groups, 1)
    return GroupedProblem(
        a,
        sfa,
        p.b,
        p.sfb,
        d,
        p.grouped_layout,
        groups,
        p.of_b,
        p.alignment,
        p.zero_padding,
        rows_of_a_group,
        p.of_a,
    )


def run(
    problem: ContiguousProblem | MaskedProblem, config: Config | None = None, *, is_behind_cast: bool = False
) -> Plan | None:
    """Compute a product of grouped rows on the GPU that its tensors are on; give the plan, which serves other calls.

    The host does not wait for the layout. `config` None leaves the choice to the heuristics. `is_behind_cast`: the
    kernel ahead on this stream writes A and its scales alone, and lets this one start only when all that ran before it
    is over, the layout among it.
    """
    p = grouped_problem(problem)
    if 0 in (p.planes, p.m, p.n, p.num_groups):
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(problem, config, is_behind_cast=is_behind_cast)
    if p.k == 0:
        if get_compile_mode() == 0:
            write_zeros(problem)
        return None
    config = chosen(config, p.num_groups, p.expected_m, p.n, p.k, output_of(p), device)
    ready = prepared(p, config)
    launcher = fp8_gemm_decode.kernel_of(config).launcher(config, device, is_behind_cast or get_pdl())
    # Else the kernel ahead writes more than A and its scales: the layout too, which is read ahead of the wait.
    is_ready = is_behind_cast and ready.sfb is p.sfb and ready.c is p.c
    plan = plan_of(ready, config, get_num_sms(), launcher, weight_is_ready=is_ready)
    plan.set_copies(p, ready)
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(ready))
    return plan


def chosen(
    config: Config | None, num_groups: int, rows_of_group: float, n: int, k: int, output: Output, device: int
) -> Config:
    """Choose a configuration if there is none, and check that one which there is fits."""
    if config is None:
        config = selected(num_groups, rows_of_group, n, k, output, device)
    else:
        refuse_if(config.name, fp8_gemm_decode.why_unfit(config, k, output))
    print_if_asked(num_groups, n, k, config)
    return config


def chosen_tall(
    config: GemmConfig | None, num_groups: int, rows_of_group: float, n: int, k: int, output: Output, device: int
) -> GemmConfig:
    """Choose the same of an output that `fp8_gemm` alone computes."""
    found = chosen(config, num_groups, rows_of_group, n, k, output, device)
    assert isinstance(found, GemmConfig)
    return found


def selected(num_groups: int, rows_of_group: float, n: int, k: int, output: Output, device: int) -> Config:
    """Choose a configuration, by the settings in force."""
    gpu = gpu_of(device)
    decodes = not get_batch_invariant() and num_sms_of(gpu.num_sms) >= gpu.num_sms
    return select_grouped(num_groups, rows_of_group, n, k, output, gpu, decodes=decodes)


def derive(templates: dict[Config, Plan], operands: Sequence[Tensor]) -> Plan | None:
    """Make a plan for other rows of the same groups, of operands that nobody has checked; None if they want the checks.

    For stacked rows alone: the room for rows that are counted is seldom new.
    """
    like = next(iter(templates.values()))
    found, layout = other_rows(like, operands), operands[C]
    if found is None:
        return None
    m, pitch, of_rows = found
    num_groups, groups = operands[B].shape[0], like.output.groups
    if layout.shape != ((num_groups,) if groups == Groups.ENDS else (m,)):
        return None
    config = selected(num_groups, m / num_groups, like.n, like.k, like.output, like.device)
    template = templates.get(config)
    if template is None or template.copies_sfa:
        return None
    print_if_asked(num_groups, like.n, like.k, config)
    ctas = grid(config, 1, m, like.n, get_num_sms())
    changed, is_tall = partial(resized_for, template, m, pitch), isinstance(config, GemmConfig)
    return derived_for_rows(templates, config, m, pitch, (of_rows, ctas), changed, are_whole=is_tall, counts=COUNTS)


def resized_for(plan: Plan, m: int, pitch: int) -> tuple[dict[str, int], list[Resized]]:
    """Parameters of a plan of stacked rows for other rows, and its maps; `pitch` is that of A's scales in elements."""
    numbers = dict.fromkeys(COUNTS, m)
    if isinstance(plan.config, DecodeConfig):
        of_decode, resized = fp8_gemm_decode.resized_for(plan.config, m, plan.n, pitch, 1)
        return numbers | of_decode, resized
    resized = [  # places where a box of rows may begin: one more than there are rows
        Resized("map_a", 2, m + 1),
        Resized("map_sfa", 0, m, pitch * SCALE_BYTES),
    ]
    if "map_d" in plan.maps:
        resized.append(Resized("map_d", 2, m + 1))
    if "map_whole_d" in plan.maps:
        resized.append(Resized("map_whole_d", len(plan.maps["map_whole_d"].sizes) - 2, m))
    return numbers, resized


def output_of(p: GroupedProblem) -> Output:
    """Give all that decides the kernel's code besides the tile."""
    is_fp32, b = p.d.dtype == torch.float32, values_of(p.b)
    return Output(is_fp32=is_fp32, b=b, sfa=p.of_a, sfb=p.of_b, groups=p.groups)


def prepared(p: GroupedProblem, config: Config | None = None) -> GroupedProblem:
    """Lay scales, and the layout, out as the kernel loads them; the problem itself where they lie so."""
    kind = config or output_of(p)
    sfa = fp8_gemm_decode.scales_for(kind, Words.A, p.sfa, p.of_a, p.k)
    sfb = fp8_gemm_decode.scales_for(kind, Words.B, p.sfb, p.of_b, p.k)
    layout = p.c.clone() if p.groups == Groups.IDS and p.c.data_ptr() % ADDRESS_ALIGNMENT else p.c
    if sfa is p.sfa and sfb is p.sfb and layout is p.c:
        return p
    return p._replace(sfa=sfa, sfb=sfb, c=layout)


def plan_of(
    p: GroupedProblem, config: Config, num_sms: int, launcher: driver.Launcher, *, weight_is_ready: bool = False
) -> Plan:
    """Prepare the launch for a problem that is `prepared`; `weight_is_ready`: as in `Params` of the decode kernel."""
    numbers = numbers_of(p, row_pitch(p.d))
    if isinstance(config, DecodeConfig):
        numbers["weight_is_ready"] = int(weight_is_ready)
        plan = _decode_plan_of(p, config, numbers, num_sms, launcher)
    else:
        plan = _plan_of(p, config, numbers, num_sms, launcher)
    plan.config, plan.output, plan.n, plan.k = config, output_of(p), p.n, p.k
    plan.c_is_d, plan.needs_c = False, True
    plan.alignment_of_c = ADDRESS_ALIGNMENT if p.groups == Groups.IDS else 4
    if p.groups != Groups.COUNTS:
        plan.rows = plan.rows._replace(shape=plan.rows.shape[1:])
    return plan


def _decode_plan_of(
    p: GroupedProblem, config: DecodeConfig, numbers: Mapping[str, int | bytes], num_sms: int, launcher: driver.Launcher
) -> Plan:
    maps = {
        "map_a": plane_map(ElementType.UINT8, p.a, (min(config.block_tokens, p.m), BLOCK_K), 128),
        "map_b": plane_map(ElementType.UINT8, p.b, (min(config.block_n, p.n), BLOCK_K), 128),
    }
    places = [Place("map_a", A), Place("map_b", B), Place("sfa", SFA), *PLACES]
    of_group = int(p.groups == Groups.COUNTS)
    numbers = {
        **numbers,
        "sfa_stride_m": p.sfa.stride(1),
        "sfa_stride_k": p.sfa.stride(2),
        "sfa_stride": p.sfa.stride(0) * of_group,
        "d_stride": p.d.stride(0) * of_group,
        "slot_bytes": fp8_gemm_decode.slot_bytes(config, p.m, p.n),
    }
    ctas = grid(config, p.planes, p.m, p.n, num_sms)
    return Plan(p, fp8_gemm_decode.ROWS_PARAMS, numbers, maps, places, launcher, ctas)


def _plan_of(
    p: GroupedProblem, config: GemmConfig, numbers: Mapping[str, int | bytes], num_sms: int, launcher: driver.Launcher
) -> Plan:
    element = ElementType.FLOAT32 if config.is_fp32 else ElementType.BFLOAT16
    swizzle = config.panel_columns * config.output_bytes
    maps, places = operand_maps(p, config)
    maps["map_d"] = clipped_map(element, p.d, (WGMMA_ROWS, config.panel_columns), swizzle)
    places.append(Place("map_d", D, WGMMA_ROWS * row_pitch(p.d) * p.d.element_size()))
    if config.loads_sfb:
        maps["map_sfb"] = plane_map(ElementType.FLOAT32, p.sfb.mT, (config.scale_parts_of_b, config.block_n), 0)
        places.append(Place("map_sfb", SFB))
    else:
        maps["map_whole_d"] = output_map(config, p.d)
        places.append(Place("map_whole_d", D))
    return Plan(p, params_of(config), numbers, maps, places, launcher, grid(config, p.planes, p.m, p.n, num_sms))


def operand_maps(p: GroupedProblem, config: GemmConfig) -> tuple[dict[str, TensorMap], list[Place]]:
    """Maps of what is loaded, and places of what has an address, D's map apart."""
    line_of_b = config.loaded_line_bytes_of_b
    maps = {
        "map_a": clipped_map(ElementType.UINT8, p.a, (config.box_rows_of_a, BLOCK_K), 128),
        "map_b": plane_map(ElementType.UINT8, p.b, (config.box_rows_of_b, line_of_b), line_of_b),
        "map_sfa": plane_map(ElementType.FLOAT32, p.sfa.mT, (config.scale_parts, config.box_scale_rows), 0),
    }
    places = [
        # Maps that cut boxes off begin a box before their tensor: "Rows that are not the group's", gemm/work/rows.cuh.
        Place("map_a", A, config.box_rows_of_a * row_pitch(p.a) * p.a.element_size()),
        Place("map_b", B),
        Place("map_sfa", SFA),
        *PLACES,
    ]
    return maps, places


def numbers_of(p: GroupedProblem, d_pitch: int) -> dict[str, int | bytes]:
    """Parameters that are neither maps nor addresses."""
    return {
        "c": 0,
        "c_pitch": 0,
        "d_pitch": d_pitch,
        "sfb_stride_n": p.sfb.stride(1),
        "sfb_stride_k": p.sfb.stride(2),
        "m": p.m,
        "n": p.n,
        "k": p.k,
        "words": sides_in_words(p.sfa, p.sfb),
        "groups.sfb_stride": p.sfb.stride(0),
        "groups.count": p.num_groups,
        "groups.rows": p.m,
        "groups.alignment": p.alignment,
        "groups.zeroes_padding": int(p.zero_padding),
    }


def grid(config: Config, planes: int, m: int, n: int, num_sms: int) -> int:
    """Count CTAs: as many as run at once, but no more than there can be tiles, or halves; a tile has a row at least."""
    if isinstance(config, DecodeConfig):
        return min(num_sms * config.ctas_per_sm, planes * m * ceil_div(n, config.block_n))
    return min(num_sms, planes * m * ceil_div(n, config.block_n) * (2 if config.cuts_last_tiles else 1))


def write_zeros(p: ContiguousProblem | MaskedProblem) -> None:
    """Write zeros, the product of depth 0, to the rows that are written."""
    if isinstance(p, MaskedProblem):
        is_written = torch.arange(p.max_m, device=p.d.device) < p.masked_m[:, None]
    elif p.layout_is_ends:
        ends = p.grouped_layout.clamp(0, p.m)
        aligned = (ends + (p.alignment - 1)) // p.alignment * p.alignment
        starts = torch.cat([torch.zeros_like(aligned[:1]), aligned[:-1]])
        rows = torch.arange(p.m, device=p.d.device)[:, None]
        last = aligned if p.zero_padding else ends
        is_written = ((rows >= starts) & (rows < last) & (ends > starts)).any(dim=1)
    else:
        is_written = p.grouped_layout >= 0
        if p.zero_padding:
            is_written |= padding_rows(p.grouped_layout, p.alignment)
    p.d.masked_fill_(is_written[..., None], 0)


def print_if_asked(num_groups: int, n: int, k: int, config: Config) -> None:
    """Say what is planned, if DG_PRINT_CONFIGS asks for it."""
    if settings().print_configs:
        print(f"deep_gemm: {num_groups} groups of {n} x {k} run {config.name}", file=sys.stderr)
