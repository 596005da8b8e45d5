"""Tests of SGLang with the patch, and with hopper_gemm.py in place, on the CPU: `python -m pytest contrib/sglang`."""

import pytest
import torch

pytest.importorskip("sglang")
ours = pytest.importorskip("sglang.srt.layers.moe.moe_runner.hopper_gemm")
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization import fp8_utils

import deep_gemm

SHAPES = (4, 256, 256), (4, 256, 128)
IDS = torch.tensor([[0, 3], [1, -1], [3, 1], [2, 0], [0, 1]], dtype=torch.int32)


def weights(kind):
    if kind == "blocks":
        return [deep_gemm.per_block_cast_to_fp8(torch.randn(*of).bfloat16(), False) for of in SHAPES]
    made = [torch.randn(*of).to(torch.float8_e4m3fn) for of in SHAPES]
    return [(w, torch.rand(4, w.shape[1], 1) if kind == "rows" else torch.rand(4)) for w in made]


def dispatched(x, topk_weights):
    return StandardDispatchOutput(x, None, StandardTopKOutput(topk_weights, IDS, None))


GATINGS = (
    ({}, {"limit": None}),
    ({"swiglu_limit": 1.0, "routed_scaling_factor": 2.5}, {"limit": 1.0}),
    (
        {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
        {"alpha": 1.7, "beta": 1.0, "limit": 7.0},
    ),
)


@pytest.mark.parametrize("kind", ["blocks", "rows", "tensors"])
@pytest.mark.parametrize(("said", "expected"), GATINGS)
def test_experts_are_experts(kind, said, expected):
    w1, w2 = weights(kind)
    block = [128, 128] if kind == "blocks" else None
    quant = TritonMoeQuantInfo(w1[0], w2[0], use_fp8_w8a8=True, w13_scale=w1[1], w2_scale=w2[1], block_shape=block)
    x, p = torch.randn(5, 256).bfloat16(), torch.rand(5, 2)
    runner = MoeRunner(resolve_moe_runner_backend("hopper_gemm"), MoeRunnerConfig(**said))
    got = runner.run(dispatched(x, p), quant).hidden_states
    scaled = p * said.get("routed_scaling_factor", 1.0)
    assert torch.equal(got, deep_gemm.experts(x, IDS, scaled, w1, w2, **expected))


@pytest.mark.parametrize(
    ("said", "told"),
    [({"activation": "gelu"}, "activation=gelu"), ({"no_combine": True}, "no_combine"), ({"is_gated": False}, "gated")],
)
def test_what_it_refuses_it_names(said, told):
    w1, w2 = weights("tensors")
    quant = TritonMoeQuantInfo(w1[0], w2[0], w13_scale=w1[1], w2_scale=w2[1])
    with pytest.raises(ValueError, match=told):
        given = dispatched(torch.randn(5, 256).bfloat16(), torch.rand(5, 2))
        ours.fused_experts_none_to_hopper_gemm(given, quant, MoeRunnerConfig(**said))


def test_a_linear_layer_is_linear(monkeypatch):
    weight, scales = deep_gemm.per_block_cast_to_fp8(torch.randn(256, 384).bfloat16(), False)
    x, bias = torch.randn(2, 3, 384).bfloat16(), torch.randn(256).bfloat16()
    got = ours.hopper_gemm_w8a8_block_fp8_linear(x, weight, [128, 128], scales, bias=bias)
    assert torch.equal(got, deep_gemm.linear(x, (weight, scales), bias=bias))
    monkeypatch.setattr(fp8_utils, "triton_w8a8_block_fp8_linear", lambda *_, **__: "Triton's")
    assert ours.hopper_gemm_w8a8_block_fp8_linear(x.half(), weight, [128, 128], scales) == "Triton's"


def test_the_linear_backend_is_chosen_by_its_name(monkeypatch):
    asked = fp8_utils.Fp8GemmRunnerBackend("hopper_gemm")
    with pytest.raises(RuntimeError, match="requires a Hopper"):
        fp8_utils._dispatch_explicit_backend(asked)
    monkeypatch.setattr(fp8_utils, "get_platform", lambda: type("Hopper", (), {"is_sm90": True}))
    assert fp8_utils._dispatch_explicit_backend(asked) is ours.hopper_gemm_w8a8_block_fp8_linear
