"""A layer of experts has the bits of its parts and of a plain loop over experts; any routes; the workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import captured, dequantize, framed, same_bits, some
from helpers import numbers as random
from layer_cases import assert_mistake, random_routes, weights_without_values, without_values
from torch import Tensor
from torch.utils._pytree import tree_map

import deep_gemm
from deep_gemm import (
    bf16_gemm_nt,
    experts,
    experts_workspace_bytes,
    fp8_gemm_nt,
    per_block_cast_to_fp8,
    per_token_cast_to_fp8,
    silu_mul_cast_to_fp8,
)
from deep_gemm.casts.gating import activated, gating_of
from deep_gemm.core.check.layout import align, ceil_div
from deep_gemm.moe import api as parts

TOKENS, TOPK, NUM, HIDDEN, INTER = 12, 3, 5, 144, 80

Weights = tuple[Tensor, Tensor]
Sizes = tuple[int, int, int]


def weights(num: int = NUM, hidden: int = HIDDEN, inter: int = INTER) -> tuple[Weights, Weights]:
    w1, w2 = random(num, 2 * inter, hidden, seed=1), random(num, hidden, inter, seed=2)
    return per_block_cast_to_fp8(w1), per_block_cast_to_fp8(w2)


def call(tokens: int = TOKENS, topk: int = TOPK, num: int = NUM, **changes: Any) -> dict[str, Any]:
    w1, w2 = weights(num)
    return {
        "x": random(tokens, HIDDEN, seed=3),
        "topk_ids": random_routes(tokens, topk, num, seed=4),
        "topk_weights": random(tokens, topk, dtype=torch.float32, seed=5),
        "w1": w1,
        "w2": w2,
        **changes,
    }


def summed(y: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Add up the rows of each token's routes, in the order of the routes."""
    total = torch.zeros(len(y), y.shape[2])
    for column in range(topk_ids.shape[1]):
        routed = topk_ids[:, column] >= 0
        total[routed] += topk_weights[routed, column, None].float() * y[routed, column].float()
    return total.to(torch.bfloat16)


def one_by_one(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Weights,
    w2: Weights,
    first: tuple[int, dict[str, Any]] = (128, {}),
    second: tuple[int, dict[str, Any]] = (128, {}),
    **gating: Any,
) -> Tensor:
    """Compute each expert's tokens by two dense products; add up results in the order of the routes.

    `first` and `second`: the number of columns that share a scale of a product's activations, and the recipes.
    """

    def multiplied(a: Weights, w: Weights, recipes: dict[str, Any]) -> Tensor:
        d = torch.empty(len(a[0]), w[0].shape[1], dtype=torch.bfloat16)
        fp8_gemm_nt(a, (w[0][expert], w[1][expert]), d, **recipes)
        return d

    y = torch.zeros(*topk_ids.shape, x.shape[1], dtype=torch.bfloat16)
    for expert in range(len(w1[0])):
        tokens, columns = (topk_ids == expert).nonzero(as_tuple=True)
        h = multiplied(per_token_cast_to_fp8(x[tokens], gran_k=first[0]), w1, first[1])
        y[tokens, columns] = multiplied(silu_mul_cast_to_fp8(h, gran_k=second[0], **gating), w2, second[1])
    return summed(y, topk_ids, topk_weights)


def called(arguments: dict[str, Any]) -> Tensor:
    out = some(experts(**arguments))
    assert out.dtype == torch.bfloat16
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("route_weights", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_arguments(dtype: torch.dtype, ids: torch.dtype, route_weights: torch.dtype) -> None:
    arguments = call()
    arguments["x"] = arguments["x"].to(dtype)
    arguments["topk_ids"] = arguments["topk_ids"].to(ids)
    arguments["topk_weights"] = arguments["topk_weights"].to(route_weights)
    assert same_bits(called(arguments), one_by_one(**arguments))


def test_it_is_its_parts() -> None:
    arguments = call(limit=1.0)
    rows = deep_gemm.expert_rows(arguments["topk_ids"], NUM)
    a = deep_gemm.gather_cast_to_fp8(arguments["x"], rows)
    h = some(deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, arguments["w1"], grouped_layout=rows.ids))
    a = silu_mul_cast_to_fp8(h, limit=1.0)
    y = some(deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, arguments["w2"], grouped_layout=rows.ids))
    assert same_bits(called(arguments), some(deep_gemm.gather_weighted(y, rows, arguments["topk_weights"])))


def test_the_alignment_that_is_set_changes_nothing() -> None:
    arguments = call()
    expected = called(arguments)
    deep_gemm.set_mk_alignment_for_contiguous_layout(1)
    assert same_bits(called(arguments), expected)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_rows_without_a_token_matter_to_nobody(monkeypatch: pytest.MonkeyPatch, is_bf16: bool) -> None:
    arguments = bf16_call() if is_bf16 else call()
    expected = called(arguments)
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **how: made(*args, **how).fill_(torch.nan))
    assert bool((arguments["topk_ids"] < 0).any())
    assert same_bits(called(arguments), expected)
    arguments["topk_ids"][:] = 3  # all other experts have no rows
    assert same_bits(called(arguments), (bf16_one_by_one if is_bf16 else one_by_one)(**arguments))


def test_a_token_that_holds_nan_and_has_no_expert_is_zero_and_harms_nobody() -> None:
    arguments = call()
    arguments["topk_ids"][2] = -1
    expected = called(arguments)
    assert not expected[2].any()
    arguments["x"][2] = torch.nan
    arguments["topk_weights"][arguments["topk_ids"] < 0] = torch.nan
    assert same_bits(called(arguments), expected)
    arguments["topk_ids"][2, 1] = 0
    out = called(arguments)
    assert out[2].isnan().all() or arguments["topk_weights"][2, 1].isnan()
    assert same_bits(out[3:], expected[3:])


def test_an_expert_that_occurs_twice_counts_twice() -> None:
    arguments = call(1, 2)
    arguments["topk_ids"][:], arguments["topk_weights"][:] = 1, 1.0
    twice = called(arguments)
    arguments["topk_ids"], arguments["topk_weights"] = arguments["topk_ids"][:, :1], torch.full((1, 1), 2.0)
    assert same_bits(twice, called(arguments))


@pytest.mark.parametrize("sizes", [(0, 2, 3), (4, 0, 3), (4, 2, 0), (0, 0, 0)])
def test_empty_sizes_work(sizes: Sizes) -> None:
    for arguments in (call(*sizes), bf16_call(*sizes)):
        assert same_bits(called(arguments), torch.zeros(sizes[0], HIDDEN, dtype=torch.bfloat16))


def test_no_routes_work() -> None:
    arguments = call()
    arguments["topk_ids"][:] = -1
    assert not called(arguments).any()


def test_out_is_written_and_nothing_around_it() -> None:
    arguments, frame = call(), framed((TOKENS, HIDDEN), torch.bfloat16)
    assert experts(**arguments, out=frame.view) is None
    assert same_bits(frame.view, called(arguments))
    frame.assert_untouched_outside()


def test_strides_change_nothing() -> None:
    arguments = call()
    expected = called(arguments)
    for name in ("x", "topk_ids", "topk_weights"):
        given = arguments[name]
        wide = torch.cat([given, given], dim=1)[:, : given.shape[1]]
        assert same_bits(called({**arguments, name: wide}), expected)
        assert same_bits(called({**arguments, name: given.t().contiguous().t()}), expected)


def test_no_gradient_is_carried() -> None:
    arguments = call()
    arguments["x"].requires_grad_()
    arguments["topk_weights"].requires_grad_()
    assert not called(arguments).requires_grad


# Biases


def test_experts_without_rows_add_no_bias_and_compiled_layers_have_the_same_bits() -> None:
    arguments = call(w1_bias=random(NUM, 2 * INTER).float(), w2_bias=random(NUM, HIDDEN).float())
    arguments["topk_ids"][:] = 3
    out = called(arguments)
    arguments["w1_bias"][:3], arguments["w2_bias"][4] = torch.nan, torch.inf
    assert same_bits(called(arguments), out)
    compiled = torch.compile(lambda x, **more: some(experts(x, **more)) * 2, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(**arguments), out * 2)
    assert called(tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, arguments)).shape == out.shape


def bf16_call(tokens: int = TOKENS, topk: int = TOPK, num: int = NUM, inter: int = 72, **more: Any) -> dict[str, Any]:
    w1, w2 = random(num, 2 * inter, HIDDEN, seed=1), random(num, HIDDEN, inter, seed=2)
    return call(tokens, topk, num) | {"w1": w1, "w2": w2} | more


def bf16_one_by_one(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor, **gating: Any) -> Tensor:
    """Compute each expert's tokens by two dense products in BF16; add up results in the order of the routes."""
    gates = gating_of(**{"activation": "swiglu", "alpha": None, "beta": None, "limit": None} | gating)
    y = torch.zeros(*topk_ids.shape, x.shape[1], dtype=torch.bfloat16)
    for expert in range(len(w1)):
        tokens, columns = (topk_ids == expert).nonzero(as_tuple=True)
        h = some(bf16_gemm_nt(x[tokens].bfloat16(), w1[expert]))
        y[tokens, columns] = some(bf16_gemm_nt(activated(h, gates).bfloat16(), w2[expert]))
    return summed(y, topk_ids, topk_weights)


# Both kinds of weights


BOTH: dict[str, Any] = {"fp8": (call, one_by_one), "bf16": (bf16_call, bf16_one_by_one)}
EACH = pytest.mark.parametrize("kind", BOTH)
OF_GPT_OSS, SITU = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}, {"activation": "situ"}


@EACH
@pytest.mark.parametrize(("tokens", "topk", "num"), [(12, 3, 5), (1, 1, 1), (40, 2, 3), (5, 8, 32), (150, 2, 2)])
@pytest.mark.parametrize("gating", [{}, {"limit": 0.5}, OF_GPT_OSS, SITU, SITU | {"alpha": 2, "beta": 9}], ids=str)
def test_it_is_a_loop_over_experts_to_the_bit(kind: str, tokens: int, topk: int, num: int, gating: Any) -> None:
    of_kind, one_by_one = BOTH[kind]
    arguments = of_kind(tokens, topk, num, **gating)
    out = called(arguments)
    assert same_bits(out, one_by_one(**arguments))
    assert not gating or not same_bits(out, called(of_kind(tokens, topk, num)))


def in_fp64(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Compute the layer with FP64 weights, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, column in (topk_ids >= 0).nonzero().tolist():
        expert = int(topk_ids[t, column])
        gate, up = (w1[expert] @ x[t].double()).chunk(2)
        out[t] += float(topk_weights[t, column]) * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize(("kind", "least", "most"), [("fp8", 1e-4, 2e-3), ("bf16", 0, 2e-5)])
def test_it_is_near_the_layer_in_fp64(kind: str, least: float, most: float) -> None:
    arguments = BOTH[kind][0](64)
    exact: Any = (lambda w: dequantize(w[0], w[1], 128)) if kind == "fp8" else Tensor.double
    of = {name: exact(arguments[name]) for name in ("w1", "w2")}
    assert least < deep_gemm.calc_diff(called(arguments), in_fp64(**{**arguments, **of})) < most


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_a_gpu_computes_it_and_a_graph_captures_it(kind: str, tokens: int) -> None:
    arguments = BOTH[kind][0](tokens)
    on_gpu: dict[str, Any] = tree_map(Tensor.cuda, arguments)
    called(on_gpu)
    graph, out = captured(called, on_gpu)
    for seed in range(3):
        arguments["topk_ids"] = random_routes(tokens, TOPK, NUM, seed)
        on_gpu["topk_ids"].copy_(arguments["topk_ids"])
        graph.replay()
        # A GPU rounds sums of products in another order, so some elements of h become the next FP8 number.
        assert deep_gemm.calc_diff(out.cpu(), called(arguments)) < (1e-4 if kind == "fp8" else 1e-5)
        assert same_bits(called(on_gpu).cpu(), out.cpu())


# Weights in BF16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_of_other_types_are_rounded_to_bf16(dtype: torch.dtype) -> None:
    arguments = bf16_call()
    arguments["x"] = arguments["x"].to(dtype) * 1.01
    assert same_bits(called(arguments), bf16_one_by_one(**arguments))


def test_bf16_weights_lie_in_any_way_that_products_take() -> None:
    arguments = bf16_call()
    expected = called(arguments)
    for name in ("w1", "w2"):
        turned = arguments[name].mT.contiguous().mT
        wide = torch.zeros(NUM, 2 * turned.shape[1], turned.shape[2] + 8, dtype=torch.bfloat16)
        narrow = wide[:, : turned.shape[1], : turned.shape[2]].copy_(turned)
        for other in (turned, narrow):
            assert same_bits(called({**arguments, name: other}), expected)
    shared = arguments["w1"][:1].expand(arguments["w1"].shape)
    assert same_bits(called({**arguments, "w1": shared}), called({**arguments, "w1": shared.contiguous()}))


def test_the_layer_in_bf16_is_compiled_as_one_operator() -> None:
    arguments = bf16_call(limit=1.0)
    compiled = torch.compile(lambda x, **more: some(experts(x, **more)) * 2, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(**arguments), called(arguments) * 2)


BF16_1, BF16_2 = (bf16_call()[name] for name in ("w1", "w2"))
BF16_OUT = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w1": weights()[0]}, "TypeError: w2: expected a pair (values, scales), got Tensor: per_token_cast_to_fp8"),
        ({"w2": weights()[1]}, "TypeError: w2: expected a BF16 tensor, as w1 is a tensor, got tuple"),
        ({"w1": BF16_1.float()}, "w1: expected dtype torch.bfloat16, got torch.float32"),
        ({"w2": BF16_2.half()}, "w2: expected dtype torch.bfloat16, got torch.float16"),
        ({"w2": weights()[1][0]}, "w2: expected dtype torch.bfloat16, got torch.float8_e4m3fn"),
        ({"w1": BF16_1[:, :, 8:]}, "w1: expected shape (experts, 2 intermediate, hidden) = (experts, 2 inter"),
        ({"w1": BF16_1[:, :128]}, "w1: expected 2 * intermediate = 144 rows, gate and up, because w2"),
        ({"w2": BF16_2[1:]}, "w2: expected shape (experts, hidden, intermediate) = (5, 144, intermediate), got"),
        ({"w2": BF16_2.to("meta")}, "w2: expected device cpu, where x is, got meta"),
        ({"x": random(TOKENS, 152)}, "x: expected shape (tokens, hidden) = (tokens, 144), got (12, 152)"),
        ({"w2": torch.zeros(NUM, HIDDEN, 73).bfloat16()[..., :72]}, "w2: expected a stride that is a multiple of 8"),
        ({"w2": torch.zeros(NUM, HIDDEN, 144).bfloat16()[..., ::2]}, "w2: expected values contiguous along hidden or"),
        ({"w1": BF16_1[:, ::2], "w2": BF16_2[..., :36]}, "intermediate: expected a multiple of 8, got 36"),
        ({"gran_k": 128}, "NotImplementedError: gran_k: expected None, got 128 beside BF16 weights, which have no"),
        ({"recipe_b": (128, 128)}, "NotImplementedError: recipe_b: expected None, got (128, 128) beside BF16 weights"),
        ({"out": BF16_OUT, "x": BF16_OUT}, "out: expected memory that does not overlap x"),
        ({"out": BF16_1[0, :TOKENS]}, "out: expected memory that does not overlap w1"),
    ],
)
def test_a_mistake_in_bf16_weights_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    given = bf16_call() | {"w1": BF16_1, "w2": BF16_2} | changes
    assert_mistake(experts, given, message)


# Workspace


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("sizes", [(12, 3, 5), (1, 1, 1), (0, 2, 3), (4, 0, 2)])
def test_workspace_is_what_the_parts_give(sizes: Sizes, is_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    between: list[Tensor] = []

    def seen(name: str) -> None:
        part = getattr(parts, name)

        def watched(*args: Any, **options: Any) -> Any:
            result = part(*args, **options)
            between.extend([result] if isinstance(result, Tensor) else [x for x in result if x is not None])
            return result

        monkeypatch.setattr(parts, name, watched)

    for name in ("expert_rows", "gather_and_cast", "product_of_rows", "activate_rows"):
        seen(name)
    called(bf16_call(*sizes, INTER) if is_bf16 else call(*sizes))
    assert len(between) == 5 + 2 + 1 + 2 + 1 - 2 * is_bf16
    found, rows = sum(x.nbytes for x in between), sizes[0] * sizes[1]
    padding = 4 * (align(rows, 4) - rows) * (ceil_div(HIDDEN, 128) + ceil_div(INTER, 128)) * (not is_bf16)
    gran_k = None if is_bf16 else 128
    assert experts_workspace_bytes(*sizes, HIDDEN, INTER, gran_k=gran_k) == found + padding


@pytest.mark.parametrize("size", [-1, 2.5, "3"])
@pytest.mark.parametrize("name", ["tokens", "topk", "num_experts", "hidden", "intermediate"])
def test_sizes_of_a_workspace_are_integers(name: str, size: Any) -> None:
    sizes = {"tokens": 1, "topk": 1, "num_experts": 1, "hidden": 16, "intermediate": 16, name: size}
    words = f"{name}: expected an integer in 0..2147483647, got {size!r}"
    assert_mistake(experts_workspace_bytes, sizes, words)


# On a GPU


def test_the_host_reads_no_value_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {name: given.to("meta") for name, given in call().items() if isinstance(given, Tensor)}
    w1, w2 = weights_without_values(NUM, 2 * INTER, HIDDEN), weights_without_values(NUM, HIDDEN, INTER)
    with without_values(monkeypatch):
        out = called({**arguments, "w1": w1, "w2": w2, "limit": 7.0})
        assert out.device.type == "meta"
        experts(**arguments, w1=w1, w2=w2, out=out)


# Mistakes

W1, W2 = weights()
OUT = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
BIAS1, BIAS2 = torch.zeros(NUM, 2 * INTER), torch.zeros(NUM, HIDDEN)
ROOM = torch.zeros(TOKENS * HIDDEN).bfloat16()
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"x": [1.0]}, "TypeError: x: expected a tensor, got a list of 1"),
    ({"x": torch.ones(4)}, "x: expected shape (tokens, hidden), got (4,)"),
    ({"x": random(TOKENS, 160)}, "x: expected shape (tokens, hidden) = (tokens, 144), got (12, 160)"),
    ({"x": random(TOKENS, HIDDEN).double()}, "x: expected dtype torch.bfloat16 or torch.float16 or"),
    ({"x": random(TOKENS, HIDDEN).to("meta")}, "topk_ids: expected device meta, where x is, got cpu"),
    ({"topk_ids": [[1]]}, "TypeError: topk_ids: expected a tensor, got a list of 1"),
    ({"topk_ids": torch.zeros(3, 2).long()}, "topk_ids: expected shape (tokens, topk) = (12, topk), got (3,"),
    ({"topk_ids": torch.zeros(TOKENS, TOPK)}, "topk_ids: expected dtype torch.int32 or torch.int64, got"),
    ({"topk_ids": torch.full((TOKENS, TOPK), NUM)}, "topk_ids: expected values in -1..4, got 5 at index (0,"),
    ({"topk_ids": torch.zeros(TOKENS, TOPK).long().to("meta")}, "topk_ids: expected device cpu, where x is"),
    ({"topk_weights": 1.0}, "TypeError: topk_weights: expected a tensor, got float"),
    ({"topk_weights": torch.ones(TOKENS, 2)}, "topk_weights: expected shape (tokens, topk) = (12, 3), got"),
    ({"topk_weights": torch.ones(TOKENS, TOPK).double()}, "topk_weights: expected dtype torch.float32 or"),
    ({"topk_weights": torch.ones(TOKENS, TOPK).to("meta")}, "topk_weights: expected device cpu, where x is"),
    ({"w1": W1[0]}, "TypeError: w1: expected a pair (values, scales), got Tensor"),
    ({"w1": (W1[0], None)}, "TypeError: sfw1: expected a tensor, got NoneType"),
    ({"w1": (W1[0].float(), W1[1])}, "w1: expected dtype torch.float8_e4m3fn, got torch.float32"),
    ({"w1": weights(NUM, 160)[0]}, "w1: expected shape (experts, 2 intermediate, hidden) = (experts, 2 inter"),
    ({"w1": (W1[0], W1[1][:, :1])}, "sfw1: expected shape (5, 2, 2) of 128x128 values, "),
    ({"w1": weights(NUM, HIDDEN, 96)[0]}, "w1: expected 2 * intermediate = 160 rows, gate and up, because w2"),
    ({"w1": (W1[0].to("meta"), W1[1])}, "w1: expected device cpu, where x is, got meta"),
    ({"w2": weights(4)[1]}, "w2: expected shape (experts, hidden, intermediate) = (5, 144, intermediate), got"),
    ({"w2": (W2[0], W2[1].double())}, "sfw2: expected dtype torch.float32, got torch.float64"),
    ({"w2": (W2[0], W2[1].to("meta"))}, "sfw2: expected device cpu, where x is, got meta"),
    (dict(zip(("w1", "w2"), weights(NUM, HIDDEN, 88), strict=True)), "intermediate: expected a multiple of 16, got 88"),
    ({"limit": 0.0}, "limit: expected a number above 0, got 0.0"),
    ({"activation": ["swiglu"]}, "activation: expected one of ['swiglu', 'situ'], got ['swiglu']"),
    ({"activation": "gelu"}, "activation: expected one of ['swiglu', 'situ'], got 'gelu'"),
    ({"alpha": -1.0}, "alpha: expected a finite FP32 number that is not negative, got -1.0"),
    ({"beta": torch.inf}, "beta: expected a finite FP32 number, got inf"),
    ({"activation": "situ", "limit": 7.0}, "limit: expected None with activation='situ', which has bounds"),
    ({"activation": "situ", "beta": 0}, "beta: expected a number above 0, got 0"),
    ({"out": 1}, "TypeError: out: expected a tensor, got int"),
    ({"out": OUT.float()}, "out: expected dtype torch.bfloat16, got torch.float32"),
    ({"out": OUT[1:]}, "out: expected shape (tokens, hidden) = (12, 144), got (11, 144)"),
    ({"out": OUT.to("meta")}, "out: expected device cpu, where x is, got meta"),
    ({"out": OUT, "x": OUT}, "out: expected memory that does not overlap x"),
    ({"w1_bias": BIAS1[:, 8:]}, "w1_bias: expected shape (experts, 2 intermediate) = (5, 160), got (5, 152)"),
    ({"w2_bias": BIAS2[1:]}, "w2_bias: expected shape (experts, hidden) = (5, 144), got (4, 144)"),
    ({"w2_bias": [0.0]}, "TypeError: w2_bias: expected a tensor, got a list of 1"),
    ({"w1_bias": BIAS1.half()}, "w1_bias: expected dtype torch.bfloat16 or torch.float32, got torch.float16"),
    ({"w2_bias": BIAS2.to("meta")}, "w2_bias: expected device cpu, where x is, got meta"),
    ({"w2_bias": torch.zeros(NUM, 160)[:, :HIDDEN]}, "w2_bias: expected contiguous rows aligned to 16 bytes"),
    ({"w1_bias": BIAS1.clone().requires_grad_()}, "w1_bias: expected a tensor without a gradient, got one that"),
    (
        {"w2_bias": ROOM.view(torch.float32)[: NUM * HIDDEN].view(NUM, HIDDEN), "out": ROOM.view(TOKENS, HIDDEN)},
        "out: expected memory that does not overlap w2_bias",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    assert_mistake(experts, call(**changes), message)
