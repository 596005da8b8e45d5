"""Kernels of experts across GPUs, computed by torch's operations at the addresses that a launch gets.

They test, without a GPU, the host's code that passes addresses: tensors seem to be on a GPU, except while torch
computes here. Results have the same bits as the package's on the CPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from math import inf, prod
from operator import attrgetter
from typing import Any, TypeVar
from unittest import mock

import fake_gpu
import pytest
import torch
from fake_gpu import FakeGpu, FakeLauncher
from torch import Tensor

from deep_gemm.across import gather_rows as gather_rows_kernel
from deep_gemm.across import message
from deep_gemm.across.owners import count_routes as routes_by_rank
from deep_gemm.across.owners import owners_of_routes, owners_of_tokens
from deep_gemm.across.rows_twice import COUNTS, COUNTS_OF_BLOCK
from deep_gemm.casts import lay_scales as scales
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.casts.gating import Gating, activated
from deep_gemm.casts.rules import UNSCALED
from deep_gemm.core import call, replay
from deep_gemm.core.call import Function
from deep_gemm.core.check import checks
from deep_gemm.core.check.layout import ids_of_groups
from deep_gemm.core.check.recipes import PER_64, PER_ROW, WHOLE, Scales
from deep_gemm.core.kernel import Kernel
from deep_gemm.core.params import Params
from deep_gemm.core.record import Record
from deep_gemm.gemm.api.bf16_grouped import product_of_bf16_rows
from deep_gemm.gemm.api.grouped import product_of_rows_by_64, product_of_stacked_rows
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds import works
from deep_gemm.moe import route_rows as route_rows_kernel
from deep_gemm.moe.activation import activated_product_of_rows, cast_activated
from deep_gemm.moe.check import ActivationProblem, ExpertRows
from deep_gemm.moe.route_rows import Totals
from deep_gemm.moe.routing import expert_rows, stack_routes, weighted_sum
from lab.sim.experts_few import rows_of

INT32, INT64, FP8, FP32, BF16 = torch.int32, torch.int64, torch.float8_e4m3fn, torch.float32, torch.bfloat16


def at(address: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """Make a tensor of the memory at an address."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    assert address % dtype.itemsize == 0
    strides = strides or [prod(shape[i + 1 :]) for i in range(len(shape))]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def aligned(num_bytes: int) -> Tensor:
    """Allocate zeros at an address at which a GPU's memory may begin."""
    memory = torch.zeros(num_bytes + 16, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 16 :][:num_bytes]


Launched = dict[str, Any]
Pair = tuple[Tensor, Tensor]


def members(params: Params, memory: memoryview, address: int) -> Launched:
    """Read the members of a launch's parameters by name; of a member that consists of bytes, return the address."""
    found = {}
    for each in params.fields:
        offset = params.offset(each.name)
        found[each.name] = (
            address + offset if each.is_bytes else struct.unpack_from(f"<{each.kind.format}", memory, offset)[0]
        )
    return found


def plan_sends(config: Any, p: Launched) -> None:
    ids = at(p["topk_ids"], (p["tokens"], p["topk"]), {4: INT32, 8: INT64}[config.id_bytes])
    owners = owners_of_routes(ids, p["experts_here"], p["ranks"])
    rows = expert_rows(owners_of_tokens(owners, p["ranks"]), p["ranks"])
    at(p["row_of"], ids.shape, INT32).copy_(rows.row_of)
    numbers = [at(p["facts"], (7,), INT64), rows.counts.long(), routes_by_rank(owners, p["ranks"])]
    at(p["told"], (7 + 2 * p["ranks"],), INT64).copy_(torch.cat(numbers))


def pack_rows(config: Any, p: Launched) -> None:
    tokens, topk, hidden = p["tokens"], p["topk"], p["hidden"]
    x = at(p["x"], (tokens, hidden), config.dtype, (p["x_pitch"] // config.dtype.itemsize, 1))
    ids = at(p["topk_ids"], (tokens, topk), {4: INT32, 8: INT64}[config.id_bytes])
    weights, row_of = at(p["topk_weights"], (tokens, topk), FP32), at(p["row_of"] or p["rows"], (tokens, topk), INT32)
    used = int((row_of >= 0).sum()) if p["row_of"] else p["slots"]
    assert not p["row_of"] or p["slots"] == tokens
    packed = message.pack(x, ids, weights, row_of if p["row_of"] else None, used)
    at(p["rows"], (used, p["row_bytes"] // 4), INT32).copy_(packed)


def count_routes(config: Any, p: Launched) -> None:
    routes, topk, experts = p["num_routes"], p["topk"], p["num_experts"]
    of_ids = INT32 if config.id_bytes == 4 else INT64
    ids = at(p["topk_ids"], (routes // topk, topk), of_ids, (topk + p["gap"], 1)).flatten() - p["first"]
    of_parts = ids.split(route_rows_kernel.PART)
    for of_part, counts in zip(of_parts, at(p["of_parts"], (len(of_parts), experts), INT32), strict=True):
        counts.copy_(of_part[(of_part >= 0) & (of_part < experts)].long().bincount(minlength=experts))


def route_rows(config: Any, p: Launched) -> None:
    routes, topk, experts = p["num_routes"], p["topk"], p["num_experts"]
    of_ids = INT32 if config.id_bytes == 4 else INT64
    ids = at(p["topk_ids"], (routes // topk, topk), of_ids, (topk + p["gap"], 1))
    shapes = (experts,), (experts,), (routes // topk, topk), (routes,), (routes,)
    found = stack_routes(ids, experts, p["first"])
    if config.totals == Totals.OF_PARTS:
        table = at(p["of_parts"], (-(-routes // route_rows_kernel.PART), experts), INT32)
        assert torch.equal(table.sum(0, dtype=INT32), found.counts)
    parts = [at(p[name], shape, INT32) for name, shape in zip(ExpertRows._fields, shapes, strict=True)]
    for part, right in zip(parts, found, strict=True):
        part.copy_(right)
    assert all(map(torch.equal, parts, found)), "parts that overlap"


def is_whole(p: Launched) -> bool:
    return not int(at(p["meeting.error"], (1,), INT32))


def meet(p: Launched) -> None:
    """Set this rank's flag on all ranks, and wait for all ranks' flags: ranks are threads."""
    rank, ranks = p["meeting.rank"], p["meeting.ranks"]
    epoch = at(p["meeting.reached"], (1,), INT32).add_(1)
    flags = [at(room + p["meeting.flags"], (ranks,), INT32) for room in rooms_of(p)]
    for each in flags:
        each[rank] = epoch
    begin = time.monotonic()
    for other in range(ranks):
        while int(flags[rank][other]) != int(epoch):
            if time.monotonic() - begin > p["meeting.limit"] / 1e9:
                for word in ("meeting.error", "meeting.report"):
                    at(p[word], (1,), INT32).fill_(other + 1)
                return
            time.sleep(1e-4)


def rooms_of(p: Launched) -> list[int]:
    return at(p["meeting.rooms"], (max(p["meeting.ranks"], 1),), INT64).tolist()


def post_rows(config: Any, p: Launched) -> None:
    tokens, most, topk, hidden, here = (p[name] for name in ("tokens", "max_tokens", "topk", "hidden", "experts_here"))
    columns = hidden if config.has_scales else hidden // BF16.itemsize
    x = at(p["x"], (tokens, columns), config.dtype, (p["x_pitch"] // config.dtype.itemsize, 1))
    ids = at(p["topk_ids"], (tokens, topk), {4: INT32, 8: INT64}[config.id_bytes])
    weights, row_of = at(p["topk_weights"], (tokens, topk), FP32), at(p["row_of"], (tokens, topk), INT32)
    if not is_whole(p):
        row_of.fill_(-1)
        return
    rooms, rank, blocks = rooms_of(p), p["meeting.rank"], -(-hidden // 128) if config.has_scales else 0
    if config.dtype == FP8:
        of_x = [x, at(p["sf"], (tokens, blocks), FP32, (p["sf_pitch"] // 4, 1))]
    else:
        assert p["sf"] == 0
        of_x = [*per_token_cast_to_fp8(x)] if config.has_scales else [x]
    columns_of_parts = (0, hidden) if len(of_x) == 2 else (0,)
    for column, part in zip((*columns_of_parts, hidden + 4 * blocks), (*of_x, weights), strict=True):
        place = rooms[rank] + column
        at(place, part.shape, part.dtype, (p["row_bytes"] // part.element_size(), 1)).copy_(part)
    has_expert = (ids >= 0) & (ids < here * len(rooms))
    row_of.copy_(torch.arange(tokens * topk).view(tokens, topk).masked_fill(~has_expert, -1))
    for other, room in enumerate(rooms):
        there = at(room + p["ids"] + rank * most * topk * 4, (most, topk), INT32).fill_(-1)
        there[:tokens] = torch.where(has_expert & (ids // here == other), ids - other * here, -1)
    meet(p)


def meet_ranks(config: Any, p: Launched) -> None:
    if is_whole(p):
        meet(p)


def gather_rows(config: Any, p: Launched) -> None:
    """Gather rows from one memory, or from the rooms of a node's ranks; do not write behind an expert's last row."""
    slots, rows, hidden, slot_bytes, most = (
        p[name] for name in ("num_slots", "rows", "hidden", "slot_bytes", "max_tokens")
    )
    blocks = -(-hidden // 128)
    source = at(p["token_of"], (rows,), INT32).long()
    assert int(source.max()) < slots
    is_used = source >= 0
    source = source[is_used]
    rooms, counts = rooms_of(p), [min(most, slots - first) for first in range(0, slots, most)]

    def of_slots(column: int, columns: int, dtype: torch.dtype) -> Tensor:
        pitch = slot_bytes // dtype.itemsize
        of_rooms = zip(rooms, counts, strict=True)
        return torch.cat([at(room + column, (count, columns), dtype, (pitch, 1)) for room, count in of_rooms])

    at(p["values"], (rows, hidden), torch.uint8)[is_used] = of_slots(0, hidden, torch.uint8)[source]
    if config.value_bytes == 1:
        at(p["sfa"], (rows, blocks), FP32, (1, p["pitch"]))[is_used] = of_slots(p["scales_at"], blocks, FP32)[source]
    if p["addresses"] == 0:
        assert p["weights"] == 0
        return
    row_of = at(p["row_of"], (slots, p["topk"]), INT32).long()
    slot, route = (row_of >= 0).nonzero().unbind(1)
    if p["weights"]:
        of_routes = of_slots(p["weights_at"], p["topk"], FP32)
        at(p["weights"], (rows,), FP32)[row_of[slot, route]] = of_routes[slot, route]
    result_bytes = hidden // config.value_bytes * 2
    place = (slot % most * p["topk"] + route) * result_bytes + torch.tensor(rooms)[slot // most] + p["results"]
    at(p["addresses"], (rows,), INT64)[row_of[slot, route]] = place if is_whole(p) else torch.zeros_like(place)


def gather_weighted(config: Any, p: Launched) -> None:
    tokens, topk, n = p["tokens"], p["topk"], p["n"]
    row_of = at(p["row_of"], (tokens, topk), INT32)
    y = at(p["y"], (int(row_of.max()) + 1, n), BF16, (p["y_pitch"], 1))
    weights = at(p["weights"], (tokens, topk), config.weights, (p["weights_pitch"], 1)) if config.weights else None
    out = at(p["out"], (tokens, n), BF16, (p["out_pitch"], 1))
    out.copy_(weighted_sum(y, row_of, weights) if len(y) else torch.zeros(1))


def gather_weighted_many(config: Any, p: Launched) -> None:
    gather_weighted(config, p)


def cast_rows(config: Any, p: Launched) -> None:
    m, k, groups = p["m"], p["k"], p["num_groups"]
    strides = p["scales_stride_m"] // 4, p["scales_stride_k"] // 4
    if config.to_routes:
        x = at(p["x"], (m, k), config.dtype, (p["x_pitch"] // config.dtype.itemsize, 1))
        row_of = at(p["row_of"], (m, p["topk"]), INT32).long()
        rows, (token, route) = int(row_of.max()) + 1, (row_of >= 0).nonzero().unbind(1)
        if config.to.format == UNSCALED.format:
            at(p["values"], (rows, k), BF16, (p["values_pitch"] // 2, 1))[row_of[token, route]] = x.to(BF16)[token]
            return
        values, scales = per_token_cast_to_fp8(x, gran_k=config.to.columns)
        to = at(p["values"], (rows, k), torch.uint8, (p["values_pitch"], 1))
        to[row_of[token, route]] = values.view(torch.uint8)[token]
        at(p["scales"], (rows, scales.shape[1]), FP32, strides)[row_of[token, route]] = scales[token]
        return
    h, ends = at(p["x"], (m, 2 * k), BF16, (p["x_pitch"] // 2, 1)), at(p["sizes"], (groups,), INT32)
    weights = at(p["row_weights"], (m,), FP32) if p["row_weights"] else None
    limit = None if p["limit"] == inf else p["limit"]
    gating = Gating("situ" if p["gating"] == 2 else "swiglu", p["alpha"], p["beta"], limit)
    problem = ActivationProblem(h, weights, None, ends, 1, gating)
    if config.to.format == UNSCALED.format:
        at(p["values"], (m, k), BF16, (p["values_pitch"] // 2, 1)).copy_(cast_activated(problem, scaled=None)[0])
        return
    values, scales = cast_activated(problem, mn_major=True, scaled=Scales(1, config.to.columns))
    at(p["values"], (m, k), FP8, (p["values_pitch"], 1)).copy_(values)
    at(p["scales"], scales.shape, FP32, strides).copy_(scales)


def lay_scales(config: Any, p: Launched) -> None:
    shape = p["m"], p["k_blocks"]
    assert not p["are_words"]
    at(p["out"], shape, FP32, (1, p["pitch"])).copy_(at(p["sf"], shape, FP32, (p["stride_m"], p["stride_k"])))


def layout_of(config: Any, p: Launched) -> Pair:
    """Return the layout (ids or ends), and the group of each row."""
    if config.work == works.IDS:
        ids = at(p["groups.layout"], (p["m"],), INT32)
        return ids, ids
    assert (p["groups.alignment"], p["groups.zeroes_padding"]) == (1, 0)
    ends = at(p["groups.layout"], (p["groups.count"],), INT32)
    return ends, ids_of_groups(ends, p["m"], 1)


def rows_to_addresses(a: Pair, b: Pair, ids: Tensor, addresses: Tensor, *, of_a: Scales = PER_ROW) -> None:
    d = torch.empty(len(ids), b[0].shape[1], dtype=BF16)
    (product_of_rows_by_64 if of_a == PER_64 else product_of_stacked_rows)(a, b, d, ids)
    store(d, ids, addresses)


def store(d: Tensor, ids: Tensor, addresses: Tensor) -> None:
    for row, address in enumerate(addresses.tolist()):
        if int(ids[row]) >= 0 and address:
            at(address, d.shape[1:], BF16).copy_(d[row])


def weights_of(p: Launched, *, is_fp4: bool, of: Scales | None = None) -> Pair:
    n, k, groups = p["n"], p["k"], p["groups.count"]
    row, group = (16 * number for number in at(p["map_b"] + 12, (2,), INT32).tolist())
    row_bytes, dtype, rows_of_scales, of_scales = (
        (k // 2, torch.uint8, n, INT32) if is_fp4 else (k, FP8, -(-n // 128), FP32)
    )
    b = at(int(at(p["map_b"], (1,), INT64)), (groups, n, row_bytes), dtype, (group, row, 1))
    strides = p["groups.sfb_stride"], p["sfb_stride_n"], p["sfb_stride_k"]
    if of == WHOLE:
        return b, at(p["sfb"], (groups, n, 1), FP32, strides)
    return b, at(p["sfb"], (groups, rows_of_scales, -(-k // 128)), of_scales, strides)


def bf16_gemm(config: Any, p: Launched) -> None:
    m, n, k = p["m"], p["n"], p["k"]
    first, first_of_b = (int(at(p[name], (1,), INT64)) for name in ("map_a", "map_b"))
    assert not p["groups.zeroes_padding"]
    row, group = (8 * number for number in at(p["map_b"] + 12, (2,), INT32).tolist())
    a, (_, ids) = at(first + config.box_rows_of_a * k * 2, (m, k), BF16), layout_of(config, p)
    is_mn = config.majors.b_is_mn
    b = at(first_of_b, (p["groups.count"], *((k, n) if is_mn else (n, k))), BF16, (group, row, 1))
    b = b.mT if is_mn else b
    if config.epilogue.has_row_addresses:
        d = torch.empty(m, n, dtype=BF16)
        product_of_bf16_rows(a, b, d, ids)
        store(d, ids, at(p["d"], (m,), INT64))
        return
    d = at(p["d"], (m, n // (1 + config.epilogue.activates)), BF16, (p["d_pitch"], 1))
    if not config.epilogue.activates:
        product_of_bf16_rows(a, b, d, ids, recipes_and_bias(config, p)[1])
        return
    h = torch.empty(m, n, dtype=BF16)
    product_of_bf16_rows(a, b, h, ids)
    limit = None if p["activation.limit"] == inf else p["activation.limit"]
    d[ids >= 0] = activated(h, Gating(limit=limit)).to(BF16)[ids >= 0]


def recipes_and_bias(config: Any, p: Launched) -> tuple[Any, Tensor | None]:
    bias = at(p["c"], (p["groups.count"], p["n"]), FP32) if config.with_c else None
    return (None, (1, 0), (1, 0)) if config.sfb == WHOLE else (None, None, None), bias


def experts_few(config: Any, p: Launched) -> None:
    shape, n, k, experts = (p["tokens"], p["topk"]), p["n"], p["k"], p["num_experts"]
    ids = at(p["topk_ids"], shape, {4: INT32, 8: INT64}[p["id_bytes"]], (p["ids_pitch"], 1))
    ids = torch.where((ids >= p["first_expert"]) & (ids < p["first_expert"] + experts), ids - p["first_expert"], -1)
    row_of, pairs = rows_of(ids, experts)
    weight = at(int(at(p["map_w"], (1,), INT64)), (experts, p["units"] * 16, k), BF16 if config.scales is None else FP8)
    layout, tokens = torch.tensor(pairs, dtype=INT32).view(-1, 2).t().contiguous()
    type_of_h = BF16 if config.scales is None else FP32
    of_b = type_of_h if config.is_second else BF16
    a = at(p["b"], (len(pairs) if config.is_second else p["tokens"], k), of_b, (p["b_pitch"] // of_b.itemsize, 1))
    a = a if config.is_second else a[tokens]
    h = torch.empty(len(pairs), weight.shape[1], dtype=BF16)
    if config.scales is None:
        assert int(at(p["map_b"], (1,), INT64)) == p["b"]
        product_of_bf16_rows(a, weight, h, layout)
    else:
        rows, columns = config.scales
        sizes = experts, -(-weight.shape[1] // rows), -(-k // columns) if columns else 1
        scales = at(p["sfw"], sizes, FP32, (p["sfw_stride_e"], p["sfw_stride_n"], p["sfw_stride_k"]))
        recipes = (None, (1, 0), (1, 0)) if config.scales == WHOLE else (None, None, None)
        product_of_stacked_rows(per_token_cast_to_fp8(a, gran_k=columns), (weight, scales), h, layout, recipes)
    d = at(p["d"], (len(pairs), n), BF16 if config.is_second else type_of_h)
    if config.is_second:
        d.copy_(h)
        return
    limit = None if p["limit"] == inf else p["limit"]
    d.copy_(activated(h, Gating("situ" if p["gating"] == 2 else "swiglu", p["alpha"], p["beta"], limit)))
    at(p["row_of"], shape, INT32).copy_(row_of)


def fp8_gemm_few_rows(config: DecodeConfig, p: Launched) -> None:
    m, n, k = p["m"], p["n"], p["k"]
    blocks = 1 if config.sfb == WHOLE else -(-k // 128)
    sfa = at(p["sfa"], (m, blocks), FP32, (p["sfa_stride_m"], p["sfa_stride_k"]))
    a, (_, ids) = at(int(at(p["map_a"], (1,), INT64)), (m, k), FP8), layout_of(config, p)
    d = at(p["d"], (m, n), BF16, (p["d_pitch"], 1))
    b = weights_of(p, is_fp4=config.is_fp4, of=config.sfb)
    product_of_stacked_rows((a, sfa), b, d, ids, *recipes_and_bias(config, p))


def both_products(config: Any, p: Launched) -> None:
    """Compute both products of experts' rows. Here the ring has a slot for each block of rows, which is used once."""
    rows, k, columns = p["groups.rows"], p["k"], p["second.k"]
    assert p["blocks"] >= rows // 128 + p["groups.count"] and p["slots"] * 128 == p["second.m"]
    assert not at(p["counts"], (COUNTS + COUNTS_OF_BLOCK * p["blocks"],), INT32).any()
    a, sfa = torch.zeros(rows, k, dtype=torch.uint8).view(FP8), torch.zeros(-(-k // 128), rows, dtype=FP32)
    of_rooms = {name.removeprefix("rooms."): value for name, value in p.items() if name.startswith("rooms.")}
    more = {"num_slots": p["meeting.ranks"] * of_rooms["max_tokens"], "rows": rows, "hidden": k, "pitch": rows}
    weights = torch.zeros(rows, dtype=FP32) if of_rooms["weights"] else None
    to = {"values": a.data_ptr(), "sfa": sfa.data_ptr(), "weights": 0 if weights is None else weights.data_ptr()}
    gather_rows(gather_rows_kernel.CONFIGS[1], {**p, **of_rooms, **more, "slot_bytes": of_rooms["row_bytes"], **to})
    sfa = sfa.t()
    ends = at(p["groups.layout"], (p["groups.count"],), INT32)
    of_a = PER_64 if config.scale_parts == 2 else PER_ROW
    middle = torch.empty(rows, columns, dtype=FP8), torch.empty(-(-columns // of_a.columns), rows, dtype=FP32).t()
    limit = None if p["activation.limit"] == inf else p["activation.limit"]
    b = weights_of(p, is_fp4=False)
    is_apart = config.epilogue.gates_apart
    activated_product_of_rows((a, sfa), b, middle, ends, weights, limit=limit, gates_apart=is_apart)
    of_second = {name.removeprefix("second."): value for name, value in p.items() if name.startswith("second.")}
    b = weights_of({**p, **of_second, "groups.sfb_stride": p["second_sfb_stride"]}, is_fp4=False)
    rows_to_addresses(middle, b, ids_of_groups(ends, rows, 1), at(p["second.d"], (rows,), INT64), of_a=of_a)


def fp8_gemm_rows(config: Any, p: Launched) -> None:
    if isinstance(config, DecodeConfig):
        fp8_gemm_few_rows(config, p)
        return
    if config.work.is_twice:
        both_products(config, p)
        return
    m, n, k = p["m"], p["n"], p["k"]
    first_words = {name: at(p[name], (16,), INT64).tolist() for name in ("map_a", "map_sfa") if name in p}
    a = at(first_words["map_a"][0] + config.box_rows_of_a * k, (m, k), FP8)
    if config.sfb == WHOLE:
        sfa = at(int(at(p["whole_sfa"], (1,), INT64)), (m, 1), FP32)
    else:
        pitch = int(at(p["map_sfa"] + 12, (1,), INT32)) * 4
        sfa = at(first_words["map_sfa"][0], (m, -(-k // (128 // config.scale_parts))), FP32, (1, pitch))
    b = weights_of(p, is_fp4=config.converts_b, of=config.sfb)
    layout, ids = layout_of(config, p)
    if config.epilogue.has_row_addresses:
        of_a = PER_64 if config.scale_parts == 2 else PER_ROW
        rows_to_addresses((a, sfa), b, ids, at(p["d"], (m,), INT64), of_a=of_a)
        return
    if not config.epilogue.activates:
        d = at(p["d"], (m, n), BF16, (p["d_pitch"], 1))
        product_of_stacked_rows((a, sfa), b, d, ids, *recipes_and_bias(config, p))
        return
    d = at(p["d"], (m, n // 2), FP8, (p["d_pitch"], 1))
    blocks = n // 2 // (128 if config.epilogue.gates_apart else 64)
    scales = at(p["activation.scales"], (m, blocks), FP32, (1, p["activation.scales_pitch"]))
    weights = at(p["activation.row_weights"], (m,), FP32) if p["activation.row_weights"] else None
    said = {
        "limit": None if p["activation.limit"] == inf else p["activation.limit"],
        "gates_apart": config.epilogue.gates_apart,
    }
    activated_product_of_rows((a, sfa), b, (d, scales), layout, weights, **said)


class _Where(threading.local):
    computes = False


_WHERE = _Where()
F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def computing() -> Iterator[None]:
    """Treat this thread's tensors as CPU tensors within the block."""
    before, _WHERE.computes = _WHERE.computes, True
    try:
        yield
    finally:
        _WHERE.computes = before


def on_cpu(function: F) -> F:
    """Make a function compute on the CPU, for right results and for tests' operands."""

    @wraps(function)
    def computed(*given: Any, **said: Any) -> Any:
        with computing():
            return function(*given, **said)

    return computed  # type: ignore[return-value]


class Launcher(FakeLauncher):
    """Replaces the driver's launcher: a launch calls the function in this file that has the kernel's name."""

    def __init__(self, gpu: FakeGpu, kernel: Kernel[Any], *of: Any) -> None:
        super().__init__(gpu, kernel, *of)
        self.name = "fp8_gemm_rows" if kernel in (FP8_GEMM, FP8_GEMM_DECODE) else kernel.name

    def start(self, config: None, function: None, pointers: None, extra: int) -> tuple[int]:
        with computing():
            globals()[self.name](self.of, members(self.layout, self.params.bytes, self.params.address))
        return super().start(config, function, pointers, extra)


@dataclass
class Seen:
    """Notes the launches that reach the driver, and the record of each call, or None for a call without a record."""

    gpu: FakeGpu
    made: list[Record | None] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    """Bytes of memory that each replayed call uses for data between launches."""

    @property
    def names(self) -> list[str]:
        """Return the names of the launched kernels."""
        return [each.kernel for each in self.gpu.launches]

    def by_record_as_without(self, run: Callable[[], object], *more: str) -> list[tuple[Any, ...]]:
        """Run a call by a record, and without records. Launches must be equal, also in the facts that `more` names."""
        facts, by_way = attrgetter("kernel", "config", "grid", "is_dependent", *more), []
        without: Any = mock.patch.multiple(call, RECORDS={}, recorded=lambda *_: (None, None))
        for way in (nullcontext(), without):
            self.gpu.launches.clear()
            with way:
                run()
            by_way.append([facts(each) for each in self.gpu.launches])
        assert by_way[0] == by_way[1]
        return by_way[0]

    def cleared(self) -> Seen:
        """Forget the launches and calls that were noted so far, but keep all records."""
        self.gpu.launches.clear()
        self.made.clear()
        self.scratch.clear()
        return self


def install(monkeypatch: pytest.MonkeyPatch, *of: Function) -> Seen:
    """Replace a GPU's kernels by these, make tensors seem to be on a GPU, and watch calls of the functions `of`."""
    on_host = checks.on_host
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: not _WHERE.computes))
    monkeypatch.setattr(scales, "has_kernel", lambda _: not _WHERE.computes)
    monkeypatch.setattr(checks, "on_host", lambda x: _WHERE.computes and on_host(x))
    return watched(monkeypatch, fake_gpu.install(monkeypatch, launcher=Launcher), *of)


def watched(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, *of: Function) -> Seen:
    """Note the record (or None) that each call gets if it has none yet: calls of the functions `of`, or of all."""
    seen, recorded, ordinary = Seen(gpu), call.recorded, replay.replay

    def replayed(record: Record, tensors: Any, values: Any, *more: Any) -> list[Tensor]:
        seen.scratch.append(values[record.scratch])
        return ordinary(record, tensors, values, *more)

    def noted(function: Function, *given: Any) -> tuple[Any, Any]:
        found = recorded(function, *given)
        if not of or function in of:
            seen.made.append(found[0])
        return found

    monkeypatch.setattr(call, "recorded", noted)
    monkeypatch.setattr(replay, "replay", replayed)
    return seen
