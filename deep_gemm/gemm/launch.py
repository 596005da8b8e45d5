"""Products on a GPU: the kernel that computes a problem, and its launch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..casts.lay_scales import laid_out, mn_major
from ..core.check.layout import ADDRESS_ALIGNMENT, ceil_div
from ..core.check.recipes import BFLOAT16, WHOLE, Scales
from ..core.check.ue8m0 import Words, sides_in_words
from ..core.gpu import WGMMA_ROWS, Gpu, gpu_of
from ..core.params import Kind
from ..core.settings import num_sms_of, settings
from ..core.shadow import Mapped, Number, plain
from . import kernel
from .choose import bf16 as choose_bf16
from .choose.cost import BANDS, band_of, rows_alike
from .choose.fp8 import choose
from .config.decode import DecodeConfig
from .config.tall import K_MAJOR, GemmConfig, Majors
from .kernel import kernel_of
from .kinds.output import Output, Sizes
from .maps import clipped_map, late_map, operand_map, output_map, part_map, row_pitch, scales_map
from .problem import Problem, write_without_depth

Config = GemmConfig | DecodeConfig
MORE_ALIKE = 4
"""Neighbouring bands of rows, on each side, that are tried for the same choice: a try adds 50 us to a first call."""


def run(p: Problem, config: Any = None, *, is_behind_cast: bool = False) -> None:
    """Compute a product on the GPU of its tensors. The host does not wait for a layout.

    If `config` is None, the heuristics choose it. `is_behind_cast`: the previous kernel on this stream writes only A
    and its scales, and lets this one start only when all earlier work is finished, including the layout's.
    """
    if 0 in (p.m, p.n, p.groups):
        return
    if 0 in p.a.shape:
        write_without_depth(p)
        return
    gpu = gpu_of(p.d.get_device())
    config = fitting(config, p, gpu)
    ready = prepared(p, config)
    # Otherwise the previous kernel writes more than A and its scales.
    is_ready = is_behind_cast and ready.sfb is p.sfb and ready.c is p.c
    start(ready, config, num_sms_of(gpu.num_sms), is_dependent=is_behind_cast, weight_is_ready=int(is_ready))


def start(
    p: Problem, config: Config, num_sms: int, planes: int | None = None, *, is_dependent: bool = False, **more: Any
) -> None:
    """Launch the kernel of a configuration for a `prepared` problem; `more`: as for `values_of`.

    `planes`: the number of products that the CTAs divide among them, if it is not the problem's.
    """
    ctas = config.ctas(p.m, p.n, num_sms, p.planes if planes is None else planes)
    values = values_of(p, config, **more)
    kernel_of(config).run(config, values, ctas, p.d.get_device(), is_dependent=is_dependent)


def fitting(config: Any, p: Problem, gpu: Gpu) -> Any:
    """Choose a configuration for a problem, or check that the given one fits."""
    if config is None:
        sizes = Sizes(*map(plain, p.sizes))
        config = chosen(sizes, p.output, gpu, majors_of(p), 0 if p.heads is None else p.heads.part_multiple)
        _note_what_serves(p, sizes, config, gpu)
    elif (reason := why_unfit(config, p)) is not None:
        raise ValueError(f"config: {config.name} {reason}")
    if settings().print_configs:
        line = p.output.work.line.format(m=p.m, n=p.n, k=p.k, groups=p.groups)
        print(f"deep_gemm: {line} {config.name}", file=sys.stderr)
    return config


def chosen(sizes: Sizes, output: Output, gpu: Gpu, majors: Majors = K_MAJOR, part_multiple: int = 0) -> Any:
    """Choose a configuration, by the settings in force."""
    if output.b == BFLOAT16:
        return choose_bf16.choose(sizes, output, majors, gpu)
    return choose(sizes, output, gpu, part_multiple)


def _note_what_serves(p: Problem, sizes: Sizes, config: Any, gpu: Gpu) -> None:
    """Make the current record serve all numbers of rows, or depths, that get the same configuration."""
    m: Any = p.m
    if p.work.is_along_k:
        _let_serve_alike(p.k, lambda k: chosen(sizes._replace(k=k), p.output, gpu) == config)
    for size in (p.n, p.groups, *([] if p.work.is_along_k else [p.k])):
        int(size)
    if not isinstance(m, Number):
        return
    if p.work.is_stacked:
        majors = majors_of(p)
        _let_serve_alike(m, lambda m: chosen(sizes._replace(m=m / sizes.groups), p.output, gpu, majors) == config)
        return
    if p.work.groups_rows or (p.output.b == BFLOAT16 and m.value > BANDS[-2]):
        int(m)
    let_serve_band(m, gpu)


def _let_serve_alike(number: Any, is_same: Callable[[int], bool]) -> None:
    """Make the current record serve all numbers that share one choice, and neighbours with the same configuration."""
    if not isinstance(number, Number):
        return
    if settings().print_configs:
        int(number)
    first, last = rows_alike(number.value)
    for _ in range(MORE_ALIKE):
        if not is_same(last + 1):
            break
        last = rows_alike(last + 1)[1]
    for _ in range(MORE_ALIKE):
        if first == 1 or not is_same(first - 1):
            break
        first = rows_alike(first - 1)[0]
    _ = (number < first, number > last)


def let_serve_band(m: Any, gpu: Gpu) -> None:
    """Make the current record serve the whole band of rows that share one choice of a dense product."""
    if not isinstance(m, Number):
        return
    if num_sms_of(gpu.num_sms) < gpu.num_sms or settings().print_configs:  # print_configs prints each choice
        int(m)
    band = band_of(m.value)
    if band:
        _ = m > BANDS[band - 1]
    if band < len(BANDS) - 1:
        _ = m > BANDS[band]


def why_unfit(config: Config, p: Problem) -> str | None:
    """Say why a configuration would compute something else than this problem; None if it computes this problem."""
    reason = kernel.why_unfit(config, p.k, p.output)
    if reason is not None or not isinstance(config, GemmConfig):
        return reason
    if config.majors != majors_of(p):
        return f"is for operands of other majors: {config.majors.name}, not {majors_of(p).name}"
    if p.heads is not None and p.heads.part_multiple % config.panel_columns:
        return f"stores panels of {config.panel_columns} columns, but parts of heads are no multiples of that"
    return None


def majors_of(p: Problem) -> Majors:
    """Tell for A and B whether m or n is contiguous instead of k: false in FP8."""
    return Majors(p.a.stride(-1) != 1, p.b.stride(-1) != 1) if p.of_b is None else K_MAJOR


def prepared(p: Problem, config: Config) -> Problem:
    """Copy scales and a layout to the form that the kernel loads; return the problem itself if nothing needs a copy."""
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
    """Convert a side's scales to the kernel's form: words if it reads words, else FP32, m-major if TMA loads them."""
    if sf.dtype == torch.int32:
        return sf if side in config.reads_words else laid_out(sf, ceil_div(k, of.columns))
    by_tma = isinstance(config, GemmConfig) and of != WHOLE and (side == Words.A or config.loads_sfb)
    return mn_major(sf) if by_tma else sf


def values_of(p: Problem, config: Config, **more: Any) -> dict[str, Any]:
    """Return the kernel's parameters for a `prepared` problem, by member.

    `more` has further members, which do not depend on the problem, by the last part of their dotted names.
    """
    of = _tall_operands(p, config) if isinstance(config, GemmConfig) else _decode_operands(p, config)
    known: dict[str, Any] = {"weight_is_ready": 0, **_facts(p), **more}
    if isinstance(config, DecodeConfig):
        known["slot_bytes"] = config.slot_bytes(p.m, p.n)
    values: dict[str, Any] = {}
    for field in kernel.params_of(config).fields:
        name, short = field.name, field.name.rpartition(".")[2]
        if name in of:
            values[name] = of[name]
        elif field.kind is Kind.MAP:
            values[name] = b""
        else:
            values[name] = known.get(short) if field.kind is Kind.POINTER else known[short]
    return values


def _facts(p: Problem) -> dict[str, Any]:
    """Return a problem's numbers, by the last part of each parameter's name."""
    has_rows, loads_sfb = p.work.groups_rows, p.work.is_along_k  # along k, only TMA loads the scales of B
    c_stride, c_pitch, _ = _strides(None if has_rows else p.c)
    d_stride, d_pitch, _ = _strides(p.d)
    sfa_stride, sfa_stride_m, sfa_stride_k = _strides(p.sfa)
    sfb_stride, sfb_stride_n, sfb_stride_k = _strides(p.sfb)
    facts: dict[str, Any] = {
        "m": p.m,
        "n": p.n,
        "k": 0 if p.work.may_be_empty else p.k,
        "words": 0 if p.sfa is None or p.sfb is None else sides_in_words(p.sfa, p.sfb),
        "sfb": 0,
        "c": p.bias if has_rows else p.c,
        "layout": p.c if has_rows else None,
        "c_pitch": c_pitch,
        "d_pitch": row_pitch(p.d) if has_rows and p.d.dim() > 1 else d_pitch,
        "whole_sfa": (p.sfa, sfa_stride_m, sfa_stride),
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
    return facts | (p.softmax or {})


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of the last three dimensions; 0 for a missing dimension, or for no tensor."""
    return (0, 0, 0) if x is None else (0, 0, 0, *x.stride())[-3:]


def _planes(p: Problem, x: Tensor) -> Tensor:
    """Return rows of groups as planes: stacked rows are one plane."""
    return x[None] if p.work.is_stacked else x


def _decode_operands(p: Problem, config: DecodeConfig) -> dict[str, Any]:
    """Return maps and operands by their names in `fp8_gemm_decode`."""
    # A box has no more rows than the tensor: TMA takes longer to fill a row with zeros than to load one.
    return {
        "map_a": Mapped(operand_map(_planes(p, p.a), min(config.block_tokens, p.m), config.block_k), p.a),
        "map_b": Mapped(operand_map(p.b, min(config.block_n, p.n), config.block_k), p.b),
        **{"sfa": p.sfa, "sfb": p.sfb, "d": p.d},
    }


def _tall_operands(p: Problem, config: GemmConfig) -> dict[str, Any]:
    """Return maps and operands by their names in `fp8_gemm` and `bf16_gemm`."""
    of = _maps_of_operands(p, config)
    if config.has_scales:
        of["map_sfa"] = Mapped(scales_map(_planes(p, p.sfa), config.box_rows_of_sfa(p.m), p.output.scale_parts), p.sfa)
    if config.epilogue.by_tma:
        of |= _maps_of_d(p, config)
    if config.loads_sfb:
        of["map_sfb"] = Mapped(scales_map(p.sfb, config.block_n, config.scale_parts_of_b), p.sfb)
    if p.sfb is not None and not p.work.is_along_k:
        of["sfb"] = p.sfb
    if config.epilogue.activates:
        of |= {"activation.row_weights": p.row_weights, "activation.scales": p.scales}
    return of | {"d": p.d}


def _maps_of_operands(p: Problem, config: GemmConfig) -> dict[str, Any]:
    """Return maps of A and B; none for groups along k with scales, because `k_group_maps` makes their maps."""
    columns, majors = config.block_k, config.majors
    of_b = columns // 2 if config.converts_b else columns  # bytes of FP4
    if p.work.maps is None:
        return {}
    if p.work.maps == "late":  # boxes of late maps may begin with zeros, before a group's first row
        map_a, map_b = late_map(p.a.mT, (columns, WGMMA_ROWS), 128), late_map(p.b.mT, (columns, 64), 128)
        return {"map_a": Mapped(map_a, p.a), "map_b": Mapped(map_b, p.b)}
    map_b = operand_map(p.b, config.box_rows_of_b // config.cluster_m, of_b, is_mn_major=majors.b_is_mn)
    if p.work.groups_rows:
        # Maps that cut off boxes begin a box before their tensor: "Rows that are not the group's", gemm/work/rows.cuh.
        rows, before = config.box_rows_of_a, config.box_rows_of_a * row_pitch(p.a) * p.a.element_size()
        map_a = clipped_map(_planes(p, p.a), (rows, columns), 128)
        return {"map_a": Mapped(map_a, p.a, before), "map_b": Mapped(map_b, p.b)}
    # A box of A has no more rows than A.
    map_a = operand_map(p.a, min(config.box_rows_of_a, p.m), columns, is_mn_major=majors.a_is_mn)
    return {"map_a": Mapped(map_a, p.a), "map_b": Mapped(map_b, p.b)}


def _maps_of_d(p: Problem, config: GemmConfig) -> dict[str, Any]:
    panel, d = config.panel_columns, _planes(p, p.d)
    if p.heads is not None:
        left, right = p.heads.of(p.d)
        before = -(p.heads.left + p.heads.mid) * p.d.element_size()
        map_d, map_right = part_map(p.d, left, panel), part_map(p.d, right, panel)
        return {"map_d": Mapped(map_d, p.d), "map_right_d": Mapped(map_right, p.d, before)}
    if not p.work.groups_rows:
        return {"map_d": Mapped(output_map(d, panel), p.d)}
    map_d = clipped_map(d, (WGMMA_ROWS, panel), panel * config.output_bytes)
    maps = {"map_d": Mapped(map_d, p.d, WGMMA_ROWS * row_pitch(p.d) * p.d.element_size())}
    return maps | ({"map_whole_d": Mapped(output_map(d, panel), p.d)} if config.has_second_map else {})
