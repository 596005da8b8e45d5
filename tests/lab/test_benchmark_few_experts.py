"""`bench few_experts`, what needs no GPU of it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from lab.bench import experts, few_experts
from lab.bench.contenders import OURS
from lab.bench.experts_by_torch import chains_in_bf16
from lab.bench.fp4 import VLLM


@pytest.fixture
def layer() -> few_experts.FewExperts:
    return few_experts.FewExperts((4, 2, 6, 256, 96), experts.weights_of(4, 256, 96, "cpu"))


def vllm_that_answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Install modules of vLLM's names, as far as the benchmark knows them."""
    package = "vllm.model_executor.layers.fused_moe"
    names = ["vllm", f"{package}.config", f"{package}.fused_moe"]
    found = {name: ModuleType(name) for name in names}
    found["vllm"].__spec__ = ModuleSpec("vllm", None)
    vars(found[names[1]])["fp8_w8a8_moe_quant_config"] = lambda *scales, block_shape: (scales, block_shape)
    vars(found[names[2]])["fused_experts"] = answer
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_the_rivals_error_is_beside_our_result(monkeypatch: pytest.MonkeyPatch, layer: few_experts.FewExperts) -> None:
    def answer(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, *, quant_config: Any) -> Tensor:
        assert (w1, w2) == (layer.weights.w1[0], layer.weights.w2[0])
        assert quant_config == ((layer.weights.w1[1], layer.weights.w2[1]), [128, 128])
        plain = layer.weights.plain1, layer.weights.plain2
        return dict(chains_in_bf16(x, ids, weights, *plain, with_compiled=False))["bmm"]()

    vllm_that_answers(monkeypatch, answer)
    ways = {way.name: way for way in layer.contenders()}
    assert tuple(ways) == few_experts.CONTENDERS
    assert layer.check(ways[OURS].call)[1] is None
    ways[VLLM].call()
    error = ways[VLLM].error
    assert error is not None and 0 < error() < experts.MOST_ERROR
    layer.out.mul_(2)
    assert 0.4 < error() < 0.6


def test_without_vllm_its_row_says_so(layer: few_experts.FewExperts) -> None:
    ways = {way.name: way for way in layer.contenders()}
    with pytest.raises(NotImplementedError, match=r"pip install vllm==0\.26\.0"):
        ways[VLLM].call()


def test_experts_takes_every_slice() -> None:
    shapes = few_experts.shapes_of()
    assert set(few_experts.shapes_of(quick=True)) < set(shapes)
    assert all(hidden % 16 == 0 == width % 16 and 96 <= width <= 512 for *_, hidden, width in shapes)
