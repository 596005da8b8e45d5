"""Modules for inference: what their functions give, with weights whose types no cast of a model changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp4_cases import random_weight
from helpers import same_bits
from layer_cases import fine_weight, random_routes

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.nn import FrozenExperts, FrozenLinear

NUM, HIDDEN, INTER = 3, 128, 64


FORMATS = ["fp4", "128x128", "32x32"]


def weight(*shape: int, of: str) -> Operand:
    if of == "fp4":
        values, scales = random_weight(*shape)
        return values.view(torch.int8), (scales // 8 + 110).view(torch.float8_e8m0fnu)
    if of == "32x32":
        return fine_weight(*shape, of=(32, 32), form="e8m0")
    return deep_gemm.per_block_cast_to_fp8(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def cases(of: str) -> list[tuple[torch.nn.Module, tuple[Any, ...], Any]]:
    """Modules, what they are given, and what their functions give."""
    w, bias, x = weight(40, HIDDEN, of=of), torch.ones(40), torch.randn(2, 5, HIDDEN)
    w1, w2 = weight(NUM, 2 * INTER, HIDDEN, of=of), weight(NUM, HIDDEN, INTER, of=of)
    routed = x[0], random_routes(5, 2, NUM), torch.rand(5, 2)
    return [
        (FrozenLinear(w, bias), (x,), deep_gemm.linear(x, w, bias=bias)),
        (FrozenLinear(w), (x,), deep_gemm.linear(x, w)),
        (FrozenLinear(w, gran_k=64), (x,), deep_gemm.linear(x, w, gran_k=64)),
        (FrozenExperts(w1, w2, limit=0.5), routed, deep_gemm.experts(*routed, w1, w2, limit=0.5)),
        (FrozenExperts(w1, w2, gran_k=64), routed, deep_gemm.experts(*routed, w1, w2, gran_k=64)),
    ]


@pytest.mark.parametrize("of", FORMATS)
def test_modules_are_their_functions_whatever_a_model_is_cast_to(of: str) -> None:
    for module, given, in_bf16 in cases(of):
        types = [each.dtype for each in module.buffers()]
        right = in_bf16.to(given[0].dtype)
        assert same_bits(module(*given), right)
        assert same_bits(module.half()(*given), right)  # the bias is ones, in any type
        assert [each.dtype for each in module.buffers()] == types
        assert len(types) == (4 if isinstance(module, FrozenExperts) else 2)


@pytest.mark.parametrize("of", FORMATS)
def test_on_meta_modules_give_shapes(of: str) -> None:
    for module, given, right in cases(of):
        out = module.to("meta")(*(each.to("meta") for each in given))
        assert (out.device.type, out.dtype, out.shape) == ("meta", given[0].dtype, right.shape)


@pytest.mark.parametrize("of", FORMATS)
def test_a_state_dict_holds_all(of: str) -> None:
    for (module, given, right), (other, *_) in zip(cases(of), cases(of), strict=True):
        for each in (*other.buffers(), *other.parameters()):
            each.view(torch.uint8).zero_()
        other.load_state_dict(module.state_dict())
        assert same_bits(other(*given), right.to(given[0].dtype))


def test_what_is_no_pair_or_no_limit_is_refused() -> None:
    w1, w2 = weight(NUM, 2 * INTER, HIDDEN, of="fp4"), weight(NUM, HIDDEN, INTER, of="fp4")
    with pytest.raises(TypeError, match=r"^w: expected a pair \(values, scales\), got Tensor"):
        FrozenLinear(w1[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^bias: expected a tensor, got a list of 1"):
        FrozenLinear((w1[0][0], w1[1][0]), bias=[0.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^limit: expected a number above 0, got 0"):
        FrozenExperts(w1, w2, limit=0)
