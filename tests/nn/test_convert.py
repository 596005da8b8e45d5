"""Convert a model to FP8 by one call: layers that change or stay, state dicts both ways, and references to layers."""

from __future__ import annotations

import copy
import functools
import io
import json
import types
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from helpers import refused, same_bits, some
from layer_cases import fine_weight, random_routes
from nn_cases import TYPICAL_OF_EXPERTS, error
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm.convert import dequantized_state_dict, to_fp8_inference, to_fp8_training

HIDDEN, INTER = 144, 272
numbers = functools.partial(helpers.numbers, dtype=torch.float32, seed=1)
BOTH = [to_fp8_training, to_fp8_inference]


class Mlp(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(HIDDEN, INTER, dtype=dtype)
        self.down = torch.nn.Linear(INTER, HIDDEN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return y


def same_state(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(same_bits(got[name], value) for name, value in expected.items())


# Results


def test_a_model_is_trained_by_our_layers_and_all_that_refers_to_it_stays() -> None:
    model, called = Mlp(), []
    up, parameters = model.up, list(model.parameters())
    up.register_forward_hook(lambda *_: called.append("up"))
    optimizer, before = torch.optim.SGD(parameters, lr=1.0), copy.deepcopy(model.state_dict())
    assert to_fp8_training(model).converted == ["up", "down"]
    assert same_state(model.state_dict(), before)
    assert model.up is up
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    ours = deep_gemm.nn.Linear(HIDDEN, INTER)
    ours.load_state_dict(up.state_dict())
    assert vars(up).keys() == vars(ours).keys()
    x = numbers(20, HIDDEN)
    assert same_bits(up(x), ours(x))
    model(x).sum().backward()
    optimizer.step()
    assert called == ["up", "up"]
    assert not same_bits(model.down.weight, before["down.weight"])
    theirs = Mlp()
    theirs.load_state_dict(model.state_dict())
    theirs.load_state_dict(before)
    model.load_state_dict(theirs.state_dict())
    assert same_state(model.state_dict(), before)
    assert repr(model.down) == "Linear(in_features=272, out_features=144, bias=False, products=fp8)"


def test_a_recipe_is_that_of_the_layers_and_state_dicts_are_the_same() -> None:
    models = Mlp(), Mlp()
    for model, recipe in zip(models, ("block", "row"), strict=True):
        done = to_fp8_training(model, recipe=recipe)
        assert (done.converted, done.note) == (["up", "down"], "")
    by_block: Any = models[0]
    by_row: Any = models[1]
    assert same_state(by_row.state_dict(), by_block.state_dict())
    by_row.load_state_dict(fp8_checkpoint())  # loading multiplies values by blocks' scales
    by_row.load_state_dict(by_block.state_dict())
    ours = deep_gemm.nn.Linear(HIDDEN, INTER, recipe="row")
    ours.load_state_dict(by_row.up.state_dict())
    assert vars(by_row.up).keys() == vars(ours).keys()
    x = numbers(20, HIDDEN)
    assert same_bits(by_row.up(x), ours(x))
    assert not same_bits(by_row.up(x), by_block.up(x))
    assert repr(by_row.down).endswith("products=fp8, recipe=row)")
    by_row.up.recipe = "block"  # the recipe may change between steps
    assert same_bits(by_row.up(x), by_block.up(x))
    assert to_fp8_inference(by_row).converted == ["up", "down"]


def test_gradients_are_added_to_main_grad_if_one_says_so() -> None:
    model: Any = Mlp()
    to_fp8_training(model, accumulates_main_grad=True)
    for layer in (model.up, model.down):
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    model(numbers(3, HIDDEN)).sum().backward()
    assert model.up.weight.main_grad.any()
    assert model.up.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [False, True])
def test_a_model_for_inference_is_made_of_linear(dtype: torch.dtype, trained: bool) -> None:
    model, plain = Mlp(dtype), Mlp(dtype)
    if trained:
        to_fp8_training(model)
    assert to_fp8_inference(model).converted == ["up", "down"]
    assert not [p for p in model.parameters() if p.requires_grad]
    x = numbers(2, 5, HIDDEN, dtype=dtype)
    right = some(deep_gemm.linear(x, deep_gemm.per_block_cast_to_fp8(plain.up.weight), bias=plain.up.bias))
    assert same_bits(model.up(x), right.to(dtype))
    assert error(model(x), plain(x)) < TYPICAL_OF_EXPERTS  # two products and an activation between them
    assert isinstance(model.up, deep_gemm.nn.FrozenLinear)
    assert (model.up.in_features, model.up.bias is not None, model.down.bias) == (HIDDEN, True, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x.float()).dtype == torch.bfloat16
    assert "weight=float8_e4m3fn [144, 272], weight_scale_inv=float32 [2, 3], bias=False" in repr(model)


def test_experts_that_were_trained_become_those_of_inference() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"experts": deep_gemm.nn.Experts(3, 64, 48, limit=0.5)})
    given = numbers(9, 64, dtype=torch.bfloat16), random_routes(9, 2, 3), torch.rand(9, 2)
    right, before = model["experts"](*given).detach(), copy.deepcopy(model.state_dict())
    to_fp8_inference(model)
    assert type(model["experts"]) is deep_gemm.nn.FrozenExperts
    assert same_bits(model["experts"](*given), right)
    types = {name: held.dtype for name, held in model.state_dict().items()}
    assert types == {
        f"experts.{w}{end}": dtype
        for w in ("w1", "w2")
        for end, dtype in (("", torch.float8_e4m3fn), ("_scale_inv", torch.float32))
    }
    for held in model.state_dict().values():
        held.view(torch.uint8).zero_()
    model.load_state_dict(before)
    assert same_bits(model["experts"](*given), right)


@pytest.mark.parametrize("change", BOTH)
def test_a_converted_model_is_copied_and_saved(change: Any) -> None:
    model, x = Mlp(), numbers(3, HIDDEN)
    change(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert same_bits(other(x), model(x))
        assert same_state(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("change", BOTH)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_converted_model_is_compiled_as_one_graph_with_recomputing(change: Any, device: str) -> None:
    model = Mlp().to(device)
    change(model)

    def recomputed(x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(recomputed, backend=counter, fullgraph=True)
    for tokens in (40, 7, 64):
        x = numbers(tokens, HIDDEN).to(device).requires_grad_()
        if tokens == 40:
            torch._dynamo.mark_dynamic(x, 0)
        leaves = [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]
        found = [(y.detach(), *torch.autograd.grad(y.sum(), leaves)) for y in (recomputed(x), compiled(x))]
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    assert counter.frame_count == 1


# Layers that stay


class Doubled(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Zoo(torch.nn.Module):
    """A model with layers of all kinds."""

    def __init__(self) -> None:
        super().__init__()

        def linear(k: int = 32, n: int = 64, **more: Any) -> Any:
            return torch.nn.Linear(k, n, **more)

        self.taken, self.narrow, self.odd_n, self.odd_k = linear(), linear(n=24), linear(n=10), linear(k=20)
        self.again = self.taken
        self.embedding, self.tied = torch.nn.Embedding(64, 32), linear(bias=False)
        self.tied.weight = self.embedding.weight
        self.attention = torch.nn.MultiheadAttention(32, 2)
        self.block = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.in_fp64, self.of_integers = linear(dtype=torch.float64), linear()
        self.of_integers.weight = torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)
        self.derived, self.lazy = Doubled(32, 64), torch.nn.LazyLinear(32)
        self.pruned, self.hooked = linear(), linear()
        self.pruned.wide = self.pruned._parameters.pop("weight")
        self.pruned.weight = self.pruned.wide * 1
        self.hooked.forward = self.hooked.forward
        self.norm, self.router, self.lm_head = torch.nn.LayerNorm(32), linear(), linear()


ALWAYS_LEFT = {
    "odd_n": "got 10",
    "odd_k": "got 20",
    "embedding": "Embedding, no linear layer",
    "attention": "MultiheadAttention, no linear layer",
    "attention.out_proj": "NonDynamicallyQuantizableLinear, derived from torch.nn.Linear",
    "of_integers": "got torch.int8",
    "derived": "Doubled, derived from torch.nn.Linear, which may compute something else",
    "lazy": "LazyLinear, derived from torch.nn.Linear",
    "pruned": "weight: expected a Parameter, got Tensor",
    "hooked": "its forward is replaced on the layer itself",
    "router": "an output or a router by its name: only a filter converts it",
    "lm_head": "an output or a router by its name: only a filter converts it",
    "block.self_attn": "MultiheadAttention, no linear layer",
    "block.self_attn.out_proj": "NonDynamicallyQuantizableLinear",
}
OF_EACH = [
    (
        to_fp8_training,
        ["taken", "tied", "block.linear1", "block.linear2", "in_fp64"],
        {"narrow": "out_features: expected a multiple of 16, which FP8 products need, got 24"},
    ),
    (
        to_fp8_inference,
        ["taken", "narrow"],
        {
            "tied": "weight: shared with another module",
            "in_fp64": "weight: expected dtype torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
            "block.linear1": "read by torch.nn.TransformerEncoderLayer itself",
            "block.linear2": "read by torch.nn.TransformerEncoderLayer itself",
        },
    ),
]


@pytest.mark.parametrize(("change", "converted", "left"), OF_EACH)
def test_what_is_left_is_told_and_stays(change: Any, converted: list[str], left: dict[str, str]) -> None:
    model = Zoo()
    kinds = {name: type(module) for name, module in model.named_modules()}
    done = change(model)
    assert done.converted == converted
    reasons = ALWAYS_LEFT | left
    assert {name: why for name, why in done.left.items() if reasons.get(name, "none") not in why} == {}
    assert done.left.keys() == reasons.keys()
    assert all(type(model.get_submodule(name)) is kinds[name] for name in reasons)
    assert all(type(model.get_submodule(name)).__module__.startswith("deep_gemm.nn") for name in converted)
    lines = str(done).splitlines()
    assert lines[1] == f"layers converted to FP8: {len(converted)}, left: {len(reasons)}"
    assert sum("%" in line for line in lines) == len(set(done.left.values())) + 2
    assert max(map(len, lines)) <= 80
    assert model.again is model.taken
    again = change(model)
    assert again.converted == []
    assert {name for name, why in again.left.items() if why == "in FP8 already"} == set(converted)
    x = torch.randn(2, 3, 32)
    for _ in range(2):
        assert model.block(x).shape == model.taken(x)[..., :32].shape
        with torch.no_grad():
            model.eval().block(x)


@pytest.mark.parametrize("change", BOTH)
def test_a_filter_decides(change: Any) -> None:
    model, asked = Zoo(), {}

    def wanted(name: str, layer: torch.nn.Module) -> bool:
        asked[name] = layer
        return name in ("lm_head", "odd_n")

    done = change(model, wanted)
    assert done.converted == ["lm_head"]
    assert done.left["taken"] == "left by the filter"
    assert "got 10" in done.left["odd_n"]
    assert all(type(layer).__name__ in ("Linear", "FrozenLinear") for layer in asked.values())
    assert model.get_submodule("lm_head") is asked["lm_head"]
    assert change(model, filter=lambda name, _: name == "taken").converted == ["taken"]


def test_what_a_model_calls_its_output_is_left() -> None:
    model: Any = Mlp()
    model.get_output_embeddings = lambda: model.down
    assert to_fp8_training(model).converted == ["up"]
    assert to_fp8_training(model, filter=lambda *_: True).converted == ["down"]


@pytest.mark.parametrize("change", BOTH)
def test_mistakes_are_told_and_change_nothing(change: Any) -> None:
    model = Mlp()
    none, of_all = "model: expected a layer that can be converted, got none", HIDDEN * INTER * 2 + INTER
    listed = "layers converted to FP8: 0, left: 2\n  99.7%      2  left by the filter: up, down"
    mistakes: list[tuple[tuple[Any, ...], str]] = [
        (("model",), "TypeError: model: expected a torch.nn.Module, got str"),
        ((model, "down"), "TypeError: filter: expected a function of a name and a layer, got str"),
        ((model, lambda of, _: of == "up" or None), "TypeError: filter: expected True or False for 'down', got None"),
        ((model, lambda *_: False), f"{none}\nin FP8: 0.0% of {of_all:,} parameters\n{listed}"),
        ((torch.nn.ReLU(),), none),
        ((torch.nn.Linear(8, 4),), none),
    ]
    for given, message in mistakes:
        with refused(message):
            change(*given)
    assert {type(layer) for layer in model.children()} == {torch.nn.Linear}


def test_a_model_that_is_one_layer() -> None:
    layer = torch.nn.Linear(32, 16)
    assert to_fp8_training(layer).converted == [""]
    assert isinstance(layer, deep_gemm.nn.Linear)
    again = to_fp8_training(layer)
    assert str(again).splitlines()[:3] == [
        "in FP8: 97.0% of 528 parameters",
        "layers converted to FP8: 0, left: 1",
        "  97.0%      1  in FP8 already: the model",
    ]


@pytest.mark.parametrize("change", BOTH)
def test_parameters_are_counted_once_and_stay_counted(change: Any) -> None:
    """A weight that two layers share is one weight, in FP8 or not."""
    model: Any = Mlp()
    model.embedding, model.tied = torch.nn.Embedding(16, HIDDEN), torch.nn.Linear(HIDDEN, 16, bias=False)
    model.tied.weight = model.embedding.weight
    before, weights = sum(p.numel() for p in model.parameters()), 2 * HIDDEN * INTER
    done = change(model, lambda name, _: name != "tied")
    assert (done.parameters, done.in_fp8()) == (before, weights)
    assert sum(p.numel() for p in model.parameters()) == before
    assert sum(done.held.values()) == before - INTER
    assert change(model, lambda *_: False).in_fp8() == weights
    assert f"in FP8: {weights / before:.1%} of {before:,} parameters" in str(done)


# State dicts of FP8


def fp8_checkpoint() -> dict[str, Tensor]:
    """Make a checkpoint in the form of DeepSeek-V3."""
    found = {}
    for name, value in Mlp(torch.bfloat16).state_dict().items():
        if name.endswith("weight"):
            found[name], found[f"{name}_scale_inv"] = deep_gemm.per_block_cast_to_fp8(value)
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_fp8_is_loaded_and_is_what_a_converted_model_has(assign: bool) -> None:
    right, x = Mlp(torch.bfloat16), numbers(6, HIDDEN, dtype=torch.bfloat16)
    to_fp8_inference(right)
    with torch.device("meta" if assign else "cpu"):
        model = Mlp(torch.bfloat16)
    to_fp8_inference(model)
    if not assign:
        model.up.weight.view(torch.uint8).zero_()
    assert model.up.weight.is_meta is assign
    model.load_state_dict(fp8_checkpoint(), assign=assign)
    assert same_bits(model(x), right(x))
    assert same_state(right.state_dict(), model.state_dict())
    assert right.state_dict().keys() == fp8_checkpoint().keys()
    with torch.no_grad():
        for p in (*model.parameters(), *model.buffers()):
            p.view(torch.uint8).zero_()
    model.load_state_dict(Mlp(torch.bfloat16).state_dict(), assign=assign)  # these weights are not cast yet
    assert same_bits(model(x), right(x))
    assert model.up.weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("of", "form"), [((64, 64), None), ((32, 32), "e8m0"), ((1, 32), "bytes"), (128, "bf16")])
def test_scales_are_taken_as_they_come(of: Any, form: Any, assign: bool) -> None:
    if form == "bf16":
        values, scales = deep_gemm.per_block_cast_to_fp8(numbers(INTER, HIDDEN), use_ue8m0=True)
        given = values, scales.bfloat16()
    else:
        values, scales = given = fine_weight(INTER, HIDDEN, of=of, form=form)
    model, x = Mlp(), numbers(6, HIDDEN)
    to_fp8_inference(model)
    state = model.state_dict() | {"up.weight": given[0], "up.weight_scale_inv": given[1]}
    model.load_state_dict(state, assign=assign)
    right = some(deep_gemm.linear(x, (values, scales), bias=model.up.bias))
    assert same_bits(model.up(x), right.float())


def test_state_dicts_that_would_give_wrong_numbers_are_refused() -> None:
    model = Mlp()
    to_fp8_inference(model)
    before, x = copy.deepcopy(model.state_dict()), numbers(2, HIDDEN)
    right, bad = model(x), before["up.weight"]
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"up.weight_scale_inv": None}, "up.weight_scale_inv: expected scales beside values of torch.float8_e4m3fn"),
        ({"up.weight": bad.view(torch.int8)}, r"up.weight: expected torch.float8_e4m3fn \[272, 144\], got torch.int8"),
        ({"up.weight": bad[:16]}, r"up.weight: expected torch.float8_e4m3fn \[272, 144\], got torch.float8_e4m3fn"),
        ({"up.weight": bad.float()}, "got torch.float32"),
        ({"up.weight_scale_inv": torch.ones(2, 2)}, "up.weight_scale_inv: expected shape"),
        ({"up.weight": None}, 'Missing key.*"up.weight"'),
    ]
    for changes, message in mistakes:
        state = {name: value for name, value in (before | changes).items() if value is not None}
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state)
        if "up.weight" in state:
            with pytest.raises(RuntimeError, match=message):
                model.load_state_dict(state, strict=False)
        assert same_bits(model(x), right)


FORMS = {"dynamic": "(n, 1) in BF16", "static": "(1,)", "modelopt": "()"}
"""The scales of FP8_DYNAMIC, of compressed-tensors for a tensor, and of ModelOpt."""


def by_row(w: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Cast a weight to values and scales in this form of checkpoints."""
    largest = w.float().abs().amax(dim=1, keepdim=True) if form == "dynamic" else w.float().abs().amax()
    scales = (largest / 448).bfloat16() if form == "dynamic" else largest / 448
    values = (w.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales.reshape(1) if form == "static" else scales


def checkpoint_by_row(state: dict[str, Tensor], form: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint in this form, and the state dict of a converted model that has loaded the checkpoint."""
    found, right = {}, {}
    for name, value in state.items():
        found[name] = right[name] = value
        if not name.endswith(("up.weight", "down.weight", "proj.weight")):
            continue
        found[name], found[f"{name}_scale"] = by_row(value, form)
        column = found[f"{name}_scale"].float().expand(len(value), 1)
        right[name], right[f"{name}_scale"] = found[name], column.contiguous()
        if form != "dynamic":
            layer = name.removesuffix("weight")
            one = torch.ones(found[f"{name}_scale"].shape)
            found |= {layer + end: one.clone() for end in ("input_scale", "k_scale", "v_scale")}
    return found, right


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_rows_and_tensors_are_loaded_by_the_names_of_checkpoints(form: str, assign: bool) -> None:
    state, right = checkpoint_by_row(Mlp(torch.bfloat16).state_dict(), form)
    with torch.device("meta" if assign else "cpu"):
        model: Any = Mlp(torch.bfloat16)
    model.register_buffer("v_scale", torch.zeros(1))
    to_fp8_inference(model)
    of_cache = {"v_scale": torch.ones(1)}
    model.load_state_dict(state | of_cache | {"k_scale": torch.ones(1)}, assign=assign)  # strict loading accepts these
    assert same_state(dict(model.state_dict()), right | of_cache)
    del model.v_scale
    x = numbers(6, HIDDEN, dtype=torch.bfloat16)
    w = right["up.weight"], right["up.weight_scale"]
    assert same_bits(model.up(x), some(deep_gemm.linear(x, w, bias=right["up.bias"])))
    scale = torch.as_tensor(state["up.weight_scale"]).float()
    assert same_bits(model.up(x), some(deep_gemm.linear(x, (w[0], scale), bias=right["up.bias"])))
    model.load_state_dict(Mlp(torch.bfloat16).state_dict())  # not cast yet
    w = deep_gemm.per_token_cast_to_fp8(Mlp(torch.bfloat16).up.weight.detach(), gran_k=0)
    assert all(same_bits(a, b) for a, b in zip(model.up.held("weight"), w, strict=True))
    model.load_state_dict(fp8_checkpoint())  # and back to blocks
    assert same_state(dict(model.state_dict()), fp8_checkpoint())
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"up.output_scale"'):
        model.load_state_dict(state | {"up.output_scale": torch.ones(1)})


def test_scales_of_parts_are_taken_where_the_parts_are_halves() -> None:
    values, scales = deep_gemm.per_token_cast_to_fp8(numbers(INTER, HIDDEN), gran_k=0)[0], torch.tensor([2.0, 3.0])
    for name, halves in (("gate_up_proj", True), ("qkv_proj", False)):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(HIDDEN, INTER, bias=False)})
        to_fp8_inference(model)
        state = {f"{name}.weight": values, f"{name}.weight_scale": scales}
        if halves:
            model.load_state_dict(state)
            assert model.state_dict()[f"{name}.weight_scale"].flatten().tolist() == [2.0] * 136 + [3.0] * 136
            multiplied = dequantized_state_dict(state)[f"{name}.weight"]
            assert same_bits(multiplied[136:], (values[136:].float() * 3).bfloat16())
            continue
        message = rf"^{name}.weight_scale: expected a scale for each of 272 rows or for all, got \(2,\)"
        with pytest.raises(RuntimeError, match=message[1:]):
            model.load_state_dict(state, strict=False)
        with pytest.raises(ValueError, match=message.replace("^", "^sf").replace("_scale", "")):
            dequantized_state_dict(state)


@pytest.mark.parametrize("form", FORMS)
def test_weights_with_scales_of_rows_and_tensors_are_multiplied_for_other_models(form: str) -> None:
    state, right = checkpoint_by_row(Mlp().state_dict(), form)
    plain, trained = Mlp(), Mlp()
    plain.load_state_dict(dequantized_state_dict(state | {"k_scale": torch.ones(1)}, torch.float32))
    to_fp8_training(trained)
    trained.load_state_dict(state)
    expected = right["up.weight"].float() * right["up.weight_scale"]
    assert same_bits(plain.up.weight.detach(), expected)
    assert same_bits(trained.up.weight.detach(), expected)
    named = {"gate": torch.ones(4, 4), "gate_scale": torch.ones(4), "k_scale": torch.ones(1)}
    assert dequantized_state_dict(named).keys() == named.keys()  # nothing here is FP8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_dict_without_fp8_loads_into_other_models(dtype: torch.dtype) -> None:
    plain, trained = Mlp(dtype), Mlp(dtype)
    model: Any = Mlp()
    to_fp8_inference(model)
    to_fp8_training(trained)
    state = dequantized_state_dict(model.state_dict(), dtype)
    for other in (plain, trained):
        other.load_state_dict(state)
    scales = model.up.weight_scale_inv.repeat_interleave(128, 0)[:INTER].repeat_interleave(128, 1)[:, :HIDDEN]
    assert same_bits(plain.up.weight.detach(), (model.up.weight.float() * scales).to(dtype))
    assert same_bits(trained.up.bias.detach(), model.up.bias.to(dtype))
    again = Mlp()
    to_fp8_inference(again)
    again.load_state_dict(dequantized_state_dict(model.state_dict(), torch.float32))
    assert same_bits(again.up.weight, model.up.weight)
    for of, form in (((64, 64), None), ((1, 32), "e8m0")):
        w = fine_weight(INTER, HIDDEN, of=of, form=form)
        found = dequantized_state_dict({"w": w[0], "w_scale_inv": w[1], "alone_scale_inv": scales}, dtype)
        assert found.keys() == {"w", "alone_scale_inv"}
        assert same_bits(found["w"], deep_gemm.cast_back_from_fp8(*w, of[1]).to(dtype))
    with pytest.raises(ValueError, match=r"^w: expected torch.float8_e4m3fn beside scales, got torch.int8"):
        dequantized_state_dict({"w": torch.zeros(16, 16, dtype=torch.int8), "w_scale_inv": torch.ones(1, 1)})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_in_training_multiplies_a_state_dict_in_fp8(dtype: torch.dtype, assign: bool) -> None:
    right, model, state = Mlp(dtype), Mlp(dtype), fp8_checkpoint()
    to_fp8_training(model)
    right.load_state_dict(dequantized_state_dict(state, dtype))
    model.load_state_dict(state, assign=assign)  # strict: all scales are used
    for layer, expected in ((model.up, right.up), (model.down, right.down)):
        assert same_bits(layer.weight.detach(), expected.weight.detach())
    experts = deep_gemm.nn.Experts(2, 32, 16, dtype=dtype)
    w1, w2 = (deep_gemm.per_block_cast_to_fp8(w.detach()) for w in (experts.w1, experts.w2))
    experts.load_state_dict({"w1": w1[0], "w1_scale_inv": w1[1], "w2": w2[0], "w2_scale_inv": w2[1]}, assign=assign)
    assert same_bits(experts.w1.detach(), deep_gemm.cast_back_from_fp8(*w1).to(dtype))
    assert same_bits(experts.w2.detach(), deep_gemm.cast_back_from_fp8(*w2).to(dtype))


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_in_training_refuses_what_would_be_noise(strict: bool) -> None:
    model, state = Mlp(), fp8_checkpoint()
    to_fp8_training(model)
    before, values = copy.deepcopy(model.state_dict()), state["up.weight"]
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"up.weight_scale_inv": None}, "up.weight_scale_inv: expected scales beside values of torch.float8_e4m3fn"),
        ({"up.weight_scale_inv": torch.ones(2, 2)}, "up.weight_scale_inv: expected shape"),
        ({"up.weight": values.view(torch.int8)}, "up.weight: expected torch.float8_e4m3fn beside scales, got torch.in"),
        ({"up.weight": values.float()}, "up.weight: expected torch.float8_e4m3fn beside scales, got torch.float32"),
    ]
    for changes, message in mistakes:
        given = {name: value for name, value in (state | changes).items() if value is not None and "up" in name}
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict({**before, **given}, strict=strict)
        assert same_bits(model.up.weight.detach(), before["up.weight"])


def test_the_page_that_a_conversion_points_at_exists() -> None:
    file, _, anchor = str(to_fp8_training(Mlp())).rpartition(": ")[2].partition("#")
    page = (Path(__file__).parents[2] / file).read_text().lower().replace(" ", "-")
    assert f"##-{anchor}\n" in page


def test_a_conversion_for_inference_says_where_a_state_dict_in_fp8_belongs() -> None:
    assert "dequantized_state_dict" in str(to_fp8_inference(Mlp()))
    assert "dequantized_state_dict" not in str(to_fp8_training(Mlp()))


def test_a_state_dict_and_a_type_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^state_dict: expected names and tensors, got NoneType"):
        dequantized_state_dict(None)  # type: ignore[arg-type]
    for dtype in ("bf16", torch.int8):
        with pytest.raises(ValueError, match=r"^dtype: expected torch.bfloat16 or .*, got .*(bf16|int8)"):
            dequantized_state_dict(fp8_checkpoint(), dtype)  # type: ignore[arg-type]


def test_stacked_experts_of_other_libraries_are_named_as_such() -> None:
    class MadeExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.gate_up_proj = 2, torch.nn.Parameter(torch.zeros(2, 32, 16))

    layers = {"up": torch.nn.Linear(32, 32), "experts": MadeExperts(), "conv": torch.nn.Conv1d(1, 1, 1)}
    left = to_fp8_training(torch.nn.ModuleDict(layers)).left
    assert left["experts"] == "MadeExperts, stacked experts: see deep_gemm.nn.Experts"
    assert left["conv"] == "Conv1d, no linear layer"


@pytest.mark.gpu
def test_a_gpu_loads_and_computes_what_the_cpu_does() -> None:
    model = Mlp(torch.bfloat16)
    to_fp8_inference(model)
    on_gpu, x = Mlp(torch.bfloat16).cuda(), numbers(6, HIDDEN, dtype=torch.bfloat16)
    for p in on_gpu.parameters():
        torch.nn.init.zeros_(p)
    to_fp8_inference(on_gpu)
    for state in (Mlp(torch.bfloat16).state_dict(), fp8_checkpoint()):
        on_gpu.load_state_dict(state)
        assert on_gpu.up.weight.is_cuda
        got = {name: value.cpu() for name, value in on_gpu.state_dict().items()}
        assert same_state(got, dict(model.state_dict()))
        assert error(on_gpu(x.cuda()).cpu(), model(x)) < 2e-3
        on_gpu.up.weight.view(torch.uint8).zero_()


# Models of transformers


def small_qwen(kind: str = "Qwen3", **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()


def test_a_model_of_transformers_is_trained_and_generates() -> None:
    model = small_qwen().train()
    plain, tokens = copy.deepcopy(model), torch.randint(0, 256, (2, 24))
    done = to_fp8_training(model)
    assert len(done.converted) == 7
    assert done.left.keys() == {"model.embed_tokens", "lm_head"}
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert error(loss, plain(tokens, labels=tokens).loss) < 0.01
    assert all(p.grad is not None for p in model.parameters())
    assert to_fp8_inference(model.eval()).converted == done.converted
    assert error(model(tokens).logits, plain(tokens).logits) < 0.1
    assert model.generate(tokens[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
    plain.load_state_dict(dequantized_state_dict(model.state_dict()))


def compressed(layer: Any, form: str) -> tuple[Tensor, Tensor]:
    """Put FP8 into a layer as compressed-tensors does: wrapped, with a scheme."""
    w, scales = by_row(layer.weight.detach(), form)
    layer.weight, layer.weight_scale, layer.input_scale = map(torch.nn.Parameter, (w, scales, torch.ones(1)))
    layer.quantization_scheme, layer.quantization_status = "W8A8", "compressed"

    @functools.wraps(torch.nn.Linear.forward)
    def forward(self: torch.nn.Linear, input: Tensor) -> Tensor:
        raise AssertionError("the wrapped forward")

    layer.forward = types.MethodType(forward, layer)
    return w, scales.float().expand(len(w), 1).contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_layers_that_hold_fp8_already_are_taken_as_they_are(form: str) -> None:
    layer: Any = torch.nn.Linear(HIDDEN, INTER)
    model, w, x = torch.nn.ModuleDict({"lm_head": layer}), compressed(layer, form), numbers(3, HIDDEN)
    assert to_fp8_inference(model).converted == ["lm_head"]  # the name does not matter, since the layer is in FP8
    assert same_bits(layer(x), some(deep_gemm.linear(x, w, bias=layer.bias)).float())
    ours = deep_gemm.nn.FrozenLinear(w, layer.bias)
    assert vars(layer).keys() == vars(ours).keys() | {"in_features", "out_features"}
    assert list(model.state_dict()) == ["lm_head.weight", "lm_head.bias", "lm_head.weight_scale"]


def test_all_layers_of_compressed_tensors_are_converted_or_none() -> None:
    def refused(change: Any, message: str, **more: Any) -> None:
        model: Any = Mlp()
        compressed(model.up, "dynamic")
        change(model.up)
        before = {name: type(layer) for name, layer in model.named_modules()}
        with pytest.raises(ValueError, match=f"^model: .* compressed-tensors to be converted, got up: {message}"):
            to_fp8_inference(model, **more)
        assert {name: type(layer) for name, layer in model.named_modules()} == before

    def hold(name: str, x: Tensor) -> Any:
        return lambda layer: setattr(layer, name, torch.nn.Parameter(x, requires_grad=False))

    refused(lambda _: None, "left by the filter", filter=lambda name, _: name == "down")
    refused(hold("weight_zero_point", torch.zeros(1)), "its forward is replaced")
    refused(hold("weight", torch.zeros(INTER, HIDDEN)), "its forward is replaced")  # happens after the first forward
    refused(hold("weight_scale", torch.ones(3)), r"weight_scale: expected a scale for each of 272 rows or for all")
    refused(hold("weight_scale", torch.ones(INTER, 9)), "weight_scale: expected shape")
    refused(lambda layer: setattr(layer, "forward", functools.partial(layer.forward)), "its forward is replaced")


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.o_proj", "re:.*k_proj$"]}


def test_a_checkpoint_of_modelopt_is_loaded_into_a_model_without_weights_and_saved_for_others(tmp_path: Path) -> None:
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    plain, tokens = small_qwen(), torch.arange(8)[None]
    state, _ = checkpoint_by_row(plain.state_dict(), "modelopt")
    ignored = [f"model.layers.0.self_attn.{name}_proj" for name in "ko"]
    state = {name: x for name, x in state.items() if not name.startswith(tuple(ignored))}
    state |= {name: x for name, x in plain.state_dict().items() if name.startswith(tuple(ignored))}
    config = copy.deepcopy(plain.config)
    config.quantization_config = MODELOPT
    with accelerate.init_empty_weights():
        model = type(plain)(config).bfloat16().eval()
    assert to_fp8_inference(copy.deepcopy(model), lambda name, _: name in ignored).converted == ignored
    left = to_fp8_inference(model).left
    assert [name for name, why in left.items() if why == "ignored by quantization_config"] == ignored
    assert not [name for name in model.state_dict() if name.endswith("_scale_inv")]  # names as in its checkpoint
    of_cache = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    model.load_state_dict(state | of_cache, assign=True)
    said = model.config.quantization_config
    assert said["quant_method"] == "compressed-tensors"
    assert said["ignore"] == ["lm_head", "model.embed_tokens", *ignored]
    group = said["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    plain.load_state_dict(dequantized_state_dict(state))
    with torch.no_grad():
        assert error(model(tokens).logits, plain(tokens).logits) < 0.1
    model.save_pretrained(tmp_path)
    assert same_state(safetensors.load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))
    plain.config.quantization_config = MODELOPT
    with pytest.raises(ValueError, match="weight: expected the device meta, as transformers loads no"):
        to_fp8_inference(plain)


def test_what_is_said_of_a_checkpoint_follows_the_scales_that_are_loaded() -> None:
    model = small_qwen()
    state, _ = checkpoint_by_row(model.state_dict(), "dynamic")
    to_fp8_inference(model)
    in_blocks = model.config.quantization_config
    assert in_blocks["quant_method"] == "fp8"
    first = {name: x for name, x in state.items() if "self_attn" in name}
    model.load_state_dict(first, strict=False)
    assert "quant_method" not in model.config.quantization_config  # no name means a mixture of both forms
    model.load_state_dict(state)
    assert model.config.quantization_config["quant_method"] == "compressed-tensors"
    again = copy.deepcopy(model)
    again.load_state_dict(small_qwen().state_dict())
    assert list(again.state_dict()) == list(model.state_dict())
    assert again.config.quantization_config["quant_method"] == "compressed-tensors"  # cast by row, like before
    of_tensor = small_qwen()
    of_tensor.lm_head = deep_gemm.nn.FrozenLinear((torch.zeros(256, 64).to(torch.float8_e4m3fn), torch.ones(1)))
    to_fp8_inference(of_tensor)
    assert "quant_method" not in of_tensor.config.quantization_config


@pytest.mark.parametrize("form", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3Moe"])
def test_a_model_of_compressed_tensors_is_converted_and_saved(kind: str, form: str, tmp_path: Path) -> None:
    """transformers multiplies the scales of experts in, so these weights are BF16."""
    pytest.importorskip("compressed_tensors")
    transformers, safetensors = pytest.importorskip("transformers"), pytest.importorskip("safetensors.torch")
    more = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2} if kind == "Qwen3Moe" else {}
    plain, tokens = small_qwen(kind, **more), torch.arange(8)[None]
    plain.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    state, right = checkpoint_by_row(safetensors.load_file(file), form)
    state = {name: x for name, x in state.items() if not name.endswith(("k_scale", "v_scale"))}
    safetensors.save_file(state, file, metadata={"format": "pt"})
    of_8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights, rows = dict[str, Any](strategy="channel"), dict[str, Any](strategy="token", dynamic=True)
    if form == "static":
        weights = rows = {"strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": of_8 | weights, "input_activations": of_8 | rows}
    said: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    said |= {"quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))

    def load(folder: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    model = load(tmp_path)
    done = to_fp8_inference(model)
    assert len(done.converted) == (7 if kind == "Qwen3" else 5)
    assert not model._forward_pre_hooks
    assert not hasattr(model, "hf_quantizer")
    found = model.state_dict()
    for name, x in right.items():
        if f"{name}_scale" in right and "experts" not in name:
            assert same_bits(found[name], x)
            # transformers rounds the scales to the model's type
            assert same_bits(found[f"{name}_scale"], right[f"{name}_scale"].bfloat16().float())
    with torch.no_grad():
        logits = model(tokens).logits
        assert error(logits, plain(tokens).logits) < 0.1
        model.save_pretrained(tmp_path / "again")
        again = load(tmp_path / "again")
        assert to_fp8_inference(again).converted == done.converted
        assert same_bits(again(tokens).logits, logits)


def test_another_call_converts_what_a_filter_left_of_a_model_by_rows() -> None:
    model = small_qwen()
    to_fp8_inference(model, lambda name, _: "mlp" in name)
    state = {name: x for name, x in small_qwen().state_dict().items() if "mlp" in name}
    for name, x in [*state.items()]:
        state[name], state[f"{name}_scale"] = deep_gemm.per_token_cast_to_fp8(x, gran_k=0)
    model.load_state_dict(state, strict=False)
    assert model.config.quantization_config["quant_method"] == "compressed-tensors"
    assert len(to_fp8_inference(model).converted) == 4
    assert "model.layers.0.self_attn.q_proj" not in model.config.quantization_config.get("ignore", ())


def test_finer_scales_are_saved_as_they_are() -> None:
    model = small_qwen()
    to_fp8_inference(model)
    state = small_qwen().state_dict()
    for name in [name for name in state if "proj" in name]:
        state[name], state[f"{name}_scale_inv"] = deep_gemm.per_block_cast_to_fp8(state[name], gran_k=32)
    model.load_state_dict(state)
    assert model.config.quantization_config["weight_block_size"] == [32, 32]


def test_a_state_dict_with_values_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="w: expected scales beside values of"):
        dequantized_state_dict({"w": torch.zeros(16, 16).to(torch.float8_e4m3fn)})
