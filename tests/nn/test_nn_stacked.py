"""Mixtures of transformers' models in FP8: trained by an experts implementation, and frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import same_bits
from nn_cases import TYPICAL_OF_EXPERTS, error, kept_by_autograd
from torch import Tensor

from deep_gemm import nn, per_block_cast_to_fp8
from deep_gemm.convert import dequantized_state_dict, to_bf16_training, to_fp8_inference, to_fp8_training
from deep_gemm.nn.stacked import NAME, NAME_FP8, WEIGHTS, FrozenStackedExperts

transformers: Any = pytest.importorskip("transformers", minversion="5.17")

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]


def model_of(kind: str = "mixtral", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tokens() -> Tensor:
    return torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))


def of_experts(model: Any) -> Any:
    return model.get_submodule(EXPERTS[0])


def routed(model: Any, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, SIZES["hidden_size"], generator=generator).bfloat16()
    ids = torch.randint(4, (tokens, 2), generator=generator)
    return x, ids, torch.rand(tokens, 2, generator=generator)


def test_one_call_trains_experts_too_and_tells_the_share() -> None:
    model = model_of()
    plain, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    done = to_fp8_training(model)
    assert {*EXPERTS} <= {*done.converted}
    assert done.left.keys() == {"model.embed_tokens", "lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))}
    assert done.in_fp8() > 0.9 * done.parameters == 0.9 * model.num_parameters()
    assert "now in FP8: q_proj, k_proj, v_proj, o_proj, experts\n" in str(done)
    assert model.config._experts_implementation == NAME_FP8
    loss, right = (each(tokens(), labels=tokens()).loss for each in (model, plain))
    assert 0 < error(loss, right) < 0.01
    loss.backward()
    assert all(p.grad.any() for p in model.parameters())
    optimizer.step()
    assert model(tokens(), labels=tokens()).loss < loss
    layer, ours = of_experts(model), nn.Experts(4, 64, 128, dtype=torch.bfloat16)
    ours.load_state_dict(dict(zip(("w1", "w2"), (getattr(layer, name) for name in WEIGHTS), strict=True)))
    grads = []
    for each, names in ((layer, WEIGHTS), (ours, ("w1", "w2"))):
        leaves = [getattr(each, name) for name in names]
        y = each(*routed(model))
        grads.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))
    again = to_fp8_training(model)
    assert (again.converted, again.in_fp8()) == ([], done.in_fp8())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_trains_experts_in_bf16_and_leaves_linear_layers(dtype: torch.dtype) -> None:
    model = model_of().to(dtype)
    plain, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    done = to_bf16_training(model)
    assert done.converted == EXPERTS
    layer, ours = of_experts(model), nn.Experts(4, 64, 128, dtype=dtype, products="bf16")
    weights = 2 * sum(getattr(layer, name).numel() for name in WEIGHTS)
    assert (done.multiplied_in("bf16"), done.in_fp8()) == (weights, 0)
    assert str(done).startswith(f"in BF16: {weights / done.parameters:.1%} of")
    assert "layers converted to BF16: 2, left: 12\n" in str(done)
    assert "now in BF16: experts\n" in str(done)
    of_attention = {done.left[f"model.layers.0.self_attn.{name}_proj"] for name in "qkvo"}
    assert of_attention == {"a linear layer, which stays torch's"}
    assert model.config._experts_implementation == NAME
    loss, right = (each(tokens(), labels=tokens()).loss for each in (model, plain))
    assert error(loss, right) < 1e-3
    for each in (loss, right):
        each.backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad.any()
        assert error(got.grad, expected.grad) < 0.02  # the error of BF16; FP8's is larger
    optimizer.step()
    assert model(tokens(), labels=tokens()).loss < loss
    ours.load_state_dict(dict(zip(("w1", "w2"), (getattr(layer, name) for name in WEIGHTS), strict=True)))
    grads = []
    for each, names in ((layer, WEIGHTS), (ours, ("w1", "w2"))):
        leaves = [getattr(each, name) for name in names]
        x, ids, p = routed(model)
        with kept_by_autograd(*leaves) as kept:
            y = each(x.to(dtype), ids, p)
        assert not any(each.dtype == torch.float8_e4m3fn for each in kept)
        grads.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))
    again = to_bf16_training(model)
    assert (again.converted, again.multiplied_in("bf16")) == ([], weights)


def test_experts_go_from_fp8_to_bf16_and_back_and_keep_state_dicts() -> None:
    model = model_of()
    state = copy.deepcopy(model.state_dict())
    in_fp8 = to_fp8_training(model, recipe="row")
    assert "experts have a scale for 128x128 of a weight: recipe='row' is for linear layers" in str(in_fp8)
    assert "recipe" not in str(to_fp8_training(model_of()))
    assert model.model.layers[0].self_attn.q_proj.recipe == "row"
    found = [of_experts(model)(*routed(model))]
    in_bf16 = to_bf16_training(model)
    assert in_bf16.converted == EXPERTS
    assert in_bf16.left["model.layers.1.self_attn.q_proj"] == "in FP8 already"
    assert in_bf16.in_fp8() + in_bf16.multiplied_in("bf16") == in_fp8.in_fp8()
    found.append(of_experts(model)(*routed(model)))
    assert to_fp8_training(model).converted == EXPERTS
    found.append(of_experts(model)(*routed(model)))
    assert same_bits(found[0], found[2])
    assert 0 < error(found[1], found[0]) < TYPICAL_OF_EXPERTS
    assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())
    both = torch.nn.ModuleList([torch.nn.Linear(16, 16), nn.Experts(2, 16, 16, products="bf16")])
    assert to_fp8_training(both).left == {"1": "in BF16 already"}


def test_experts_whose_sizes_are_multiples_of_8_are_trained_in_bf16_alone() -> None:
    model = model_of("qwen3_moe", moe_intermediate_size=40)
    assert to_bf16_training(model, lambda name, _: name == EXPERTS[0]).converted == EXPERTS[:1]
    assert to_bf16_training(model).converted == EXPERTS[1:]
    in_fp8 = to_fp8_training(model_of("qwen3_moe", moe_intermediate_size=40))
    assert in_fp8.left[EXPERTS[0]] == "intermediate: expected a multiple of 16, which FP8 products need, got 40"
    for other in (model_of("gpt_oss"), torch.nn.Linear(16, 16)):
        with pytest.raises(ValueError, match=r"^model: expected a layer .* converted, got none\nin BF16: 0.0% of"):
            to_bf16_training(other)


def test_experts_that_a_filter_leaves_stay_as_they_are() -> None:
    """All experts of a model read the same configuration, which names the way to compute experts."""
    for chosen in EXPERTS:
        model = model_of()
        plain = copy.deepcopy(model)
        to_fp8_training(model, lambda name, _: name == chosen)  # noqa: B023
        same = [same_bits(*(m.get_submodule(name)(*routed(m)) for m in (model, plain))) for name in EXPERTS]
        assert same == [name != chosen for name in EXPERTS]
    assert to_fp8_training(model).converted[-1].startswith("model.layers.1")
    assert not same_bits(of_experts(model)(*routed(model)), of_experts(plain)(*routed(plain)))
    model.set_experts_implementation("eager")
    copied = copy.deepcopy(model)
    to_fp8_training(copied)
    assert copied.get_submodule(EXPERTS[1]).config._experts_implementation == NAME_FP8
    assert model.get_submodule(EXPERTS[1]).config._experts_implementation == "eager"


@pytest.mark.parametrize("trained", [False, True])
def test_one_call_freezes_experts_and_all_parameters_stay_counted(trained: bool) -> None:
    model = model_of().eval()
    plain, number = copy.deepcopy(model), model.num_parameters()
    if trained:
        to_fp8_training(model)
    done = to_fp8_inference(model)
    assert (model.num_parameters(), done.parameters) == (number, number)
    layer, theirs = of_experts(model), of_experts(plain)
    assert type(layer) is FrozenStackedExperts
    weights = [per_block_cast_to_fp8(getattr(theirs, name)) for name in WEIGHTS]
    ours = nn.FrozenExperts(weights[0], weights[1])
    assert same_bits(layer(*routed(model)), ours(*routed(model)))
    x, ids, p = routed(model)
    other_ranks = ids.clone()
    other_ranks[:, 1] = 4  # 4 is larger than all experts' ids
    assert same_bits(layer(x, other_ranks, p), layer(x, ids, p * torch.tensor([1.0, 0.0])))
    assert error(model(tokens()).logits, plain(tokens()).logits) < 2 * TYPICAL_OF_EXPERTS
    assert model.generate(tokens()[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
    assert to_fp8_inference(model).in_fp8() == done.in_fp8()


def test_state_dicts_go_from_each_form_to_each() -> None:
    plain, trained, frozen, late = (model_of() for _ in range(4))
    to_fp8_training(trained)
    to_fp8_training(late)
    for model in (frozen, late):  # the hook of training stays, and ignores frozen weights
        to_fp8_inference(model)
    in_fp8 = copy.deepcopy(frozen.state_dict())
    assert {f"{EXPERTS[0]}.{name}{end}" for name in WEIGHTS for end in ("", "_scale_inv")} <= in_fp8.keys()
    for model in (frozen, late):
        for held in model.state_dict().values():
            held.view(torch.uint8).zero_()
        model.load_state_dict(plain.state_dict())  # loading casts them
        assert all(same_bits(held, in_fp8[name]) for name, held in model.state_dict().items())
        model.load_state_dict(in_fp8)
    trained.load_state_dict(in_fp8)  # loading multiplies them by their scales
    plain.load_state_dict(dequantized_state_dict(in_fp8))
    assert all(same_bits(held, plain.state_dict()[name]) for name, held in trained.state_dict().items())
    key = f"{EXPERTS[0]}.down_proj"
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=f"{key}_scale_inv: expected scales beside values"):
            trained.load_state_dict({key: in_fp8[key]}, strict=strict)


def test_on_meta_experts_are_frozen_too() -> None:
    right = model_of()
    with torch.device("meta"):
        model = model_of()
    to_fp8_inference(model)
    state = right.state_dict()
    model.load_state_dict(state, assign=True)
    to_fp8_inference(right)
    assert same_bits(of_experts(model)(*routed(model)), of_experts(right)(*routed(right)))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gpt_oss", {}, "has_bias: expected experts whose products add no bias, got GptOssExperts"),
        ("mixtral", {"hidden_act": "gelu"}, "gate: expected silu"),
        ("mixtral", {"intermediate_size": 136}, "intermediate: expected a multiple of"),
        ("qwen3_moe", {"moe_intermediate_size": 192}, "intermediate: expected a multiple of 128, got 192"),
    ],
)
def test_experts_that_are_left_are_told_and_stay(kind: str, changes: dict[str, Any], reason: str) -> None:
    model = model_of(kind, **changes)
    plain = copy.deepcopy(model)
    changed = [to_fp8_inference] if "moe_intermediate_size" in changes else [to_fp8_training, to_fp8_inference]
    for change in changed:
        done = change(model)
        assert all(reason in done.left[name] for name in EXPERTS)
        assert "docs/convert.md#what-is-converted" in str(done)
        assert max(map(len, str(done).splitlines())) <= 80
        names = [name for name in done.left if name in EXPERTS]
        assert sum(done.held[name] for name in names) > 0.5 * done.parameters
        assert same_bits(of_experts(model)(*routed(model)), of_experts(plain)(*routed(plain)))
