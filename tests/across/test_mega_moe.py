"""Mega MoE on one process: names, mistakes, alternating rows, values. test_distributed.py has several processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import forked
import numpy as np
import pytest
import torch
from fp4_cases import FORMS
from helpers import refused
from mega_cases import Model, Tokens, chain, dequantized, fill, filling, result
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.checks import Operand

MODEL = Model()
Y = torch.zeros(4, 256, dtype=torch.bfloat16)
FP4 = replace(MODEL, is_fp4=True)
STATS = "cumulative_local_expert_recv_stats"
NAMES = {
    "SM90SymmBuffer",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch_sm90",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
}


def test_names_are_there_and_those_that_could_not_work_are_not() -> None:
    assert set(vars(deep_gemm)["__all__"]) >= NAMES
    assert all(getattr(deep_gemm, name) is getattr(deep_gemm.distributed, name) for name in NAMES)
    for name in ("SymmBuffer", "bf16_mega_moe"):
        assert not hasattr(deep_gemm, name)


WITHOUT_DISTRIBUTED = """
import sys, types
import torch
for name in [name for name in sys.modules if name.startswith("torch.distributed.")]:
    sys.modules[name] = None
sys.modules["torch._C._distributed_c10d"] = None
torch.distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
torch.distributed.is_available = lambda: False
import deep_gemm
from deep_gemm import *
print(sorted(name for name in {"distributed", *NAMES} if hasattr(deep_gemm, name)))
print(linear(torch.ones(2, 128), per_block_cast_to_fp8(torch.ones(8, 128)))[0, 0].item())
"""


def test_the_package_works_without_these_where_torch_has_no_distributed() -> None:
    code = WITHOUT_DISTRIBUTED.replace("NAMES", str(NAMES))
    done = forked.run("-c", code)
    assert done.stdout.split("\n")[:2] == ["[]", "128.0"]


# The buffer


def test_a_buffer_is_what_callers_fill() -> None:
    buffer = MODEL.buffer(129)
    t = 256  # rounded up to a multiple of 128
    assert (buffer.num_experts, buffer.num_max_tokens_per_rank, buffer.num_topk) == (6, t, 3)
    assert (buffer.hidden, buffer.intermediate_hidden) == (256, 128)
    rows = t * 3
    shapes = {
        "x": (torch.float8_e4m3fn, (t, 256)),
        "x_sf": (torch.float32, (t, 2)),
        "topk_idx": (torch.int64, (t, 3)),
        "topk_weights": (torch.float32, (t, 3)),
        "l1_acts": (torch.float8_e4m3fn, (rows, 256)),
        "l1_acts_sf": (torch.float32, (rows, 2)),
        "l2_acts": (torch.float8_e4m3fn, (rows, 128)),
        "l2_acts_sf": (torch.float32, (rows, 2)),
    }
    for name, (dtype, shape) in shapes.items():
        tensor = getattr(buffer, name)
        assert (tensor.dtype, tuple(tensor.shape), tensor.device.type) == (dtype, shape, "cpu"), name
    assert bool((buffer.topk_idx == -1).all())


def test_a_buffer_serves_calls_with_and_without_inference_mode() -> None:
    tokens, weights = MODEL.tokens(3), MODEL.weights()
    with torch.inference_mode():
        buffer = MODEL.buffer()
        first = result(buffer, tokens, *weights)
    assert torch.equal(first, result(buffer, tokens, *weights))


def test_a_buffer_that_was_destroyed_is_refused() -> None:
    buffer = MODEL.buffer()
    buffer.destroy()
    buffer.destroy()
    y = torch.empty(1, 256, dtype=torch.bfloat16)
    for use in (lambda: buffer.x, lambda: deep_gemm.fp8_mega_moe(y, *MODEL.weights(), buffer)):
        with pytest.raises(ValueError, match="buffer: expected a buffer in use, got a destroyed one"):
            use()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected an integer in 1..2147483647, got 0"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank: expected an integer in 1.."),
        ({"num_topk": 0}, "num_topk: expected an integer in 1.."),
        ({"hidden": 384}, "hidden: expected a multiple of 256, got 384"),
        ({"intermediate_hidden": 192}, "intermediate_hidden: expected a multiple of 128, got 192"),
        ({"hidden": 0}, "hidden: expected an integer in 1.."),
        ({"hidden": 256.0}, "hidden: expected an integer in 1.."),
        ({"use_fp8_dispatch": False}, "NotImplementedError: use_fp8_dispatch: expected True, got False"),
        ({"activation": "gelu"}, "NotImplementedError: activation: expected 'swiglu', got 'gelu'"),
    ],
)
def test_what_a_buffer_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    sizes = {"num_experts": 6, "num_max_tokens_per_rank": 8, "num_topk": 3, "hidden": 256, "intermediate_hidden": 128}
    with refused(message):
        deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, **(sizes | changed))


# Weights


def test_rows_of_gate_and_up_follow_each_other_in_turns_of_8() -> None:
    l1, l2 = Model(inter=256, num_experts=2).weights()
    (values, scales), same = deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2)
    assert scales is l1[1]
    assert same[0] is l2[0]
    assert same[1] is l2[1]
    for j in range(256 // 8):
        for half in range(2):  # gate, up
            got = values[:, 16 * j + 8 * half : 16 * j + 8 * half + 8]
            right = l1[0][:, 256 * half + 8 * j : 256 * half + 8 * j + 8]
            assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))
    assert values.is_contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda l1, l2: (l1[0], l2), "TypeError: l1_weights: expected a pair (values, scales), got Tensor"),
        (lambda l1, l2: (l1, (l2[0], None)), "TypeError: sfl2_weights: expected a tensor, got NoneType"),
        (lambda l1, l2: ((l1[0].float(), l1[1]), l2), "l1_weights: expected dtype torch.float8_e4m3fn"),
        (lambda l1, l2: ((l1[0], l1[1][:, :1]), l2), "sfl1_weights: expected shape (groups, ceil(2 inter"),
        (lambda l1, l2: (l1, (l2[0][:5], l2[1][:5])), "l2_weights: expected shape (experts here, hidden"),
        (
            lambda l1, l2: ((l1[0][:, :128], l1[1][:, :1]), l2),
            "l1_weights: expected 2 * intermediate = 256 rows, gate and up, because l2_weights has depth 128, got 128",
        ),
        (
            lambda l1, l2: ((l1[0][..., :128], l1[1][..., :1]), (l2[0][:, :128], l2[1][:, :1])),
            "hidden: expected a multiple of 256, got 128",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Callable[[Operand, Operand], Any], message: str) -> None:
    with refused(message):
        deep_gemm.transform_weights_for_mega_moe_sm90(*change(*MODEL.weights()))


@pytest.mark.parametrize("form", FORMS)
def test_a_transform_of_fp4_keeps_its_bytes_and_its_input(form: str) -> None:
    """Transformed weights share memory with the given ones, so a call sees weights that were refreshed in place."""
    l1, l2 = ((values, FORMS[form](scales)) for values, scales in FP4.weights())
    before = [each.clone() for each in (*l1, *l2)]
    made = deep_gemm.transform_weights_for_mega_moe(l1, l2)
    for (given, got), was in zip(zip((*l1, *l2), (*made[0], *made[1]), strict=True), before, strict=True):
        assert got.data_ptr() == given.data_ptr()
        assert got.numel() * got.element_size() == given.numel() * given.element_size()
        assert torch.equal(given.contiguous().view(torch.uint8), was.contiguous().view(torch.uint8))
    tokens = FP4.tokens(9)
    buffer, y = FP4.buffer(), torch.empty(9, FP4.hidden, dtype=torch.bfloat16)
    fill(buffer, tokens)
    l1[0].zero_()
    deep_gemm.fp8_fp4_mega_moe(y, *made, buffer)
    assert not y.any()


@pytest.mark.parametrize("model", [MODEL, FP4])
def test_each_function_takes_its_own_weights_alone(model: Model) -> None:
    weights, buffer = model.weights(), model.buffer()
    function: Any = deep_gemm.fp8_mega_moe if model.is_fp4 else deep_gemm.fp8_fp4_mega_moe
    of_other: Callable[..., Any] = deep_gemm.transform_weights_for_mega_moe
    if model.is_fp4:
        of_other = deep_gemm.transform_weights_for_mega_moe_sm90
    calls: list[tuple[Any, ...]] = [(of_other, *weights), (function, Y, *weights, buffer)]
    for call, *given in calls:
        with pytest.raises(ValueError, match=r"^l1_weights: expected dtype torch\.(float8_e4m3fn|int8)"):
            call(*given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts: expected 0, got 1"),
        ({"mma_type": "bf16xfp4"}, "mma_type: expected a name that begins with 'fp8', got 'bf16xfp4'"),
        ({"use_fp8_dispatch": False}, "use_fp8_dispatch: expected True, got False"),
        ({"activation": "situ"}, "activation: expected 'swiglu', got 'situ'"),
    ],
)
def test_what_a_buffer_of_the_other_name_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    assert deep_gemm.get_symm_buffer_for_mega_moe(None, 6, 8, 3, 256, 128, 0, True, "fp8xfp8").x.shape == (128, 256)
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        deep_gemm.get_symm_buffer_for_mega_moe(None, 6, 8, 3, 256, 128, **changed)
    if changed.keys() <= {"mma_type", "activation"}:
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            deep_gemm.transform_weights_for_mega_moe(*FP4.weights(), **changed)


def test_keywords_of_later_are_accepted_where_they_change_nothing() -> None:
    tokens, weights, buffer = FP4.tokens(4), FP4.weights(), FP4.buffer()
    fill(buffer, tokens)
    y = torch.empty_like(Y)
    call: Any = deep_gemm.fp8_fp4_mega_moe
    call(y, *weights, buffer, None, (1, 1, 32), "swiglu", None, True, something_new=None, another=False)
    assert torch.equal(y, result(FP4.buffer(), tokens, *weights))
    for said, message in (
        ({"something_new": True}, "something_new: expected None, got True"),
        ({"recipe": (1, 128, 128)}, r"recipe: expected \(1, 1, 32\), got \(1, 128, 128\)"),
        ({"activation": "situ"}, "activation: expected 'swiglu', got 'situ'"),
    ):
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            call(y, *weights, buffer, **said)
    with pytest.raises(TypeError, match=r"^sym_buffer: expected SM90SymmBuffer, got NoneType"):
        deep_gemm.fp8_fp4_mega_moe(y, *weights, None)  # type: ignore[arg-type]


# Values


@pytest.mark.combinations
@pytest.mark.parametrize("clamp", [None, 0.25])
@pytest.mark.parametrize(
    ("model", "count"),
    [
        (MODEL, 1),
        (MODEL, 33),
        (Model(512, 256, 32, 6), 8),  # hidden 4096, intermediate 2048, 256 experts, top-6, made smaller
        (Model(768, 384, 48, 6), 24),  # hidden 7168, intermediate 3072, 384 experts, top-6, made smaller
        (FP4, 33),
        (Model(512, 384, 48, 6, is_fp4=True), 24),
    ],
)
def test_a_call_is_the_chain_of_one_expert_after_another(model: Model, count: int, clamp: float | None) -> None:
    tokens, weights = model.tokens(count), model.weights()
    got = result(model.buffer(), tokens, *weights, clamp=clamp)
    right = chain(tokens, *weights, clamp)
    assert deep_gemm.calc_diff(got, right) < 1e-6
    assert clamp is None or deep_gemm.calc_diff(got, chain(tokens, *weights)) > 1e-2


def test_a_route_without_an_expert_adds_nothing_whatever_its_weight_is() -> None:
    tokens = MODEL.tokens(6)
    tokens[2][3] = -1
    tokens[3][tokens[2] < 0] = torch.nan
    got = result(MODEL.buffer(), tokens, *MODEL.weights())
    assert not got[3].any()
    assert bool(got[[0, 1, 2, 4, 5]].any(1).all())


def test_rows_behind_those_of_y_are_not_read() -> None:
    tokens, buffer = MODEL.tokens(4), MODEL.buffer()
    buffer.x.view(torch.uint8).fill_(0x7F)  # NaN
    buffer.topk_idx.fill_(99)
    buffer.topk_weights.fill_(torch.nan)
    first = result(buffer, tokens, *MODEL.weights())
    assert torch.equal(first, result(MODEL.buffer(), tokens, *MODEL.weights()))


def test_a_token_has_the_same_bits_beside_other_tokens_and_in_each_call() -> None:
    tokens, buffer = MODEL.tokens(20), MODEL.buffer()
    all_at_once = result(buffer, tokens, *MODEL.weights())
    assert torch.equal(all_at_once, result(buffer, tokens, *MODEL.weights()))
    last: Tokens = tuple(each[19:] for each in tokens)  # type: ignore[assignment]
    assert torch.equal(all_at_once[19:], result(buffer, last, *MODEL.weights()))


def test_the_weight_of_a_route_comes_before_the_cast_of_its_middle_and_routes_are_added_in_order() -> None:
    (x, sf, _, _), weights = MODEL.tokens(1), MODEL.weights()

    def of_routes(ids: list[int], p: list[float]) -> Tensor:
        return result(MODEL.buffer(), (x, sf, torch.tensor([ids]), torch.tensor([p])), *weights)[0].float()

    large = 3 * 2.0**20  # FP32 rounds a small number that is added to it
    y = of_routes([1, 0, 1], [large, 1.0, -large])
    one, two = of_routes([1, -1, -1], [large] * 3), of_routes([-1, 0, -1], [1.0] * 3)
    three = of_routes([-1, -1, 1], [-large] * 3)
    assert torch.equal(y, ((one + two) + three).bfloat16().float())
    assert not torch.equal(y, ((one + three) + two).bfloat16().float())
    weighted_later = (large * of_routes([1, -1, -1], [1.0] * 3)).bfloat16().float()
    assert not torch.equal(one, weighted_later)  # scales that are no powers of two round differently


def test_the_middle_has_a_scale_for_each_64_columns() -> None:
    """If every other block of 64 columns is far larger, one scale for 128 would leave few bits of the small blocks."""
    model = Model(num_experts=1, topk=1)
    (v1, s1), l2 = model.weights()
    v1 = v1.clone()
    v1[0, 128:192] = (v1[0, 128:192].float() * 2.0**-6).to(v1.dtype)
    values = l2[0].float()
    values[:, :, 64:] = 0  # only the small columns of the middle reach the result
    l2 = values.to(v1.dtype), l2[1]
    tokens = model.tokens(8)
    tokens[2].zero_()
    got, right = result(model.buffer(), tokens, (v1, s1), l2), chain(tokens, (v1, s1), l2)
    assert deep_gemm.calc_diff(got, right) < 1e-6
    x = tokens[0].float() * tokens[1].repeat_interleave(128, 1)
    gate, up = (x @ dequantized((v1, s1), 0).t()).chunk(2, 1)
    values, scales = deep_gemm.per_token_cast_to_fp8(tokens[3] * torch.nn.functional.silu(gate) * up)
    by_128 = values.float() * scales
    assert deep_gemm.calc_diff(got, by_128 @ dequantized(l2, 0).t()) > 10 * deep_gemm.calc_diff(got, right)


def test_counts_of_tokens_are_added_up() -> None:
    tokens, buffer = MODEL.tokens(20), MODEL.buffer()
    counts = torch.arange(6, dtype=torch.int32)
    for _ in range(2):
        result(buffer, tokens, *MODEL.weights(), counts)
    came = torch.bincount(tokens[2][tokens[2] >= 0], minlength=6)
    assert counts.tolist() == (torch.arange(6) + 2 * came).tolist()


def test_no_token_at_all() -> None:
    counts = torch.zeros(6, dtype=torch.int32)
    assert result(MODEL.buffer(), MODEL.tokens(0), *MODEL.weights(), counts).shape == (0, 256)
    assert not counts.any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": None}, "TypeError: y: expected a tensor, got NoneType"),
        ({"y": Y.float()}, "y: expected dtype torch.bfloat16, got torch.float32"),
        ({"y": Y[:, :128]}, "y: expected shape (tokens, hidden) = (tokens, 256), got (4, 128)"),
        ({"y": Y[:1].expand(129, 256)}, "y: expected at most 128 tokens, the size of the buffer, got 129"),
        ({"y": Y[:1].expand(4, 256)}, "y: expected rows that do not overlap"),
        ({"sym_buffer": None}, "TypeError: sym_buffer: expected SM90SymmBuffer, got NoneType"),
        ({"l1_weights": Y}, "TypeError: l1_weights: expected a pair (values, scales), got Tensor"),
        ({"recipe": (1, 128, 128)}, "NotImplementedError: recipe: expected (128, 128, 128), got (1, 128, 128)"),
        ({"recipe": 128}, "recipe: expected a tuple of integers, got 128"),
        ({"activation": "relu"}, "NotImplementedError: activation: expected 'swiglu', got 'relu'"),
        ({"activation_clamp": 0.0}, "activation_clamp: expected a number above 0, got 0.0"),
        ({"num_tokens_bound": Y}, "NotImplementedError: num_tokens_bound: expected None, got Tensor"),
        ({"activation_clamp": "1"}, "activation_clamp: expected a finite FP32 number"),
        ({STATS: torch.zeros(5).int()}, f"{STATS}: expected shape (experts here,) = (6,), got (5,)"),
        ({STATS: torch.zeros(6)}, f"{STATS}: expected dtype torch.int32, got torch.float32"),
    ],
)
def test_mistakes_say_what_was_expected(changed: dict[str, Any], message: str) -> None:
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*MODEL.weights())
    given: dict[str, Any] = {"y": Y, "l1_weights": l1, "l2_weights": l2, "sym_buffer": MODEL.buffer()}
    with refused(message):
        deep_gemm.fp8_mega_moe(**(given | changed))


def test_weights_of_other_sizes_and_experts_that_nobody_has_are_refused_before_anything_is_written() -> None:
    buffer, y = MODEL.buffer(), torch.full_like(Y, 3.0)
    others = deep_gemm.transform_weights_for_mega_moe_sm90(*Model(num_experts=5).weights())
    with pytest.raises(ValueError, match="l1_weights: expected shape"):
        deep_gemm.fp8_mega_moe(y, *others, buffer)
    weights = deep_gemm.transform_weights_for_mega_moe_sm90(*MODEL.weights())
    buffer.topk_idx[2, 1] = 6
    counts = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"buffer.topk_idx: expected values in -1..5, got 6 at index \(2, 1\)"):
        deep_gemm.fp8_mega_moe(y, *weights, buffer, counts)
    buffer.topk_idx[2, 1] = -1
    with pytest.raises(ValueError, match=r"y: expected memory that does not overlap buffer.x\b"):
        deep_gemm.fp8_mega_moe(buffer.x[:8].view(torch.bfloat16).view(4, 256), *weights, buffer)
    assert bool((y == 3).all())
    assert not counts.any()


# Filling the buffer


def test_tokens_are_cast_into_the_buffer_and_its_other_rows_get_no_expert() -> None:
    buffer = MODEL.buffer()
    fill(buffer, MODEL.tokens(128, seed=5))
    g = torch.Generator().manual_seed(6)
    x = torch.randn(7, 256, generator=g).bfloat16()
    ids, p = torch.randint(-1, 6, (7, 3), generator=g, dtype=torch.int32), torch.randn(7, 3, generator=g)
    filled = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    old = buffer.x[5:].clone()
    deep_gemm.mega_moe_pre_dispatch_sm90(x, ids, p, *filled, num_tokens=5, group_size=128, routed_scaling_factor=2.5)
    values, scales = deep_gemm.per_token_cast_to_fp8(x[:5])
    assert torch.equal(buffer.x[:5].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(buffer.x[5:].view(torch.uint8), old.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:5], scales)
    assert torch.equal(buffer.topk_idx[:5], ids[:5].long())
    assert bool((buffer.topk_idx[5:] == -1).all())
    assert torch.equal(buffer.topk_weights[:5], p[:5] * 2.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 64}, "NotImplementedError: group_size: expected 128, got 64"),
        ({"group_size": torch.tensor(128)}, "group_size: expected an integer in 1..2147483647, got "),
        ({"group_size": torch.ones(2)}, "group_size: expected an integer in 1..2147483647, got "),
        ({"group_size": np.array([128, 3])}, "group_size: expected an integer in 1..2147483647, got "),
        ({"num_tokens": torch.tensor(3)}, "num_tokens: expected an integer in 0..4, got tensor(3)"),
        ({"num_tokens": 5}, "num_tokens: expected an integer in 0..4, got 5"),
        ({"routed_scaling_factor": torch.ones(1)}, "routed_scaling_factor: expected a finite number"),
        ({"x": torch.ones(4, 128)}, "hidden: expected a multiple of 256, got 128"),
        ({"topk_idx": torch.ones(4, 3)}, "topk_idx: expected dtype torch.int32 or torch.int64"),
        ({"topk_weights": torch.ones(4, 2)}, "topk_weights: expected shape (tokens, topk) = (4, 3)"),
        ({"buf_x": torch.ones(128, 256)}, "buf_x: expected dtype torch.float8_e4m3fn, got torch.float32"),
        ({"buf_x_sf": torch.ones(128, 3)}, "buf_x_sf: expected shape (max_tokens, hidden / 128)"),
        ({"buf_x_sf": torch.ones(2, 128).t()}, "buf_x_sf: expected a contiguous tensor, got strides"),
        ({"buf_topk_idx": None}, "TypeError: buf_topk_idx: expected a tensor, got NoneType"),
    ],
)
def test_what_does_not_fit_a_buffer_is_refused(changed: dict[str, Any], message: str) -> None:
    buffer = MODEL.buffer()
    given = filling(buffer, torch.ones(4, 256), torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3))
    with refused(message):
        deep_gemm.mega_moe_pre_dispatch_sm90(**(given | changed))
    assert bool((buffer.topk_idx == -1).all())


def test_sizes_may_be_integers_of_numpy() -> None:
    sizes = map(np.int64, (6, 128, 3, 256, 128))
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, *sizes)
    given = torch.ones(4, 256), torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3)
    filled = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    deep_gemm.mega_moe_pre_dispatch_sm90(*given, *filled, np.int64(2), np.int32(128), np.float32(2))
    assert buffer.topk_idx[:3, 0].tolist() == [0, 0, -1]
    assert buffer.topk_weights[0, 0] == 2


@pytest.mark.parametrize(
    ("name", "target", "change"),
    [
        ("x", "buf_x", lambda b: b.x.view(torch.bfloat16).view(-1)[: 4 * 256].view(4, 256)),
        ("x", "buf_topk_idx", lambda b: b.topk_idx.view(torch.bfloat16).view(-1)[: 4 * 256].view(4, 256)),
        ("topk_idx", "buf_topk_idx", lambda b: b.topk_idx[1:5]),
        ("topk_idx", "buf_topk_idx", lambda b: b.topk_idx.view(torch.int32).view(-1)[:12].view(4, 3)),
        ("topk_weights", "buf_topk_weights", lambda b: b.topk_weights[1:5]),
        ("topk_weights", "buf_x_sf", lambda b: b.x_sf.view(-1)[:12].view(4, 3)),
        ("topk_weights", "buf_topk_idx", lambda b: b.topk_idx.view(torch.float32).view(-1)[:12].view(4, 3)),
        ("buf_x_sf", "buf_topk_weights", None),
    ],
)
def test_what_overlaps_the_buffer_is_refused_before_anything_is_written(name: str, target: str, change: Any) -> None:
    buffer = MODEL.buffer()
    tensors = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    for each in tensors:
        each.view(torch.uint8).fill_(1)
    before = [each.clone() for each in tensors]
    given = filling(buffer, torch.ones(4, 256), torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3))
    room = torch.ones(128 * 3)
    both = {"buf_x_sf": room[:256].view(128, 2), "buf_topk_weights": room.view(128, 3)}
    given |= both if change is None else {name: change(buffer)}
    with pytest.raises(ValueError) as found:
        deep_gemm.mega_moe_pre_dispatch_sm90(**given)
    assert str(found.value) == f"{target}: expected memory that does not overlap {name}"
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
    assert bool((room == 1).all())


def test_routes_that_are_in_the_buffer_already_may_be_given_as_they_are() -> None:
    buffer = MODEL.buffer()
    filled = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    buffer.topk_idx[:2], buffer.topk_weights[:2] = 3, 0.5
    routes = buffer.topk_idx[:2], buffer.topk_weights[:2]
    deep_gemm.mega_moe_pre_dispatch_sm90(torch.ones(2, 256), *routes, *filled, routed_scaling_factor=4.0)
    assert buffer.topk_idx[:3, 0].tolist() == [3, 3, -1]
    assert buffer.topk_weights[:3, 0].tolist() == [2, 2, 0]


@pytest.mark.parametrize("group", ["world", 3, object()])
def test_what_is_no_group_is_refused_in_words(group: Any) -> None:
    message = rf"^group: expected a process group of torch.distributed or None, got {type(group).__name__}$"
    with pytest.raises(TypeError, match=message):
        deep_gemm.get_symm_buffer_for_sm90_mega_moe(group, 6, 128, 3, 256, 128)
    l1, l2 = MODEL.weights()
    with pytest.raises(TypeError, match=message):
        deep_gemm.distributed.Experts(6, l1, l2, group)
    with pytest.raises(TypeError, match=message):
        deep_gemm.distributed.owned_experts(6, group)
