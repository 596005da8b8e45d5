"""BF16 experts of transformers on grouped products, and products in place of torch's, as in examples/, on the CPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import numbers, some
from nn_cases import TYPICAL_OF_EXPERTS, error
from torch import Tensor

from deep_gemm import calc_diff
from deep_gemm.integrations import torch_mm
from deep_gemm.integrations.torch_mm import batch_invariant_mm


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def counted(func: Any, ours: Any, *args: Any) -> Any:
        seen.append(str(func))
        return ours(*args)

    counting = {func: partial(counted, func, ours) for func, ours in torch_mm.PRODUCTS.items()}
    monkeypatch.setattr(torch_mm, "PRODUCTS", counting)
    return seen


@pytest.mark.parametrize(("n", "k"), [(13, 20), (16, 24)])
def test_linear_layers_and_their_gradients_run_our_products(calls: list[str], n: int, k: int) -> None:
    x, w, bias = numbers(5, k).requires_grad_(), numbers(n, k, seed=1).requires_grad_(), numbers(n, seed=2)
    with batch_invariant_mm():
        y = F.linear(x, w, bias)
        y.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert calls == ["aten.addmm.default", "aten.mm.default", "aten.mm.default"]
    p, q = (t.detach().float().requires_grad_() for t in (x, w))
    right = F.linear(p, q, bias.float())
    right.square().sum().backward()  # type: ignore[no-untyped-call]
    for mine, its in ((y, right), (x.grad, p.grad), (w.grad, q.grad)):
        assert some(mine).shape == some(its).shape
        assert calc_diff(some(mine), some(its)) < 1e-5


def test_several_products_at_once_and_what_is_left_to_torch(calls: list[str]) -> None:
    a, b = numbers(3, 5, 24), numbers(3, 24, 10, seed=1)
    with batch_invariant_mm():
        made = a @ b
        single = torch.mm(a[0].float(), b[0].float())
    assert calls == ["aten.bmm.default"]
    assert calc_diff(made, a.float() @ b.float()) < 1e-5
    assert torch.equal(single, a[0].float() @ b[0].float())


moe = pytest.importorskip("transformers.integrations.moe")


class Experts(torch.nn.Module):
    """A mixture that is defined like the mixtures of transformers' models."""

    def __init__(self, config: Any, turned: bool = False) -> None:
        super().__init__()
        self.num_experts = 4
        shapes = [(4, 64, 32), (4, 32, 32)]
        self.gate_up_proj, self.down_proj = (
            torch.nn.Parameter((numbers(*s, seed=i).mT if turned else numbers(*s, seed=i)).contiguous() / 4)
            for i, s in enumerate(shapes)
        )
        self.act_fn = F.silu


@pytest.mark.parametrize("turned", [False, True])
def test_experts_of_transformers_and_their_gradients(turned: bool) -> None:
    from deep_gemm.integrations.transformers_bf16 import NAME, register_experts

    register_experts()
    made = moe.use_experts_implementation(experts_class=type("Made", (Experts,), {}), is_transposed=turned)
    x, weights = numbers(7, 32, seed=5), torch.rand(7, 2, generator=torch.Generator().manual_seed(6)).bfloat16()
    ids = torch.randint(4, (7, 2), generator=torch.Generator().manual_seed(7))
    results = []
    for name in (NAME, "batched_mm"):
        layer = made(config=SimpleNamespace(_experts_implementation=name), turned=turned)
        x_here = x.clone().requires_grad_()
        y = layer(x_here, ids, weights)
        y.float().square().sum().backward()
        results.append((y, x_here.grad, layer.gate_up_proj.grad, layer.down_proj.grad))
    for mine, its in zip(*results, strict=True):
        assert calc_diff(mine, its) < 1e-3


@pytest.mark.parametrize("bounds", [(0.02, TYPICAL_OF_EXPERTS), (1e-4, 0.01)], ids=["fp8", "bf16"])
def test_models_of_experts_are_trained(bounds: tuple[float, float]) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from deep_gemm.integrations.transformers_bf16 import NAME, NAME_FP8, register_experts

    implementation, (least, most) = NAME_FP8 if bounds[0] > 0.01 else NAME, bounds

    register_experts()
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture)).bfloat16()
    tokens = torch.randint(64, (2, 20))

    def step(name: str, of: Any) -> dict[str, Tensor]:
        model.set_experts_implementation(name)
        model.zero_grad()
        of(tokens, labels=tokens).loss.backward()
        found = {key: p.grad.float() for key, p in model.named_parameters() if "experts" in key}
        assert found.keys() == {f"model.layers.0.mlp.experts.{of}_proj" for of in ("gate_up", "down")}
        return found

    right, found = step("eager", model), step(implementation, model)
    assert all(least < error(found[key], right[key]) < most for key in right), "another result, but near the first"
    again = step(implementation, torch.compile(model, backend="aot_eager"))
    assert all(torch.equal(again[key], found[key]) for key in found)


def test_a_mixture_that_is_no_silu_gate_is_not_trained_in_fp8() -> None:
    from deep_gemm.integrations.transformers_bf16 import NAME_FP8, register_experts

    register_experts()
    x, ids, weights = numbers(7, 32), torch.zeros(7, 2, dtype=torch.long), torch.ones(7, 2)
    biased = "has_bias: expected experts whose products add no bias, got Made with .*implementation='deep_gemm_bf16'"
    turned = "is_transposed: expected weights of experts as torch.nn.Linear has its own"
    for change, message in (("has_bias", biased), ("is_transposed", turned), ("", r"gate: expected silu")):
        said = {change: True} if change else {}
        made = moe.use_experts_implementation(experts_class=type("Made", (Experts,), {}), **said)
        layer = made(config=SimpleNamespace(_experts_implementation=NAME_FP8), turned=change == "is_transposed")
        layer.act_fn = F.gelu
        with pytest.raises(NotImplementedError, match=message):
            layer(x, ids, weights)
