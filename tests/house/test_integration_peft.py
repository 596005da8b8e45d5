"""peft's LoRA with FP8 layers: trained, saved, loaded and merged; settings that are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_bits
from nn_cases import TYPICAL, error
from torch import Tensor

from deep_gemm import cast_back_from_fp8, per_block_cast_to_fp8
from deep_gemm.convert import to_fp8_inference
from deep_gemm.nn import FrozenLinear

peft: Any = pytest.importorskip("peft", minversion="0.21")
transformers: Any = pytest.importorskip("transformers")

TARGETS = ["q_proj", "v_proj", "o_proj"]
SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from deep_gemm.integrations.peft import register_lora

    dispatching = import_module("peft.tuners.lora.model")
    monkeypatch.setattr(dispatching, "dispatch_default", dispatching.dispatch_default)  # monkeypatch restores it
    register_lora()
    register_lora()
    yield


def model_of(kind: str = "mixtral", *, dtype: torch.dtype = torch.bfloat16, in_fp8: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if in_fp8:
        to_fp8_inference(model)
    return model


def with_lora(model: Any, autocast_adapter_dtype: bool = True, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 8, "target_modules": TARGETS} | changes)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)


def tokens() -> Tensor:
    return torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(2))


def train(model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "dtype"), [("mixtral", torch.bfloat16), ("llama", torch.float32)])
def test_adapters_are_trained_saved_loaded_and_merged(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = model_of(kind, dtype=dtype)
    before, weights = copy.deepcopy(base.state_dict()), base.num_parameters()
    model = with_lora(base)
    trainable, every = model.get_nb_trainable_parameters()
    assert (every, trainable) == (weights + trainable, 2 * 3 * 8 * 2 * 128)
    losses = train(model, 8)
    assert losses[-1] < losses[0] - 0.5
    held = model.state_dict()
    named = {name.removeprefix("base_model.model.").replace(".base_layer", ""): x for name, x in held.items()}
    assert all(same_bits(named[name], x) for name, x in before.items()), "the base model's weights must not change"

    model.eval().save_pretrained(tmp_path)
    assert not any("base_layer" in name for name in peft.load_peft_weights(str(tmp_path)))
    right = model(tokens()).logits
    loaded = peft.PeftModel.from_pretrained(model_of(kind, dtype=dtype), tmp_path).eval()
    assert same_bits(loaded(tokens()).logits, right)
    with loaded.disable_adapter():
        without = loaded(tokens()).logits
    assert same_bits(without, model_of(kind, dtype=dtype).eval()(tokens()).logits)

    plain = model_of(kind, dtype=dtype, in_fp8=False)
    merged = peft.PeftModel.from_pretrained(plain, tmp_path).merge_and_unload().eval()
    to_fp8_inference(merged)
    assert error(merged(tokens()).logits, right) < 2 * TYPICAL < error(without, right)
    with pytest.raises(NotImplementedError, match=r"^merge: expected weights in BF16, got FP8, .*merge_and_unload"):
        loaded.merge_and_unload()


@pytest.mark.parametrize("share", [0.003, 0.01])
def test_a_small_adapter_would_be_lost_in_fp8_weights(share: float) -> None:
    """A cast of FP8 weights plus an adapter of 1% of their norm keeps 37% of it; of BF16 weights plus it, 99.8%."""
    torch.manual_seed(0)
    w, delta = torch.randn(1024, 1024), torch.randn(1024, 16) @ torch.randn(16, 1024)
    base = cast_back_from_fp8(*per_block_cast_to_fp8(w))
    delta *= share * base.norm() / delta.norm()

    def kept(summed: Tensor) -> float:
        change = cast_back_from_fp8(*per_block_cast_to_fp8(summed)) - base
        return float((change * delta).sum() / delta.square().sum())

    assert kept(base + delta) < 0.4
    assert abs(kept(w + delta) - 1) < 0.02


@pytest.mark.parametrize("in_fp32", [False, True])
def test_adapters_get_the_gradients_of_torch(in_fp32: bool) -> None:
    """Compare with a torch layer whose weight has the FP8 weight's numbers. Adapters are never in FP8."""
    torch.manual_seed(0)
    values, scales = per_block_cast_to_fp8(torch.randn(256, 128) / 8)
    plain: Any = torch.nn.ModuleDict({"up": torch.nn.Linear(128, 256), "down": torch.nn.Linear(256, 128)})
    plain["up"].weight.data = cast_back_from_fp8(values, scales)
    ours = torch.nn.ModuleDict(
        {"up": FrozenLinear((values, scales), plain["up"].bias), "down": copy.deepcopy(plain["down"])}
    )
    found = []
    for model in (ours, plain):
        lora = with_lora(model, in_fp32, target_modules=["up"], init_lora_weights=False)
        adapters = {name: p for name, p in lora.named_parameters() if p.requires_grad}
        expected = torch.bfloat16 if model is ours and not in_fp32 else torch.float32
        assert {p.dtype for p in adapters.values()} == {expected}
        layer = lora.base_model.model
        x = torch.randn(40, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        y = layer["down"](torch.nn.functional.silu(layer["up"](x)))
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in adapters.values())])
    assert len(found[0]) == 4
    assert all(0 < error(a, b) < 2 * TYPICAL for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "unsupported variant combination: .'use_dora',."),
        ({"init_lora_weights": "pissa"}, r"^init_lora_weights: expected one of \(True, .*, got 'pissa'"),
        ({"target_modules": ["experts"]}, "^target_modules: expected layers that are FrozenLinear in FP8, got F"),
        ({"target_modules": [], "target_parameters": ["experts.down_proj"]}, "got FrozenStackedExperts of torch.fl"),
    ],
)
def test_adapters_that_would_read_or_change_weights_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_lora(model_of(), **changes)


def test_weights_in_fp4_are_refused() -> None:
    values, scales = torch.full((8, 64), 0x22, dtype=torch.int8), torch.full((8, 4), 127, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"got FrozenLinear of torch.int8$"):
        with_lora(torch.nn.ModuleDict({"up": FrozenLinear((values, scales))}), target_modules=["up"])


def test_other_layers_get_what_peft_gives_them() -> None:
    model = with_lora(model_of(), target_modules=["q_proj", "lm_head"])
    layers = {type(layer).__name__ for layer in model.modules() if hasattr(layer, "lora_A")}
    assert layers == {"LoraFrozenLinear", "Linear"}
