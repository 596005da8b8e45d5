"""Layers with FP8 weights whose scales are finer than 128x128: the bits of their parts, and how scales are known."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from addressed_kernels import watched
from fake_gpu import FakeGpu, on_gpu
from fp4_cases import FORMS as FP4_FORMS
from fp4_cases import plain, random_weight
from helpers import numbers as random
from helpers import same_bits, some
from layer_cases import SCALED, assert_mistake, fine_weight, random_routes, recipes, weights_of
from test_experts import in_fp64, one_by_one
from torch import Tensor
from torch.utils._pytree import tree_map

import deep_gemm
from deep_gemm import experts, fp8_gemm_nt, linear, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts import lay_scales
from deep_gemm.casts.gating import Gating
from deep_gemm.core.check import checks
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import MX, PER_BLOCK
from deep_gemm.linear.check import SCALES_OF_WEIGHTS, weight
from deep_gemm.moe import api as parts

FINE = [(64, 64), (32, 32), (1, 32)]
FORMS = [None, "bytes", "e8m0", "words", "words, MN-major"]
NUM, HIDDEN, INTER = 5, 288, 144
TYPES = {"FP32": (torch.float32, 1), "bytes": (torch.uint8, 1), "words": (torch.int32, 4)}


def call(of1: tuple[int, int], of2: tuple[int, int], form: str | None = None, tokens: int = 12) -> dict[str, Any]:
    return {
        "x": random(tokens, HIDDEN, seed=3),
        "topk_ids": random_routes(tokens, 3, NUM, seed=4),
        "topk_weights": random(tokens, 3, dtype=torch.float32, seed=5),
        "w1": fine_weight(NUM, 2 * INTER, HIDDEN, of=of1, form=form, seed=1),
        "w2": fine_weight(NUM, HIDDEN, INTER, of=of2, form=form, seed=2),
    }


# Bits


@pytest.mark.few
@pytest.mark.parametrize("columns", [None, 32, 64, 128])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", FINE, ids=str)
@pytest.mark.parametrize(("n", "k"), [(72, 288), (576, 16), (8, 576)])
def test_a_linear_layer_is_cast_and_product(n: int, k: int, of: Any, form: str | None, columns: int | None) -> None:
    x, w, bias = random(2, 3, k), fine_weight(n, k, of=of, form=form), random(n, seed=3, dtype=torch.float32) * 1.001
    of_x, said = recipes(of, columns)
    d = torch.empty(6, n)
    fp8_gemm_nt(per_token_cast_to_fp8(x.view(6, k), gran_k=of_x), w, d, bias.repeat(6, 1), **said)
    expected = d.to(torch.bfloat16).view(2, 3, n)
    more: dict[str, Any] = {"recipe_b": of} if form in ("words", "words, MN-major") else {}  # words may be ambiguous
    got = some(linear(x, w, bias=bias, gran_k=columns, **more))
    assert same_bits(got, expected)
    out = torch.zeros_like(expected)
    assert linear(x, w, bias=bias, out=out, gran_k=columns, **more) is None
    assert same_bits(out, expected)


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("of", [(128, 128), "fp4"], ids=str)
def test_activations_may_be_finer_than_the_weight(of: Any, columns: int) -> None:
    x, d, cast = random(6, 288), torch.empty(6, 72, dtype=torch.bfloat16), deep_gemm.per_block_cast_to_fp8
    w = deep_gemm.quantize_mxfp4(random(72, 288, seed=1)) if of == "fp4" else cast(random(72, 288, seed=1))
    said: dict[str, Any] = {"recipe_a": (1, columns), "recipe_b": (1, 32) if of == "fp4" else of}
    fp8_gemm_nt(per_token_cast_to_fp8(x, gran_k=columns), w, d, **said)
    got = some(linear(x, w, gran_k=columns))
    assert same_bits(got, d)
    assert not same_bits(got, linear(x, w))  # type: ignore[arg-type]


@pytest.mark.few
@pytest.mark.parametrize("columns", [None, 128])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("of1", "of2"), [(of, of) for of in FINE] + [((32, 32), (64, 64)), ((128, 128), (1, 32))])
def test_experts_are_a_loop_over_experts(of1: Any, of2: Any, form: str | None, columns: int | None) -> None:
    arguments = call(of1, of2, form if of1 != (128, 128) else None)
    more: dict[str, Any] = {"limit": 0.5, "alpha": 1.5}
    expected = one_by_one(**arguments, first=recipes(of1, columns), second=recipes(of2, columns), **more)
    got = some(experts(**arguments, gran_k=columns, **more))
    assert same_bits(got, expected)
    out = torch.zeros_like(expected)
    assert experts(**arguments, gran_k=columns, out=out, **more) is None
    assert same_bits(out, expected)


@pytest.mark.parametrize("columns", [None, 32, 128])
@pytest.mark.parametrize("form", ["rows", "rows, blocks", "blocks, rows"])
def test_experts_by_rows_are_a_loop_over_experts(form: str, columns: int | None) -> None:
    """Tokens of zeros, NaN and infinity, and scales of 0, negative, NaN and infinite, must not change other tokens."""
    of1, of2 = SCALED[form]
    arguments = call(of1, of2, tokens=40)
    arguments["x"][3], arguments["x"][5, 2], arguments["x"][7, 1] = 0, torch.nan, torch.inf
    for expert, scale in enumerate((0.0, -0.5, torch.nan, torch.inf)):
        for name, of in (("w1", of1), ("w2", of2)):
            if of == (1, 0):
                arguments[name][1][expert, 3] *= scale
    expected = one_by_one(**arguments, first=recipes(of1, columns), second=recipes(of2, columns))
    got = some(experts(**arguments, gran_k=columns))
    assert torch.equal(got.isnan(), expected.isnan()) and bool(got.isnan().any()) and not got[:3].isnan().all()
    assert same_bits(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.few
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 7, 64, 600])
@pytest.mark.parametrize("which", ["", "1", "2", "12"])
@pytest.mark.parametrize("form", [*SCALED, "BF16"])
def test_experts_with_biases_are_their_public_parts(form: str, which: str, tokens: int, device: str) -> None:
    """Check bits on either device for few rows, whose products load B before the cast ends, and for many rows."""
    num, hidden, inter, topk = 16, 288, 160, 8
    w1, w2 = tree_map(lambda x: x.to(device), weights_of(form, num, hidden, inter))
    biases: dict[str, Any] = {
        f"w{name}_bias": random(num, columns, seed=7).float().to(device) * 1.01
        for name, columns in (("1", 2 * inter), ("2", hidden))
        if name in which
    }
    x, ids = random(tokens, hidden, seed=3).to(device), random_routes(tokens, topk, num, seed=4).to(device)
    p = random(tokens, topk, dtype=torch.float32, seed=5).to(device)
    rows = deep_gemm.expert_rows(ids, num)
    of1, of2 = SCALED.get(form, (None, None))
    columns1, columns2 = (0 if of and not of[1] else 128 for of in (of1, of2))

    def multiplied(a: Any, w: Any, name: str, of: Any, columns: int) -> Any:
        if of is None:
            return deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, w, grouped_layout=rows.ids, bias=biases.get(name))
        more: Any = {"bias": biases.get(name), "recipe_a": (1, columns), "recipe_b": of}
        return deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, w, grouped_layout=rows.ids, **more)

    a: Any = x[rows.token_of.clamp_min(0).long()]
    if of1 is not None:
        a = deep_gemm.gather_cast_to_fp8(x, rows, gran_k=columns1)
    h = multiplied(a, w1, "w1_bias", of1, columns1)
    middle: Any = parts.activate_rows(h, rows, Gating(), None)[0]
    if of2 is not None:
        middle = deep_gemm.silu_mul_cast_to_fp8(h, gran_k=columns2)
    y = multiplied(middle, w2, "w2_bias", of2, columns2)
    right = some(deep_gemm.gather_weighted(y, rows, p)).cpu()
    out = torch.full_like(x, torch.nan)
    for _ in range(3):  # by a record, after kernels of other calls
        assert same_bits(some(experts(x, ids, p, w1, w2, **biases)).cpu(), right)
        assert experts(x, ids, p, w1, w2, out=out, **biases) is None
        assert same_bits(out.cpu(), right)
    halves: dict[str, Any] = {name: bias.bfloat16() for name, bias in biases.items()}
    rounded: dict[str, Any] = {name: bias.float() for name, bias in halves.items()}
    assert same_bits(experts(x, ids, p, w1, w2, **halves), some(experts(x, ids, p, w1, w2, **rounded)))


def test_many_rows_on_a_gpu_are_activated_behind_the_product(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product that activates supports only scales of 128 columns, so other layers must not launch it."""
    arguments = call((128, 128), (128, 128))
    rows = deep_gemm.expert_rows(arguments["topk_ids"], NUM)
    a = deep_gemm.gather_cast_to_fp8(arguments["x"], rows)
    monkeypatch.setattr(parts, "activates_in_product", lambda *_: True)
    monkeypatch.setattr(parts, "activated_product_of_rows", lambda *_, **__: pytest.fail("launched"))
    stated = {"recipes": (None, (1, 128), (128, 128))}, {"of_middle": MX}
    for said, columns in zip(stated, (128, 32), strict=True):
        got = parts.activations_of_rows((on_gpu(a[0]), a[1]), arguments["w1"], rows, Gating(), **said)  # type: ignore[arg-type]
        assert got[1].shape[1] == ceil_div(INTER, columns)
    with pytest.raises(pytest.fail.Exception, match="launched"):
        parts.activations_of_rows((on_gpu(a[0]), a[1]), arguments["w1"], rows, Gating())


def test_a_workspace_has_room_for_more_scales() -> None:
    sizes = 12, 3, NUM, HIDDEN, INTER
    more = 4 * 36 * (ceil_div(HIDDEN, 32) + ceil_div(INTER, 32) - ceil_div(HIDDEN, 128) - ceil_div(INTER, 128))
    needed = deep_gemm.experts_workspace_bytes
    assert needed(*sizes, gran_k=32) == needed(*sizes) + more
    assert needed(*sizes, gran_k=0) == needed(*sizes) - 4 * 36 * (3 + 2 - 2)


@pytest.mark.parametrize("form", ["bytes", "words", "words, MN-major", None])
@pytest.mark.parametrize("of", [*FINE, "FP4"], ids=str)
def test_layers_have_one_record(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, of: Any, form: str | None) -> None:
    """The scales' rows of bytes fill whole words here. If they did not, each call would make words."""
    shapes = (NUM, 512, 512), (NUM, 512, 256), (512, 512)
    if of == "FP4":
        w1, w2, w = (small(*shape, form=form or "e8m0") for shape in shapes)
    else:
        w1, w2, w = (fine_weight(*shape, of=of, form=form) for shape in shapes)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(checks, "on_host", lambda _: False)
    monkeypatch.setattr(lay_scales, "has_kernel", lambda _: True)
    seen = watched(monkeypatch, gpu)
    for tokens in (12, 11):
        x, ids, p = random(tokens, 512), random_routes(tokens, 3, NUM), torch.ones(tokens, 3)
        experts(x, ids, p, w1, w2, gran_k=128)
        linear(x, w)
    assert len(seen.made) == 2 and None not in seen.made


# How the layout of scales is known


def checked(n: int, k: int, sf: Tensor, recipe_b: Any = None) -> Any:
    values = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    return weight("w", (values, sf), ("n", "k"), {}, None, recipe_b)[1][2]


def scales_of(n: int, k: int, of: tuple[int, int], form: str) -> Tensor:
    dtype, each = TYPES[form]
    return torch.zeros(ceil_div(n, of[0]), ceil_div(k, of[1] * each), dtype=dtype)


@pytest.mark.parametrize("form", TYPES)
def test_the_shape_of_scales_says_what_they_are_of(form: str) -> None:
    """A recipe found by the scales' shape is right for the weight and the cast of x. Ambiguous shapes need recipe_b."""
    asked = set()
    for n, k, of in product((8, 32, 40, 64, 72, 136), (16, 32, 48, 64, 80, 128, 144, 256, 288), SCALES_OF_WEIGHTS):
        if of == PER_BLOCK and form != "FP32":
            continue  # no product accepts UE8M0 scales of these blocks
        sf = scales_of(n, k, of, form)
        try:
            found = checked(n, k, sf)
        except ValueError as error:
            assert str(error).startswith("recipe_b: expected"), error
            asked.add((n, k))
            found = checked(n, k, sf, tuple(of))
        assert found == of or (min(n, k) >= 8 and n <= 64 and k <= min(of.columns, found.columns))
        if found != of:
            assert n <= min(of.rows, found.rows)
    if form == "words":
        assert (32, 64) in asked
        assert (72, 128) not in asked
    else:
        assert not asked


def test_words_that_may_be_of_either_are_settled_by_recipe_b() -> None:
    x = random(3, 128)
    words = {of: fine_weight(32, 128, of=of, form="words") for of in ((64, 64), (32, 32))}
    for of, w in words.items():
        said = "recipe_b: expected (128, 128), (64, 64) or (32, 32): sfw fits each of them, got None"
        assert_mistake(linear, {"x": x, "w": w}, said)
        bytes_of = fine_weight(32, 128, of=of, form="bytes")
        assert same_bits(linear(x, w, recipe_b=of), linear(x, bytes_of))  # type: ignore[arg-type]


def test_scales_for_128_columns_are_no_ue8m0() -> None:
    values, sf = fine_weight(256, 256, of=(64, 64), form="e8m0")
    with pytest.raises(NotImplementedError, match=r"^sfw: UE8M0 scales \(torch.float8_e8m0fnu\) are not supported"):
        linear(random(2, 256), (values, sf[:2, :2]))
    got = some(linear(random(2, 256), (values, sf[:2, :2]), gran_k=32))  # with finer scales of x they are accepted
    assert same_bits(got, linear(random(2, 256), (values, sf[:2, :2].float()), gran_k=32))  # type: ignore[arg-type]


W, RECIPE_B = fine_weight(72, HIDDEN, of=(32, 32)), "NotImplementedError: recipe_b: expected"
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"gran_k": 48}, "gran_k: expected 32, 64 or 128 columns for each scale, got 48"),
    ({"gran_k": True}, "gran_k: expected 32, 64 or 128 columns for each scale, got True"),
    ({"recipe_b": (1, 128)}, f"{RECIPE_B} (128, 128), (64, 64), (32, 32), (1, 32), (1, 0) or"),
    ({"recipe_b": (32,)}, f"{RECIPE_B} (128, 128), (1, 128), (64, 64), (32, 32), (1, 32), (1, 0) or"),
    ({"recipe_b": (64, 64)}, "sfw: expected shape (ceil(n / 64), ceil(k / 64)) = (2, 5), got (3, 9)"),
    (
        {"w": (W[0], W[1][:, :8])},
        "sfw: expected shape (1, 3) of 128x128 values, (2, 5) of 64x64 values, (3, 9) of 32x32 values, (72, 9) of "
        "1x32 values or (72, 1) of 1xk values with torch.float32, got (3, 8)",
    ),
    ({"w": (W[0], W[1].half())}, "sfw: expected dtype torch.float32, got torch.float16"),
    (
        {"w": deep_gemm.quantize_mxfp4(random(72, HIDDEN)), "recipe_b": (32, 32)},
        "recipe_b: expected (1, 32) for packed FP4 values, got (32, 32)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[message[:40] for *_, message in MISTAKES])
def test_a_mistake_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    assert_mistake(linear, {"x": random(2, HIDDEN), "w": W, **changes}, message)


def test_mistakes_of_experts_name_the_weight() -> None:
    arguments = call((32, 32), (64, 64))
    wrong = arguments["w2"][0], arguments["w2"][1][:, :1]
    assert_mistake(experts, arguments | {"w2": wrong}, "sfw2: expected shape (5, 3, 2) of 128x128 values,")
    by_rows = torch.ones(NUM, HIDDEN, 1)
    for sf, message, more in (
        (by_rows[:, 1:], "sfw2: expected shape (5, 3, 2) of 128x128 values,", {}),
        (by_rows[1:, 0, 0], "sfw2: expected shape (groups, 1, 1) = (5, 1, 1), got (4,)", {}),
        (by_rows.double(), "sfw2: expected dtype torch.float32, got torch.float64", {}),
        (by_rows.to("meta"), "sfw2: expected device cpu, where x is, got meta", {}),
        (by_rows, "gran_k: expected 32, 64 or 128 columns for each scale, got 0", {"gran_k": 0}),
    ):
        assert_mistake(experts, arguments | {"w2": (arguments["w2"][0], sf)} | more, message)


# Layers with FP4 weights (MXFP4): the bits of the same layer composed of its parts, and refused arguments.


NUM_OF_FP4, HIDDEN_OF_FP4, INTER_OF_FP4 = 5, 160, 96
fp8_fp4_gemm_nt: Any = deep_gemm.fp8_fp4_gemm_nt


def small(*shape: int, seed: int = 0, form: str = "bytes") -> Operand:
    """Draw an FP4 weight whose numbers are about 1 in size."""
    values, scales = random_weight(*shape, seed=seed)
    return values.view(torch.int8), FP4_FORMS[form](scales // 8 + 110)


def fp4_call(tokens: int = 12, form: str = "bytes", **changes: Any) -> dict[str, Any]:
    return {
        "x": random(tokens, HIDDEN_OF_FP4, seed=3),
        "topk_ids": random_routes(tokens, 3, NUM_OF_FP4, seed=4),
        "topk_weights": random(tokens, 3, dtype=torch.float32, seed=5),
        "w1": small(NUM_OF_FP4, 2 * INTER_OF_FP4, HIDDEN_OF_FP4, seed=1, form=form),
        "w2": small(NUM_OF_FP4, HIDDEN_OF_FP4, INTER_OF_FP4, seed=2, form=form),
        **changes,
    }


@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FP4_FORMS)
@pytest.mark.parametrize("leading", [(), (2, 3), (0,)])
def test_a_linear_layer_is_cast_and_product_with_fp4(leading: tuple[int, ...], form: str, bias_dtype: Any) -> None:
    x, w = random(*leading, HIDDEN_OF_FP4), small(72, HIDDEN_OF_FP4, form=form)
    bias = None if bias_dtype is None else (random(72, seed=3) * 1.001).to(bias_dtype)
    rows = x.reshape(-1, HIDDEN_OF_FP4)
    d = torch.empty(len(rows), 72)
    fp8_fp4_gemm_nt(per_token_cast_to_fp8(rows), w, d, None if bias is None else bias.float().repeat(len(rows), 1))
    expected = d.to(torch.bfloat16).view(*leading, 72)
    assert same_bits(linear(x, w, bias=bias), expected)
    out = torch.zeros(*leading, 72, dtype=torch.bfloat16)
    assert linear(x, w, bias=bias, out=out) is None
    assert same_bits(out, expected)


@pytest.mark.parametrize("form", FP4_FORMS)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_are_a_loop_over_experts_with_fp4(limit: float | None, form: str) -> None:
    arguments = fp4_call(form=form, limit=limit)
    assert same_bits(experts(**arguments), one_by_one(**arguments))


def test_experts_are_near_the_layer_in_fp64() -> None:
    arguments = fp4_call(64)
    of = {name: plain(arguments[name][0].view(torch.uint8), arguments[name][1]) for name in ("w1", "w2")}
    out = some(experts(**arguments))
    assert deep_gemm.calc_diff(out, in_fp64(**{**arguments, **of})) < 2e-3


def test_one_weight_may_be_fp4_and_the_other_fp8() -> None:
    arguments = fp4_call(w2=per_block_cast_to_fp8(random(NUM_OF_FP4, HIDDEN_OF_FP4, INTER_OF_FP4)))
    assert same_bits(experts(**arguments), one_by_one(**arguments))
    arguments = fp4_call(w1=fine_weight(NUM_OF_FP4, 2 * INTER_OF_FP4, HIDDEN_OF_FP4, of=(32, 32)))
    assert same_bits(experts(**arguments), one_by_one(**arguments, first=recipes((32, 32))))


FINER = call(FINE[1], FINE[0], "e8m0")
COMPILED: dict[str, tuple[dict[str, Any], Operand, dict[str, Any]]] = {
    "fine": (FINER | {"gran_k": 128}, fine_weight(72, HIDDEN, of=(1, 32)), {"recipe_b": (1, 32)}),
    "FP4": (fp4_call(), small(72, HIDDEN_OF_FP4, form="e8m0"), {}),
}


@pytest.mark.parametrize("of", COMPILED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_have_the_same_bits(backend: str, of: str) -> None:
    arguments, w, said = COMPILED[of]

    def layers(x: Tensor) -> Tensor:
        y = some(experts(**{**arguments, "x": x}))
        z = some(linear(y, w, **said))
        return z * 2

    assert same_bits(torch.compile(layers, fullgraph=True, backend=backend)(arguments["x"]), layers(arguments["x"]))


@pytest.mark.parametrize("of", [*FINE, "FP4"], ids=str)
def test_what_requires_a_gradient_is_refused(of: Any) -> None:
    said = "w: expected torch.float8_e4m3fn where x or bias requires a gradient"
    if of != "FP4":
        said = f"w: expected scales of 128x128 beside 1x128 of x where x or bias requires a gradient, got {of[0]}x"
    w = small(72, HIDDEN) if of == "FP4" else fine_weight(72, HIDDEN, of=of)
    x, bias = random(3, HIDDEN), random(72).requires_grad_()
    learning: list[dict[str, Any]] = [{"x": x.clone().requires_grad_()}, {"x": x, "bias": bias}]
    for given in learning:
        assert_mistake(linear, {**given, "w": w}, said)
        with torch.no_grad():
            assert linear(w=w, **given) is not None
    given = {"x": x, "w": per_block_cast_to_fp8(random(72, HIDDEN)), "bias": bias, "gran_k": 32}
    assert_mistake(linear, given, "w: expected scales of 128x128 beside 1x128 of x where x or bias")
    arguments = fp4_call()
    arguments["x"] = arguments["x"].requires_grad_() * 1
    assert_mistake(experts, arguments, "x: expected a tensor without a gradient")


VALUES = small(NUM_OF_FP4, HIDDEN_OF_FP4, 96)[0]
FP4_MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"w1": small(NUM_OF_FP4, 2 * INTER_OF_FP4, 192)},
        "w1: expected shape (experts, 2 intermediate, hidden / 2) = (experts, 2 intermediate, 80), got (5, 192, 96)",
    ),
    (
        {"w2": small(NUM_OF_FP4, HIDDEN_OF_FP4, 64)},
        "w1: expected 2 * intermediate = 128 rows, gate and up, because w2 has depth 64, got 192",
    ),
    ({"w2": (VALUES[..., 8:], None)}, "TypeError: sfw2: expected a tensor"),
    ({"w2": (VALUES[..., :40], torch.zeros(1))}, "intermediate: expected a multiple of 32 for"),
    ({"w2": (VALUES, torch.zeros(NUM_OF_FP4, 2, 1))}, "sfw2: expected shape (5, 160, 3) of torch.float32"),
]


@pytest.mark.parametrize(("changes", "message"), FP4_MISTAKES, ids=[message[:30] for *_, message in FP4_MISTAKES])
def test_a_mistake_is_refused_in_words_with_fp4(changes: dict[str, Any], message: str) -> None:
    assert_mistake(experts, fp4_call(**changes), message)
