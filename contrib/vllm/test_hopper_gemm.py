"""Tests of our classes inside vLLM's, on the CPU: `python -m pytest contrib/vllm`, in an environment with vLLM."""

import subprocess
from pathlib import Path

import pytest
import torch

vllm = pytest.importorskip("vllm")
import hopper_gemm as ours
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.quantization.utils import quant_utils as keys

import deep_gemm

BLOCKS = keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(ours, "_is_hopper", lambda: True)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        yield


def linear_config(n=256, k=384, out=torch.bfloat16):
    return ours.FP8ScaledMMLinearLayerConfig(
        weight_quant_key=BLOCKS[0],
        activation_quant_key=BLOCKS[1],
        weight_shape=(n, k),
        input_dtype=torch.bfloat16,
        out_dtype=out,
    )


def moe_config(inner=128, dtype=torch.bfloat16):
    return FusedMoEConfig(
        num_experts=4,
        experts_per_token=2,
        hidden_dim=256,
        intermediate_size=inner,
        num_local_experts=4,
        num_logical_experts=4,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
    )


def test_a_linear_layer_is_linear():
    kernel = ours.HopperGemmFp8BlockScaledMMKernel(linear_config())
    weight, scales = deep_gemm.per_block_cast_to_fp8(torch.randn(256, 384).bfloat16(), False)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, 384).bfloat16(), torch.randn(256).bfloat16()
    expected = deep_gemm.linear(x, (weight, scales))
    assert torch.equal(kernel.apply_weights(layer, x), expected)
    assert torch.equal(kernel.apply_weights(layer, x, bias), expected + bias)
    layer.is_bmm = True
    with pytest.raises(NotImplementedError, match="bmm layers"):
        kernel.process_weights_after_loading(layer)


def test_which_linear_layers_it_takes():
    of = ours.HopperGemmFp8BlockScaledMMKernel
    assert of.is_supported() == (True, None)
    assert of.can_implement(linear_config()) == (True, None)
    assert not of.can_implement(linear_config(n=260))[0]
    assert not of.can_implement(linear_config(out=torch.float16))[0]


@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_experts_are_experts(activation, is_mapped):
    w1, w2 = (deep_gemm.per_block_cast_to_fp8(torch.randn(4, *of).bfloat16(), False) for of in ((256, 256), (256, 128)))
    gating = {"gemm1_alpha": 1.7, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}
    quant = fp8_w8a8_moe_quant_config(w1[1], w2[1], block_shape=[128, 128], **gating)
    kind = ours.HopperGemmExperts(moe_config(), quant)
    x, weights = torch.randn(5, 256).bfloat16(), torch.rand(5, 2)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]], dtype=torch.int32)
    expert_map = torch.tensor([2, -1, 0, 3], dtype=torch.int32) if is_mapped else None
    shape, *_ = kind.workspace_shapes(5, 256, 256, 2, 4, 4, None, activation)
    out = torch.empty(shape, dtype=torch.bfloat16)
    rest = (4, expert_map, None, None, out.new_empty(0), out.new_empty(0), None, False)
    kind.apply(out, x, w1[0], w2[0], weights, ids, activation, *rest)
    local = ids if expert_map is None else expert_map[ids.long()]
    limits = {"limit": 7.0} if activation == MoEActivation.SILU else {"limit": 7.0, "alpha": 1.7, "beta": 1.0}
    assert torch.equal(out, deep_gemm.experts(x, local, weights, w1, w2, **limits))


def test_which_experts_it_takes():
    kind = ours.HopperGemmExperts

    def takes(config, pair=BLOCKS):
        return kind.is_supported_config(kind, config, *pair, kind.activation_format())[0]

    assert takes(moe_config())
    assert not takes(moe_config(inner=192))
    assert not takes(moe_config(dtype=torch.float16))
    assert not takes(moe_config(), (keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym))


def test_the_patch_fits_this_release():
    root = Path(vllm.__file__).parent.parent
    patch = ["patch", "--dry-run", "-p1", "-i", str(Path(__file__).with_name("register.patch"))]
    run = subprocess.run(patch, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
