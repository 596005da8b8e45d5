"""Records of products: a problem's tensors become shadows of the call's, and what prepares a launch notes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..casts import lay_scales
from ..core.check.layout import ADDRESS_ALIGNMENT, WORD_BYTES, pitch_of_scales
from ..core.check.recipes import BFLOAT16
from ..core.gpu import Gpu, gpu_of
from ..core.params import Kind
from ..core.record import From, Number, Record, Recording, Shadow
from ..core.seen import STAYS, Free
from ..core.settings import get_pdl, num_sms_of
from . import kernel
from .choose.cost import BANDS, band_of, rows_alike
from .config.decode import DecodeConfig
from .config.tall import GemmConfig
from .kernel import kernel_of
from .launch import _decode_maps, _facts, _tall_maps, fitting, prepared
from .plan import SCALE_BYTES, SFA, SFB, A, B, C, D
from .problem import Problem


def record_of(
    p: Problem, tensors: Sequence[Tensor], free: Sequence[Free], has_d: bool, *, is_behind_cast: bool = False
) -> Record | None:
    """Give the record of calls like one with these tensors, which asked for a problem; None if there is none.

    `free`: sizes and strides of each tensor that may be others. `has_d`: D is among them. The device is the current one.
    """
    if 0 in (p.m, p.n, p.groups) or p.a.numel() == 0 or p.heads is not None:
        return None
    device = p.d.get_device()
    gpu = gpu_of(device)
    config = fitting(None, p, gpu)
    ready = prepared(p, config)
    launcher = kernel_of(config).launcher(config, device, is_behind_cast or get_pdl())
    r = Recording(device)
    shadows = []
    for i, x in enumerate(tensors):
        sizes, strides = free[i] if i < len(free) else STAYS
        shadows.append(r.shadow(x, 1, sizes, strides))
    if p.m < 2:  # strides of a single row say nothing of others: the record is for this one
        for number in (*shadows[0].shape, *(x for each in shadows for x in (*each.shape, *each.strides))):
            int(number)
    made = None if has_d else r.result(_shape(p.d, p, shadows[0]), _strides_of(p.d), p.d.dtype)
    asked: dict[str, Any] = {}
    for name in ("a", "sfa", "b", "sfb", "d", "c"):
        x, laid = getattr(p, name), getattr(ready, name)
        if x is None:
            continue
        found = made if name == "d" and not has_d else _shadow_of(x, tensors, shadows)
        if found is None or (laid is not x and name not in ("sfa", "sfb")):
            return None
        asked[name] = found if laid is x else _laid(r, found, laid, device)
    shadow = ready._replace(**asked)
    _note_what_serves(shadow, config, gpu)
    maps, places = _tall_maps(shadow, config) if isinstance(config, GemmConfig) else _decode_maps(shadow, config)
    facts: dict[str, Any] = {
        **_facts(shadow),
        "weight_is_ready": int(is_behind_cast and ready.sfb is p.sfb and ready.c is p.c),
    }
    if isinstance(config, DecodeConfig):
        facts["slot_bytes"] = config.slot_bytes(shadow.m, shadow.n)
    operands = [shadow.a, shadow.sfa, shadow.b, shadow.sfb, shadow.d, shadow.c]
    params, placed = kernel.params_of(config), {place.member for place in places}
    addresses = {
        place.member: r.address(operands[place.operand], place.before)
        for place in places
        if operands[place.operand] is not None and place.member not in maps
    }
    at = {
        place.member: (maps[place.member], r.address(operands[place.operand], place.before))
        for place in places
        if place.member in maps
    }
    values = {
        field.name: b"" if field.kind is Kind.MAP else facts[field.name.rpartition(".")[2]]
        for field in params.fields
        if field.name not in placed
    } | {place.member: 0 for place in places if operands[place.operand] is None}
    by_tma = {place.operand for place in places if place.member in maps}
    aligned = {A: ADDRESS_ALIGNMENT, B: ADDRESS_ALIGNMENT, D: ADDRESS_ALIGNMENT}
    aligned |= {each: ADDRESS_ALIGNMENT if each in by_tma else SCALE_BYTES for each in (SFA, SFB)}
    aligned[C] = WORD_BYTES if p.work.groups_rows and not p.work.reads_ids else ADDRESS_ALIGNMENT
    for operand, each in enumerate(operands):
        if each is not None and each.base[0] is From.TENSOR:
            place = each.base[1]
            given = r.given[place]
            r.given[place] = given._replace(alignment=max(given.alignment, aligned[operand]))
    for each in shadows:  # of scales that are laid out
        given = r.given[each.base[1]]
        r.given[each.base[1]] = given._replace(alignment=max(given.alignment, min(each.element_size(), 4)))
    r.launch(
        launcher, config.ctas(shadow.m, shadow.n, num_sms_of(gpu.num_sms), shadow.planes), params, values, addresses, at
    )
    if has_d:
        d = shadow.d
        for i, each in enumerate(shadows):
            if i != d.base[1]:
                is_c = shadow.c is each and not p.work.groups_rows
                r.keep_apart(d, each, or_same=is_c and p.output.c_is_d is None)
    return r.record()


def _shadow_of(x: Tensor, tensors: Sequence[Tensor], shadows: Sequence[Shadow]) -> Shadow | None:
    for given, shadow in zip(tensors, shadows, strict=True):
        if x.data_ptr() != given.data_ptr() or x.dtype != given.dtype or x.dim() != given.dim():
            continue
        if (x.shape, x.stride()) == (given.shape, given.stride()):
            return shadow
        if x.dim() > 1 and (x.shape, x.stride()) == (given.mT.shape, given.mT.stride()):
            return shadow.mT
    return None


def _shape(d: Tensor, p: Problem, a: Shadow) -> tuple[Any, ...]:
    """The shape of a D that is made, in numbers."""
    rows = a.shape[0]
    return tuple(rows if i == 0 and isinstance(rows, Number) else size for i, size in enumerate(d.shape))


def _strides_of(d: Tensor) -> tuple[int, ...]:
    return tuple(d.stride())


def _laid(r: Recording, sf: Shadow, laid: Tensor, device: int) -> Shadow:
    """Lay scales out between launches."""
    *outer, _ = sf.shape
    pitch, blocks = pitch_of_scales(outer[-1]), laid.shape[-1]
    out = r.between((*outer, blocks), (blocks * pitch, 1, pitch)[3 - sf.dim() :], torch.float32)
    *group_strides, stride_m, stride_k = sf.stride()
    values = {
        "group_stride": group_strides[0] if group_strides else 0,
        "stride_m": stride_m,
        "stride_k": stride_k,
        "pitch": pitch,
        "m": outer[-1],
        "k_blocks": blocks,
        "reads_along_m": int(stride_m < stride_k),
        "are_words": int(sf.dtype == torch.int32),
    }
    config, of = lay_scales.CONFIG, lay_scales.KERNEL
    r.launch(
        of.launcher(config, device, False),
        lay_scales.grid(config, out),
        of.params,
        values,
        {"sf": r.address(sf), "out": r.address(out)},
        {},
    )
    return out


def _note_what_serves(p: Problem, config: Any, gpu: Gpu) -> None:
    """Note for which rows the configuration is the one to choose, and which scales TMA loads."""
    m: Any = p.m
    if not isinstance(m, Number):
        return
    _ = m > 1
    if p.sfa is not None and isinstance(pitch := p.sfa.stride(-1), Number):
        _ = (pitch % (ADDRESS_ALIGNMENT // SCALE_BYTES) == 0, pitch < m, p.sfa.shape[0] == m)
    if p.d.shape[0] is not m:
        _ = p.d.shape[0] == m
    if p.c is not None:
        _ = p.c.shape[0] == (p.groups if p.work.groups_rows and not p.work.reads_ids else m)
    if p.work.is_stacked and p.output.b != BFLOAT16:
        first, last = rows_alike(m.value)
        _ = (m < first, m > last)
        return
    if p.work.groups_rows or num_sms_of(gpu.num_sms) < gpu.num_sms:
        int(m)
        return
    band = band_of(m.value)
    if band:
        _ = m > BANDS[band - 1]
    if band < len(BANDS) - 1:
        _ = m > BANDS[band]
    elif p.output.b == BFLOAT16:
        int(m)
