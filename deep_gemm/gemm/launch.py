"""Products on a GPU: which kernel computes one, and the plan that launches it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..casts.lay_scales import laid_out, mn_major
from ..core.check.layout import ADDRESS_ALIGNMENT, WORD_BYTES, ceil_div
from ..core.check.recipes import BFLOAT16, Scales
from ..core.check.ue8m0 import Words, sides_in_words
from ..core.gpu import WGMMA_ROWS, Gpu, gpu_of
from ..core.jit import driver
from ..core.jit.tensor_map import TensorMap
from ..core.params import Kind
from ..core.settings import get_compile_mode, get_pdl, num_sms_of, settings
from . import kernel
from .choose import bf16 as choose_bf16
from .choose.cost import band_of
from .choose.fp8 import choose
from .config.decode import DecodeConfig
from .config.tall import K_MAJOR, GemmConfig, Majors
from .kernel import kernel_of
from .kinds.output import Output, Sizes
from .maps import clipped_map, late_map, operand_map, output_map, part_map, row_pitch, scales_map
from .plan import SCALE_BYTES, SFA, SFB, A, B, C, D, Place, Plan, Resized, addresses_of, derived_for_rows, other_rows
from .plan_kinds import ROW_WEIGHTS, SCALES, plan_kind
from .problem import Problem, write_without_depth

Config = GemmConfig | DecodeConfig
Numbers = dict[str, float | bytes]


def run(p: Problem, config: Any = None, *, is_behind_cast: bool = False) -> Plan | None:
    """Compute a product on the GPU that its tensors are on, and give the plan, which serves other calls.

    The host does not wait for a layout. `config` None leaves the choice to the heuristics. `is_behind_cast`: the kernel
    ahead on this stream writes A and its scales alone, and lets this one start only when all that ran before it is
    over, a layout among it.
    """
    if 0 in (p.m, p.n, p.groups):
        return None
    if p.a.numel() == 0:
        write_without_depth(p)
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(p, config, is_behind_cast=is_behind_cast)
    gpu = gpu_of(device)
    config = fitting(config, p, gpu)
    ready = prepared(p, config)
    launcher = kernel_of(config).launcher(config, device, is_behind_cast or get_pdl())
    # Else the kernel ahead writes more than A and its scales.
    is_ready = is_behind_cast and ready.sfb is p.sfb and ready.c is p.c
    plan = plan_of(ready, config, num_sms_of(gpu.num_sms), launcher, weight_is_ready=is_ready)
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(ready))
    plan.set_copies(p, ready)
    return plan


def fitting(config: Any, p: Problem, gpu: Gpu) -> Any:
    """Choose a configuration for a problem, or check that the given one fits."""
    if config is None:
        config = chosen(p.sizes, p.output, gpu, majors_of(p), 0 if p.heads is None else p.heads.part_multiple)
    elif (reason := why_unfit(config, p)) is not None:
        raise ValueError(f"config: {config.name} {reason}")
    print_if_asked(p.output, p.m, p.sizes, config)
    return config


def chosen(sizes: Sizes, output: Output, gpu: Gpu, majors: Majors = K_MAJOR, part_multiple: int = 0) -> Any:
    """Choose a configuration, by the settings in force."""
    if output.b == BFLOAT16:
        return choose_bf16.choose(sizes, output, majors, gpu)
    return choose(sizes, output, gpu, part_multiple)


def why_unfit(config: Config, p: Problem) -> str | None:
    """Say why a configuration would compute something else than this problem; None if it computes it."""
    reason = kernel.why_unfit(config, p.k, p.output)
    if reason is not None or not isinstance(config, GemmConfig):
        return reason
    if config.majors != majors_of(p):
        return f"is for operands that lie otherwise: {config.majors.name}, not {majors_of(p).name}"
    if p.heads is not None and p.heads.part_multiple % config.panel_columns:
        return f"stores panels of {config.panel_columns} columns, of which parts are no multiples"
    return None


def majors_of(p: Problem) -> Majors:
    """Say which operands have m or n contiguous, not k: none in FP8."""
    return Majors(p.a.stride(-1) != 1, p.b.stride(-1) != 1) if p.of_b is None else K_MAJOR


def print_if_asked(output: Output, m: int, sizes: Sizes, config: Config) -> None:
    """Print the problem and its configuration, if DG_PRINT_CONFIGS asks for it."""
    if settings().print_configs:
        line = output.work.line.format(m=m, n=sizes.n, k=sizes.k, groups=sizes.groups)
        print(f"deep_gemm: {line} {config.name}", file=sys.stderr)


def prepared(p: Problem, config: Config) -> Problem:
    """Lay scales, and a layout, out as the kernel loads them; the problem itself where they lie so."""
    layout = p.c
    if p.work.reads_ids and layout is not None and layout.data_ptr() % ADDRESS_ALIGNMENT:
        layout = layout.clone()
    if p.of_a is None or p.of_b is None or p.sfa is None or p.sfb is None:
        return p if layout is p.c else p._replace(c=layout)
    sfa = _scales_for(config, Words.A, p.sfa, p.of_a, p.k)
    sfb = _scales_for(config, Words.B, p.sfb, p.of_b, p.k)
    if sfa is p.sfa and sfb is p.sfb and layout is p.c:
        return p
    return p._replace(sfa=sfa, sfb=sfb, c=layout)


def _scales_for(config: Config, side: Words, sf: Tensor, of: Scales, k: int) -> Tensor:
    """Give a side's scales as a kernel takes them: words, if it reads these, or FP32, m-major where TMA loads them."""
    if sf.dtype == torch.int32:
        return sf if side in config.reads_words else laid_out(sf, ceil_div(k, of.columns))
    by_tma = isinstance(config, GemmConfig) and (side == Words.A or config.loads_sfb)
    return mn_major(sf) if by_tma else sf


def plan_of(
    p: Problem,
    config: Config,
    num_sms: int,
    launcher: driver.Launcher,
    *,
    weight_is_ready: bool = False,
    numbers: Mapping[str, float | bytes] | None = None,
    places: Sequence[Place] = (),
    count: int | None = None,
    kind: type[Plan] | None = None,
) -> Plan:
    """Prepare the launch for a problem that is `prepared`.

    `weight_is_ready`: as in `Params` of fp8_gemm_decode.cuh. `numbers` and `places` are of further members; `count`:
    the products among which CTAs are shared out, if not the problem's planes; `kind`: of a plan of several launches.
    """
    is_tall = isinstance(config, GemmConfig)
    maps, own = _tall_maps(p, config) if isinstance(config, GemmConfig) else _decode_maps(p, config)
    own += places
    known: Numbers = {**_facts(p), "weight_is_ready": int(weight_is_ready)}
    if isinstance(config, DecodeConfig):
        known["slot_bytes"] = config.slot_bytes(p.m, p.n)
    placed, given = {place.member for place in own}, numbers or {}
    params = kernel.params_of(config)
    known |= {field.name.rpartition(".")[2]: b"" for field in params.fields if field.kind is Kind.MAP}
    values = {
        field.name: given[field.name] if field.name in given else known[field.name.rpartition(".")[2]]
        for field in params.fields
        if field.name not in placed
    }
    ctas = config.ctas(p.m, p.n, num_sms, p.planes if count is None else count)
    plan = (kind or plan_kind(p))(p, params, values, maps, own, launcher, ctas)
    plan.config, plan.output, plan.n, plan.k = config, p.output, p.n, p.k
    if p.work.groups_rows:
        plan.c_is_d, plan.needs_c = False, True
        plan.alignment_of_c = ADDRESS_ALIGNMENT if p.work.reads_ids else WORD_BYTES
    elif p.c is not None and is_tall:
        plan.c_is_d = plan.output.c_is_d
    return plan


def _facts(p: Problem) -> Numbers:
    """Give numbers of a problem by the last part of the names that members of Params have."""
    has_rows, loads_sfb = p.work.groups_rows, p.work.is_along_k  # TMA alone loads the latter's scales of B
    c_stride, c_pitch, _ = _strides(None if has_rows else p.c)
    d_stride, d_pitch, _ = _strides(p.d)
    sfa_stride, sfa_stride_m, sfa_stride_k = _strides(p.sfa)
    sfb_stride, sfb_stride_n, sfb_stride_k = _strides(p.sfb)
    facts: Numbers = {
        "m": p.m,
        "n": p.n,
        "k": 0 if p.work.may_be_empty else p.k,
        "words": 0 if p.sfa is None or p.sfb is None else sides_in_words(p.sfa, p.sfb),
        "sfb": 0,
        "c": 0,
        "c_pitch": c_pitch,
        "d_pitch": row_pitch(p.d) if has_rows and p.d.dim() > 1 else d_pitch,
        "sfa_stride_m": sfa_stride_m,
        "sfa_stride_k": sfa_stride_k,
        "sfb_stride_n": 0 if loads_sfb else sfb_stride_n,
        "sfb_stride_k": 0 if loads_sfb else sfb_stride_k,
        "c_stride": c_stride,
        "d_stride": d_stride,
        "sfa_stride": sfa_stride,
        "sfb_stride": sfb_stride,
        "count": p.groups,
        "products": p.groups,
        "rows": p.m,
        "alignment": p.alignment,
        "zeroes_padding": int(p.zero_padding),
        "limit": math.inf if p.limit is None else p.limit,
        "scales_pitch": 0 if p.scales is None else p.scales.stride(-1),
    }
    if p.heads is not None:
        multiplier, shift = p.heads.division
        of_heads = {"left": p.heads.left, "mid": p.heads.mid, "columns": p.heads.columns}
        facts |= {**of_heads, "multiplier": multiplier, "shift": shift}
    return facts


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Give the strides of the last three dimensions; 0 for a dimension that is missing, or without a tensor."""
    return (0, 0, 0) if x is None else (0, 0, 0, *x.stride())[-3:]


def _planes(p: Problem, x: Tensor) -> Tensor:
    """Give rows of groups as planes: stacked ones as one."""
    return x[None] if p.work.is_stacked else x


def _decode_maps(p: Problem, config: DecodeConfig) -> tuple[dict[str, TensorMap], list[Place]]:
    # A box has no rows that are never there: to fill one with zeros takes TMA longer than to load one.
    maps = {
        "map_a": operand_map(_planes(p, p.a), min(config.block_tokens, p.m), config.block_k),
        "map_b": operand_map(p.b, min(config.block_n, p.n), config.block_k),
    }
    places = [Place("map_a", A), Place("map_b", B), Place("sfa", SFA), Place("sfb", SFB), Place("d", D)]
    return maps, [*places, Place("groups.layout" if p.work.groups_rows else "c", C)]


def _tall_maps(p: Problem, config: GemmConfig) -> tuple[dict[str, TensorMap], list[Place]]:
    """Maps of a problem for `fp8_gemm` or `bf16_gemm`, and places of all that has an address."""
    has_rows = p.work.groups_rows
    maps, places = _operand_maps(p, config)
    if config.has_scales:
        maps["map_sfa"] = scales_map(_planes(p, p.sfa), config.box_rows_of_sfa(p.m), config.scale_parts)
        places.append(Place("map_sfa", SFA))
    if config.epilogue.by_tma:
        _add_maps_of_d(p, config, maps, places)
    if config.loads_sfb:
        maps["map_sfb"] = scales_map(p.sfb, config.block_n, config.scale_parts_of_b)
        places.append(Place("map_sfb", SFB))
    if p.sfb is not None and not p.work.is_along_k:
        places.append(Place("sfb", SFB))
    if config.epilogue.activates:
        places += [Place("activation.row_weights", ROW_WEIGHTS), Place("activation.scales", SCALES)]
    return maps, [*places, Place("d", D), Place("groups.layout" if has_rows else "c", C)]


def _operand_maps(p: Problem, config: GemmConfig) -> tuple[dict[str, TensorMap], list[Place]]:
    """Maps of A and B, which groups along k have in a room of their own if they have scales."""
    columns, of_b, majors = config.block_k, config.loaded_columns_of_b, config.majors
    if p.work.maps is None:
        return {}, []
    if p.work.maps == "late":  # their boxes may begin with zeros
        maps = {"map_a": late_map(p.a.mT, (columns, WGMMA_ROWS), 128), "map_b": late_map(p.b.mT, (columns, 64), 128)}
        return maps, [Place("map_a", A), Place("map_b", B)]
    rows_of_b = config.box_rows_of_b // config.cluster_m
    map_b = operand_map(p.b, rows_of_b, of_b, is_mn_major=majors.b_is_mn)
    if p.work.groups_rows:
        # Maps that cut boxes off begin a box before their tensor: "Rows that are not the group's", gemm/work/rows.cuh.
        rows, before = config.box_rows_of_a, config.box_rows_of_a * row_pitch(p.a) * p.a.element_size()
        map_a = clipped_map(_planes(p, p.a), (rows, columns), 128)
        return {"map_a": map_a, "map_b": map_b}, [Place("map_a", A, before), Place("map_b", B)]
    # Boxes of A have no rows that are never there.
    map_a = operand_map(p.a, min(config.box_rows_of_a, p.m), columns, is_mn_major=majors.a_is_mn)
    return {"map_a": map_a, "map_b": map_b}, [Place("map_a", A), Place("map_b", B)]


def _add_maps_of_d(p: Problem, config: GemmConfig, maps: dict[str, TensorMap], places: list[Place]) -> None:
    panel, d = config.panel_columns, _planes(p, p.d)
    if p.heads is not None:
        left, right = p.heads.of(p.d)
        maps |= {"map_d": part_map(p.d, left, panel), "map_right_d": part_map(p.d, right, panel)}
        before = -(p.heads.left + p.heads.mid) * p.d.element_size()
        places += [Place("map_d", D), Place("map_right_d", D, before)]
    elif p.work.groups_rows:
        maps["map_d"] = clipped_map(d, (WGMMA_ROWS, panel), panel * config.output_bytes)
        places.append(Place("map_d", D, WGMMA_ROWS * row_pitch(p.d) * p.d.element_size()))
        if config.has_second_map:
            maps["map_whole_d"] = output_map(d, panel)
            places.append(Place("map_whole_d", D))
    else:
        maps["map_d"] = output_map(d, panel)
        places.append(Place("map_d", D))


def derive(templates: dict[Any, Plan], operands: Sequence[Any]) -> Plan | None:
    """Make a plan for other rows of a weight, or of the same groups, of operands whose free parts are unchecked.

    None sends the call through the checks. Groups have stacked rows: the room for rows that are counted is seldom new.
    """
    like = next(iter(templates.values()))
    found, c, work = other_rows(like, operands), operands[C], like.output.work
    if found is None:
        return None
    m, pitch, rows = found
    gpu, sizes = gpu_of(like.device), Sizes(m, like.n, like.k)
    if work.groups_rows:
        groups = operands[B].shape[0]
        if c.shape != ((m,) if work.reads_ids else (groups,)):
            return None
        sizes = Sizes(m / groups, like.n, like.k, groups)
        config = chosen(sizes, like.output, gpu)
    else:
        if c is not None and c.shape[0] != m:
            return None
        config = _chosen_for_rows(like, sizes, gpu)
    template = templates.get(config)
    if template is None or template.copies_sfa:
        return None
    print_if_asked(like.output, m, sizes, config)
    ctas = config.ctas(m, like.n, num_sms_of(gpu.num_sms))
    is_tall = isinstance(config, GemmConfig)
    are_whole = is_tall if work.groups_rows else m >= config.rows_of_tile
    return derived_for_rows(
        templates,
        config,
        m,
        pitch,
        (rows, ctas),
        resized_for,
        are_whole=are_whole,
        counts=COUNTS if work.groups_rows else COUNTS[:1],
        pitch_name=None if is_tall else "sfa_stride_k",
    )


COUNTS = ("m", "groups.rows")
"""Parameters that count the rows of a product."""


def _chosen_for_rows(like: Plan, sizes: Sizes, gpu: Gpu) -> Any:
    """Choose for other rows of a weight: each band of rows once, if the band decides."""
    if like.output.b == BFLOAT16:
        template: Any = like.config
        return chosen(sizes, like.output, gpu, template.majors)
    band = band_of(int(sizes.m))
    config = like.by_band.get(band)
    if config is None:
        config = choose(sizes, like.output, gpu)
        if num_sms_of(gpu.num_sms) >= gpu.num_sms:  # else m itself may decide
            like.by_band[band] = config
    return config


def resized_for(plan: Plan, m: int, pitch: int) -> tuple[dict[str, int], list[Resized]]:
    """Parameters and maps of a plan for other rows; `pitch` of A's scales is in elements."""
    config: Any = plan.config
    has_rows = plan.output.work.groups_rows
    numbers = dict.fromkeys(COUNTS if has_rows else COUNTS[:1], m)
    if isinstance(config, DecodeConfig):
        numbers |= {"sfa_stride_m": 1, "sfa_stride_k": pitch, "slot_bytes": config.slot_bytes(m, plan.n)}
        planes = (1,) if has_rows else ()
        return numbers, [Resized("map_a", 1, m, box=(config.block_k, min(config.block_tokens, m), *planes))]
    if not has_rows:
        resized = [
            Resized("map_a", 1, m, box=(config.block_k, min(config.box_rows_of_a, m))),
            Resized("map_d", 2 if config.has_wide_panels else 1, m),
        ]
        if plan.output.sfa is not None:
            box = config.box_rows_of_sfa(m), config.scale_parts
            resized.insert(1, Resized("map_sfa", 0, m, pitch * SCALE_BYTES, box))
        return numbers, resized
    resized = [  # places where a box of rows may begin: one more than there are rows
        Resized("map_a", 2, m + 1),
        Resized("map_sfa", 0, m, pitch * SCALE_BYTES),
    ]
    if "map_d" in plan.maps:
        resized.append(Resized("map_d", 2, m + 1))
    if "map_whole_d" in plan.maps:
        resized.append(Resized("map_whole_d", len(plan.maps["map_whole_d"].sizes) - 2, m))
    return numbers, resized
