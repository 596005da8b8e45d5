"""The plugin for SGLang, with a replacement of SGLang that has the parts of 0.5.23 which the plugin uses."""

import importlib
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from dataclasses import field as of_default
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from helpers import as_new_process
from stand_in import BAD_VARIABLES, said, stand_in, started

import deep_gemm
from deep_gemm.integrations import sglang as plugin

experts: Any = deep_gemm.experts
linear: Any = deep_gemm.linear
OURS = "deep_gemm.integrations.sglang_layers"
FP8_UTILS, NAME_OF_LINEAR = plugin.LINEAR
NAME_OF_ROW_LINEAR = plugin.ROW_LINEAR[1]
RUNNER = plugin.EXPERTS[0]
MOE = f"{plugin.OF_LAYERS}.moe"


class HookType(Enum):
    AFTER, AROUND = "after", "around"


class HookRegistry:
    _hooks: ClassVar[defaultdict[str, list[tuple[HookType, Any, Any]]]] = defaultdict(list)

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER, *, source: Any = None) -> None:
        cls._hooks[target].append((hook_type, hook, source))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, ((hook_type, hook, _),) in cls._hooks.items():
            assert hook_type == HookType.AROUND
            path, name = target.rsplit(".", 1)
            owner = sys.modules.get(path) or getattr(sys.modules[path.rpartition(".")[0]], path.rpartition(".")[2])
            setattr(owner, name, around(getattr(owner, name), hook))


def around(own: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: hook(own, *given, **named)


class Backend(Enum):
    AUTO, DEEP_GEMM, TRITON = "auto", "deep_gemm", "triton"

    def is_auto(self) -> bool:
        return self == Backend.AUTO

    def is_deep_gemm(self) -> bool:
        return self == Backend.DEEP_GEMM


UNSAID = ("num_experts", "num_local_experts", "hidden_size", "intermediate_size_per_partition", "layer_id", "top_k")
CONFIG = dict.fromkeys((*UNSAID, "num_fused_shared_experts", "params_dtype", "routing_method_type")) | {
    **{"runner_backend": None, "activation": "silu", "is_gated": True, "apply_router_weight_on_input": False},
    **{"inplace": True, "no_combine": False, "no_combine_keep_router_weight": False, "routed_scaling_factor": None},
    **{"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None, "swiglu_limit": None},
    **{"gate_up_interleaved": True, "layer": None, "use_tp_all_gather_activation": False},
    **{"silu_mul_keep_fp32": False},
}
TRITON = {"b13": None, "b2": None, "use_mxfp8": False, "use_fp8_w8a8": False, "use_int8_w8a8": False} | {
    **{"use_int8_w8a16": False, "use_int4_w4a16": False, "per_channel_quant": False, "w13_scale": None},
    **{"w2_scale": None, "w13_zp": None, "w2_zp": None, "a13_scale": None, "a2_scale": None, "block_shape": None},
    **{"fuse_swiglu_interleaved": False},
}


def record(name: str, required: tuple[str, ...], defaults: dict[str, Any]) -> Any:
    said = [(field, Any, of_default(default=value)) for field, value in defaults.items()]
    return make_dataclass(name, [*((field, Any) for field in required), *said])


MoeRunnerConfig = record("MoeRunnerConfig", (), CONFIG)
TritonMoeQuantInfo = record("TritonMoeQuantInfo", ("w13_weight", "w2_weight"), TRITON)


@dataclass
class DeepGemmMoeQuantInfo:
    w13_weight: Any
    w2_weight: Any
    use_fp8: bool
    w13_scale: Any = None
    w2_scale: Any = None
    block_shape: Any = None
    is_fp4_experts: bool = False
    use_mxfp8: bool = False


class Tokens(NamedTuple):
    hidden_states: Any
    hidden_states_scale: Any
    topk_output: Any
    hidden_states_pre_quant: Any = None


class Combined(NamedTuple):
    hidden_states: Any


class Routes(NamedTuple):
    topk_weights: Any
    topk_ids: Any
    router_logits: Any


class TopKOutputChecker:
    @staticmethod
    def format_is_standard(topk_output: Any) -> bool:
        return isinstance(topk_output, Routes)


def own_row_linear(
    input: Any,
    weight: Any,
    weight_scale: Any,
    input_scale: Any = None,
    input_scale_ub: Any = None,
    bias: Any = None,
    cutlass_fp8_supported: bool = True,
    use_per_token_if_dynamic: bool = False,
    pad_output: Any = None,
    compressed_tensor_quant: bool = False,
    pre_quant_output_dtype: Any = None,
) -> str:
    return f"SGLang's {compressed_tensor_quant}"


def own_linear(
    input: Any,
    weight: Any,
    block_size: Any,
    weight_scale: Any,
    input_scale: Any = None,
    bias: Any = None,
    act_scale_ue8m0: bool = False,
    weight_bf16: Any = None,
) -> str:
    return f"SGLang's {act_scale_ue8m0}"


def own_mode(enable_bmm: bool = True) -> str:
    return f"SGLang's {enable_bmm}"


@contextmanager
def use_symmetric_memory(group_coordinator: Any, disabled: bool = False) -> Iterator[None]:
    assert (group_coordinator, disabled) == ("the group", False)
    yield


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the replacement. After the test, unload our modules that imported from it."""

    class MoeRunner:
        def __init__(self, config: Any, lora_enabled: bool = False) -> None:
            self.config, self.lora_enabled = config, lora_enabled

        def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
            return "SGLang's"

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: SimpleNamespace(tp_group="the group"),
        },
        "sglang.srt.utils": {"is_sm90_supported": lambda: True},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        plugin.MODE[0]: {plugin.MODE[1]: own_mode},
        "sglang.srt.distributed.device_communicators.pynccl_allocator": {"use_symmetric_memory": use_symmetric_memory},
        FP8_UTILS: {
            **{NAME_OF_LINEAR: own_linear, NAME_OF_ROW_LINEAR: own_row_linear, "use_triton_w8a8_fp8_kernel": False},
            "get_fp8_gemm_runner_backend": lambda: Backend.AUTO,
        },
        RUNNER: {"MoeRunner": MoeRunner},
        f"{plugin.OF_LAYERS}.deep_gemm_wrapper.configurer": {"ENABLE_JIT_DEEPGEMM": True},
        f"{plugin.OF_LAYERS}.dp_attention": {"is_allocation_symmetric": lambda: True},
        f"{MOE}.moe_runner.base": {"MoeRunnerConfig": MoeRunnerConfig},
        f"{MOE}.moe_runner.deep_gemm": {"DeepGemmMoeQuantInfo": DeepGemmMoeQuantInfo},
        f"{MOE}.moe_runner.triton": {"TritonMoeQuantInfo": TritonMoeQuantInfo},
        f"{MOE}.token_dispatcher.standard": {"StandardCombineInput": Combined, "StandardDispatchOutput": Tokens},
        f"{MOE}.topk": {"TopKOutputChecker": TopKOutputChecker},
        f"{MOE}.utils": {"get_moe_runner_backend": lambda: Backend.AUTO},
    }
    yield stand_in(monkeypatch, contents)
    sys.modules.pop(OURS, None)


@pytest.fixture
def hooked(sglang: Any) -> Any:
    """Return SGLang with the plugin's hooks."""
    plugin.register()
    HookRegistry.apply_hooks()
    return sglang


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    found = importlib.metadata.entry_points(group="sglang.srt.plugins")
    assert [each.load() for each in found if each.name == "deep_gemm"] == [plugin.register]


@pytest.mark.parametrize("is_there", [True, False])
def test_hooks_stand_around_the_functions_that_are_there(
    sglang: Any, is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_there:
        del sglang[FP8_UTILS].use_triton_w8a8_fp8_kernel
    plugin.register()
    of_rows = [f"{FP8_UTILS}.{NAME_OF_ROW_LINEAR}"] * is_there
    linear, mode = f"{FP8_UTILS}.{NAME_OF_LINEAR}", ".".join(plugin.MODE)
    assert [*HookRegistry._hooks] == [mode, linear, f"{RUNNER}.MoeRunner.run", *of_rows]
    told = f"deep_gemm leaves out row_linear_or: sglang 0.5.23 has no {FP8_UTILS}.use_triton_w8a8_fp8_kernel"
    assert said(caplog) == [told] * (not is_there)


@pytest.mark.parametrize("reason", ["variable", "another GPU", "no DeepGEMM"])
def test_no_hooks_where_the_plugin_is_turned_off(sglang: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "variable":
        as_new_process(monkeypatch, DG_DISABLE_SGLANG_PLUGIN=1)
    elif reason == "another GPU":
        sglang["sglang.srt.utils"].is_sm90_supported = lambda: False
    else:
        sglang[f"{plugin.OF_LAYERS}.deep_gemm_wrapper.configurer"].ENABLE_JIT_DEEPGEMM = False
    plugin.register()
    assert HookRegistry._hooks == {}


@pytest.mark.parametrize("variable", BAD_VARIABLES)
def test_a_bad_variable_ends_no_server(
    sglang: Any, variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started(plugin, "sglang.srt.plugins", variable, monkeypatch)
    assert HookRegistry._hooks == {}
    told = variable.replace("DG_CACHE_DIR", "DG_JIT_CACHE_DIR")
    assert said(caplog) == [f"deep_gemm leaves all layers to SGLang: SettingError: {told}: expected"]


def test_a_start_that_fails_changes_nothing(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Full(HookRegistry):
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER, *, source: Any = None) -> None:
            super().register(target, hook, hook_type, source=source)
            if sum(map(len, cls._hooks.values())) == 3:
                raise RuntimeError("no room for\nhooks")

    sglang["sglang.srt.plugins.hook_registry"].HookRegistry = Full
    Full._hooks["another plugin's"].append((HookType.AFTER, "hook", None))
    plugin.register()
    assert Full._hooks == {"another plugin's": [(HookType.AFTER, "hook", None)]}
    assert said(caplog) == ["deep_gemm leaves all layers to SGLang: RuntimeError: no room for hooks"]


@pytest.mark.parametrize("change", ["gone", "other parameters"])
def test_another_release_is_left_alone_in_words(sglang: Any, change: str, caplog: pytest.LogCaptureFixture) -> None:
    runner = sglang[RUNNER].MoeRunner
    if change == "gone":
        del runner.run
    else:
        runner.run = lambda self, dispatch_output, quant_info: None
    with caplog.at_level(logging.WARNING, plugin.logger.name):
        plugin.register()
    expected = f"0.5.23 has no {RUNNER}.MoeRunner.run" if change == "gone" else "expected MoeRunner.run of ('self', "
    assert expected in caplog.text
    assert HookRegistry._hooks == {}


def weight_of(*shape: int, block: int = 128) -> Any:
    return deep_gemm.per_block_cast_to_fp8(torch.randn(shape).bfloat16(), True, block)


@pytest.mark.parametrize("block", [128, 64, 32])
def test_a_linear_layer_is_linear(hooked: Any, block: int) -> None:
    there = getattr(hooked[FP8_UTILS], NAME_OF_LINEAR)
    w, sf = weight_of(72, 144, block=block)
    x, bias = torch.randn(2, 3, 144).bfloat16(), torch.randn(72).bfloat16()
    given = {"input": x, "weight": w, "block_size": [block, block], "weight_scale": sf, "input_scale": None}
    assert torch.equal(there(**given, bias=bias), linear(x, (w, sf), bias=bias))
    assert torch.equal(there(x[0], w, [block, block], sf), linear(x[0], (w, sf)))
    assert there(x[0, :0], w, [block, block], sf).shape == (0, 72)


def test_a_compiled_model_has_it_in_its_graph(hooked: Any) -> None:
    there = getattr(hooked[FP8_UTILS], NAME_OF_LINEAR)
    w, sf = weight_of(128, 128)
    x = torch.randn(4, 128).bfloat16()
    compiled = torch.compile(partial(there, block_size=[128, 128]), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight=w, weight_scale=sf), linear(x, (w, sf)))


def test_an_older_release_has_fewer_parameters(sglang: Any) -> None:
    """SGLang 0.5.17 has neither the parameter `act_scale_ue8m0` nor `weight_bf16`."""
    got: list[Any] = []

    def older(
        input: Any, weight: Any, block_size: Any, weight_scale: Any, input_scale: Any = None, bias: Any = None
    ) -> str:
        got.append(bias)
        return "SGLang's"

    setattr(sglang[FP8_UTILS], NAME_OF_LINEAR, older)
    plugin.register()
    HookRegistry.apply_hooks()
    there = getattr(sglang[FP8_UTILS], NAME_OF_LINEAR)
    w, sf = weight_of(72, 144)
    x = torch.randn(2, 144)
    assert torch.equal(there(x.bfloat16(), w, [128, 128], sf), linear(x.bfloat16(), (w, sf)))
    assert there(x.half(), w, [128, 128], sf, bias="a bias") == "SGLang's"
    assert got == ["a bias"]


def test_which_linear_layers_are_left_to_sglang(hooked: Any, caplog: pytest.LogCaptureFixture) -> None:
    there = getattr(hooked[FP8_UTILS], NAME_OF_LINEAR)
    w, sf = weight_of(72, 144)
    usual = {"input": torch.randn(2, 144).bfloat16(), "weight": w, "block_size": [128, 128], "weight_scale": sf}
    for name, value in {
        "input": torch.randn(2, 144).half(),
        "weight": w[:71],
        "block_size": [1, 32],
        "weight_scale": sf.int(),
        "input_scale": sf,
    }.items():
        assert there(**usual | {name: value}) == "SGLang's False", name
    assert there(**usual | {"weight": w[None]}) == "SGLang's False"
    with caplog.at_level(logging.INFO, plugin.logger.name):
        assert there(**usual, act_scale_ue8m0=True) == "SGLang's True"
    assert "leaves a linear layer to SGLang: activations are cast with FP32 scales here" in caplog.text


@pytest.mark.parametrize("shape", [(72, 1), (72,), (1,), ()])
def test_a_linear_layer_by_rows_is_linear(hooked: Any, shape: tuple[int, ...]) -> None:
    there = getattr(hooked[FP8_UTILS], NAME_OF_ROW_LINEAR)
    w, sf = torch.randn(72, 144).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    x, bias = torch.randn(2, 3, 144).bfloat16(), torch.randn(72).bfloat16()
    expected = linear(x, (w, sf.reshape(72, 1) if sf.numel() > 1 else sf.reshape(())), bias=bias)
    given = {"input": x, "weight": w.t(), "weight_scale": sf, "input_scale": torch.tensor(0.01), "bias": bias}
    assert torch.equal(there(**given, use_per_token_if_dynamic=True, compressed_tensor_quant=True), expected)
    compiled = torch.compile(partial(there, bias=bias), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, w.t(), sf), expected)


def test_which_linear_layers_by_rows_are_left_to_sglang(hooked: Any, caplog: pytest.LogCaptureFixture) -> None:
    there = getattr(hooked[FP8_UTILS], NAME_OF_ROW_LINEAR)
    w, sf = torch.randn(72, 144).to(torch.float8_e4m3fn), torch.rand(72, 1)
    usual = {"input": torch.randn(2, 144).bfloat16(), "weight": w.t(), "weight_scale": sf}
    assert not isinstance(there(**usual), str)
    with caplog.at_level(logging.INFO, plugin.logger.name):
        assert there(w[:2], w.t(), sf, sf, compressed_tensor_quant=True) == "SGLang's True"
    assert "leaves a linear layer with scales of rows to SGLang: activations are cast already" in caplog.text
    for name, value in {
        "input": torch.randn(2, 144).half(),
        "weight": w.t().contiguous(),
        "weight_scale": torch.rand(3),
        "input_scale_ub": sf,
    }.items():
        assert there(**usual | {name: value}) == "SGLang's False", name
    utils = hooked[FP8_UTILS]
    asked: dict[str, Any] = {"use_triton_w8a8_fp8_kernel": True, "get_fp8_gemm_runner_backend": lambda: Backend.TRITON}
    for name, other in asked.items():
        before = getattr(utils, name)
        setattr(utils, name, other)
        assert there(**usual) == "SGLang's False", name
        setattr(utils, name, before)


X = torch.randn(3, 160).bfloat16()
IDS = torch.tensor([[0, 3], [1, -1], [3, 1]], dtype=torch.int32)
WEIGHTS = torch.rand(3, 2)


def weights_of_experts(kind: str) -> Any:
    """Make weights in the form of a kind of runner, and in the form that `experts` accepts."""
    if kind == "FP4":
        w1, w2 = (deep_gemm.quantize_mxfp4(torch.randn(4, *of).bfloat16()) for of in ((256, 160), (160, 128)))
        w1, w2 = ((w[0].view(torch.int8), w[1].float()) for w in (w1, w2))
    else:
        w1, w2 = weight_of(4, 256, 160), weight_of(4, 160, 128)
    said: dict[str, Any] = {"w13_scale": w1[1], "w2_scale": w2[1], "block_shape": [128, 128]}
    if kind == "Triton":
        return TritonMoeQuantInfo(w1[0], w2[0], use_fp8_w8a8=True, **said), w1, w2
    return DeepGemmMoeQuantInfo(w1[0], w2[0], True, is_fp4_experts=kind == "FP4", **said), w1, w2


def tokens(x: Any = X, ids: Any = IDS, weights: Any = WEIGHTS) -> Tokens:
    return Tokens(x, None, Routes(weights, ids, None), ("what was cast before",))


ALPHA = {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False}
GATINGS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"swiglu_limit": 1.0}, {"limit": 1.0}),
    (ALPHA, {"alpha": 1.7, "beta": 1.0, "limit": 7.0}),
    ({**ALPHA, "gemm1_beta": 1.0}, {"alpha": 1.7, "beta": 1.0, "limit": 7.0}),
    ({"activation": "situ", "gemm1_clamp_limit": 20.0}, {"activation": "situ", "beta": 20.0}),
    (
        {"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 20.0},
        {"activation": "situ", "alpha": 3.0, "beta": 20.0},
    ),
)


@pytest.mark.parametrize("kind", ["Triton", "DeepGEMM", "FP4"])
@pytest.mark.parametrize(("said", "expected"), GATINGS)
def test_experts_are_experts(hooked: Any, kind: str, said: dict[str, Any], expected: dict[str, Any]) -> None:
    given, w1, w2 = weights_of_experts(kind)
    runner = hooked[RUNNER].MoeRunner(MoeRunnerConfig(num_experts=4, num_local_experts=4, **said))
    for _ in range(2):
        got = runner.run(tokens(), given)
        assert isinstance(got, Combined)
        assert torch.equal(got.hidden_states, experts(X, IDS, WEIGHTS, w1, w2, **expected))


def test_weights_of_routes_are_scaled(hooked: Any) -> None:
    given, w1, w2 = weights_of_experts("Triton")
    runner = hooked[RUNNER].MoeRunner(MoeRunnerConfig(routed_scaling_factor=2.5))
    assert torch.equal(runner.run(tokens(), given).hidden_states, experts(X, IDS, 2.5 * WEIGHTS, w1, w2))


def test_some_fields_make_no_difference(hooked: Any) -> None:
    given, w1, w2 = weights_of_experts("DeepGEMM")
    said = {"silu_mul_keep_fp32": True, "inplace": False, "layer": 1, "num_fused_shared_experts": 1, "num_experts": 9}
    got = hooked[RUNNER].MoeRunner(MoeRunnerConfig(**said)).run(tokens(), given)
    assert torch.equal(got.hidden_states, experts(X, IDS, WEIGHTS, w1, w2))


def test_no_tokens(hooked: Any) -> None:
    given, *_ = weights_of_experts("DeepGEMM")
    none = tokens(X[:0], IDS[:0], WEIGHTS[:0])
    assert hooked[RUNNER].MoeRunner(MoeRunnerConfig()).run(none, given).hidden_states.shape == (0, 160)


@pytest.mark.parametrize(
    "said",
    [
        {"apply_router_weight_on_input": True},
        {"no_combine": True},
        {"is_gated": False},
        {"activation": "gelu"},
        {"activation": "situ"},
        {"gemm1_clamp_limit": 7.0},
        {**ALPHA, "gate_up_interleaved": True},
        {**ALPHA, "gemm1_beta": 0.5},
        {**ALPHA, "swiglu_limit": 7.0},
        {"gemm1_alpha": 1.7, "gate_up_interleaved": False},
    ],
)
def test_other_activations_and_sums_are_left_to_sglang(hooked: Any, said: dict[str, Any]) -> None:
    given, *_ = weights_of_experts("Triton")
    assert hooked[RUNNER].MoeRunner(MoeRunnerConfig(**said)).run(tokens(), given) == "SGLang's"


def test_experts_in_bf16_are_experts(hooked: Any) -> None:
    w1, w2 = torch.randn(4, 144, 160).bfloat16(), torch.randn(4, 160, 72).bfloat16()
    runner = hooked[RUNNER].MoeRunner(MoeRunnerConfig(swiglu_limit=1.0))
    got = runner.run(tokens(), TritonMoeQuantInfo(w1, w2))
    assert torch.equal(got.hidden_states, experts(X, IDS, WEIGHTS, w1, w2, limit=1.0))
    other = hooked[RUNNER].MoeRunner(MoeRunnerConfig())
    assert other.run(tokens(), TritonMoeQuantInfo(w1, w2, fuse_swiglu_interleaved=True)) == "SGLang's"


@pytest.mark.parametrize("by", ["rows", "experts"])
def test_experts_by_rows_are_experts(hooked: Any, by: str) -> None:
    sizes = (4, 96, 160), (4, 160, 48)
    w1, w2 = (torch.randn(size).to(torch.float8_e4m3fn) for size in sizes)
    s1, s2 = (torch.rand(*size[:2], 1) / 9 if by == "rows" else torch.rand(4) / 9 for size in sizes)
    of_rows = {"per_channel_quant": by == "rows", "use_fp8_w8a8": True, "a13_scale": torch.tensor(0.1)}
    b1, b2 = torch.randn(4, 96), torch.randn(4, 160)
    for of_layer, biases in (({}, {}), ({"b13": b1, "b2": b2}, {"w1_bias": b1, "w2_bias": b2})):
        given = TritonMoeQuantInfo(w1, w2, w13_scale=s1, w2_scale=s2, **of_rows, **of_layer)
        got = hooked[RUNNER].MoeRunner(MoeRunnerConfig()).run(tokens(), given).hidden_states
        assert torch.equal(got, experts(X, IDS, WEIGHTS, (w1, s1), (w2, s2), **biases))


def changed(given: Any, **said: Any) -> Any:
    vars(given).update(said)
    return given


def test_other_weights_and_tokens_are_left_to_sglang(hooked: Any, caplog: pytest.LogCaptureFixture) -> None:
    def is_left(given: Any, dispatched: Any = None, **of: Any) -> bool:
        runner = hooked[RUNNER].MoeRunner(MoeRunnerConfig(), **of)
        return bool(isinstance(runner.run(dispatched or tokens(), given), str))

    triton, *_ = weights_of_experts("Triton")
    fp4, *_ = weights_of_experts("FP4")
    assert not is_left(triton)
    assert is_left(triton, lora_enabled=True)
    assert is_left(SimpleNamespace(**vars(triton)))
    assert is_left(SimpleNamespace())
    assert is_left(triton, (X, None, Routes(WEIGHTS, IDS, None)))
    assert is_left(triton, tokens()._replace(hidden_states_scale=X))
    assert is_left(triton, tokens()._replace(topk_output=(WEIGHTS, IDS, None)))
    assert is_left(triton, tokens(X.half()))
    assert is_left(changed(weights_of_experts("Triton")[0], w13_zp=X))
    assert is_left(changed(weights_of_experts("Triton")[0], use_int8_w8a8=True))
    assert is_left(changed(weights_of_experts("Triton")[0], block_shape=[1, 32]))
    assert is_left(changed(weights_of_experts("Triton")[0], w13_weight=triton.w13_weight.bfloat16()))
    assert is_left(changed(fp4, w13_weight=fp4.w13_weight[:, :80]))
    with caplog.at_level(logging.INFO, plugin.logger.name):
        assert is_left(changed(triton, w13_weight=triton.w13_weight[:, :192]))
    assert "leaves experts to SGLang: the intermediate size 96 is not a multiple of 128" in caplog.text


def test_its_batch_invariant_mode_is_ours_too_and_layers_stay(hooked: Any) -> None:
    assert not deep_gemm.get_batch_invariant()
    assert hooked[plugin.MODE[0]].enable_batch_invariant_mode(enable_bmm=False) == "SGLang's False"
    assert deep_gemm.get_batch_invariant()
    w, sf = weight_of(72, 144)
    x = torch.randn(2, 144).bfloat16()
    by_rows = torch.rand(72, 1)
    assert torch.equal(getattr(hooked[FP8_UTILS], NAME_OF_LINEAR)(x, w, [128, 128], sf), linear(x, (w, sf)))
    assert torch.equal(getattr(hooked[FP8_UTILS], NAME_OF_ROW_LINEAR)(x, w.t(), by_rows), linear(x, (w, by_rows)))
    given, w1, w2 = weights_of_experts("Triton")
    got = hooked[RUNNER].MoeRunner(MoeRunnerConfig()).run(tokens(), given)
    assert torch.equal(got.hidden_states, experts(X, IDS, WEIGHTS, w1, w2))


def test_a_field_of_a_newer_release_must_have_its_default(hooked: Any) -> None:
    given, w1, w2 = weights_of_experts("Triton")
    newer = record("MoeRunnerConfig", (), {**CONFIG, "gate_is_softened": 0.0})
    taken, left = (hooked[RUNNER].MoeRunner(newer(gate_is_softened=by)) for by in (0.0, 0.5))
    assert torch.equal(taken.run(tokens(), given).hidden_states, experts(X, IDS, WEIGHTS, w1, w2))
    assert left.run(tokens(), given) == "SGLang's"


def test_what_is_asked_for_by_name_is_left_alone(hooked: Any) -> None:
    given, *_ = weights_of_experts("Triton")
    for backend, is_taken in ((Backend.TRITON, False), (Backend.DEEP_GEMM, True)):
        sys.modules[OURS].get_moe_runner_backend = lambda asked=backend: asked  # type: ignore[attr-defined]
        got = hooked[RUNNER].MoeRunner(MoeRunnerConfig()).run(tokens(), given)
        assert isinstance(got, Combined) == is_taken
