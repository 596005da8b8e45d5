"""The gated activation: arithmetic compared with FP64, the rows that are used, and the rules of casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import captured, int32, same_bits
from layer_cases import FP8_NAN, assert_mistake, same_pairs, without_values
from torch import Tensor

import deep_gemm
from deep_gemm import per_token_cast_to_fp8, silu_mul_cast_to_fp8
from deep_gemm.casts.gating import Gating, activated
from deep_gemm.core.check.layout import align, ceil_div, rows_of_groups
from deep_gemm.moe.activation import silu_mul
from lab.casts import MOST_OTHERS, assert_near

TYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_x(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 3) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def exact(x: Tensor, limit: float | None = None) -> Tensor:
    """Compute the activation of finite numbers in FP64."""
    gate, up = x.double().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + (-gate).exp()) * up


EXACT: dict[Gating, Callable[[Tensor, Tensor], Tensor]] = {
    Gating("swiglu", 1.702, 1.0, 7.0): lambda gate, up: (
        gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
    ),
    Gating("swiglu", limit=10.0): lambda gate, up: torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10),
    Gating("situ", 4.0, 25.0): lambda gate, up: 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh(),
}
"""The activations of gpt-oss, DeepSeek-V4 and Kimi-K3, as functions of gate and up in FP64."""


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double().repeat_interleave(128, -1)[..., : values.shape[-1]]


# The arithmetic


@pytest.mark.parametrize("gating", EXACT, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 3.0, 40.0])
def test_activations_of_models_are_those_in_fp64(gating: Gating, scale: float) -> None:
    x = random_x(50, 512, dtype=torch.float32, scale=scale)
    y, right = activated(x, gating).double(), EXACT[gating](*x.double().chunk(2, dim=-1))
    # A sigmoid below 2^-126 counts as zero, and a sum near zero is as exact as its largest summand.
    least = 2.0**-23 * x.double().abs().amax() if gating.beta == 1.0 else 2.0**-110
    assert bool(((y - right).abs() <= right.abs() * 6 * 2.0**-24 + least).all())
    named = silu_mul_cast_to_fp8(x, activation=gating.name, alpha=gating.alpha, beta=gating.beta, limit=gating.limit)
    assert same_pairs(named, per_token_cast_to_fp8(activated(x, gating)))


def test_activations_have_the_parameters_of_their_models() -> None:
    x = random_x(5, 256)
    situ = silu_mul_cast_to_fp8(x, activation="situ", alpha=4.0, beta=25.0)
    assert same_pairs(silu_mul_cast_to_fp8(x, activation="situ"), situ)
    assert same_pairs(silu_mul_cast_to_fp8(x, activation="swiglu", alpha=1, beta=0), silu_mul_cast_to_fp8(x))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("shape", [(1, 2), (3, 256), (5, 2 * 100), (2, 3, 4, 2 * 144), (7, 2 * 1000)])
def test_each_step_is_rounded_once(shape: tuple[int, ...], limit: float | None, dtype: torch.dtype) -> None:
    x = random_x(*shape, dtype=dtype)
    y, right = silu_mul(x, limit), exact(x, limit)
    assert y.dtype == torch.float32
    assert bool(((y.double() - right).abs() <= right.abs() * 3.01 * 2.0**-24 + 2.0**-148).all())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(3, 256), (5, 2 * 100), (2, 3, 4, 2 * 144)])
def test_the_result_is_cast_by_the_rules_of_casts(shape: tuple[int, ...], use_ue8m0: bool, dtype: torch.dtype) -> None:
    x = random_x(*shape, dtype=dtype)
    weights = random_x(*shape[:-1], dtype=torch.float32, seed=1)
    values, scales = silu_mul_cast_to_fp8(x, weights, limit=2.0, use_ue8m0=use_ue8m0, min_amax=0.25)
    expected = per_token_cast_to_fp8(silu_mul(x, 2.0) * weights[..., None], use_ue8m0, min_amax=0.25)
    assert same_pairs((values, scales), expected)
    assert values.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], ceil_div(shape[-1] // 2, 128))
    assert values.is_contiguous()
    assert scales.is_contiguous()
    right = exact(x, 2.0) * weights.double()[..., None]
    assert deep_gemm.calc_diff(dequantized(values, scales), right) < (2e-3 if use_ue8m0 else 1e-3)


def test_an_element_has_the_same_bits_wherever_it_lies() -> None:
    x = random_x(1, 2 * 1003, dtype=torch.float32)
    gate, up = x.chunk(2, dim=-1)
    one_by_one = [silu_mul(torch.stack([g, u])[None], None) for g, u in zip(gate[0], up[0], strict=True)]
    assert same_bits(silu_mul(x, None), torch.cat(one_by_one, dim=1))


def test_strides_change_nothing() -> None:
    x = random_x(6, 2 * 150)
    expected = silu_mul_cast_to_fp8(x)
    for same in (x.t().contiguous().t(), torch.cat([x, x], 1)[:, : 2 * 150], x.repeat_interleave(2, 0)[::2]):
        assert same_pairs(silu_mul_cast_to_fp8(same), expected)
    weights = random_x(6, dtype=torch.float32, seed=2)
    expected = silu_mul_cast_to_fp8(x, weights)
    assert same_pairs(silu_mul_cast_to_fp8(x, weights.repeat_interleave(3)[::3]), expected)


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0), (2, 0, 256), (0, 4, 256)])
def test_empty_sizes_give_empty_results(shape: tuple[int, ...]) -> None:
    values, scales = silu_mul_cast_to_fp8(torch.empty(shape))
    assert values.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], ceil_div(shape[-1] // 2, 128))
    groups = int32(*[0] * shape[0])
    if len(shape) == 3:
        assert silu_mul_cast_to_fp8(torch.empty(shape), masked_m=groups)[0].shape == values.shape
    else:
        assert silu_mul_cast_to_fp8(torch.empty(shape), ends=int32())[0].shape == values.shape


def test_no_gradient_is_carried() -> None:
    x = random_x(3, 256, dtype=torch.float32).requires_grad_()
    assert not any(result.requires_grad for result in silu_mul_cast_to_fp8(x, torch.ones(3).requires_grad_()))


# Special values


def test_limit_cuts_gate_above_and_up_on_both_sides_and_keeps_nan() -> None:
    big, nan = 100.0, torch.nan
    gate = torch.tensor([big, -2.0, nan, 1.0, 1.0, 1.0, torch.inf])
    up = torch.tensor([1.0, 1.0, 1.0, big, -big, nan, 1.0])
    y = silu_mul(torch.cat([gate, up])[None], 7.0)[0]
    silu = exact(torch.tensor([[7.0, -2.0, 1.0, 1.0, 1.0, 1.0]]))[0].float()
    assert torch.equal(y.isnan(), torch.tensor([False, False, True, False, False, True, False]))
    assert torch.allclose(y[[0, 1, 3, 4, 6]], torch.stack([silu[0], silu[1], silu[2] * 7, -silu[2] * 7, silu[0]]))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_nan_of_either_sign_gives_one_byte_and_leaves_its_block_alone(sign: int) -> None:
    x = random_x(2, 256, dtype=torch.float32)
    clean = silu_mul_cast_to_fp8(torch.where(torch.arange(256) % 128 == 5, 0.0, x))
    x[0, 5] = torch.copysign(torch.tensor(torch.nan), torch.tensor(float(sign)))
    x[1, 128 + 5] = x[0, 5]
    values, scales = silu_mul_cast_to_fp8(x)
    assert values.view(torch.uint8)[:, 5].tolist() == [FP8_NAN, FP8_NAN]
    assert torch.equal(scales, clean[1])
    assert same_bits(values[:, :5], clean[0][:, :5])
    assert same_bits(values[:, 6:], clean[0][:, 6:])


def test_infinities_and_overflow_become_nan_and_leave_the_scale_alone() -> None:
    x = torch.zeros(1, 256)
    x[0, :3], x[0, 128:131] = torch.tensor([torch.inf, 3e38, 10.0]), torch.tensor([1.0, -3e38, 44.8])
    values, scales = silu_mul_cast_to_fp8(x)
    assert values.view(torch.uint8)[0, :2].tolist() == [FP8_NAN, FP8_NAN]
    assert values[0, 2].float() == 448.0
    assert float(scales) == pytest.approx(1.0, abs=1e-3)


def test_subnormal_results_have_the_smallest_scale_and_zeros_have_scale_1() -> None:
    x = torch.zeros(2, 512)
    x[0, 0], x[0, 256] = 2.0**-70, 2.0**-75
    values, scales = silu_mul_cast_to_fp8(x)
    assert scales.tolist() == [[2.0**-126, 1.0], [1.0, 1.0]]
    assert values[0, 0].float() == 0  # 2^-146 is below half the smallest E4M3 number times the scale
    assert not values.float().any()


def test_gates_far_below_zero_give_zeros() -> None:
    x = torch.cat([torch.full((1, 128), -200.0), torch.full((1, 128), 3.0)], dim=1)
    values, _ = silu_mul_cast_to_fp8(x)
    assert not values.float().any()


@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_min_amax_is_the_least_that_a_block_counts_as(use_ue8m0: bool) -> None:
    x = torch.zeros(3, 256)
    x[1, 0], x[1, 128] = 1.0, 1e-3
    x[2, 0], x[2, 128] = 1.0, 1e3
    _, scales = silu_mul_cast_to_fp8(x, use_ue8m0=use_ue8m0, min_amax=448.0 / 64)
    _, without = silu_mul_cast_to_fp8(x, use_ue8m0=use_ue8m0)
    assert scales[:, 0].tolist() == [1 / 64, 1 / 64, without[2, 0].item()]


# Rows that are used


def counting(x: Tensor, counts: Tensor, **arguments: Any) -> None:
    """Check that used rows do not depend on unused rows, and that unused rows become zeros with scale 1."""
    weights = random_x(*x.shape[:-1], dtype=torch.float32, seed=3)
    want_values, want_scales = silu_mul_cast_to_fp8(x, weights, min_amax=0.5)
    for poison in (torch.nan, torch.inf, 0.0):
        dirty_x, dirty_weights = x.masked_fill(~counts[..., None], poison), weights.masked_fill(~counts, poison)
        values, scales = silu_mul_cast_to_fp8(dirty_x, dirty_weights, min_amax=0.5, **arguments)
        assert same_bits(values[counts], want_values[counts])
        assert same_bits(scales[counts], want_scales[counts])
        assert not values[~counts].view(torch.uint8).any()
        assert bool((scales[~counts] == 1).all())


@pytest.mark.parametrize("masked_m", [(0, 4, 9), (9, 9, 9), (0, 0, 0)])
def test_with_masked_m_the_first_rows_of_each_group_count(masked_m: tuple[int, ...]) -> None:
    counts = torch.arange(9) < torch.tensor(masked_m)[:, None]
    counting(random_x(3, 9, 2 * 130), counts, masked_m=int32(*masked_m))


ENDS = [(8, (3, 11, 20)), (8, (3, 3, 20)), (8, (3, 8, 20)), (8, (0, 0, 0)), (1, (3, 3, 20)), (1, (5, 12, 24))]


@pytest.mark.parametrize(("rows", "ends"), [*ENDS, (128, (24, 24, 24)), (16, (16, 24, 24)), (8, ())])
def test_with_ends_the_rows_of_groups_count(rows: int, ends: tuple[int, ...]) -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(rows)
    counts, start = torch.zeros(24, dtype=torch.bool), 0
    for end in ends:
        counts[start:end] = True
        start = align(end, rows)
    assert torch.equal(rows_of_groups(int32(*ends), 24, rows), counts)
    counting(random_x(24, 2 * 130), counts, ends=int32(*ends))


def test_rows_of_ends_are_those_of_products() -> None:
    deep_gemm.set_mk_alignment_for_contiguous_layout(16)
    ends, x = int32(5, 16, 40), random_x(48, 256)
    a = silu_mul_cast_to_fp8(x, ends=ends)
    b = deep_gemm.per_block_cast_to_fp8(random_x(3, 8, 128, seed=1))
    d = torch.full((48, 8), torch.nan, dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ends, use_psum_layout=True, ensure_zero_padding=False)
    assert torch.equal(~d.isnan().any(dim=1), rows_of_groups(ends, 48, 16))


# On a GPU


def test_the_host_reads_no_value_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_values(monkeypatch):
        x, weights = torch.empty(3, 8, 512, device="meta"), torch.empty(3, 8, device="meta")
        groups = torch.empty(3, dtype=torch.int32, device="meta")
        for values, scales in (
            silu_mul_cast_to_fp8(x, weights, limit=7.0, use_ue8m0=True, min_amax=1e-10),
            silu_mul_cast_to_fp8(x, weights, masked_m=groups),
            silu_mul_cast_to_fp8(x.flatten(0, 1), ends=groups),
        ):
            assert {values.device.type, scales.device.type} == {"meta"}
            assert values.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    "read", [Tensor.tolist, Tensor.cpu, Tensor.nonzero, Tensor.item, Tensor.any, lambda x: x[x > 0]]
)
def test_a_read_by_the_host_would_be_noticed(read: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(read(torch.empty(1, device="meta")))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["all", "masked", "ends"])
def test_a_gpu_is_within_a_step_of_the_cpu_and_a_graph_captures_it(kind: str) -> None:
    x, weights = random_x(3, 9, 2 * 200), random_x(3, 9, dtype=torch.float32, seed=1)
    arguments: dict[str, Any] = {}
    counts = torch.ones(3, 9, dtype=torch.bool)
    if kind == "masked":
        arguments["masked_m"] = int32(0, 4, 9)
        counts = torch.arange(9) < arguments["masked_m"][:, None]
    elif kind == "ends":
        x, weights, arguments["ends"] = x.flatten(0, 1), weights.flatten(), int32(3, 3, 3)
        counts = torch.arange(27) < 3
    want = silu_mul_cast_to_fp8(x, weights, **arguments)
    on_gpu = {name: given.cuda() for name, given in arguments.items()}
    gpu_x, gpu_weights = x.cuda(), weights.cuda()
    silu_mul_cast_to_fp8(gpu_x, gpu_weights, **on_gpu)
    graph, (values, scales) = captured(silu_mul_cast_to_fp8, gpu_x, gpu_weights, **on_gpu)
    graph.replay()
    found = values.cpu()[counts], scales.cpu()[counts]
    assert assert_near(found, (want[0][counts], want[1][counts])) <= MOST_OTHERS
    again = silu_mul_cast_to_fp8(gpu_x, gpu_weights, **on_gpu)
    assert same_pairs(found, (again[0].cpu()[counts], again[1].cpu()[counts]))


# Mistakes


def call(**changes: Any) -> dict[str, Any]:
    return {"x": random_x(3, 8, 256), **changes}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"x": [[1.0]]}, "TypeError: x: expected a tensor, got a list of 1"),
    ({"x": torch.ones(2, 4, dtype=torch.float64)}, "x: expected dtype torch.bfloat16 or torch.float16 or"),
    ({"x": torch.ones(4)}, "x: expected shape (..., m, 2 i), got (4,)"),
    ({"x": torch.ones(2, 5)}, "x: expected an even number of columns, gate and up, got 5"),
    ({"row_weights": [1.0]}, "TypeError: row_weights: expected a tensor, got a list of 1"),
    ({"row_weights": torch.ones(3)}, "row_weights: expected shape (..., m) = (3, 8), got (3,)"),
    ({"row_weights": torch.ones(3, 8).bfloat16()}, "row_weights: expected dtype torch.float32, got torch.bfloat16"),
    ({"row_weights": torch.ones(3, 8, device="meta")}, "row_weights: expected device cpu, where x is, got meta"),
    ({"masked_m": int32(1, 2)}, "masked_m: expected shape (groups,) = (3,), got (2,)"),
    ({"masked_m": int32(1, 2, 9)}, "masked_m: expected values in 0..8, got 9 at index 2"),
    ({"masked_m": int32(1, 2, 3).long()}, "masked_m: expected dtype torch.int32, got torch.int64"),
    ({"masked_m": [1, 2, 3]}, "TypeError: masked_m: expected a tensor, got a list of 3"),
    ({"masked_m": int32(1, 2, 3).to("meta")}, "masked_m: expected device cpu, where x is, got meta"),
    ({"masked_m": int32(1), "x": torch.ones(2, 4)}, "x: expected shape (groups, max_m, 2 i), got (2, 4)"),
    ({"masked_m": int32(1, 2, 3), "ends": int32(1)}, "ends: expected None because masked_m is given"),
    ({"ends": int32(1)}, "x: expected shape (m, 2 i), got (3, 8, 256)"),
    ({"ends": int32(5), "x": torch.ones(2, 4)}, "ends: expected values in 0..2, got 5 at index 0"),
    ({"ends": int32(1, 2), "x": torch.ones(2, 4)}, "ends: expected an end of 1 or from 128, the aligned"),
    ({"ends": int32(1)[None], "x": torch.ones(2, 4)}, "ends: expected shape (groups,) = (1,), got (1, 1)"),
    ({"ends": 3, "x": torch.ones(2, 4)}, "TypeError: ends: expected a tensor, got int"),
    ({"limit": 0}, "limit: expected a number above 0, got 0"),
    ({"limit": "7"}, "limit: expected a finite FP32 number that is not negative, got '7'"),
    ({"limit": torch.ones(())}, "limit: expected a finite FP32 number that is not negative, got tensor"),
    ({"min_amax": torch.nan}, "min_amax: expected a finite FP32 number that is not negative, got nan"),
    ({"min_amax": 1e39}, "min_amax: expected a finite FP32 number that is not negative, got 1e+39"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    assert_mistake(silu_mul_cast_to_fp8, call(**changes), message)
