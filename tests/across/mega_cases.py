"""Mega MoE: weights, tokens, and the same computation in plain torch operations, one expert after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deep_gemm
from deep_gemm import SM90SymmBuffer
from deep_gemm.across import mega_by_peers
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.meeting import MAX_RANKS
from deep_gemm.gemm.packed import as_e4m3, is_packed
from deep_gemm.moe import api as layers

Tokens = tuple[Tensor, Tensor, Tensor, Tensor]
"""FP8 values, the values' scales, and the expert and weight of each route."""

FORMS = {"apart": (10**6, MAX_RANKS + 1), "by one kernel": (1, 1)}
"""Forms of products. Layers with at least the first number of rows, and mega MoE on at least the second number of
ranks, compute both products by one kernel.

Weights in BF16 or FP4 take two kernels in both forms; with many rows the first activates BF16.
"""


def take(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the products of layers and of mega MoE in one of FORMS, for any number of rows and ranks."""
    many_rows, least_ranks = FORMS[form]
    monkeypatch.setattr(layers, "MANY_ROWS", many_rows)
    monkeypatch.setattr(mega_by_peers, "LEAST_RANKS", least_ranks)
    monkeypatch.setattr(mega_by_peers, "LEAST_ROWS", 0)


@dataclass(frozen=True)
class Model:
    hidden: int = 256
    inter: int = 128
    num_experts: int = 6
    topk: int = 3
    is_fp4: bool = False

    def weights(self, device: str = "cpu", seed: int = 0) -> tuple[Operand, Operand]:
        """Draw the weights of all experts, with the gate's rows first."""
        g = torch.Generator(device).manual_seed(seed)
        shapes = (2 * self.inter, self.hidden), (self.hidden, self.inter)
        if self.is_fp4:
            l1, l2 = (random_fp4(self.num_experts, *shape, g) for shape in shapes)
            return l1, l2
        l1, l2 = (random_weight(self.num_experts, *shape, g) for shape in shapes)
        return l1, l2

    def tokens(self, count: int, device: str = "cpu", seed: int = 1, all_to: int | None = None) -> Tokens:
        """Draw tokens: some routes are -1, some name an expert twice, and weights have both signs."""
        g = torch.Generator(device).manual_seed(seed)
        x = torch.randn(count, self.hidden, generator=g, device=device)
        ids = torch.randint(-1, self.num_experts, (count, self.topk), generator=g, device=device)
        ids = ids if all_to is None else torch.full_like(ids, all_to)
        return *deep_gemm.per_token_cast_to_fp8(x), ids, torch.randn(count, self.topk, generator=g, device=device)

    def buffer(self, max_tokens: int = 128, group: dist.ProcessGroup | None = None) -> SM90SymmBuffer:
        sizes = self.num_experts, max_tokens, self.topk, self.hidden, self.inter
        if self.is_fp4:
            return deep_gemm.get_symm_buffer_for_mega_moe(group, *sizes)
        return deep_gemm.get_symm_buffer_for_sm90_mega_moe(group, *sizes)


def random_weight(experts: int, n: int, k: int, g: torch.Generator) -> Operand:
    """Draw FP8 values from random bits, so that large weights need no FP32 copy, and scales of blocks."""
    values = torch.randint(0, 256, (experts, n, k), dtype=torch.uint8, generator=g, device=g.device)
    values.bitwise_and_(0xB7).bitwise_or_(0x20)  # magnitudes from 2^-3 to 0.9375
    scales = (torch.rand(experts, n // 128, k // 128, generator=g, device=g.device) + 0.5) / k**0.5
    return values.view(torch.float8_e4m3fn), scales


def random_fp4(experts: int, n: int, k: int, g: torch.Generator) -> Operand:
    """Draw MXFP4 values of every code, and scales as bytes."""
    values = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=g, device=g.device)
    return values, torch.randint(117, 125, (experts, n, k // 32), dtype=torch.uint8, generator=g, device=g.device)


def weights_on_gpu(num: int, hidden: int, inter: int, g: torch.Generator) -> tuple[Operand, Operand]:
    """Draw weights of experts, and cast them. Their numbers are about as large as a model's."""
    shapes = (num, 2 * inter, hidden), (num, hidden, inter)
    w1, w2 = (deep_gemm.per_block_cast_to_fp8(torch.randn(s, device="cuda", generator=g) / s[2] ** 0.5) for s in shapes)
    return w1, w2


def transformed(l1: Operand, l2: Operand) -> tuple[Operand, Operand]:
    """Transform weights to the form that calls require."""
    if is_packed(l1):
        return deep_gemm.transform_weights_for_mega_moe(l1, l2)
    return deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2)


def call(
    y: Tensor, l1: Operand, l2: Operand, buffer: SM90SymmBuffer, counts: Tensor | None, clamp: float | None
) -> None:
    """Call the function for these transformed weights."""
    function = deep_gemm.fp8_fp4_mega_moe if is_packed(l1) else deep_gemm.fp8_mega_moe
    function(y, l1, l2, buffer, counts, activation_clamp=clamp)


def filling(buffer: SM90SymmBuffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict[str, Any]:
    """Return the arguments of mega_moe_pre_dispatch_sm90."""
    filled = {f"buf_{name}": getattr(buffer, name) for name in ("x", "x_sf", "topk_idx", "topk_weights")}
    return {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, **filled}


def fill(buffer: SM90SymmBuffer, tokens: Tokens) -> None:
    count = len(tokens[0])
    for target, source in zip(buffer.tensors, tokens, strict=False):
        target[:count] = source


def result(
    buffer: SM90SymmBuffer,
    tokens: Tokens,
    l1: Operand,
    l2: Operand,
    counts: Tensor | None = None,
    clamp: float | None = None,
) -> Tensor:
    """Return the rows that a call writes, and check that it writes all rows and nothing behind the last row."""
    fill(buffer, tokens)
    count = len(tokens[0])
    room = torch.full((count + 1, buffer.hidden), torch.nan, dtype=torch.bfloat16, device=buffer.x.device)
    y, behind = room[:count], room[count]
    call(y, *transformed(l1, l2), buffer, counts, clamp)
    assert bool(y.isfinite().all())
    assert bool(behind.isnan().all())
    return y


def chain(tokens: Tokens, l1: Operand, l2: Operand, clamp: float | None = None) -> Tensor:
    """Compute the definition by torch in FP32. With FP4 weights gate and up are rounded to BF16."""
    values, scales, ids, weights = tokens
    is_fp4 = is_packed(l1)
    x = values.float() * scales.repeat_interleave(128, 1)
    routes = x.new_zeros(*ids.shape, x.shape[1])
    for expert in set(ids[ids >= 0].tolist()):
        token, k = (ids == expert).nonzero(as_tuple=True)
        both = x[token] @ dequantized(l1, expert).t()
        gate, up = (both.bfloat16().float() if is_fp4 else both).chunk(2, 1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        middle = weights[token, k, None] * torch.nn.functional.silu(gate) * up
        blocks = middle.view(len(token), -1, 128 if is_fp4 else 64)
        scale = blocks.abs().amax(2, keepdim=True) / 448
        cast = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
        routes[token, k] = (cast.view_as(middle) @ dequantized(l2, expert).t()).bfloat16().float()
    return routes.sum(1).bfloat16()


def dequantized(weight: Operand, expert: int) -> Tensor:
    if is_packed(weight):
        return as_e4m3(weight[0][expert]).float() * 2.0 ** (weight[1][expert].float() - 127).repeat_interleave(32, 1)
    values, scales = weight[0][expert].float(), weight[1][expert]
    return values * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def part(weights: tuple[Operand, Operand], mine: slice) -> tuple[Operand, Operand]:
    l1, l2 = weights
    return (l1[0][mine], l1[1][mine]), (l2[0][mine], l2[1][mine])


# Cases of several processes, which across_cases.py starts


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    raise AssertionError("no error")


def over_ranks(world: int) -> None:
    """Check bits and counts of received rows: ranks have unequal numbers of tokens or none, and some routes are -1."""
    model = Model(num_experts=2 * world)
    counts = [0, 9, 130][-world:]
    for each in (model, replace(model, is_fp4=True)):
        check_over_ranks(each, counts, each.tokens(sum(counts)), None)
    counts = counts[1:] + counts[:1]
    check_over_ranks(model, counts, model.tokens(sum(counts), seed=2), 0.5)


def to_one_rank(world: int) -> None:
    """Test all routes to one expert of the last rank, then routes without an expert, then no tokens."""
    model = Model(num_experts=world)
    for expert in (world - 1, -1):
        check_over_ranks(model, [5] * world, model.tokens(5 * world, all_to=expert), None)
    check_over_ranks(model, [0] * world, model.tokens(0), None)


def check_over_ranks(model: Model, by_rank: list[int], tokens: Tokens, clamp: float | None) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([each]) for each in range(world)][rank]
    mine = deep_gemm.distributed.owned_experts(model.num_experts)
    l1, l2 = model.weights()
    own = part((l1, l2), mine)
    share: Tokens = tuple(torch.split(each, by_rank)[rank] for each in tokens)  # type: ignore[assignment]
    received = torch.full((model.num_experts // world,), 7, dtype=torch.int32)
    buffer = model.buffer(130)
    assert buffer.num_max_tokens_per_rank == 256
    y = result(buffer, share, *own, received, clamp)
    again = result(buffer, share, *own, received, clamp)
    right = result(model.buffer(max(sum(by_rank), 1), alone), tokens, l1, l2, None, clamp)
    share_of_right = torch.split(right, by_rank)[rank]
    for each in (y, again):
        assert torch.equal(each.view(torch.int16), share_of_right.view(torch.int16)), "not the bits of one process"
    assert deep_gemm.calc_diff(right, chain(tokens, l1, l2, clamp)) < 1e-6
    came = torch.bincount(tokens[2][tokens[2] >= 0].flatten(), minlength=model.num_experts)[mine]
    assert received.tolist() == (7 + 2 * came).tolist()


def mega_mistakes(world: int) -> None:
    """A mistake of the last rank raises an error on every rank, and the group still works."""
    model = Model(num_experts=world)
    rank, last = dist.get_rank(), world - 1
    mine = deep_gemm.distributed.owned_experts(model.num_experts)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*part(model.weights(), mine))
    buffer = model.buffer()
    y = torch.zeros(4, model.hidden, dtype=torch.bfloat16)
    make = deep_gemm.get_symm_buffer_for_sm90_mega_moe
    said = error_of(lambda: deep_gemm.fp8_mega_moe(y.float() if rank == last else y, l1, l2, buffer))
    elsewhere = f"experts across processes: the arguments of rank {last} were refused there"
    assert said == ("y: expected dtype torch.bfloat16, got torch.float32" if rank == last else elsewhere), said
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    assert not y.any()
    said = error_of(lambda: make(None, world + 1, 8, 1, 256, 128))
    assert said.startswith("num_experts: expected a multiple of the number of processes"), said
    names = ("num_max_tokens_per_rank", "intermediate_hidden")
    for name in names:
        tokens, inter = (256 if rank == last and name == each else 128 for each in names)
        said = error_of(partial(make, None, world, tokens, 2, 256, inter))
        by_rank = [128] * last + [256]
        assert said == f"experts across processes: expected one {name} on all ranks, got {by_rank} by rank", said
    # A rank whose GPU lacks the kernels would use collectives, while the other ranks wait in peer memory.
    with mock.patch.object(mega_by_peers, "why_not_by_peers", lambda *_: "another GPU" if rank == last else None):
        said = error_of(lambda: make(None, world, 128, 2, 256, 128))
    by_rank = [1] * last + [0]
    assert said == f"experts across processes: expected one peer_memory on all ranks, got {by_rank} by rank", said
