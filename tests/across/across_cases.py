"""Experts across processes, against one process:  PYTHONPATH=tests python tests/across/across_cases.py [PROCESSES ...]

The program forks the processes, so torch is imported once. It waits for them, and ends any that take too long.
"""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import torch
import torch.distributed as dist
from mega_cases import error_of, mega_mistakes, over_ranks, random_fp4, to_one_rank
from thorough import one_in
from torch import Tensor

import deep_gemm
from deep_gemm.across import by_group, collectives
from deep_gemm.across import check as experts_across
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.distributed import Experts, decode_bytes, owned_experts, prefill_bytes

HIDDEN, INTER, TOPK, MAX_TOKENS = 144, 80, 3, 20
SECONDS = 60
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "experts_across_processes.py"
TIMEOUT = timedelta(seconds=20)
Both = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Both weights of all experts after the cast to FP8."""


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as another:
        one.bind(("127.0.0.1", 0))
        another.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(another.getsockname()[1])


def weights(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    w1, w2 = (torch.randn(s, generator=g) for s in ((num, 2 * INTER, HIDDEN), (num, HIDDEN, INTER)))
    return w1 / HIDDEN**0.5, w2 / INTER**0.5


def part(pair: tuple[Tensor, Tensor], mine: slice) -> tuple[Tensor, Tensor]:
    return pair[0][mine], pair[1][mine]


def cast(w: Tensor) -> tuple[Tensor, Tensor]:
    return deep_gemm.per_block_cast_to_fp8(w)


def experts_with(num: int, both: Iterable[Any], **settings: Any) -> Experts:
    w1, w2 = both
    return Experts(num, w1, w2, **settings)


def tokens_of_ranks(counts: list[int], num: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens of all ranks: some routes are -1, some name an expert twice, and weights have both signs."""
    g = torch.Generator().manual_seed(seed)
    tokens = sum(counts)
    ids = torch.randint(-1, num, (tokens, TOPK), generator=g)
    return torch.randn(tokens, HIDDEN, generator=g).bfloat16(), ids, torch.randn(tokens, TOPK, generator=g)


def share_out(x: Tensor, counts: list[int], group: dist.ProcessGroup | None = None) -> Tensor:
    return torch.split(x, counts)[dist.get_rank(group)]


def shared_out(world: int, count: int = 6) -> tuple[int, list[Tensor]]:
    """Return the number of experts (two on each rank), and this rank's tokens."""
    num, counts = 2 * world, [count] * world
    return num, [share_out(each, counts) for each in tokens_of_ranks(counts, num)]


def own_weights(num: int) -> list[tuple[Tensor, Tensor]]:
    return [part(cast(w), owned_experts(num)) for w in weights(num)]


def gradient(leaf: Tensor | None) -> Tensor:
    assert leaf is not None and leaf.grad is not None
    assert (leaf.grad.dtype, leaf.grad.shape) == (leaf.dtype, leaf.shape)
    return leaf.grad


def same_bits(x: Tensor | None, y: Tensor) -> bool:
    if x is None or (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


def assert_near(got: Tensor, right: Tensor, ids: Tensor, p: Tensor, rows: Tensor, num: int, ranks: int) -> None:
    """Allow a BF16 rounding of each sum that a rank sends, a rounding of the whole sum, and a rounding of `right`.

    `rows` are the BF16 results of each route, computed by one process: these results bound every rank's sum.
    """
    count = num // ranks
    bound = torch.zeros(got.shape, dtype=torch.float64)
    terms = rows.double() * p.double()[..., None]
    for rank in range(ranks):
        is_here = (ids >= 0) & (ids.div(count, rounding_mode="floor") == rank)
        bound += torch.where(is_here[..., None], terms, 0).sum(1).abs() * 2.0**-8
    bound += 2.0**-8 * (right.double().abs() + got.double().abs())
    # Another order of a few terms changes FP32 sums far less, but this change counts if the terms cancel.
    bound += 2.0**-20 * terms.abs().sum(1)
    worst = ((got.double() - right.double()).abs() - bound).max() if got.numel() else torch.tensor(-1.0)
    assert worst <= 0, f"{worst} beyond the bound"


def by_one(x: Tensor, ids: Tensor, p: Tensor, both: Both, **said: Any) -> tuple[Tensor, Tensor]:
    """Return the result that one process computes, and the result of each route."""
    w1, w2 = both
    out = deep_gemm.experts(x, ids, p, w1, w2, **said)
    each = deep_gemm.experts(
        x.repeat_interleave(ids.shape[1], 0), ids.reshape(-1, 1), torch.ones(ids.numel(), 1), w1, w2, **said
    )
    assert out is not None and each is not None
    return out, each.view(*ids.shape, x.shape[1])


def check_layer(
    counts: list[int],
    num: int,
    ids: Tensor | None = None,
    limit: float | None = None,
    group: dist.ProcessGroup | None = None,
    both: Both | None = None,
    **more: Any,
) -> None:
    x, drawn, p = tokens_of_ranks(counts, num)
    if both is None:
        first, second = weights(num)
        both = cast(first), cast(second)
    x = x[:, : both[1][0].shape[1]].contiguous()
    ids = drawn if ids is None else ids
    p = p[:, : ids.shape[1]]
    w1, w2 = (part(w, owned_experts(num, group)) for w in both)
    layer = Experts(num, w1, w2, group, limit=limit, max_tokens=MAX_TOKENS, **more)
    mine = [share_out(each, counts, group) for each in (x, ids, p)]
    with torch.inference_mode():  # tensors that the first call makes must serve calls of any mode
        layer(*mine)
        layer.decode(*mine)
    got = layer(*mine)
    out, rows = by_one(x, ids, p, both, limit=limit, **more)
    out, rows = share_out(out, counts, group), share_out(rows, counts, group)
    assert got.dtype == torch.bfloat16
    assert_near(got, out, mine[1], mine[2], rows, num, len(counts))
    assert same_bits(layer(*mine), got), "another call has other bits"
    assert same_bits(layer.decode(*mine), got), "the decode form has other bits"
    given = torch.full_like(got, torch.nan)
    assert layer.decode(mine[0], mine[1].int(), mine[2], out=given) is None
    assert same_bits(given, got)
    if mine[0].shape[0]:
        assert not got[(mine[1] < 0).all(1)].any()


def uneven(world: int) -> None:
    check_layer([3 + 7 * r % 11 for r in range(world)], 2 * world)
    check_layer([5, *[8] * (world - 1)], 3 * world, limit=0.4)
    one_route = torch.arange(5 * world)[:, None] % (2 * world)
    check_layer([5] * world, 2 * world, one_route)


def with_fp4_weights(world: int) -> None:
    g, num = torch.Generator().manual_seed(7), 2 * world
    both = random_fp4(num, 192, 128, g), random_fp4(num, 128, 96, g)
    check_layer([3 + 7 * r % 11 for r in range(world)], num, both=both)
    check_layer([0, *[8] * (world - 1)], num, limit=0.4, both=both)
    w1, w2 = (part(w, owned_experts(num)) for w in both)
    layer, (x, ids, p) = Experts(num, w1, w2), tokens_of_ranks([4], num)
    said = error_of(lambda: layer(x[:, :128].requires_grad_(), ids, p))
    assert said == "x: expected tensors without a gradient, because the weights are cast, for inference", said
    layer.bfloat16()
    assert [each.dtype for each in layer.buffers()] == [torch.uint8] * 4


def with_finer_weights(world: int) -> None:
    num, cast_rows, words = 2 * world, deep_gemm.per_token_cast_to_fp8, words_of
    for of, gran_k in (((32, 32), None), ((1, 32), None), ((64, 64), 128)):
        casts = ((cast_rows if of[0] == 1 else deep_gemm.per_block_cast_to_fp8)(w, True, of[1]) for w in weights(num))
        w1, (values, sf) = casts  # scales of one weight in FP32, of the other in words
        both = w1, (values, words(sf.to(torch.float8_e8m0fnu)))
        check_layer([3 + 7 * r % 11 for r in range(world)], num, both=both, recipe_b=of, gran_k=gran_k)
        check_layer([0, *[8] * (world - 1)], num, limit=0.4, both=both, recipe_b=of, gran_k=gran_k)
    mine = [part(w, owned_experts(num)) for w in both]
    layer = experts_with(num, mine, max_tokens=9, gran_k=32 if dist.get_rank() else 64)
    tokens, columns = tokens_of_ranks([4], num), ["64", *["32"] * (world - 1)]
    for call, what, got in (
        (layer, "dtype of x", [f"torch.bfloat16 with scales of 1x{each}" for each in columns]),
        (layer.decode, "gran_k of x", columns),
    ):
        said = error_of(partial(call, *tokens))
        assert said == f"experts across processes: expected one {what} on all ranks, got [{', '.join(got)}] by rank", (
            said
        )
    said = error_of(lambda: experts_with(num, mine, max_tokens=9, peer_memory=True))
    fine = "1x64 beside 64x64"
    assert said == f"peer_memory: expected scales of 1x128 beside 128x128, or beside FP4, got {fine} and {fine}", said
    said = error_of(lambda: experts_with(num, (w[:2] for w in weights(num)), gran_k=32))
    assert said == "gran_k: expected None beside weights that each call casts, got 32", said


def with_weights_by_rows(world: int) -> None:
    num, cast_rows = 2 * world, deep_gemm.per_token_cast_to_fp8
    (w1, sf1), (w2, sf2) = (cast_rows(w, gran_k=0) for w in weights(num))
    for gran_k in (None, 128):
        for both in (((w1, sf1), (w2, sf2)), ((w1, sf1[:, 0, 0] * 1), (w2, sf2[:, :1] * 1))):
            check_layer([3 + 7 * r % 11 for r in range(world)], num, both=both, gran_k=gran_k)
    check_layer([0, *[8] * (world - 1)], num, limit=0.4, both=((w1, sf1), cast(weights(num)[1])))
    assert prefill_bytes(1, 7168, 6, gran_k=0) == prefill_bytes(1, 7168, 6) - 4 * 55 + 12  # rounded up to 16 bytes
    mine = [part(w, owned_experts(num)) for w in both]
    said = error_of(lambda: experts_with(num, mine, max_tokens=9, peer_memory=True))
    one = "1xk beside nxk"
    assert said == f"peer_memory: expected scales of 1x128 beside 128x128, or beside FP4, got {one} and {one}", said


def in_bf16(world: int) -> None:
    """Check that tokens travel uncast, and that results and gradients equal those of nn.Experts(products="bf16")."""
    check_trained(torch.bfloat16, [2 + 5 * r % 7 for r in range(world)], products="bf16")
    check_trained(torch.float32, [0] + [7] * (world - 1), products="bf16")
    num = 2 * world
    own = [w[owned_experts(num)].clone() for w in weights(num)]
    layer = experts_with(num, own, products="bf16", max_tokens=MAX_TOKENS, limit=0.4)
    _, (x, ids, p) = shared_out(world)
    for of_x in (x, x.float() * 1.001):
        with torch.no_grad():
            right = layer(of_x, ids, p).bfloat16()
        into = torch.full_like(right, torch.nan)
        assert layer.decode(of_x, ids.int(), p, out=into) is None
        assert same_bits(into, right) and same_bits(layer.decode(of_x, ids, p), right)
    layer = experts_with(num, own, products="bf16" if dist.get_rank() else "fp8", max_tokens=4)
    said = error_of(partial(layer.decode, *tokens_of_ranks([4], num)))
    numbers = ", ".join(["1", *["2"] * (world - 1)])
    what = "number of bytes for a value of x"
    assert said == f"experts across processes: expected one {what} on all ranks, got [{numbers}] by rank", said
    said = error_of(partial(layer, *tokens_of_ranks([4], num)))
    kinds = ", ".join(["torch.bfloat16", *["torch.bfloat16 uncast"] * (world - 1)])
    assert said == f"experts across processes: expected one dtype of x on all ranks, got [{kinds}] by rank", said
    for given, more, message in (
        (own, {"products": "fp4"}, "products: expected 'fp8' or 'bf16', got 'fp4'"),
        (own_weights(num), {}, "products: expected 'fp8', because w1 is a pair (values, scales), got 'bf16'"),
        (own, {"max_tokens": 4, "peer_memory": True}, "peer_memory: expected weights on a Hopper GPU, got cpu"),
    ):
        said = error_of(partial(experts_with, num, given, **{"products": "bf16"} | more))
        assert said == message, said


def without_tokens(world: int) -> None:
    for counts in ([0] * (world - 1) + [9], [6] + [0] * (world - 1), [0] * world):
        check_layer(counts, world)


def all_to_one_expert(world: int) -> None:
    counts = [4] * world
    check_layer(counts, 2 * world, torch.full((4 * world, TOPK), 2 * world - 1))


def without_routes(world: int) -> None:
    check_layer([4] * world, world, torch.full((4 * world, TOPK), -1))
    only_own = torch.arange(world).repeat_interleave(4)[:, None].expand(-1, TOPK)
    check_layer([4] * world, world, only_own)


def trained(world: int) -> None:
    check_trained(torch.bfloat16, [2 + 5 * r % 7 for r in range(world)])
    check_trained(torch.float32, [0] + [7] * (world - 1))
    check_trained(torch.float16, [4] * world, of_weights=torch.bfloat16)


def as_one_process(world: int) -> None:
    """In the batch invariant mode results have the bits of one process, in every form, with or without gradients."""
    deep_gemm.set_batch_invariant(True)
    num, counts = 2 * world, [3 + 7 * r % 11 for r in range(world)]
    x, ids, p = tokens_of_ranks(counts, num)
    p[ids < 0] = torch.nan
    mine, whole = owned_experts(num), weights(num)
    first, second = (cast(w) for w in whole)
    here = [share_out(each, counts) for each in (x, ids, p)]
    right = share_out(by_one(x, ids, p, (first, second))[0], counts)
    layer = experts_with(num, own_weights(num), max_tokens=MAX_TOKENS)
    given = torch.full_like(right, torch.nan)
    assert layer.decode(*here, out=given) is None
    assert same_bits(layer(*here), right) and same_bits(layer.decode(*here), right) and same_bits(given, right)
    for products, dtype in (("fp8", torch.bfloat16), ("bf16", torch.bfloat16), ("fp8", torch.float16)):
        one = deep_gemm.nn.Experts(num, HIDDEN, INTER, products=products)
        for weight, w in zip((one.w1, one.w2), whole, strict=True):
            weight.data.copy_(w)
        x1, p1 = (each.detach().clone().requires_grad_() for each in (x.to(dtype), p))
        out1 = one(x1, ids, p1)
        layer = experts_with(num, (w[mine].clone() for w in whole), products=products, max_tokens=MAX_TOKENS)
        x2, p2 = (share_out(each, counts).detach().clone().requires_grad_() for each in (x1, p1))
        out2 = layer(x2, here[1], p2)
        assert same_bits(out2.detach(), share_out(out1.detach(), counts)), (products, dtype)
        with torch.no_grad():
            assert same_bits(layer(x2, here[1], p2), out2.detach()), "not the bits of inference"
            if dtype == torch.bfloat16:
                assert same_bits(layer.decode(x2, here[1], p2), out2.detach()), "not the bits of the decode form"
        grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
        out1.backward(grad)
        out2.backward(share_out(grad, counts))
        for name, leaf, of_one in (
            ("x", x2, share_out(gradient(x1), counts)),
            ("p", p2, share_out(gradient(p1), counts)),
            ("w1", layer.w1, gradient(one.w1)[mine]),
            ("w2", layer.w2, gradient(one.w2)[mine]),
        ):
            distance = (gradient(leaf).double() - of_one.double()).norm() / of_one.double().norm()
            assert distance < 0.08, (products, dtype, name, distance)  # two casts of a gradient, with p and without
    layer = experts_with(num, own_weights(num), max_tokens=MAX_TOKENS)
    layer.decode(*here)
    made = ref(layer.everywhere(TOPK, True).rows.row_of)
    deep_gemm.set_batch_invariant(False)
    layer.decode(*here)
    assert made() is not None, "graphs of the mode use its tensors"
    deep_gemm.set_batch_invariant(True)
    said = error_of(lambda: layer.decode(x[:1], ids[:1, :1], p[:1, :1]))
    assert said == f"topk_ids: expected {TOPK} columns, as in the first call, got 1", said
    layer = experts_with(num, (w[mine].clone() for w in whole))
    count = 0 if dist.get_rank() else len(here[0])  # other ranks have no tokens
    leaves = [each[:count].clone().requires_grad_() for each in (here[0], here[2])]
    layer(leaves[0], here[1][:count], leaves[1]).sum().backward()
    assert [gradient(leaf).shape for leaf in leaves] == [(count, HIDDEN), (count, TOPK)]
    deep_gemm.set_batch_invariant(False)


def sums_that_fp16_has_not(world: int) -> None:
    """Small and large sums have the bits of inference: training sends no sum that is rounded to FP16."""
    num, (x, ids, p) = shared_out(world)
    layer = experts_with(num, (w[owned_experts(num)].clone() for w in weights(num)))
    for scale in (1e-4, 1e5):
        with torch.no_grad():
            right = layer(x.half(), ids, p * scale)
        got = layer(x.half(), ids, (p * scale).requires_grad_()).detach()
        assert same_bits(got, right), f"not the bits of inference, scale {scale}"


def ids_of_no_expert(world: int) -> None:
    """On a GPU ids are not checked first. Ids of no expert count as -1, also if their lower half is an expert's."""
    num, (x, ids, p) = shared_out(world)
    wide = ids.clone()
    wide[0], wide[1], wide[2] = -(2**63), 2**32 + 1, num + 5
    none = ids.clone()
    none[:3] = -1
    layer = experts_with(num, (w[owned_experts(num)].clone() for w in weights(num)))
    with mock.patch.object(experts_across, "check_routes"):
        got = layer(x.clone().requires_grad_(), wide, p)
    assert same_bits(got.detach(), layer(x.clone().requires_grad_(), none, p).detach())


def autocast(world: int) -> None:
    num, (x, ids, p) = shared_out(world)
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    layer = experts_with(num, own_weights(num), max_tokens=6)
    with torch.autocast("cpu", torch.bfloat16):
        got, decoded = layer(x, ids, p), layer.decode(x, ids, p)
    assert same_bits(got, layer(x.bfloat16(), ids, p))
    assert same_bits(decoded, got)
    assert not torch.equal(got, layer(x, ids, p))


def copies(world: int) -> None:
    """A copy of a layer gives the layer's results, also after calls have stored tensors, and uses the same group."""
    num, given = shared_out(world)
    group = dist.new_group(list(range(world)))
    layer = experts_with(num, own_weights(num), group=group, max_tokens=6)
    got = layer(*given)
    assert same_bits(layer.decode(*given), got)
    again = copy.deepcopy(layer)
    assert again.group is group and again.w1_values is not layer.w1_values
    assert same_bits(again(*given), got) and same_bits(again.decode(*given), got)
    file = io.BytesIO()
    layer.group = None
    torch.save(layer, file)
    file.seek(0)
    assert same_bits(torch.load(file, weights_only=False)(*given), got)


def casts(world: int) -> None:
    """FP8 weights and scales keep their types if a model is cast to another type."""
    num, given = shared_out(world)
    layer = experts_with(num, own_weights(num), max_tokens=6)
    model = torch.nn.ModuleDict({"experts": layer, "router": torch.nn.Linear(HIDDEN, num)})
    right, state = layer(*given), {name: x.clone() for name, x in layer.state_dict().items()}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for cast_model in (model.to(dtype), copy.deepcopy(model).to("cpu", dtype), copy.deepcopy(model).type(dtype)):
            assert cast_model["router"].weight.dtype == dtype
            got: Any = cast_model["experts"]
            assert all(same_bits(x, state[name]) for name, x in got.state_dict().items())
            assert same_bits(got(*given), right) and same_bits(got.decode(*given), right)
    model.half().float().bfloat16()
    assert same_bits(layer(*given), right)
    assert all(x.device.type == "meta" and x.dtype == state[name].dtype for name, x in moved(layer).items())
    other = experts_with(num, [part(cast(-w), owned_experts(num)) for w in weights(num)])
    other.load_state_dict(layer.state_dict())
    assert same_bits(other(*given), right)
    trained_one = experts_with(num, [w[owned_experts(num)].clone() for w in weights(num)]).bfloat16()
    assert {w.dtype for w in trained_one.parameters()} == {torch.bfloat16}
    trained_one.load_state_dict(
        {name + end: x for name in ("w1", "w2") for end, x in zip(("", "_scale_inv"), layer.held(name), strict=True)}
    )
    for name, w in trained_one.named_parameters():
        assert same_bits(w.detach(), deep_gemm.cast_back_from_fp8(*layer.held(name)).bfloat16())


def moved(layer: Experts) -> dict[str, Tensor]:
    """Copy the layer, move the copy to meta and cast it in one call, and return the copy's weights."""
    return copy.deepcopy(layer).to("meta", torch.float16).state_dict()


def in_groups_of_some(world: int) -> None:
    """Check groups of some processes, where a process has another rank in the group than among all processes."""
    for members in ([1, 2], [0, 2]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            check_layer([5, 8], 4, group=group)
            check_trained(torch.bfloat16, [5, 8], group=group)
        else:
            check_of_no_member(group)


def check_of_no_member(group: Any) -> None:
    w1, w2 = (part(cast(w), slice(0, 2)) for w in weights(4))
    for call in (lambda: owned_experts(4, group), lambda: Experts(4, w1, w2, group)):
        assert error_of(call) == "group: expected a group that this process is a member of"


def check_trained(
    dtype: torch.dtype,
    counts: list[int],
    group: dist.ProcessGroup | None = None,
    of_weights: torch.dtype = torch.float32,
    products: str = "fp8",
) -> None:
    """Compare results and gradients with nn.Experts of all tokens and all experts."""
    num = 2 * len(counts)
    x, ids, p = tokens_of_ranks(counts, num, seed=5)
    x, p = x.to(dtype), p.to(of_weights)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    one = deep_gemm.nn.Experts(num, HIDDEN, INTER, products=products)
    for weight, w in zip((one.w1, one.w2), weights(num), strict=True):
        weight.data.copy_(w)
    x1, p1 = x.clone().requires_grad_(), p.clone().requires_grad_()
    one(x1, ids, p1).backward(grad)
    mine = owned_experts(num, group)
    layer = experts_with(num, (w[mine].clone() for w in weights(num)), group=group, products=products)
    x2, p2 = (share_out(each, counts, group).clone().requires_grad_() for each in (x, p))
    out = layer(x2, share_out(ids, counts, group), p2)
    assert out.dtype == dtype
    with torch.no_grad():
        assert same_bits(layer(x2, share_out(ids, counts, group), p2), out.detach()), "not the bits of inference"
    assert not out._is_view()
    out += 0  # a model may change the result in place
    out.backward(share_out(grad, counts, group))
    for name, leaf, right in (
        ("x", x2, share_out(gradient(x1), counts, group)),
        ("p", p2, share_out(gradient(p1), counts, group)),
        ("w1", layer.w1, gradient(one.w1)[mine]),
        ("w2", layer.w2, gradient(one.w2)[mine]),
    ):
        distance = (gradient(leaf).double() - right.double()).norm()
        # x: each rank rounds its sum to BF16; the others differ by the order of FP32 sums and their own rounding.
        bound = 2.0**-7 if name == "x" else max(1e-5, torch.finfo(right.dtype).eps / 2)
        assert distance <= bound * right.double().norm(), (name, distance, right.norm())
    assert any(gradient(w).any() for w in (layer.w1, layer.w2))
    # The backward pass sends no gradient of tokens, or of weights of routes, that autograd does not need.
    sizes = {"x": HIDDEN * x.element_size(), "p": TOPK * 4}
    for needed in ("", "x", "p"):
        layer.zero_grad()
        leaves = [each.detach().requires_grad_(name in needed) for name, each in (("x", x2), ("p", p2))]
        with Counted() as sent:
            out = layer(leaves[0], share_out(ids, counts, group), leaves[1])
            assert [name for name, _ in sent.calls] == ["all_gather", *["all_to_all"] * 3]
            out.backward(share_out(grad, counts, group))
        _, of_x, of_routes, of_sums, of_grad, *back = (number for _, number in sent.calls)
        goes, comes = of_x // sizes["x"], of_sums // (2 * HIDDEN)
        assert (of_x, of_routes, of_sums) == (goes * sizes["x"], goes * 8 * TOPK, comes * 2 * HIDDEN)
        assert of_grad == goes * HIDDEN * (2 if dtype == torch.bfloat16 else 4)  # sums in FP16 stay FP32
        assert back == [comes * sizes[name] for name in needed.split()]
        for name, leaf, right in zip(("x", "p"), leaves, (x2, p2), strict=True):
            assert leaf.grad is None if name not in needed else same_bits(leaf.grad, gradient(right))
        assert torch.allclose(gradient(layer.w1).double(), gradient(one.w1)[mine].double(), atol=1e-5)


class Counted:
    """Counts the bytes that collectives send to other ranks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.real = collectives.all_to_all, collectives.all_gather

    def __enter__(self) -> Counted:
        self._set(self.all_to_all, self.all_gather)
        return self

    def __exit__(self, *_: object) -> None:
        self._set(*self.real)

    @staticmethod
    def _set(all_to_all: Any, all_gather: Any) -> None:
        setattr(by_group, "all_to_all", all_to_all)  # noqa: B010
        setattr(by_group, "all_gather", all_gather)  # noqa: B010

    def all_to_all(self, to: Tensor, of: Tensor, receives: Any, sends: Any, group: Any) -> None:
        sends_to = sends or [len(of) // dist.get_world_size(group)] * dist.get_world_size(group)
        others = sum(sends_to) - sends_to[dist.get_rank(group)]
        self.calls.append(("all_to_all", others * of.shape[1] * of.element_size()))
        self.real[0](to, of, receives, sends, group)

    def all_gather(self, to: Tensor, of: Tensor, group: Any = None) -> None:
        self.calls.append(("all_gather", (dist.get_world_size() - 1) * of.numel() * of.element_size()))
        self.real[1](to, of, group=group)


def mistakes(world: int) -> None:
    num, (x, ids, p) = shared_out(world)
    w1, w2 = own_weights(num)
    rank, last = dist.get_rank(), world - 1
    to_last = torch.full_like(ids, num - 1)
    with Counted() as sent:
        said = error_of(lambda: Experts(num, w1, w2, room=6 * world - 1 if rank == last else None)(x, to_last, p))
        assert said == f"room: expected at least {6 * world} rows on rank {last}, which come there, got {6 * world - 1}"
        layer = Experts(num, w1, w2, max_tokens=5)
        wrong = ids.clone()
        wrong[2, 1] = num if rank == last else wrong[2, 1]
        said = error_of(lambda: layer(x, wrong, p))
        own = f"topk_ids: expected values in -1..{num - 1}, got {num} at index (2, 1)"
        assert said == (
            own if rank == last else f"experts across processes: the arguments of rank {last} were refused there"
        )
        said = error_of(lambda: layer(x, ids[:, : TOPK - (rank == 0)], p[:, : TOPK - (rank == 0)]))
        assert said.startswith("experts across processes: expected one topk on all ranks, got [2, 3"), said
        said = error_of(lambda: layer(x.requires_grad_(), ids, p))
        assert said.startswith("x: expected tensors without a gradient"), said
        x.requires_grad_(False)
        assert [name for name, _ in sent.calls] == ["all_gather"] * 4  # counts, and nothing else
        assert error_of(lambda: layer.decode(x, ids, p)) == "x: expected at most max_tokens = 5 tokens, got 6"
        assert error_of(lambda: Experts(num, w1, w2).decode(x, ids, p)).startswith("max_tokens: expected a number")
        few = x[:5], ids[:5], p[:5]
        for out, message in (
            (torch.empty(5, HIDDEN), "out: expected dtype torch.bfloat16, got torch.float32"),
            (torch.empty(6, HIDDEN, dtype=torch.bfloat16), "out: expected shape (tokens, hidden) = (5, 144)"),
            (torch.empty(5, HIDDEN + 4, dtype=torch.bfloat16)[:, :HIDDEN], "out: expected rows"),
        ):
            said = error_of(lambda: layer.decode(*few, out=out))  # noqa: B023
            assert said.startswith(message), said
        learned = few[0].clone().requires_grad_() * 1
        for name, call in (
            ("x", lambda: layer.decode(learned, *few[1:])),
            ("topk_weights", lambda: layer.decode(*few[:2], few[2].clone().requires_grad_() * 1)),
            ("out", lambda: layer.decode(*few, out=few[0].clone().requires_grad_())),
        ):
            said = error_of(call)
            assert said.startswith(f"{name}: expected a tensor without a gradient"), said
        assert len(sent.calls) == 4
    assert error_of(lambda: Experts(num + 1, w1, w2)).startswith("num_experts: expected a multiple of the number")
    assert error_of(lambda: Experts(2 * num, w1, w2)).startswith("w1: expected shape (experts / processes")
    wide = torch.zeros(*w2[0].shape[:2], 2 * INTER, dtype=torch.float8_e4m3fn)
    said = error_of(lambda: Experts(num, w1, (wide[..., ::2], w2[1])))
    assert said.startswith("w2: expected values contiguous along k"), said
    layer(x, ids, p)  # the group still works


def bytes_sent(world: int) -> None:
    num, (x, ids, p) = shared_out(world)
    w1, w2 = own_weights(num)
    layer = Experts(num, w1, w2, max_tokens=MAX_TOKENS)
    with Counted() as sent:
        layer.decode(x, ids, p)
    stated, _ = decode_bytes(world, MAX_TOKENS, TOPK, num, HIDDEN, INTER)
    assert sum(number for _, number in sent.calls) == stated
    with Counted() as sent:
        layer(x, ids, p)
    pairs = {(t, int(e) // 2) for t, row in enumerate(ids) for e in row if e >= 0}
    rows = sum(rank != dist.get_rank() for _, rank in pairs)
    there, back = sent.calls[1][1], sent.calls[2][1]
    assert there == prefill_bytes(rows, HIDDEN, TOPK) - rows * 2 * HIDDEN
    assert back % (2 * HIDDEN) == 0


def dies(world: int) -> None:
    """One rank ends in the middle; every other rank gets an error soon, and goes on without the ended rank."""
    num, rank = world, dist.get_rank()
    layer = experts_with(num, own_weights(num))
    x, ids, p = tokens_of_ranks([4], num)
    layer(x, ids, p)
    if rank == world - 1:
        os._exit(0)
    begun = time.monotonic()
    try:
        layer(x, ids, p)
    except RuntimeError:
        took = time.monotonic() - begun
        assert took < TIMEOUT.total_seconds() + 5, took
        return
    raise AssertionError("no error although a rank is gone")


def example(world: int) -> None:
    """Run the example in the way that torchrun starts it."""
    assert example_exits_with(world) == 0


def example_of_wrong_sums(world: int) -> None:
    """Check that the example reports wrong sums of one rank."""
    right = by_group.Plan.sum_up
    with mock.patch.object(by_group.Plan, "sum_up", lambda plan, y: right(plan, y) * (1 + 2.0**-5 * dist.get_rank())):
        assert example_exits_with(world) == 1


def example_exits_with(world: int) -> int:
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=str(world), MASTER_PORT=os.environ["NEXT_PORT"])
    dist.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        except SystemExit as end:
            own = f"rank {os.environ['RANK']} of {world}: {40 + 16 * int(os.environ['RANK'])} tokens"
            assert own in said.getvalue()
            return int(end.code or 0)
    raise AssertionError("the example does not say how it ended")


def narrowed(w: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return an FP8 weight whose dimension of the hidden size is smaller by 16."""
    values, scales = w
    rows, columns = (size - 16 * (size == HIDDEN) for size in values.shape[1:])
    return values[:, :rows, :columns].contiguous(), scales[:, : -(-rows // 128), : -(-columns // 128)].contiguous()


def ranks_that_differ(world: int) -> None:
    num, (x, ids, p) = shared_out(world, 5)
    w1, w2 = own_weights(num)
    last = world - 1
    is_last = dist.get_rank() == last
    layer = Experts(num, w1, w2, max_tokens=5)

    said = error_of(lambda: layer(x.float() if is_last else x, ids, p))
    by_rank = ", ".join(["torch.bfloat16"] * last + ["torch.float32"])
    assert said == f"experts across processes: expected one dtype of x on all ranks, got [{by_rank}] by rank", said
    of_last = Experts(num, w1[0].float(), w2[0].float()) if is_last else layer
    said = error_of(lambda: of_last(x, ids, p))
    by_rank = ", ".join(["none"] * last + ["w1 and w2"])
    expected = f"experts across processes: expected one set of gradients on all ranks, got [{by_rank}] by rank"
    assert said == expected, said

    w = [cast(w) for w in weights(2 * num)]
    both = experts_with(num, (part(each, slice(0, 2)) for each in w), max_tokens=5)
    more = experts_with(2 * num, (part(each, slice(0, 4)) for each in w), max_tokens=5) if is_last else both
    wide = experts_with(num, (narrowed(each) for each in (w1, w2)), max_tokens=5) if is_last else both
    room = experts_with(num, (part(each, slice(0, 2)) for each in w), max_tokens=6) if is_last else both
    for name, other, columns, x_of, values in (
        ("num_experts", more, TOPK, x, (num, 2 * num)),
        ("hidden", wide, TOPK, x[:, : wide.share.hidden], (HIDDEN, HIDDEN - 16)),
        ("max_tokens", room, TOPK, x, (5, 6)),
        ("topk", both, TOPK - is_last, x, (TOPK, TOPK - 1)),
    ):
        given = x_of.contiguous(), ids[:, :columns], p[:, :columns]
        by_rank = ", ".join(map(str, [values[0]] * last + [values[1]]))
        says = f"expected one {name} on all ranks, got [{by_rank}] by rank"
        if name != "max_tokens":
            assert error_of(partial(other, *given)).endswith(says), name
        if name == "num_experts":
            by_rank = ", ".join(["2"] * last + ["4"])
            says = f"expected one number of experts of a rank on all ranks, got [{by_rank}] by rank"
        assert error_of(partial(other.decode, *given)).endswith(says), name
    layer.decode(x, ids, p)
    said = error_of(lambda: layer.decode(x, ids[:, :2], p[:, :2]))
    assert said == f"topk_ids: expected {TOPK} columns, as in the first call, got 2"

    deep_gemm.set_batch_invariant(is_last)
    by_rank = ", ".join([f"{TOPK}"] * last + [f"{TOPK} in the batch invariant mode"])
    said = error_of(lambda: layer(x, ids, p))
    assert said == f"experts across processes: expected one topk on all ranks, got [{by_rank}] by rank", said
    deep_gemm.set_batch_invariant(False)

    if is_last:
        layer.w1_values = layer.w1_values.bfloat16()  # as `module.to(torch.bfloat16)` does
    casts = "per_token_cast_to_fp8 casts activations, per_block_cast_to_fp8 weights"
    own = f"w1: expected dtype torch.float8_e4m3fn, got torch.bfloat16: {casts}"
    elsewhere = f"experts across processes: the arguments of rank {last} were refused there"
    assert error_of(lambda: layer(x, ids, p)) == (own if is_last else elsewhere)
    layer.w1_values = layer.w1_values.bfloat16()
    assert error_of(lambda: layer.decode(x, ids, p)) == own


OF_TWO: list[Callable[[int], None]] = [ranks_that_differ, sums_that_fp16_has_not, ids_of_no_expert, autocast, copies]
OF_TWO += [casts, without_tokens, without_routes, bytes_sent]
SOME: list[Callable[[int], None]] = [uneven, with_fp4_weights, with_finer_weights, all_to_one_expert, trained, mistakes]
SOME += [as_one_process, over_ranks, to_one_rank, mega_mistakes, with_weights_by_rows, in_bf16]
CASES: dict[int, list[Callable[[int], None]]] = {
    2: [*OF_TWO, *SOME, example],
    3: [in_groups_of_some, *one_in(3, SOME), dies],
    4: [uneven, without_tokens, trained, bytes_sent],
}
"""The cases for each number of processes. A case that leaves the group broken comes last."""
WRONG: dict[int, list[Callable[[int], None]]] = {2: [example_of_wrong_sums]}


def process(rank: int, world: int, cases: list[Callable[[int], None]], ports: tuple[int, int]) -> None:
    name = "start"
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
        os.environ["NEXT_PORT"] = str(ports[1])  # another group must not use a port that this group may still use
        dist.init_process_group("gloo", timeout=TIMEOUT)
        for case in cases:
            name = case.__name__
            case(world)
            os.write(1, f"{world}: {name} passed\n".encode())
    except BaseException:
        os.write(1, f"rank {rank} of {world}, {name}:\n{traceback.format_exc()}".encode())
        os._exit(1)
    os._exit(0)  # a regular exit may free objects that Gloo's threads still use


def run(world: int, cases: list[Callable[[int], None]]) -> bool:
    """Run cases in processes of one group, and tell whether all passed. Nothing outlives this call."""
    context = multiprocessing.get_context("fork")
    ports = free_ports()
    started = [context.Process(target=process, args=(rank, world, cases, ports)) for rank in range(world)]
    for each in started:
        each.start()
    end = time.monotonic() + SECONDS
    for each in started:
        each.join(max(0.0, end - time.monotonic()))
    late = [each for each in started if each.is_alive()]
    for each in late:
        each.kill()
        each.join()
    if late:
        print(f"{len(late)} of {world} processes did not end within {SECONDS} s")
    return not late and not any(each.exitcode for each in started)


if __name__ == "__main__":
    chosen = [int(each) for each in sys.argv[1:]] or list(CASES)
    passed = [run(world, cases) for world, cases in [*CASES.items(), *WRONG.items()] if world in chosen]
    sys.exit(not all(passed))
