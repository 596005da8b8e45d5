"""Modules for inference return their functions' results, and keep their weights' types if a model is cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp4_cases import random_weight
from helpers import same_bits, some
from layer_cases import fine_weight, random_routes

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.nn import FrozenExperts, FrozenLinear

NUM, HIDDEN, INTER = 3, 128, 64


FORMATS = ["fp4", "128x128", "32x32", "rows"]


def weight(*shape: int, of: str) -> Operand:
    if of == "fp4":
        values, scales = random_weight(*shape)
        return values.view(torch.int8), (scales // 8 + 110).view(torch.float8_e8m0fnu)
    if of == "rows":
        return fine_weight(*shape, of=(1, 0))
    if of == "32x32":
        return fine_weight(*shape, of=(32, 32), form="e8m0")
    return deep_gemm.per_block_cast_to_fp8(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def cases(of: str) -> list[tuple[torch.nn.Module, tuple[Any, ...], Any]]:
    """Return modules, their arguments, and the results of the functions that they call."""
    if of == "bf16":
        x, both = torch.randn(5, HIDDEN), (torch.randn(NUM, 2 * INTER, HIDDEN), torch.randn(NUM, HIDDEN, INTER))
        given, (v1, v2) = (x, random_routes(5, 2, NUM), torch.rand(5, 2)), (w.bfloat16() / 10 for w in both)
        both_ways: Any = {"limit": 0.5}, {"limit": 0.5, "w2_bias": torch.randn(NUM, HIDDEN)}
        return [(FrozenExperts(v1, v2, **said), given, deep_gemm.experts(*given, v1, v2, **said)) for said in both_ways]
    w, bias, x = weight(40, HIDDEN, of=of), torch.ones(40), torch.randn(2, 5, HIDDEN)
    w1, w2 = weight(NUM, 2 * INTER, HIDDEN, of=of), weight(NUM, HIDDEN, INTER, of=of)
    routed = x[0], random_routes(5, 2, NUM), torch.rand(5, 2)
    biases: dict[str, Any] = {"w1_bias": torch.randn(NUM, 2 * INTER).bfloat16(), "w2_bias": torch.randn(NUM, HIDDEN)}
    return [
        (FrozenLinear(w, bias), (x,), deep_gemm.linear(x, w, bias=bias)),
        (FrozenLinear(w), (x,), deep_gemm.linear(x, w)),
        (FrozenLinear(w, gran_k=64), (x,), deep_gemm.linear(x, w, gran_k=64)),
        (FrozenExperts(w1, w2, limit=0.5), routed, deep_gemm.experts(*routed, w1, w2, limit=0.5)),
        (FrozenExperts(w1, w2, **biases), routed, deep_gemm.experts(*routed, w1, w2, **biases)),
        (FrozenExperts(w1, w2, gran_k=64), routed, deep_gemm.experts(*routed, w1, w2, gran_k=64)),
    ]


@pytest.mark.parametrize("of", [*FORMATS, "bf16"])
def test_modules_are_their_functions_whatever_a_model_is_cast_to(of: str) -> None:
    for module, given, in_bf16 in cases(of):
        types = [each.dtype for each in module.state_dict().values()]
        right = in_bf16.to(given[0].dtype)
        assert same_bits(module(*given), right)
        assert same_bits(module.half()(*given), right)  # the bias is ones, exact in any type
        held = module.state_dict()
        assert [each.dtype for each in held.values()] == [
            torch.float16 if name == "bias" else dtype for name, dtype in zip(held, types, strict=True)
        ]
        names = {name for name, _ in module.named_buffers()}
        scaled = [name for name, _ in module.named_parameters() if name != "bias" and of != "bf16"]
        ending = "_scale" if of == "rows" else "_scale_inv"
        assert names - {"w1_bias", "w2_bias"} == {name + ending for name in scaled}


@pytest.mark.parametrize("of", [*FORMATS, "bf16"])
def test_on_meta_modules_give_shapes(of: str) -> None:
    for module, given, right in cases(of):
        out = module.to("meta")(*(each.to("meta") for each in given))
        assert (out.device.type, out.dtype, out.shape) == ("meta", given[0].dtype, right.shape)


@pytest.mark.parametrize("of", [*FORMATS, "bf16"])
def test_a_state_dict_holds_all(of: str) -> None:
    for (module, given, right), (other, *_) in zip(cases(of), cases(of), strict=True):
        for each in (*other.buffers(), *other.parameters()):
            each.view(torch.uint8).zero_()
        state = module.state_dict()
        biases = {name: x for name, x in state.items() if name in ("w1_bias", "w2_bias")}
        other.load_state_dict(state)
        assert same_bits(other(*given), right.to(given[0].dtype))
        other.load_state_dict(state | {name: x.bfloat16() for name, x in biases.items()})
        assert all(same_bits(other.state_dict()[name], x.bfloat16().float()) for name, x in biases.items())


def test_values_are_parameters_that_nobody_trains() -> None:
    layer = FrozenLinear(weight(40, HIDDEN, of="128x128"))
    assert [p.requires_grad for p in layer.parameters()] == [False]
    right = layer(torch.ones(2, HIDDEN))
    layer.requires_grad_()
    x = torch.ones(2, HIDDEN, requires_grad=True)
    found = layer(x)
    found.sum().backward()
    assert same_bits(found.detach(), right)
    assert layer.weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("products", ["fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_gradients_flow_through_frozen_experts(dtype: torch.dtype, limit: float | None, products: str) -> None:
    """Gradients have the bits of `nn.Experts`, which casts the same weights, also within `keep_casts`."""
    torch.manual_seed(0)
    trained = deep_gemm.nn.Experts(NUM, HIDDEN, INTER, limit, products=products)
    cast: Any = deep_gemm.per_block_cast_to_fp8 if products == "fp8" else torch.Tensor.bfloat16
    w1, w2 = (cast(w.detach()) for w in (trained.w1, trained.w2))
    frozen = FrozenExperts(w1, w2, limit)
    ids, grad = random_routes(9, 2, NUM), torch.randn(9, HIDDEN).to(dtype)

    def step(layer: torch.nn.Module) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(9, HIDDEN, generator=generator).to(dtype).requires_grad_()
        p = torch.rand(9, 2, generator=generator).requires_grad_()
        out = layer(x, ids, p)
        assert out.dtype == dtype
        return [out.detach(), *torch.autograd.grad(out, (x, p), grad)]

    right, found = step(trained), step(frozen)
    assert all(same_bits(a, b) for a, b in zip(found, right, strict=True))
    with deep_gemm.nn.keep_casts():
        assert all(same_bits(a, b) for a, b in zip(step(frozen), right, strict=True))
    compiled: Any = torch.compile(frozen, backend="aot_eager")
    assert all(same_bits(a, b) for a, b in zip(step(compiled), right, strict=True))
    only_p = torch.rand(9, 2, requires_grad=True)
    frozen(torch.randn(9, HIDDEN).to(dtype), ids, only_p).sum().backward()
    assert some(only_p.grad).any()


def test_a_state_dict_in_another_type_is_rounded_to_bf16_and_fp8_is_multiplied_by_its_scales() -> None:
    module, given, right = cases("bf16")[0]
    held = module.state_dict()
    module.load_state_dict({name: x.float() for name, x in held.items()})
    assert same_bits(module(*given), right.float())
    fp8 = {}
    for name, x in held.items():
        fp8[name], fp8[f"{name}_scale_inv"] = deep_gemm.per_block_cast_to_fp8(x)
    module.load_state_dict(dict(fp8))
    found = module.state_dict()
    w1 = deep_gemm.cast_back_from_fp8(fp8["w1"], fp8["w1_scale_inv"])
    assert same_bits(found["w1"], w1.bfloat16())
    with pytest.raises(RuntimeError, match="w1_scale_inv: expected scales"):
        module.load_state_dict({**held, "w1": fp8["w1"]})


@pytest.mark.parametrize("of", ["fp4", "32x32", "rows", "biases"])
def test_experts_without_gradients_refuse_what_would_need_them(of: str) -> None:
    more: Any = {"w2_bias": torch.zeros(NUM, HIDDEN)} if of == "biases" else {}
    frozen = FrozenExperts(weight(NUM, 2 * INTER, HIDDEN, of=of), weight(NUM, HIDDEN, INTER, of=of), **more)
    x = torch.randn(5, HIDDEN, requires_grad=True) * 1
    with pytest.raises(ValueError, match=r"^x: expected a tensor without a gradient"):
        frozen(x, random_routes(5, 2, NUM), torch.rand(5, 2))


def test_what_is_no_pair_or_no_limit_is_refused() -> None:
    w1, w2 = weight(NUM, 2 * INTER, HIDDEN, of="fp4"), weight(NUM, HIDDEN, INTER, of="fp4")
    with pytest.raises(TypeError, match=r"^w: expected a pair \(values, scales\), got Tensor"):
        FrozenLinear(w1[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^bias: expected a tensor, got a list of 1"):
        FrozenLinear((w1[0][0], w1[1][0]), bias=[0.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^w2: expected a pair \(values, scales\), got Tensor"):
        FrozenExperts(w1, torch.zeros(NUM, HIDDEN, INTER).bfloat16())
    with pytest.raises(ValueError, match=r"^limit: expected a number above 0, got 0"):
        FrozenExperts(w1, w2, limit=0)
    with pytest.raises(TypeError, match=r"^w1_bias: expected a tensor, got a list of 1"):
        FrozenExperts(w1, w2, w1_bias=[0.0])  # type: ignore[arg-type]


def test_biases_of_experts_are_fp32_from_an_aligned_address_however_they_are_loaded() -> None:
    w1, w2 = torch.randn(2, 32, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16()
    module = FrozenExperts(w1, w2, w1_bias=torch.zeros(2, 32), w2_bias=torch.zeros(2, 16))
    state = {"w1": w1, "w2": w2, "w1_bias": torch.ones(2, 32).bfloat16(), "w2_bias": torch.ones(33)[1:].view(2, 16)}
    module.load_state_dict(state, assign=True)
    given = torch.randn(3, 16).bfloat16(), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    right = deep_gemm.experts(*given, w1, w2, w1_bias=state["w1_bias"].float(), w2_bias=torch.ones(2, 16))
    assert same_bits(module(*given), some(right))
