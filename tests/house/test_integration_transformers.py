"""FP8 models of transformers run on `linear` and `experts`: results, layers left to transformers, and the undoing."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp4_cases import plain, random_weight
from helpers import captured, module_of, some
from helpers import numbers as random
from thorough import one_in
from torch import Tensor
from torch.nn.functional import silu

from deep_gemm import calc_diff, cast_back_from_fp8, linear, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.convert import dequantized_state_dict, to_fp8_inference
from deep_gemm.integrations import transformers as integration
from deep_gemm.integrations.transformers import WAYS_OF_EXPERTS, dequantized, use_deep_gemm

transformers: Any = pytest.importorskip("transformers", minversion="5.17")
fp8: Any = import_module("transformers.integrations.finegrained_fp8")
safetensors: Any = import_module("safetensors")
revert_weight_conversion: Any = import_module("transformers.core_model_loading").revert_weight_conversion

FINE_ENOUGH = ((128, 128), (64, 64), (32, 32), (1, 32))
CONSTRUCTED = ("block_size", "activation_scheme", "expert_dtype", "scale_fmt")
"""Arguments of `FP8Experts` that are not in a model's configuration."""
FAMILIES = ("qwen3_moe", "deepseek_v3")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

FP8_CASTS = 2e-2
"""A limit of calc_diff, half the squared relative error: casts of activations change models' logits by 6 and 13%."""
ONE_LAYER = 5e-3
"""The calc_diff that casts of activations cause in one mixture of experts."""
ROUNDING = 2e-3
"""Transformers rounds the gated activation to BF16 before its cast, so some casts give a neighbouring FP8 value."""


example: Any = module_of(Path(__file__).resolve().parents[2] / "examples" / "transformers_moe.py")


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a BF16 model, and the same model with FP8 weights."""
    models: tuple[Any, Any] = example.models_of(example.config_of(request.param, tiny=True), "cpu")
    return models


@pytest.fixture
def calls_left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace the kernels that transformers loads from elsewhere by torch operations; return these kernels' calls."""
    calls: list[tuple[Any, ...]] = []

    def own_linear(
        x: Tensor, weight: Tensor, scales: Tensor, block_size: Any, bias: Any, activation_scale: Any
    ) -> Tensor:
        calls.append((x, weight, scales, block_size, bias, activation_scale))
        return cast_and_multiply(x, weight, scales)

    monkeypatch.setattr(fp8, "finegrained_fp8_linear", own_linear)
    return calls


def cast_and_multiply(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    values, sf = per_token_cast_to_fp8(x)
    a = values.float() * sf.repeat_interleave(128, -1)[..., : x.shape[-1]]
    return (a @ dequantized(weight, scales).mT).to(x.dtype)


def tokens(rows: int = 1, columns: int = 24, seed: int = 1, device: str = "cpu") -> Tensor:
    return torch.randint(512, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(device)


def cast_by(block: tuple[int, int], x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = block
    return (per_token_cast_to_fp8 if rows == 1 else per_block_cast_to_fp8)(x, gran_k=columns)


def linear_layer(n: int = 192, k: int = 256, bias: bool = False, **changes: Any) -> Any:
    block = changes.pop("block_size", (128, 128))
    layer = fp8.FP8Linear(k, n, block_size=block, has_bias=bias, **changes)
    values, scales = cast_by(block, random(n, k))
    if layer.weight_scale_inv.dtype == torch.float8_e8m0fnu:
        scales = scales.log2().round().exp2().to(torch.float8_e8m0fnu)
    layer.weight = torch.nn.Parameter(values, requires_grad=False)
    if layer.weight_scale_inv.shape == scales.shape:
        layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    if bias:
        layer.bias = torch.nn.Parameter(random(n, seed=5))
    return layer


def experts_layer(**config: Any) -> Any:
    """Make four experts of transformers, as a model makes them."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "hidden_act": "silu"}
    has_gate = config.pop("has_gate", True)
    arguments = {name: config.pop(name) for name in CONSTRUCTED if name in config}
    if "expert_dtype" in arguments and "expert_dtype" not in inspect.signature(fp8.FP8Experts.__init__).parameters:
        pytest.skip("this release of transformers has no experts in FP4")
    made = fp8.use_experts_implementation(
        experts_class=type("Experts", (fp8.FP8Experts,), {}),
        experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS,
        has_gate=has_gate,
    )
    settings = SimpleNamespace(**{**sizes, "_experts_implementation": "grouped_mm", **config})
    layer = made(config=settings, has_gate=has_gate, **{"block_size": (128, 128), **arguments})
    for i, name in enumerate(("gate_up_proj", "down_proj")):
        if arguments.get("expert_dtype") == "fp4":
            values, scales = random_weight(*getattr(layer, name).shape[:2], 2 * getattr(layer, name).shape[2], seed=i)
            scales = (scales // 8 + 107).view(torch.float8_e8m0fnu).to(getattr(layer, f"{name}_scale_inv").dtype)
            setattr(layer, name, torch.nn.Parameter(values.view(torch.int8), requires_grad=False))
            setattr(layer, f"{name}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
        elif hasattr(layer, name) and arguments.get("block_size", (128, 128)) in FINE_ENOUGH:
            block = arguments.get("block_size", (128, 128))
            values, scales = cast_by(block, random(*getattr(layer, name).shape, seed=i) / 8)
            setattr(layer, name, torch.nn.Parameter(values, requires_grad=False))
            setattr(layer, f"{name}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
    return layer


def routes(num_tokens: int = 12, topk: int = 2, num: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, ids and weights."""
    weights, ids = random(num_tokens, num, dtype=torch.float32, seed=8).softmax(-1).topk(topk)
    return random(num_tokens, 256, seed=9), ids, weights


def mixture(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts in FP32, one token at a time."""
    w1, w2 = (
        plain(values.view(torch.uint8), scales.to(torch.float8_e8m0fnu).view(torch.uint8)).float()
        if values.dtype == torch.int8
        else dequantized(values, scales, layer.block_size)
        for values, scales in (
            (layer.gate_up_proj, layer.gate_up_proj_scale_inv),
            (layer.down_proj, layer.down_proj_scale_inv),
        )
    )
    rows = []
    for i, token in enumerate(x.float()):
        row = torch.zeros(x.shape[1])
        for expert, weight in zip(ids[i].tolist(), weights[i], strict=True):
            if expert < len(w1):
                gate, up = (w1[expert] @ token).chunk(2)
                if layer.limit is not None:
                    gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
                row = row + weight * (w2[expert] @ (silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@contextmanager
def routers(model: Any, hook: Callable[[int, Any], Any]) -> Iterator[None]:
    """Pass each router's output to a hook, which may replace it."""
    with ExitStack() as stack:
        found = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        assert found
        for i, router in enumerate(found):
            handle = router.register_forward_hook(lambda _, __, out, i=i: hook(i, out))
            stack.callback(handle.remove)
        yield


def logits_and_routes(model: Any, ids: Tensor) -> tuple[Tensor, dict[int, Any]]:
    of_layer: dict[int, Any] = {}
    with routers(model, of_layer.__setitem__):
        return example.prefill(model, ids), of_layer


def logits_by_routes(model: Any, ids: Tensor, of_layer: dict[int, Any]) -> Tensor:
    """Compute a model's logits with another model's routes: a near tie of two experts must not count as an error."""
    with routers(model, lambda i, _: of_layer[i]):
        logits: Tensor = example.prefill(model, ids)
        return logits


# Models


@pytest.mark.parametrize("way", [*integration.WAYS_OF_EXPERTS, "eager"])
def test_a_model_agrees_with_its_dequantized_bf16_run(models: tuple[Any, Any], way: str, calls_left: list[Any]) -> None:
    plain, model = models
    model.set_experts_implementation(way)
    with use_deep_gemm() as use:
        logits, of_layer = logits_and_routes(model, tokens())
    assert 0 < calc_diff(logits, logits_by_routes(plain, tokens(), of_layer)) < FP8_CASTS
    assert not use.left
    assert not calls_left
    num_linears = sum(type(module) is fp8.FP8Linear for module in model.modules())
    num_experts = sum(type(module) is fp8.FP8Experts for module in model.modules())
    if way == "eager":
        assert use.taken["linear"] > num_linears
        assert "experts" not in use.taken
    else:
        assert use.taken == {"linear": num_linears, "experts": num_experts}


def test_a_model_agrees_with_transformers_own_way(models: tuple[Any, Any], calls_left: list[Any]) -> None:
    _, model = models
    model.set_experts_implementation("eager")
    expected, of_layer = logits_and_routes(model, tokens())
    num_calls = len(calls_left)
    assert num_calls > 0
    model.set_experts_implementation("grouped_mm")
    with use_deep_gemm():
        assert 0 < calc_diff(logits_by_routes(model, tokens(), of_layer), expected) < ROUNDING
    assert len(calls_left) == num_calls


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_generates(models: tuple[Any, Any], device: str) -> None:
    plain, model = (copy.deepcopy(each).to(device) for each in models)
    model.set_experts_implementation("grouped_mm")
    prompt, steps = tokens(rows=2, columns=9, device=device), 5
    asked = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
    asked |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    with use_deep_gemm() as use:
        out = model.generate(prompt, **asked)
        whole, of_layer = logits_and_routes(model, out.sequences[:, :-1])
    expected = logits_by_routes(plain, out.sequences[:, :-1], of_layer)
    assert not use.left
    assert use.taken["experts"] == (steps + 1) * sum(type(module) is fp8.FP8Experts for module in model.modules())
    decoded = torch.stack(out.logits, dim=1)
    assert torch.equal(out.sequences[:, -steps:], decoded.argmax(-1))
    if device == "cpu":
        assert calc_diff(decoded, whole[:, -steps:]) < ROUNDING  # decoding by a cache, and all tokens at once
    assert calc_diff(decoded, expected[:, -steps:]) < FP8_CASTS
    assert calc_diff(whole, expected) < FP8_CASTS


def test_a_model_passes_gradients_on(models: tuple[Any, Any]) -> None:
    plain, model = models
    of_layer: dict[int, Any] = {}

    def gradient(of: Any, hook: Callable[[int, Any], Any]) -> Tensor:
        with routers(of, hook):
            logits = of(tokens()).logits
        found: Tensor = torch.autograd.grad(logits.float().square().sum(), of.model.embed_tokens.weight)[0]
        return found

    with use_deep_gemm() as use:
        got = gradient(model, of_layer.__setitem__)
    assert not use.left
    # Both models use the same experts, each with its own weights of routes.
    expected = gradient(plain, lambda i, out: (*out[:2], of_layer[i][2]))
    assert calc_diff(got, expected) < 2 * FP8_CASTS


@pytest.mark.parametrize("models", one_in(2, FAMILIES), indirect=True)
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_model_gives_the_same(models: tuple[Any, Any], device: str) -> None:
    model, ids = copy.deepcopy(models[1]).to(device), tokens(device=device)
    with use_deep_gemm() as use:
        expected = example.prefill(model, ids)
        before = use.taken.copy()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        assert calc_diff(example.prefill(compiled, ids), expected) < ROUNDING
        assert use.taken == before + before


@pytest.mark.gpu
def test_a_cuda_graph_captures_experts() -> None:
    layer, (x, ids, weights) = experts_layer().cuda(), (y.cuda() for y in routes())
    with use_deep_gemm() as use, torch.no_grad():
        expected = layer(x, ids, weights)
        torch.cuda.synchronize()
        graph, out = captured(layer, x, ids, weights)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert use.taken == {"experts": 2}
    assert torch.equal(out, expected)


# Layers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_a_linear_layer(device: str, dtype: torch.dtype, scale_fmt: str) -> None:
    layer, x = linear_layer(bias=True, scale_fmt=scale_fmt).to(device), random(2, 3, 256, dtype=dtype).to(device)
    with use_deep_gemm() as use, torch.no_grad():
        out = layer(x)
    assert use.taken == {"linear": 1}
    assert out.dtype == dtype
    expected = some(linear(x, (layer.weight, layer.weight_scale_inv.float()), bias=layer.bias))
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_experts_with_a_limit_and_routes_to_other_ranks(device: str) -> None:
    layer, (x, ids, weights) = experts_layer(swiglu_limit=0.4), routes()
    layer._is_expert_parallel = True
    ids[::3, 0], weights[::3, 0] = layer.num_experts, 0
    expected = mixture(layer, x, ids, weights)
    with use_deep_gemm() as use, torch.no_grad():
        out = layer.to(device)(*(y.to(device) for y in (x, ids, weights)))
    assert use.taken == {"experts": 1}
    assert calc_diff(out.cpu(), expected) < ONE_LAYER
    assert calc_diff(expected, mixture(experts_layer(), x, ids, weights)) > ONE_LAYER  # proves that the limit matters


@pytest.mark.parametrize("device", DEVICES)
def test_a_linear_layer_has_a_gradient(device: str) -> None:
    layer, x = linear_layer().to(device), random(5, 256).to(device).requires_grad_()
    with use_deep_gemm() as use:
        out = layer(x)
        out.backward(torch.ones_like(out))
    assert use.taken == {"linear": 1}
    expected = dequantized(layer.weight, layer.weight_scale_inv).sum(dim=0).expand_as(x)
    assert calc_diff(some(x.grad), expected) < 1e-4


@pytest.mark.parametrize("x_learns", [False, True])
def test_a_bias_has_a_gradient(x_learns: bool) -> None:
    layer, x = linear_layer(), random(5, 256).requires_grad_(x_learns)
    bias = torch.zeros(layer.weight.shape[0], dtype=torch.bfloat16, requires_grad=True)
    with use_deep_gemm() as use:
        out = fp8.fp8_linear(x, layer.weight, layer.weight_scale_inv, layer.block_size, bias)
        out.backward(torch.ones_like(out))
    assert use.taken == {"linear": 1}
    assert torch.equal(some(bias.grad), torch.full_like(bias, 5))
    assert (x.grad is not None) == x_learns


def test_experts_pass_a_gradient_to_the_router_alone() -> None:
    layer, (x, ids, weights) = experts_layer(), routes()
    router = torch.ones_like(weights).requires_grad_()
    with use_deep_gemm() as use:
        out = layer(x, ids, weights * router)
        out.backward(torch.ones_like(out))
    assert use.taken["experts"] == 1
    assert some(router.grad).any()


@pytest.mark.parametrize("device", DEVICES)
def test_experts_have_gradients(device: str) -> None:
    layer, (x, ids, weights) = experts_layer(), routes()
    plain_x, plain_weights = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    torch.autograd.backward(mixture(layer, plain_x, ids, plain_weights).sum())
    layer, ids = layer.to(device), ids.to(device)
    x, weights = x.to(device).requires_grad_(), weights.to(device).requires_grad_()
    with use_deep_gemm() as use:
        out = layer(x, ids, weights)
        out.backward(torch.ones_like(out))
    assert use.taken["experts"] == 1
    for got, expected in ((x, plain_x), (weights, plain_weights)):
        assert calc_diff(some(got.grad).cpu(), some(expected.grad)) < ONE_LAYER


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_fmt", ["ue8m0", "float"])
@pytest.mark.parametrize("way", [*WAYS_OF_EXPERTS, "eager"])
def test_experts_in_fp4(way: str, scale_fmt: str, device: str) -> None:
    """DeepSeek-V4's checkpoints have FP4 experts, and their `block_size` describes the other layers only."""
    layer = experts_layer(expert_dtype="fp4", scale_fmt=scale_fmt, block_size=(64, 64), swiglu_limit=0.4)
    layer.config._experts_implementation = way
    assert layer.gate_up_proj.dtype == torch.int8
    x, ids, weights = routes()
    expected = mixture(layer, x, ids, weights)
    with use_deep_gemm() as use, torch.no_grad():
        out = layer.to(device)(*(y.to(device) for y in (x, ids, weights)))
    assert not use.left
    assert use.taken == ({"linear": 8} if way == "eager" else {"experts": 1})
    assert calc_diff(out.cpu(), expected) < ONE_LAYER


def test_there_is_no_gradient_through_fp4() -> None:
    layer, (x, ids, weights) = experts_layer(expert_dtype="fp4", scale_fmt="ue8m0"), routes()
    w, learns = (layer.gate_up_proj[0], layer.gate_up_proj_scale_inv[0]), x.clone().requires_grad_()
    with use_deep_gemm():
        out = fp8.fp8_linear(learns, *w)
        with pytest.raises(NotImplementedError, match=r"^weight: expected torch.float8_e4m3fn for gradients"):
            out.sum().backward()
        for way in ("grouped_mm", "eager"):
            layer.config._experts_implementation = way
            out = layer(learns, ids, weights)
            with pytest.raises(NotImplementedError, match="FP4"):  # newer releases use other words
                out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_fmt", ["ue8m0", "float"])
@pytest.mark.parametrize("block_size", [(64, 64), (32, 32), (1, 32)])
def test_finer_blocks(block_size: tuple[int, int], scale_fmt: str, device: str) -> None:
    layer = linear_layer(bias=True, block_size=block_size, scale_fmt=scale_fmt).to(device)
    x = random(5, 256).to(device).requires_grad_()
    w = dequantized(layer.weight, layer.weight_scale_inv, block_size)
    with use_deep_gemm() as use:
        out = layer(x)
        out.sum().backward()
        with torch.no_grad():
            assert torch.equal(layer(x), out)
    assert use.taken == {"linear": 2}
    assert calc_diff(out, x.float() @ w.mT + layer.bias) < ONE_LAYER
    assert calc_diff(some(x.grad), w.sum(0).expand_as(x)) < 1e-4
    if scale_fmt == "float":
        experts, (tokens_x, ids, weights) = experts_layer(block_size=block_size), routes()
        expected = mixture(experts, tokens_x, ids, weights)
        with use_deep_gemm() as use, torch.no_grad():
            got = experts.to(device)(*(each.to(device) for each in (tokens_x, ids, weights)))
        assert use.taken == {"experts": 1}
        assert calc_diff(got.cpu(), expected) < ONE_LAYER


# Layers left to transformers


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (partial(linear_layer, activation_scheme="static"), "linear: activation_scale: expected None"),
        (partial(linear_layer, k=248), "linear: k: expected a multiple of 16, got 248"),
    ],
)
def test_a_linear_layer_is_left_with_a_reason(layer: Any, reason: str, calls_left: list[Any]) -> None:
    made = layer()
    x = random(4, made.in_features)
    with use_deep_gemm() as use, torch.no_grad():
        with pytest.warns(RuntimeWarning, match=f"deep_gemm leaves a layer to transformers; {reason}"):
            made(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # only the first call warns
            made(x)
    assert not use.taken
    assert [key.startswith(reason) for key in use.left] == [True]
    assert list(use.left.values()) == [2]
    assert len(calls_left) == 2
    assert calls_left[0][5] is made.activation_scale


def test_other_blocks_are_left(calls_left: list[Any]) -> None:
    layer = linear_layer()
    for block_size in ((128, 64), None):
        layer.block_size = block_size
        with use_deep_gemm() as use, pytest.warns(RuntimeWarning, match="leaves"), torch.no_grad():
            layer(random(4, 256))
        allowed = "(128, 128), (64, 64), (32, 32) or (1, 32)"
        assert dict(use.left) == {f"linear: block_size: expected {allowed}, got {block_size}": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "gate: expected silu"),
        ({"swiglu_alpha": 1.7, "swiglu_limit": 7.0}, "gate: expected silu"),
        ({"has_gate": False}, "has_gate: expected experts with a gate, got .* with has_gate = False"),
        ({"activation_scheme": "static"}, "activation_scale: expected None"),
        ({"block_size": (128, 64)}, "block_size: expected"),
        ({"expert_dtype": "fp4", "activation_scheme": "static"}, "activation_scale: expected None"),
    ],
)
def test_experts_are_left_with_a_reason(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []

    def own(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        left.append(self)
        return hidden_states

    monkeypatch.setitem(fp8.ALL_FP8_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", own)
    layer = experts_layer(**changes)
    with use_deep_gemm() as use, pytest.warns(RuntimeWarning, match=f"; experts: {reason}"), torch.no_grad():
        layer(*routes())
    assert left == [layer]
    assert not use.taken
    assert fp8.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"] is own


def test_a_gate_is_tried_beyond_its_limit() -> None:
    layer = experts_layer(swiglu_limit=100.0)
    assert integration.experts_refusal(layer) is None
    without_limit = experts_layer(swiglu_limit=100.0)
    without_limit._apply_gate = lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    refusal = integration.experts_refusal(without_limit)
    assert refusal == "gate: expected silu(gate) * up, both cut at limit = 100.0, got another function"


# Undoing the conversion


def places() -> list[Any]:
    interface = fp8.ALL_FP8_EXPERTS_FUNCTIONS
    return [fp8.fp8_linear, *(interface[way] for way in integration.WAYS_OF_EXPERTS), dict(interface._local_mapping)]


def test_uses_may_overlap_and_the_last_one_leaves_transformers_as_it_was() -> None:
    before, layer = places(), linear_layer()
    with torch.no_grad():
        first = use_deep_gemm()
        layer(random(1, 256))
        second = use_deep_gemm()
        layer(random(1, 256))
        first.stop()
        first.stop()
        assert places() != before
        layer(random(1, 256))
        second.stop()
    assert (first.taken["linear"], second.taken["linear"]) == (2, 2)
    assert places() == before
    assert not fp8.ALL_FP8_EXPERTS_FUNCTIONS._local_mapping


def test_what_others_changed_meanwhile_stays(monkeypatch: pytest.MonkeyPatch, calls_left: list[Any]) -> None:
    for name in ("fp8_linear", "finegrained_fp8_linear"):
        monkeypatch.setattr(fp8, name, getattr(fp8, name))  # monkeypatch restores it
    layer = linear_layer()
    with use_deep_gemm() as use:
        here = fp8.fp8_linear
        fp8.fp8_linear = theirs = partial(here)
    assert fp8.fp8_linear is theirs
    with torch.no_grad():
        layer(random(1, 256))
    assert len(calls_left) == 1
    assert not use.taken


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "expected 5.17 or newer, none is installed"), ("5.16.1", "expected 5.17 or newer, got 5.16.1")],
)
def test_transformers_must_be_there_and_new_enough(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None if version is None else SimpleNamespace(__version__=version))
    with pytest.raises(ImportError, match=message):
        use_deep_gemm()
    assert not integration._uses


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("fp8_linear", lambda input, weight, swizzle: None, r"got \('input', 'weight', 'swizzle'\)"),
        ("fp8_linear", None, "expected a function fp8_linear of input, weight, .*, got None"),
        ("ALL_FP8_EXPERTS_FUNCTIONS", {}, "expected a function grouped_mm of self, hidden_states, .*, got None"),
    ],
)
def test_a_place_that_has_changed_is_refused(
    name: str, changed: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, name, changed)
    with pytest.raises(ImportError, match=message):
        use_deep_gemm()
    assert not integration._uses


def test_the_loop_that_gradients_go_through_is_transformers_own() -> None:
    assert inspect.unwrap(type(experts_layer()).forward).__qualname__ == "FP8Experts.forward"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_example_runs(family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example.main(["--family", family, "--tiny", "--repeats", "1"])
    out = capsys.readouterr().out
    assert "FP8, deep_gemm" in out
    assert "left to transformers: none" in out


# A checkpoint in FP8 of a model that was converted


SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_local_experts": 4, "num_experts_per_tok": 2}
OF_DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
OF_DEEPSEEK |= {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
OF_DEEPSEEK |= {"num_key_value_heads": 4}


def model_for(kind: str, **changes: int) -> Any:
    return model_of(transformers.AutoConfig.for_model(kind, **SIZES | changes))


def model_of(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(params=["llama", "qwen3_moe", "mixtral", "deepseek_v3"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, dict[str, Tensor]]:
    """Return a folder with a saved converted model, the model, and the weights before the conversion."""
    torch.manual_seed(0)
    changes = {"deepseek_v3": OF_DEEPSEEK, "mixtral": {"moe_intermediate_size": SIZES["intermediate_size"]}}
    model = model_for(request.param, **changes.get(request.param, {})).eval()
    before = {name: x.detach().clone() for name, x in model.state_dict().items()}
    assert len(to_fp8_inference(model).converted) == {"llama": 14, "deepseek_v3": 17}.get(request.param, 10)
    model.save_pretrained(tmp_path)
    return tmp_path, model, before


def test_a_converted_model_is_saved_as_a_checkpoint_that_transformers_loads(
    saved: tuple[Path, Any, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, transformers multiplies weights by their scales. It requires accelerate, but does not use it."""
    folder, model, before = saved
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    got, expected = loaded.state_dict(), dequantized_state_dict(model.state_dict())
    assert got.keys() == before.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert all(calc_diff(got[name], x) < 1e-3 for name, x in before.items())


def test_a_converted_model_is_saved_as_a_checkpoint_for_the_fp8_layers_of_transformers(
    saved: tuple[Path, Any, dict[str, Tensor]],
) -> None:
    folder, model, _ = saved
    config = transformers.AutoConfig.from_pretrained(folder)
    other = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    said = transformers.FineGrainedFP8Config(**config.quantization_config)
    fp8.replace_with_fp8_linear(other, said.modules_to_not_convert, said, pre_quantized=True)
    other.load_state_dict(model.state_dict(), assign=True)
    ids = tokens(2)
    with torch.no_grad(), use_deep_gemm() as use:
        assert torch.equal(other.eval()(ids).logits, model(ids).logits)
    assert sum(use.taken.values()) == sum(type(layer).__name__.startswith("Frozen") for layer in model.modules())


def test_a_checkpoint_has_scales_of_each_expert_by_itself(saved: tuple[Path, Any, dict[str, Tensor]]) -> None:
    """vLLM searches for the names of BF16 checkpoints, and for these names with `_scale_inv`."""
    folder, model, before = saved
    held = safetensors.safe_open(folder / "model.safetensors", "pt")
    names = set(held.keys())
    in_bf16 = {name for name in names if not name.endswith("_scale_inv")}
    expected = revert_weight_conversion(model_of(model.config), before)
    assert in_bf16 == set(expected)
    for name in in_bf16:
        values = held.get_tensor(name)
        is_fp8 = values.dtype == torch.float8_e4m3fn
        assert (f"{name}_scale_inv" in names) is is_fp8
        if is_fp8:
            back = cast_back_from_fp8(values, held.get_tensor(f"{name}_scale_inv"))
            assert calc_diff(back, expected[name]) < 1e-3


def test_the_modules_that_are_not_converted_have_the_names_of_the_checkpoint_too() -> None:
    """vLLM searches for the names that Mixtral's checkpoints have."""
    model = model_for("mixtral", num_hidden_layers=1)
    to_fp8_inference(model, lambda name, _: name == "lm_head" or name.endswith("q_proj"))
    assert model.config.quantization_config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "model.embed_tokens",
            "model.layers.0.block_sparse_moe.experts",
            "model.layers.0.block_sparse_moe.gate",
            "model.layers.0.mlp.experts",
            "model.layers.0.mlp.gate",
            *(f"model.layers.0.self_attn.{name}_proj" for name in "kov"),
        ],
    }


def test_a_part_that_is_converted_leaves_the_output_of_the_whole() -> None:
    model = model_for("llama")
    to_fp8_inference(model.model)
    assert "lm_head" in model.config.quantization_config["modules_to_not_convert"]


def test_layers_that_are_converted_one_after_the_other_are_all_named_as_fp8() -> None:
    model = model_for("llama")
    to_fp8_inference(model, lambda name, _: name == "lm_head")
    to_fp8_inference(model)
    assert model.config.quantization_config["modules_to_not_convert"] == ["model.embed_tokens"]


def test_a_model_that_is_quantized_otherwise_is_left_as_it_is() -> None:
    model = model_for("llama")
    model.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ValueError, match="model: expected weights that are not quantized yet, or FP8, got quant_m"):
        to_fp8_inference(model)
    assert type(model.lm_head) is type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
