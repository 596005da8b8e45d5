"""Kernels of the prefill form by torch's operations: what a launch reads and writes at the addresses it was given.

So a host that hands addresses to kernels is tested without a GPU. Bits are those of the package on the CPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import inf, prod
from typing import Any

import pytest
import torch
from fake_gpu import encoded_map
from torch import Tensor

from deep_gemm.activation import activated_product_of_rows
from deep_gemm.distributed import message
from deep_gemm.distributed.owners import count_routes as routes_by_rank
from deep_gemm.distributed.owners import owners_of_routes, owners_of_tokens
from deep_gemm.gpus import H200
from deep_gemm.grouped import product_of_stacked_rows
from deep_gemm.jit import driver
from deep_gemm.jit.tensor_map import TensorMap
from deep_gemm.kernels import fp8_gemm, rows_at
from deep_gemm.kernels import gather_weighted as gather_weighted_kernel
from deep_gemm.kernels import route_rows as route_rows_kernel
from deep_gemm.kernels.launch import OrdinaryKernel
from deep_gemm.kernels.params import Params
from deep_gemm.kernels.route_rows import Totals
from deep_gemm.layers import activate_rows
from deep_gemm.problem import ExpertRows
from deep_gemm.routing import expert_rows, stack_routes, weighted_sum

INT32, INT64, FP8, FP32, BF16 = torch.int32, torch.int64, torch.float8_e4m3fn, torch.float32, torch.bfloat16


def at(address: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor of memory at an address."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    assert address % dtype.itemsize == 0
    strides = strides or [prod(shape[i + 1 :]) for i in range(len(shape))]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


class Launched(dict[str, Any]):
    """The members of a launch's parameters; those that are bytes by their address."""

    def __init__(self, params: Params, memory: memoryview, address: int) -> None:
        for field in params.fields:
            offset = params.offset(field.name)
            self[field.name] = (
                address + offset if field.is_bytes else struct.unpack_from(f"<{field.kind.format}", memory, offset)[0]
            )


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
    weights, row_of = at(p["topk_weights"], (tokens, topk), FP32), at(p["row_of"], (tokens, topk), INT32)
    used = int((row_of >= 0).sum())
    assert p["slots"] == tokens
    at(p["rows"], (used, p["row_bytes"] // 4), INT32).copy_(message.pack(x, ids, weights, row_of, used))


def count_routes(config: Any, p: Launched) -> None:
    routes, topk, experts = p["num_routes"], p["topk"], p["num_experts"]
    ids = at(p["topk_ids"], (routes // topk, topk), INT32, (topk + p["gap"], 1)).flatten() - p["first"]
    of_parts = ids.split(route_rows_kernel.PART)
    for of_part, counts in zip(of_parts, at(p["of_parts"], (len(of_parts), experts), INT32), strict=True):
        counts.copy_(of_part[(of_part >= 0) & (of_part < experts)].long().bincount(minlength=experts))


def route_rows(config: Any, p: Launched) -> None:
    routes, topk, experts = p["num_routes"], p["topk"], p["num_experts"]
    ids = at(p["topk_ids"], (routes // topk, topk), INT32, (topk + p["gap"], 1))
    shapes = (experts,), (experts,), (routes // topk, topk), (routes,), (routes,)
    found = stack_routes(ids, experts, p["first"])
    if config.totals == Totals.OF_PARTS:
        table = at(p["of_parts"], (-(-routes // route_rows_kernel.PART), experts), INT32)
        assert torch.equal(table.sum(0, dtype=INT32), found.counts)
    parts = [at(p[name], shape, INT32) for name, shape in zip(ExpertRows._fields, shapes, strict=True)]
    for part, right in zip(parts, found, strict=True):
        part.copy_(right)
    assert all(map(torch.equal, parts, found)), "parts that overlap"


def gather_rows(config: Any, p: Launched) -> None:
    slots, rows, hidden, slot_bytes = p["num_slots"], p["rows"], p["hidden"], p["slot_bytes"]
    source = at(p["token_of"], (rows,), INT32).long()
    assert int(source.min()) >= 0 and int(source.max()) < slots
    blocks = -(-hidden // 128)
    assert p["max_tokens"] >= slots
    first = int(at(p["meeting.rooms"], (1,), INT64))
    values = at(first, (slots, hidden), torch.uint8, (slot_bytes, 1))
    scales = at(first + p["scales_at"], (slots, blocks), FP32, (slot_bytes // 4, 1))
    at(p["values"], (rows, hidden), torch.uint8).copy_(values[source])
    at(p["sfa"], (rows, blocks), FP32, (1, p["pitch"])).copy_(scales[source])


def gather_weighted(config: Any, p: Launched) -> None:
    tokens, topk, n = p["tokens"], p["topk"], p["n"]
    row_of = at(p["row_of"], (tokens, topk), INT32)
    y = at(p["y"], (int(row_of.max()) + 1, n), BF16, (p["y_pitch"], 1))
    weights = at(p["weights"], (tokens, topk), FP32, (p["weights_pitch"], 1)) if config.weights else None
    out = at(p["out"], (tokens, n), BF16, (p["out_pitch"], 1))
    out.copy_(weighted_sum(y, row_of, weights) if len(y) else torch.zeros(1))


def gather_weighted_many(config: Any, p: Launched) -> None:
    gather_weighted(config, p)


def cast_rows(config: Any, p: Launched) -> None:
    m, k, groups = p["m"], p["k"], p["num_groups"]
    h, ends = at(p["x"], (m, 2 * k), BF16, (p["x_pitch"] // 2, 1)), at(p["sizes"], (groups,), INT32)
    rows = ExpertRows(ends, ends, ends, ends, ends)
    values, scales = activate_rows(h, rows, None if p["limit"] == inf else p["limit"])
    at(p["values"], (m, k), FP8, (p["values_pitch"], 1)).copy_(values)
    strides = p["scales_stride_m"] // 4, p["scales_stride_k"] // 4
    at(p["scales"], scales.shape, FP32, strides).copy_(scales)


def fp8_gemm_rows(config: Any, p: Launched) -> None:
    m, n, k, groups = p["m"], p["n"], p["k"], p["groups.count"]
    first_words = {name: at(p[name], (16,), INT64).tolist() for name in ("map_a", "map_b", "map_sfa")}
    a = at(first_words["map_a"][0] + config.box_rows_of_a * k, (m, k), FP8)
    pitch = int(at(p["map_sfa"] + 12, (1,), INT32)) * 4
    sfa = at(first_words["map_sfa"][0], (m, -(-k // 128)), FP32, (1, pitch))
    row, group = (16 * number for number in at(p["map_b"] + 12, (2,), INT32).tolist())
    b = at(first_words["map_b"][0], (groups, n, k), FP8, (group, row, 1))
    strides = p["groups.sfb_stride"], p["sfb_stride_n"], p["sfb_stride_k"]
    sfb = at(p["sfb"], (groups, -(-n // 128), -(-k // 128)), FP32, strides)
    ids = at(p["groups.layout"], (m,), INT32)
    if not config.activates:
        product_of_stacked_rows((a, sfa), (b, sfb), at(p["d"], (m, n), BF16, (p["d_pitch"], 1)), ids)
        return
    d = at(p["d"], (m, n // 2), FP8, (p["d_pitch"], 1))
    scales = at(p["activation.scales"], (m, n // 256), FP32, (1, p["activation.scales_pitch"]))
    limit = None if p["activation.limit"] == inf else p["activation.limit"]
    activated_product_of_rows((a, sfa), (b, sfb), (d, scales), ids, limit=limit, gates_apart=True)


KERNELS = {
    each.__name__: each
    for each in (
        plan_sends,
        pack_rows,
        count_routes,
        route_rows,
        gather_rows,
        gather_weighted,
        gather_weighted_many,
        cast_rows,
        fp8_gemm_rows,
    )
}


class Launcher:
    """Takes what a launcher of the driver takes, and computes."""

    def __init__(self, name: str, params: Params, config: Any, launched: Counter[str]) -> None:
        self.name, self.layout, self.of, self.launched = name, params, config, launched
        self.params = driver.ParamsBuffer(params.size)
        self.lock = threading.Lock()
        self.plan: object = None
        self.grid = 0
        self.stream: int | None = None
        self.config = self.function = self.pointers = None
        self.success = 0

    def encode(self, tensor_map: TensorMap, address: int, tensor: int) -> bytes:
        return encoded_map(tensor_map.sizes, tensor_map.strides, tensor_map.box, address)

    def keeps_addresses(self) -> bool:
        return True

    def hold(self, plan: object, template: bytes, grid: int) -> None:
        self.params.bytes[: len(template)] = template
        self.plan, self.grid = plan, grid

    def set_stream(self, stream: int) -> None:
        self.stream = stream

    def current_stream(self, device: int) -> int:
        return 7

    def current_device(self) -> int:
        return -1  # what CPU tensors say they are on

    def start(self, config: None, function: None, pointers: None, extra: int) -> tuple[int]:
        self.launched[self.name] += 1
        KERNELS[self.name](self.of, Launched(self.layout, self.params.bytes, self.params.address))
        return (0,)


def install(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have these kernels take the place of a GPU's; give how often each is launched."""
    launched: Counter[str] = Counter()

    @cache
    def ordinary(kernel: OrdinaryKernel[Any], config: Any, device: int, is_dependent: bool) -> Launcher:
        return Launcher(kernel.name, kernel.params, config, launched)

    @cache
    def gemm(config: Any, device: int, is_dependent: bool) -> Launcher:
        return Launcher("fp8_gemm_rows", fp8_gemm.params_of(config), config, launched)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(driver, "sizes_are_numbers", lambda: True)
    monkeypatch.setattr(OrdinaryKernel, "launcher", ordinary)
    monkeypatch.setattr(fp8_gemm, "launcher", gemm)
    for module in (rows_at, gather_weighted_kernel):
        monkeypatch.setattr(module, "gpu_of", lambda _: H200)
    return launched
