"""A mixture of experts that is trained in FP8: the bits of `experts`, and gradients of tokens, routes and weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import count_calls, host_never_waits, same_bits, some
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import TYPICAL_OF_EXPERTS, by_blocks, by_columns, by_rows, deterministic, error, kept_by_autograd, trained
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import deep_gemm
from deep_gemm.nn import Experts
from deep_gemm.nn import experts as module

NUM, HIDDEN, INTER, TOPK = 5, 144, 80, 2
BOTH = pytest.mark.parametrize("products", ["fp8", "bf16"])
NAMES = ("out", "x", "topk_weights", "w1", "w2")
numbers = partial(helpers.numbers, seed=1)


def layer_of(*, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Experts:
    torch.manual_seed(seed)
    return Experts(NUM, HIDDEN, INTER, dtype=dtype, **more)


def routes(tokens: int, *, none: bool = True, num: int = NUM, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Draw ids and weights. Some ids are -1 if `none` is true."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1 if none else 0, num, (tokens, TOPK), generator=generator)
    return ids, torch.rand(tokens, TOPK, generator=generator)


Found = tuple[Tensor, ...]


class Plain(torch.nn.Module):
    """The same mixture computed by torch in FP32."""

    def __init__(self, layer: Experts) -> None:
        super().__init__()
        self.w1, self.w2 = (torch.nn.Parameter(w.detach().float().clone()) for w in (layer.w1, layer.w2))
        self.limit = layer.limit

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.w1)):
            token, column = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.w1[expert]).chunk(2, dim=-1)
            if self.limit is not None:
                gate, up = gate.clamp_max(self.limit), up.clamp(-self.limit, self.limit)
            y = F.linear(F.silu(gate) * up, self.w2[expert]) * weights[token, column, None]
            out = out.index_add(0, token, y)
        return out


def plain(layer: Experts, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor) -> Found:
    return trained(Plain(layer), x.float(), ids, weights.float(), grad.float())


# Results


@BOTH
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_the_result_has_the_bits_of_the_layer_of_inference(tokens: int, w_dtype: torch.dtype, products: str) -> None:
    layer, x, (ids, weights) = layer_of(dtype=w_dtype, products=products), numbers(tokens, HIDDEN), routes(tokens)
    cast: Any = deep_gemm.per_block_cast_to_fp8 if products == "fp8" else Tensor.bfloat16
    w1, w2 = (cast(w.detach()) for w in (layer.w1, layer.w2))
    expected = some(deep_gemm.experts(x, ids, weights, w1, w2))
    assert same_bits(layer(x, ids, weights).detach(), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same_bits(layer(x, ids, weights), expected)


def of_casts(layer: Experts, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor) -> Found:
    """Compute all results expert by expert in FP64 from the casts' numbers; round to BF16 where products write BF16.

    Operands cast along an expert's rows have the type of the layer's inputs, or of gate and up. Products in BF16 read
    operands rounded to BF16. The activation is multiplied by the routes' weights.
    """
    is_fp8 = layer.products == "fp8"

    def bf16(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    of_rows, of_blocks, of_columns = (by_rows, by_blocks, by_columns) if is_fp8 else (bf16,) * 3
    out, of_x, of_p = torch.zeros_like(x, dtype=torch.float64), x.double() * 0, weights.double() * 0
    of_w1, of_w2 = layer.w1.detach().double() * 0, layer.w2.detach().double() * 0
    for expert in range(NUM):
        token, column = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        w1, w2, p = of_blocks(layer.w1[expert]), of_blocks(layer.w2[expert]), weights[token, column, None].double()
        gate, up = bf16(of_rows(x[token]) @ w1.t()).chunk(2, dim=1)
        if layer.limit is not None:
            is_gate, is_up = (gate <= layer.limit).double(), (up.abs() <= layer.limit).double()
            gate, up = gate.clamp_max(layer.limit), up.clamp(-layer.limit, layer.limit)
        else:
            is_gate = is_up = torch.ones_like(gate)
        sigmoid = gate.sigmoid()
        s = gate * sigmoid * up
        out.index_add_(0, token, bf16(of_rows(s.float()) @ w2.t()) * p)
        ds = bf16(of_rows(grad[token]) @ w2)
        of_p[token, column] = (ds * s).sum(1)
        ds = ds * p
        of_gate = ds * up * sigmoid * (1 + gate * (1 - sigmoid)) * is_gate
        dh = bf16(torch.cat([of_gate, ds * gate * sigmoid * is_up], dim=1))
        of_x.index_add_(0, token, bf16(of_rows(dh.bfloat16()) @ w1))
        of_w1[expert] = of_columns(dh.bfloat16()).t() @ of_columns(x[token])
        dy, s = ((grad[token] * p).to(grad.dtype), s) if is_fp8 else (grad[token], s * p)
        of_w2[expert] = of_columns(dy).t() @ of_columns(s.bfloat16())
    return out, of_x, of_p, of_w1, of_w2


@pytest.mark.few
@BOTH
@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 9, 64, 700])
def test_it_is_made_of_products_of_casts(tokens: int, dtype: torch.dtype, limit: float | None, products: str) -> None:
    layer, (ids, weights) = layer_of(limit=limit, products=products), routes(tokens)
    x, grad = numbers(tokens, HIDDEN, dtype=dtype), numbers(tokens, HIDDEN, dtype=dtype, seed=3)
    got, right = trained(layer, x, ids, weights, grad), of_casts(layer, x, ids, weights, grad)
    for name, mine, its in zip(NAMES, got, right, strict=True):
        # The layer and `of_casts` round few numbers, all small, to BF16 or FP8 in different directions.
        assert error(mine, its) < 4e-3, name


SIZES = st.integers(1, 10).map(lambda i: 16 * i)


@settings(max_examples=20)
@given(tokens=st.integers(24, 120), num=st.integers(1, 6), hidden=SIZES, inter=SIZES, seed=st.integers(0, 2**16))
def test_gradients_are_within_the_stated_bound(tokens: int, num: int, hidden: int, inter: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer, (ids, weights) = Experts(num, hidden, inter), routes(tokens, num=num, seed=seed)
    x, grad = numbers(tokens, hidden, seed=seed + 1), numbers(tokens, hidden, seed=seed + 2)
    got, right = trained(layer, x, ids, weights, grad), plain(layer, x, ids, weights, grad)
    for name, mine, its in zip(NAMES, got, right, strict=True):
        if its.numel() >= 1024:
            assert error(mine, its) < TYPICAL_OF_EXPERTS, name


def test_wrong_gradients_are_not_within_the_bound() -> None:
    layer, (ids, weights) = layer_of(), routes(64, none=False)
    x, grad = numbers(64, HIDDEN), numbers(64, HIDDEN, seed=3)
    _, of_x, of_p, of_w1, of_w2 = plain(layer, x, ids, weights, grad)
    halves = of_w1.chunk(2, dim=1)
    wrong = [(of_x, of_x * 1.2), (of_p, of_p.flip(1)), (of_w1, torch.cat(halves[::-1], 1)), (of_w1, of_w1.roll(1, 0))]
    without_p = plain(layer, x, ids, torch.full_like(weights, float(weights.mean())), grad)
    for right, other in (*wrong, (of_w2, without_p[4])):
        assert error(other, right) > TYPICAL_OF_EXPERTS


IDS = {
    "no token": torch.zeros(0, TOPK, dtype=torch.long),
    "no route": torch.full((6, TOPK), -1),
    "one route": torch.tensor([[-1, -1], [-1, 3]]),
    "one expert": torch.full((40, TOPK), 4),
    "the same twice": torch.tensor([[1, 1], [2, 2], [0, 0]]),
    "int32": torch.tensor([[0, -1], [4, 2]], dtype=torch.int32),
    "no column": torch.zeros(3, 0, dtype=torch.long),
}


@BOTH
@pytest.mark.parametrize("name", IDS)
def test_routes_of_any_sort_with_memory_that_holds_nan(name: str, products: str) -> None:
    """Rows without a token may hold any value, which must not reach a result."""
    layer, ids = layer_of(products=products), IDS[name]
    x, grad = numbers(len(ids), HIDDEN), numbers(len(ids), HIDDEN, seed=3)
    weights = torch.rand(ids.shape)
    with deterministic(warn_only=True):
        got = trained(layer, x, ids, weights, grad)
    right = of_casts(layer, x, ids, weights, grad)
    for what, mine, its in zip(NAMES, got, right, strict=True):
        assert error(mine, its) < 4e-3, what
    assert not got[2][ids < 0].any()


# Results that are not needed


@BOTH
@pytest.mark.parametrize("needed", ["x", "topk_weights", "w1", "w2", "", "x topk_weights w1 w2"])
def test_what_nobody_needs_is_not_computed(monkeypatch: pytest.MonkeyPatch, needed: str, products: str) -> None:
    layer, x, (ids, weights) = layer_of(products=products), numbers(40, HIDDEN), routes(40)
    grad = numbers(40, HIDDEN, seed=3)
    right = dict(zip(NAMES, trained(layer, x, ids, weights, grad), strict=True))
    along_k = "k_grouped_fp8_gemm_nt_contiguous" if products == "fp8" else "k_grouped_bf16_gemm_tn_contiguous"
    of_rows = "product_of_rows"
    called = count_calls(monkeypatch, module, along_k, of_rows)
    leaves = {"x": x, "topk_weights": weights, "w1": layer.w1, "w2": layer.w2}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed.split())
        leaf.grad = None
    with kept_by_autograd(layer.w1, layer.w2) as kept:
        out = layer(x, ids, weights)
    assert out.requires_grad == bool(needed)
    assert (x.data_ptr() in {each.data_ptr() for each in kept}) == ("w1" in needed)
    assert called == [of_rows] * 2
    called.clear()
    if not needed:
        assert not kept
        return
    out.backward(grad)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in needed.split())
        assert leaf.grad is None or same_bits(leaf.grad, right[name])
    of_weights = {"x": 0, "topk_weights": 0, "w1": 1, "w2": 1}.get(needed, 2)
    assert called.count(along_k) == of_weights
    assert called.count(of_rows) == {"x": 2, "topk_weights": 1, "w1": 1, "w2": 0}.get(needed, 2)


@BOTH
def test_what_is_kept_is_x_and_gate_and_up_and_small_things(products: str) -> None:
    layer, tokens, (ids, weights) = layer_of(products=products), 64, routes(64)
    x = numbers(tokens, HIDDEN).requires_grad_()
    with kept_by_autograd(layer.w1, layer.w2) as kept:
        layer(x, ids, weights)
    large = sorted((each.dtype, tuple(each.shape)) for each in kept if each.dtype == torch.bfloat16)
    assert [shape for _, shape in large] == [(64, HIDDEN), (64 * TOPK, 2 * INTER)]
    small = sum(each.numel() * each.element_size() for each in kept if each.dtype != torch.bfloat16)
    assert small == 4 * (4 * tokens * TOPK + 2 * NUM)


# Together with torch's own features


def test_a_router_learns() -> None:
    torch.manual_seed(0)
    layer, router, x = layer_of(), torch.nn.Linear(HIDDEN, NUM, bias=False), numbers(32, HIDDEN, dtype=torch.float32)
    weights, ids = router(x).softmax(-1).topk(TOPK)
    layer(x, ids, weights).square().sum().backward()
    got = some(router.weight.grad).clone()
    router.zero_grad()
    weights, ids = router(x).softmax(-1).topk(TOPK)
    Plain(layer)(x, ids, weights).square().sum().backward()
    assert error(got, some(router.weight.grad)) < 2 * TYPICAL_OF_EXPERTS


@BOTH
@pytest.mark.parametrize("needed", ["x", "topk_weights", "w1", "w2", "x topk_weights w1 w2"])
def test_torch_counts_the_products_that_are_computed(needed: str, products: str) -> None:
    """Forward has two products. Backward has one by w2, unless only w2 is trained, and one for each of x, w1 and w2."""
    layer, (ids, weights) = layer_of(products=products), routes(40)
    by_w1, by_w2 = 2 * ids.numel() * 2 * INTER * HIDDEN, 2 * ids.numel() * INTER * HIDDEN
    leaves = {"x": numbers(40, HIDDEN), "topk_weights": weights, "w1": layer.w1, "w2": layer.w2}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed.split())
    backward = by_w2 * (needed != "w2") + sum({"x": by_w1, "w1": by_w1, "w2": by_w2}.get(x, 0) for x in needed.split())
    for each in (layer, torch.export.export(layer, (leaves["x"], ids, weights)).module()):
        with FlopCounterMode(display=False) as counter:
            each(leaves["x"], ids, weights).sum().backward()
        assert counter.get_total_flops() == by_w1 + by_w2 + backward


@BOTH
@pytest.mark.parametrize("tokens", [0, 40])
def test_gradients_are_added_to_main_grad(tokens: int, products: str) -> None:
    x, (ids, weights), grad = numbers(tokens, HIDDEN), routes(tokens), numbers(tokens, HIDDEN, seed=3)
    layer: Any = layer_of(accumulates_main_grad=True, products=products)
    right = trained(layer_of(products=products), x, ids, weights, grad)
    for w in (layer.w1, layer.w2):
        w.main_grad = torch.ones_like(w)
    layer.w2.grad_added_to_main_grad = False
    for _ in range(2):
        layer(x, ids, weights).backward(grad)
    assert layer.w1.grad is None
    assert not layer.w2.grad.any()
    assert layer.w2.grad_added_to_main_grad
    for w, its in ((layer.w1, right[3]), (layer.w2, right[4])):
        assert torch.allclose(w.main_grad - 1, 2 * its, rtol=1e-4, atol=1e-5)


def test_parameters_are_drawn_for_each_expert_as_a_linear_layer_draws_its_own() -> None:
    layer = layer_of()
    assert sorted(layer.state_dict()) == ["w1", "w2"]
    assert (tuple(layer.w1.shape), tuple(layer.w2.shape)) == ((NUM, 2 * INTER, HIDDEN), (NUM, HIDDEN, INTER))
    for w in (layer.w1, layer.w2):
        bound = w.shape[2] ** -0.5
        assert 0.99 * bound < float(w.detach().abs().max()) <= bound
    assert "products=bf16" in repr(layer_of(products="bf16"))
    assert repr(layer) == f"Experts(num_experts={NUM}, hidden={HIDDEN}, intermediate={INTER}, products=fp8)"


MISTAKES: list[tuple[Sequence[Any], str]] = [
    ((0, 32, 32), "num_experts: expected an integer"),
    ((2, 30, 32), "hidden: expected a multiple of 16, which FP8 products need, got 30"),
    ((2, 32, 8), "intermediate: expected a multiple of 16, which FP8 products need, got 8"),
    ((2, 32, 32, -1.0), "limit: expected a finite FP32 number"),
    ((2, 32, 32, None, None, torch.int32), "dtype: expected torch.bfloat16 or .*, got torch.int32"),
]


@pytest.mark.parametrize(("sizes", "message"), MISTAKES)
def test_sizes_that_products_do_not_take_are_refused_at_once(sizes: Sequence[Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Experts(*sizes)


def test_products_are_of_two_kinds_and_those_in_bf16_take_other_sizes() -> None:
    assert Experts(2, 24, 8, products="bf16").products == "bf16"
    for sizes, message in (((20, 8), "hidden: expected a multiple of 8, which BF16"), ((8, 4), "intermediate: .*BF16")):
        with pytest.raises(ValueError, match=f"^{message}"):
            Experts(2, *sizes, products="bf16")
    with pytest.raises(ValueError, match=r"^products: expected 'fp8' or 'bf16', got 'fp4'"):
        Experts(2, 16, 16, products="fp4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 16)}, "x: expected shape (..., 144), got (4, 16)"),
        ({"ids": torch.zeros(3, TOPK).long()}, "topk_ids: expected shape (..., topk) with leading dimensions (4,)"),
        ({"weights": torch.zeros(4)}, "topk_weights: expected shape (..., topk) with leading dimensions (4,)"),
        ({"weights": torch.zeros(4, 3)}, "topk_weights: expected shape (4, 2), got (4, 3)"),
        ({"ids": torch.full((4, TOPK), NUM)}, "topk_ids: expected values in -1..4, got 5"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Tensor], message: str) -> None:
    call = {"x": torch.zeros(4, HIDDEN), "ids": torch.zeros(4, TOPK).long(), "weights": torch.zeros(4, TOPK), **changes}
    with pytest.raises(ValueError) as raised:
        layer_of()(*call.values())
    assert str(raised.value).startswith(message)


# On a GPU


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 40, 700])
def test_a_gpu_gives_what_the_cpu_gives(tokens: int, w_dtype: torch.dtype, products: str) -> None:
    layer, x, (ids, weights) = layer_of(dtype=w_dtype, products=products), numbers(tokens, HIDDEN), routes(tokens)
    grad = numbers(tokens, HIDDEN, seed=3)
    right = trained(layer, x, ids, weights, grad)
    got = trained(copy.deepcopy(layer).cuda(), x.cuda(), ids.cuda(), weights.cuda(), grad.cuda())
    for name, mine, its in zip(NAMES, got, right, strict=True):
        assert mine.dtype == its.dtype
        assert error(mine.cpu(), its) < (2e-2 if products == "fp8" else 4e-3), name


@pytest.mark.gpu
@BOTH
def test_routes_of_any_sort_on_a_gpu_with_memory_that_holds_nan(products: str) -> None:
    layer = layer_of(products=products).cuda()
    with deterministic(warn_only=True):
        for name, ids in IDS.items():
            if name == "no column":
                continue
            x, grad = numbers(len(ids), HIDDEN).cuda(), numbers(len(ids), HIDDEN, seed=3).cuda()
            got = trained(layer, x, ids.cuda(), torch.rand(ids.shape).cuda(), grad)
            assert all(bool(each.isfinite().all()) for each in got), name


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_host_waits_for_nothing_and_bits_are_the_same_each_time(accumulates: bool, products: str) -> None:
    layer: Any = layer_of(dtype=torch.bfloat16, accumulates_main_grad=accumulates, products=products).cuda()
    x, grad = numbers(300, HIDDEN).cuda().requires_grad_(), numbers(300, HIDDEN, seed=3).cuda()
    ids, weights = (each.cuda() for each in routes(300))
    leaves: Any = x, weights.requires_grad_(), layer.w1, layer.w2

    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad, leaf.main_grad = None, torch.zeros(leaf.shape, device="cuda")
        layer(x, ids, weights).backward(grad)
        return [leaf.main_grad if leaf.grad is None else leaf.grad for leaf in leaves]

    first = step()
    with host_never_waits():
        again = step()
    assert all(each.any() for each in first)
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
