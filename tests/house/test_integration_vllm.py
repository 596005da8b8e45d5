"""The plugin for vLLM, beside a stand-in that has the places of vLLM 0.26 which the plugin touches."""

import importlib
import logging
import subprocess
import sys
from abc import ABC
from collections.abc import Iterator
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import as_new_process
from stand_in import BAD_VARIABLES, said, stand_in, started

import deep_gemm
from deep_gemm.integrations import vllm as plugin

experts: Any = deep_gemm.experts
linear: Any = deep_gemm.linear
FUSED = plugin.OF_MOE
LINEAR = "vllm.model_executor.kernels.linear"
OURS = "deep_gemm.integrations.vllm_layers"


class Named(Enum):
    """Names of everything that vLLM has in enumerations."""

    CUDA, SILU, SWIGLUOAI_UNINTERLEAVE, GELU, TRITON, DEEPGEMM, DEEPGEMM_MXFP4, MARLIN, Standard = range(9)


class OwnExperts:
    pass


class Linear:
    WEIGHT_SCALE, WEIGHT_SCALE_INV = "weight_scale", "weight_scale_inv"

    def __init__(self, block: int = 128) -> None:
        self.weight_group_shape = block, block

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def _get_layer_params(self, layer: Any) -> Any:
        scales = getattr(layer, "weight_scale_inv", None)
        return SimpleNamespace(
            weight_scale_inv=scales, WEIGHT_SCALE="weight_scale", WEIGHT_SCALE_INV="weight_scale_inv"
        )


class RowLinear:
    def __init__(self, c: Any, layer_param_names: Any) -> None:
        assert self.is_supported()[0]  # type: ignore[attr-defined]

    def _get_layer_params(self, layer: Any) -> Any:
        return layer.weight, layer.weight_scale, layer.input_scale, layer.input_scale_ub

    def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
        raise NotImplementedError


class Cutlass(RowLinear, ABC):
    """The class whose kernels vLLM takes as batch invariant."""


class FusedMoEConfig:
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None


class Experts:
    def __init__(self, w1_scale: Any = None, w2_scale: Any = None, **of: Any) -> None:
        self.w1_scale, self.w2_scale = w1_scale, w2_scale
        said = {"gemm1_clamp_limit": None, "gemm1_alpha": None, "gemm1_beta": None, **of}
        self.w1_bias, self.w2_bias = said.pop("w1_bias", None), said.pop("w2_bias", None)
        self.quant_config = SimpleNamespace(**said)
        self.moe_config: Any = FusedMoEConfig()

    @staticmethod
    def is_supported_config(
        kind: Any, config: Any, weight: Any, activations: Any, form: Any
    ) -> tuple[bool, str | None]:
        asked = (
            kind._supports_current_device()
            and kind._supports_quant_scheme(weight, activations)
            and kind._supports_activation(config.activation)
            and kind._supports_parallel_config(config.moe_parallel_config)
            and form == kind.activation_format()
            and (kind._supports_batch_invariance() or not sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT)
        )
        return asked, None if asked else "no"

    def apply(
        self,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: Any,
        expert_map: Any,
        a1q_scale: Any,
        a2_scale: Any,
        workspace13: Any,
        workspace2: Any,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: Any,
    ) -> None:
        raise NotImplementedError


def backend_to_kernel_cls(backend: Any) -> list[type]:
    return [OwnExperts]


def in_order(moe_config: Any, weight_key: Any, activation_key: Any) -> list[Any]:
    return [Named.MARLIN, Named.DEEPGEMM, Named.TRITON]


def plain_in_order(moe_config: Any) -> list[Any]:
    return [Named.TRITON, Named.MARLIN]


def pack(w13_weight: Any, w2_weight: Any, w13_weight_scale: Any, w2_weight_scale: Any) -> Any:
    raise NotImplementedError


def replace_parameter(layer: Any, name: str, value: Any) -> None:
    setattr(layer, name, value)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the stand-in; after the test, forget our module that imported from it."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda c: c == 90)
    oracle = {"backend_to_kernel_cls": backend_to_kernel_cls, "_get_priority_backends": in_order}
    quant = "vllm.model_executor.layers.quantization.utils.quant_utils"
    keys = ("Dynamic128", "Static128Block", "StaticChannel", "StaticTensor", "DynamicToken", "DynamicTensor")
    names = {name: name for name in ("kMxfp4Static", *(f"kFp8{key}Sym" for key in keys))}
    kernels: dict[str, Any] = {
        "_POSSIBLE_FP8_BLOCK_KERNELS": {Named.CUDA: []},
        "_POSSIBLE_FP8_KERNELS": {Named.CUDA: []},
        "CutlassFP8ScaledMMLinearKernel": Cutlass,
    }
    plain = {"backend_to_kernel_cls": backend_to_kernel_cls, "_get_priority_backends": plain_in_order}
    with_biases = type("FusedMoEExperts", (), {"w1_bias": None, "w2_bias": None})
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.26.0"},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.platforms": {"current_platform": platform, "PlatformEnum": Named},
        LINEAR: {**kernels, "_LINEAR_BACKEND_KERNEL_MAP": {"deep_gemm": set()}, "FP8ScaledMMLinearKernel": RowLinear},
        f"{LINEAR}.scaled_mm.BlockScaledMMLinearKernel": {"Fp8BlockScaledMMLinearKernel": Linear},
        "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
        quant: names,
        f"{FUSED}.config": {"FusedMoEConfig": FusedMoEConfig},
        f"{FUSED}.activation": {"MoEActivation": Named},
        f"{FUSED}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": type("TopKWeightAndReduceNoOP", (), {})},
        f"{FUSED}.modular_kernel": {
            **{"FusedMoEExpertsModular": Experts, "FusedMoEActivationFormat": Named, "FusedMoEExperts": with_biases},
        },
        f"{FUSED}.oracle.unquantized": {"UnquantizedMoeBackend": Named, **plain},
        f"{FUSED}.oracle.fp8": {"Fp8MoeBackend": Named, **oracle},
        f"{FUSED}.oracle.mxfp4": {"Mxfp4MoeBackend": Named, **oracle, "_pack_deepgemm_mxfp4_scales": pack},
    }
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM", raising=False)
    yield stand_in(monkeypatch, contents)
    sys.modules.pop(OURS, None)


def config(**said: Any) -> Any:
    usual = {"moe_backend": "auto", "has_bias": False, "in_dtype": torch.bfloat16, "hidden_dim": 256}
    usual |= {"intermediate_size_per_partition": 128, "activation": Named.SILU}
    parallel = SimpleNamespace(use_all2all_kernels=False, use_ag_rs_all2all_kernels=False)
    return SimpleNamespace(**usual | {"moe_parallel_config": parallel} | said)


BLOCKS = "kFp8Static128BlockSym", "kFp8Dynamic128Sym"
ROWS = "kFp8StaticChannelSym", "kFp8DynamicTokenSym"


def takes(kind: Any, of: Any, weight: str | None = BLOCKS[0], activations: str | None = BLOCKS[1]) -> bool:
    return bool(kind.is_supported_config(kind, of, weight, activations, kind.activation_format())[0])


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [each.load() for each in found if each.name == "deep_gemm"] == [plugin.register]


def test_layers_are_offered_once_and_first(vllm: Any) -> None:
    plugin.register()
    plugin.register()
    layers = importlib.import_module(OURS)
    assert vllm[LINEAR]._POSSIBLE_FP8_BLOCK_KERNELS[Named.CUDA] == [layers.DeepGemmLinear]
    assert vllm[LINEAR]._POSSIBLE_FP8_KERNELS[Named.CUDA] == [layers.DeepGemmRowLinear]
    both = {layers.DeepGemmLinear, layers.DeepGemmRowLinear}
    assert vllm[LINEAR]._LINEAR_BACKEND_KERNEL_MAP["deep_gemm"] == both
    fp8, mxfp4 = vllm[f"{FUSED}.oracle.fp8"], vllm[f"{FUSED}.oracle.mxfp4"]
    triton = [layers.DeepGemmExperts, layers.DeepGemmRowExperts, OwnExperts]
    assert fp8.backend_to_kernel_cls(Named.TRITON) == triton
    assert fp8.backend_to_kernel_cls(Named.DEEPGEMM) == [layers.DeepGemmExperts, OwnExperts]
    assert fp8.backend_to_kernel_cls(Named.MARLIN) == [OwnExperts]
    assert mxfp4.backend_to_kernel_cls(Named.DEEPGEMM_MXFP4) == [layers.DeepGemmExperts, OwnExperts]
    scales = [torch.zeros(2, 3, dtype=torch.uint8) for _ in range(2)]
    of_w13, of_w2 = mxfp4._pack_deepgemm_mxfp4_scales(None, None, *scales)
    assert (of_w13.data_ptr(), of_w2.data_ptr()) == tuple(each.data_ptr() for each in scales)
    for asked in (BLOCKS, ROWS):
        assert fp8._get_priority_backends(config(), *asked) == [Named.TRITON, Named.MARLIN, Named.DEEPGEMM]
        assert fp8._get_priority_backends(config(hidden_dim=136), *asked) == in_order(None, *asked)


def test_experts_that_are_not_quantized_have_a_backend_of_their_own(vllm: Any) -> None:
    plugin.register()
    oracle, kind = vllm[f"{FUSED}.oracle.unquantized"], importlib.import_module(OURS).DeepGemmBF16Experts
    ours, *others = oracle._get_priority_backends(config())
    assert others == plain_in_order(None)
    assert ours not in others
    assert ours.value == "deep_gemm"
    assert oracle.backend_to_kernel_cls(ours) == [kind]
    assert oracle.backend_to_kernel_cls(Named.TRITON) == [OwnExperts]  # its first is for LoRA, unasked


@pytest.mark.parametrize("kind", plugin.PARTS)
def test_a_release_without_places_of_one_kind_is_offered_the_others(
    vllm: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, name = next(iter(plugin.PARTS[kind]))
    delattr(vllm[module], name)
    plugin.register()
    assert said(caplog) == [f"deep_gemm leaves out {kind}: vllm 0.26.0 has no {module}.{name}"]
    linear, oracles = vllm[LINEAR], (f"{FUSED}.oracle.fp8", f"{FUSED}.oracle.unquantized")
    of_fp8 = vllm[oracles[0]].backend_to_kernel_cls(Named.TRITON)
    plain = getattr(vllm[oracles[1]], "_get_priority_backends", plain_in_order)(None)
    offered = {
        "DeepGemmLinear": bool(linear._POSSIBLE_FP8_BLOCK_KERNELS[Named.CUDA]),
        "DeepGemmRowLinear": bool(getattr(linear, "_POSSIBLE_FP8_KERNELS", {Named.CUDA: []})[Named.CUDA]),
        "DeepGemmRowExperts": len(of_fp8) == 3,
        "DeepGemmBF16Experts": len(plain) == 3,
    }
    assert [name for name, is_there in offered.items() if not is_there] == [kind]


@pytest.mark.parametrize("variable", ["VLLM_USE_DEEP_GEMM=0", "DG_DISABLE_VLLM_PLUGIN=1"])
def test_a_variable_turns_it_off(vllm: Any, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_new_process(monkeypatch, **dict([variable.split("=")]))
    plugin.register()
    assert vllm[LINEAR]._POSSIBLE_FP8_BLOCK_KERNELS[Named.CUDA] == []


ORACLES = "fp8", "mxfp4", "unquantized"


def changed_places(vllm: Any) -> list[Any]:
    """Give copies of all that the plugin changes."""
    linear, *oracles = (vllm[path] for path in (LINEAR, *(f"{FUSED}.oracle.{it}" for it in ORACLES)))
    of_backend = linear._LINEAR_BACKEND_KERNEL_MAP.get("deep_gemm", ())
    kinds = linear._POSSIBLE_FP8_BLOCK_KERNELS[Named.CUDA], linear._POSSIBLE_FP8_KERNELS[Named.CUDA]
    return [*map(list, kinds), {*of_backend}, *({**vars(oracle)} for oracle in oracles)]


@pytest.mark.parametrize("variable", BAD_VARIABLES)
def test_a_bad_variable_ends_no_server(
    vllm: Any, variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = changed_places(vllm)
    started(plugin, "vllm.general_plugins", variable, monkeypatch)
    assert changed_places(vllm) == before
    told = variable.replace("DG_CACHE_DIR", "DG_JIT_CACHE_DIR")
    assert said(caplog) == [f"deep_gemm leaves all layers to vLLM: SettingError: {told}: expected"]


@pytest.mark.parametrize("step", ["a platform", "a list", "a set", "an enumeration", "the last"])
def test_a_start_that_fails_changes_nothing(
    vllm: Any, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linear = vllm[LINEAR]
    if step == "a platform":
        del vllm["vllm.platforms"].current_platform
    elif step == "a list":
        linear._POSSIBLE_FP8_BLOCK_KERNELS = {Named.CUDA: ()}
    elif step == "a set":
        linear._LINEAR_BACKEND_KERNEL_MAP = {}
    elif step == "an enumeration":
        vllm[f"{FUSED}.oracle.mxfp4"].Mxfp4MoeBackend = None
    else:
        monkeypatch.delattr(plugin.logger.__class__, "info")
    before = changed_places(vllm)
    plugin.register()
    assert changed_places(vllm) == before
    (line,) = said(caplog)
    assert line.startswith("deep_gemm leaves all layers to vLLM: ")


def test_other_gpus_are_left_alone(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm["vllm.platforms"].current_platform, "is_device_capability", lambda c: c == 100)
    plugin.register()
    assert vllm[LINEAR]._POSSIBLE_FP8_BLOCK_KERNELS[Named.CUDA] == []


@pytest.mark.parametrize("change", ["gone", "a name gone", "other parameters"])
def test_another_release_is_left_alone_in_words(vllm: Any, change: str, caplog: pytest.LogCaptureFixture) -> None:
    there = vllm[f"{FUSED}.oracle.mxfp4"]
    if change == "a name gone":
        del vllm["vllm.model_executor.utils"].replace_parameter
    elif change == "gone":
        del there.backend_to_kernel_cls
    else:
        there.backend_to_kernel_cls = lambda backend, more: []
    with caplog.at_level(logging.WARNING, plugin.logger.name):
        plugin.register()
    expected = "has no" if change.endswith("gone") else "expected backend_to_kernel_cls of ('backend',)"
    assert expected in caplog.text
    assert vllm[LINEAR]._POSSIBLE_FP8_BLOCK_KERNELS[Named.CUDA] == []


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        ({}, True),
        ({"moe_backend": "deep_gemm"}, True),
        ({"moe_backend": "triton"}, False),
        ({"has_bias": True}, True),
        ({"in_dtype": torch.float16}, False),
        ({"intermediate_size_per_partition": 96}, False),
        ({"hidden_dim": 136}, False),
        ({"activation": Named.SWIGLUOAI_UNINTERLEAVE}, True),
        ({"activation": Named.GELU}, False),
    ],
)
def test_which_experts_are_taken(vllm: Any, said: dict[str, Any], is_taken: bool) -> None:
    kind = importlib.import_module(OURS).DeepGemmExperts
    assert takes(kind, config(**said)) == is_taken


def test_experts_by_rows_and_in_bf16_are_taken_by_their_kinds(vllm: Any) -> None:
    layers = importlib.import_module(OURS)
    by_rows, plain = layers.DeepGemmRowExperts, layers.DeepGemmBF16Experts
    tensor = [("kFp8StaticTensorSym", f"kFp8{it}Sym") for it in ("StaticTensor", "DynamicTensor", "DynamicToken")]
    for keys in (ROWS, *tensor):
        assert takes(by_rows, config(intermediate_size_per_partition=80, hidden_dim=48), *keys)
        assert not takes(layers.DeepGemmExperts, config(), *keys)
        assert not takes(plain, config(), *keys)
        assert not takes(by_rows, config(intermediate_size_per_partition=72), *keys)
        assert not takes(by_rows, config(moe_backend="triton"), *keys)
    assert not takes(by_rows, config(), ROWS[0], "kFp8StaticTensorSym")
    assert takes(plain, config(intermediate_size_per_partition=72, hidden_dim=40, has_bias=True), None, None)
    assert not takes(plain, config(intermediate_size_per_partition=68), None, None)
    assert not takes(plain, config(in_dtype=torch.float16), None, None)
    for kind in (layers.DeepGemmExperts, by_rows):
        assert not takes(kind, config(), None, None)


def test_mxfp4_takes_groups_of_32_without_biases(vllm: Any) -> None:
    kind = importlib.import_module(OURS).DeepGemmExperts
    assert not takes(kind, config(has_bias=True), "kMxfp4Static")
    assert takes(kind, config(intermediate_size_per_partition=96), "kMxfp4Static")
    assert not takes(kind, config(intermediate_size_per_partition=80), "kMxfp4Static")
    assert not takes(kind, config(), "kInt8")


@pytest.mark.parametrize("all2all", ["none", "allgather_reducescatter", "another"])
def test_tokens_come_as_they_are(vllm: Any, all2all: str) -> None:
    kind = importlib.import_module(OURS).DeepGemmExperts
    of = SimpleNamespace(use_all2all_kernels=all2all != "none", use_ag_rs_all2all_kernels=all2all.startswith("allg"))
    assert takes(kind, config(moe_parallel_config=of)) == (all2all != "another")


def key(*shape: int) -> Any:
    return SimpleNamespace(scale=SimpleNamespace(group_shape=shape))


def linear_config(block: int = 128, **said: Any) -> Any:
    usual = {"weight_quant_key": key(block, block), "activation_quant_key": key(1, block)}
    return SimpleNamespace(**usual | {"out_dtype": torch.bfloat16, "weight_shape": (72, 144)} | said)


def test_which_linear_layers_are_taken(vllm: Any) -> None:
    kind = importlib.import_module(OURS).DeepGemmLinear
    assert (kind.is_supported(90)[0], kind.is_supported(100)[0]) == (True, False)
    assert kind.can_implement(linear_config()) == (True, None)
    finer = {name: getattr(linear_config(32), name) for name in ("weight_quant_key", "activation_quant_key")}
    assert kind.can_implement(linear_config(**finer)) == (True, None)
    assert not kind.can_implement(linear_config(activation_quant_key=finer["activation_quant_key"]))[0]
    refused = {"out_dtype": torch.float16, "weight_shape": (72, 136), "activation_quant_key": None}
    refused["activation_quant_key"] = linear_config().weight_quant_key
    for name, value in {**refused, "weight_quant_key": linear_config().activation_quant_key}.items():
        assert not kind.can_implement(linear_config(**{name: value}))[0], name


def test_which_linear_layers_by_rows_are_taken(vllm: Any) -> None:
    kind = importlib.import_module(OURS).DeepGemmRowLinear
    assert kind(None, ()).is_supported(100)[0] is False
    static = {"activation_quant_key": key(-1, -1)}
    for shape in ((-1, 1), (1, -1), (-1, -1)):
        assert kind.can_implement(linear_config(weight_quant_key=key(*shape), **static)) == (True, None)
    for other in ({"weight_quant_key": key(128, 128)}, {"out_dtype": torch.float16}, {"weight_shape": (72, 136)}):
        assert not kind.can_implement(linear_config(**{"weight_quant_key": key(-1, 1), **static} | other))[0], other


@pytest.mark.parametrize("first", ["the start", "DeepGemmLinear", "DeepGemmRowLinear", "DeepGemmExperts"])
def test_its_batch_invariant_mode_is_ours_too_and_layers_stay(vllm: Any, first: str) -> None:
    """vLLM may be in this mode when the plugin starts, or be asked for it before it chooses a first layer."""
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = first == "the start"
    plugin.register()
    assert deep_gemm.get_batch_invariant() == (first == "the start")
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = True
    layers = importlib.import_module(OURS)
    by_row = key(-1, 1)
    choices: dict[str, Any] = {
        "DeepGemmLinear": lambda: layers.DeepGemmLinear.can_implement(linear_config())[0],
        "DeepGemmRowLinear": lambda: layers.DeepGemmRowLinear.can_implement(linear_config(weight_quant_key=by_row))[0],
        "DeepGemmExperts": lambda: takes(layers.DeepGemmExperts, config()),
    }
    for name in sorted(choices, key=lambda name: name != first):
        assert choices[name](), name
        assert deep_gemm.get_batch_invariant()
    assert isinstance(layers.DeepGemmRowLinear(None, ()), Cutlass)  # else vLLM multiplies in BF16


@pytest.mark.parametrize("shape", [(72, 1), (72,), (1,), ()])
def test_a_linear_layer_by_rows_is_linear(vllm: Any, shape: tuple[int, ...]) -> None:
    kind = importlib.import_module(OURS).DeepGemmRowLinear(None, ())
    w, sf = torch.randn(72, 144).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    layer = SimpleNamespace(weight=w.t(), weight_scale=sf, input_scale=torch.tensor(0.01), input_scale_ub=None)
    x, bias = torch.randn(2, 3, 144).bfloat16(), torch.randn(72).bfloat16()
    as_taken = w, sf.reshape(72, 1) if sf.numel() > 1 else sf.reshape(())
    compiled = torch.compile(partial(kind.apply_weights, layer), backend="eager", fullgraph=True)
    for computed in (kind.apply_weights(layer, x, bias), compiled(x, bias)):
        assert torch.equal(computed, linear(x, as_taken, bias=bias))
    layer.input_scale_ub = torch.tensor(0.5)
    assert torch.equal(kind.apply_weights(layer, x), linear(x.clamp(-0.5, 0.5), as_taken))
    with pytest.raises(NotImplementedError, match="DeepGemmRowLinear casts activations by itself"):
        kind.apply_scaled_mm()


@pytest.mark.parametrize("block", [128, 64, 32])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_a_linear_layer_is_linear(vllm: Any, name: str, block: int) -> None:
    kind = importlib.import_module(OURS).DeepGemmLinear(block)
    w, sf = deep_gemm.per_block_cast_to_fp8(torch.randn(72, 144).bfloat16(), True, block)
    layer = SimpleNamespace(weight=w, **{name: sf.to(torch.float8_e8m0fnu)})
    kind.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, 144).bfloat16(), torch.randn(72).bfloat16()
    assert torch.equal(kind.apply_weights(layer, x, bias), linear(x, (w, sf), bias=bias))
    with pytest.raises(NotImplementedError, match="by itself"):
        kind.apply_block_scaled_mm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_a_layer_of_heads_lies_as_fp8_einsum_takes_it(vllm: Any, dtype: torch.dtype) -> None:
    kind = importlib.import_module(OURS).DeepGemmLinear()
    w, sf = deep_gemm.per_block_cast_to_fp8(torch.randn(3, 256, 144).bfloat16(), True)
    layer = SimpleNamespace(weight=w.flatten(0, 1), weight_scale_inv=sf.flatten(0, 1).to(dtype))
    layer.is_bmm, layer.bmm_batch_size = True, 3
    x = deep_gemm.per_token_cast_to_fp8(torch.randn(5, 3, 144).bfloat16(), False)
    for _ in range(2):  # as when weights are loaded again
        kind.process_weights_after_loading(layer)
        z, expected = torch.empty(2, 5, 3, 256, dtype=torch.bfloat16)
        deep_gemm.fp8_einsum("bhr,hdr->bhd", x, (layer.weight, layer.weight_scale_inv), z, recipe=(1, 128, 128))
        deep_gemm.fp8_einsum("bhr,hdr->bhd", x, (w, sf), expected)
        assert torch.equal(z, expected)
        assert layer.weight.data_ptr() == w.data_ptr()


@pytest.mark.parametrize(("block", "rows"), [(64, 256), (128, 192)])
def test_heads_that_fp8_einsum_does_not_take_are_refused_in_words(vllm: Any, block: int, rows: int) -> None:
    kind = importlib.import_module(OURS).DeepGemmLinear(block)
    w, sf = deep_gemm.per_block_cast_to_fp8(torch.randn(2 * rows, 128).bfloat16(), True, block)
    layer = SimpleNamespace(weight=w, weight_scale_inv=sf, is_bmm=True, bmm_batch_size=2)
    with pytest.raises(NotImplementedError, match=rf"^is_bmm: .*, got {2 * rows} rows in all, for {block}x{block}$"):
        kind.process_weights_after_loading(layer)


def experts_of(num: int, is_fp4: bool) -> Any:
    cast = deep_gemm.quantize_mxfp4 if is_fp4 else deep_gemm.per_block_cast_to_fp8
    return [cast(torch.randn(num, *shape).bfloat16()) for shape in ((256, 160), (160, 128))]


def applied(layer: Any, x: Any, ids: Any, weights: Any, w1: Any, w2: Any, **said: Any) -> Any:
    out = torch.full_like(x, torch.nan)
    given = {"activation": Named.SILU, "expert_map": None, "apply_router_weight_on_input": False}
    unused = ("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")
    layer.apply(out, x, w1[0], w2[0], weights, ids, global_num_experts=4, **dict.fromkeys(unused), **given | said)
    return out


@pytest.mark.parametrize("is_fp4", [False, True])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_experts_are_experts(vllm: Any, is_fp4: bool, limit: float | None) -> None:
    w1, w2 = experts_of(4, is_fp4)
    layer = importlib.import_module(OURS).DeepGemmExperts(w1[1], w2[1], gemm1_clamp_limit=limit, gemm1_alpha=1.7)
    x, ids = torch.randn(3, 160).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, 1]])
    weights = torch.rand(3, 2)
    assert layer.expects_unquantized_inputs
    assert layer.workspace_shapes(3, 256, 160, 2)[0] == (3, 160)
    expected = experts(x, ids, weights, w1, w2, limit=limit)
    assert torch.equal(applied(layer, x, ids, weights, w1, w2), expected)
    alpha = experts(x, ids, weights, w1, w2, limit=limit, alpha=1.7)
    assert torch.equal(applied(layer, x, ids, weights, w1, w2, activation=Named.SWIGLUOAI_UNINTERLEAVE), alpha)


def test_experts_in_bf16_are_experts(vllm: Any) -> None:
    w1, w2 = torch.randn(4, 144, 40).bfloat16(), torch.randn(4, 40, 72).bfloat16()
    x, ids, weights = torch.randn(3, 40).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, 1]]), torch.rand(3, 2)
    biases = {"w1_bias": torch.randn(4, 144), "w2_bias": torch.randn(4, 40)}
    layer = importlib.import_module(OURS).DeepGemmBF16Experts(gemm1_clamp_limit=1.0, **biases)
    expected = experts(x, ids, weights, w1, w2, limit=1.0, **biases)
    assert torch.equal(applied(layer, x, ids, weights, (w1, None), (w2, None)), expected)


@pytest.mark.parametrize("by", ["rows", "experts"])
def test_experts_by_rows_are_experts(vllm: Any, by: str) -> None:
    sizes = (4, 96, 48), (4, 48, 48)
    w1, w2 = (torch.randn(size).to(torch.float8_e4m3fn) for size in sizes)
    s1, s2 = (torch.rand(size[:2] if by == "rows" else size[:1]) / 9 for size in sizes)
    biases = {"w1_bias": torch.randn(4, 96), "w2_bias": torch.randn(4, 48).bfloat16()}
    x, ids, weights = torch.randn(3, 48).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, 1]]), torch.rand(3, 2)
    as_taken = [(w, s[..., None] if by == "rows" else s) for w, s in ((w1, s1), (w2, s2))]
    for of_layer in ({}, biases):
        layer = importlib.import_module(OURS).DeepGemmRowExperts(s1, s2, **of_layer)
        expected = experts(x, ids, weights, *as_taken, **of_layer)
        assert torch.equal(applied(layer, x, ids, weights, (w1, None), (w2, None)), expected)


def test_the_model_says_what_the_weights_leave_out(vllm: Any) -> None:
    w1, w2 = experts_of(4, False)
    x, ids, weights = torch.randn(3, 160).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, 1]]), torch.rand(3, 2)
    of_model = SimpleNamespace(swiglu_limit=1.0, swiglu_alpha=1.7, swiglu_beta=1.0)
    for activation, gating in ((Named.SILU, {}), (Named.SWIGLUOAI_UNINTERLEAVE, {"alpha": 2.0, "beta": 1.0})):
        layer = importlib.import_module(OURS).DeepGemmExperts(w1[1], w2[1], gemm1_alpha=2.0)
        layer.moe_config = of_model
        expected = experts(x, ids, weights, w1, w2, limit=1.0, **gating)
        assert torch.equal(applied(layer, x, ids, weights, w1, w2, activation=activation), expected)


def test_a_hook_before_the_sum_of_rows_is_refused_in_words(vllm: Any) -> None:
    layer = importlib.import_module(OURS).DeepGemmExperts()
    layer.post_gemm2_hook = None
    assert layer.post_gemm2_hook is None
    with pytest.raises(NotImplementedError, match=r"^post_gemm2_hook: "):
        layer.post_gemm2_hook = print


def test_experts_of_other_ranks_and_weights_on_the_input(vllm: Any) -> None:
    w1, w2 = experts_of(2, False)
    layer = importlib.import_module(OURS).DeepGemmExperts(w1[1], w2[1])
    x, ids = torch.randn(3, 160).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, -1]], dtype=torch.int32)
    weights, here = torch.rand(3, 2), torch.tensor([[-1, 1], [0, -1], [1, -1]])
    of_rank = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    given = layer, x, ids, weights, w1, w2
    assert torch.equal(applied(*given, expert_map=of_rank), experts(x, here, weights, w1, w2))
    ones = experts(x, here, torch.ones(3, 2), w1, w2)
    assert torch.equal(applied(*given, expert_map=of_rank, apply_router_weight_on_input=True), ones)


@pytest.mark.release
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_an_installed_vllm_loads_deepseek_v4_into_our_layers(form: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("vllm_on_cpu.py")), str(tmp_path), form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 5:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].split() == ["DeepGemmExperts", "DeepGemmLinear"]
