"""Casts to FP4 and back: every code, every tie, numbers without a code, and layouts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deep_gemm import (
    cast_back_from_fp4,
    fp8_fp4_gemm_nt,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    quantize_mxfp4,
    transpose_packed_fp4,
    unpack_ue8m0_from_int,
)

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def codes(x: list[float], device: str = "cpu") -> list[int]:
    """Return the codes of numbers in a block whose scale is 1."""
    values, scales = per_token_cast_to_fp4(torch.tensor([[*x, *[0.0] * (-len(x) % 2), 6.0, 6.0]], device=device))
    assert scales.tolist() == [[1.0]]
    found = [half for byte in values.view(torch.uint8)[0].tolist() for half in (byte & 0xF, byte >> 4)]
    return found[: len(x)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_value_has_its_code_and_comes_back(device: str) -> None:
    assert codes([*VALUES, *(-value for value in VALUES)], device) == [*range(8), *range(8, 16)]
    x = torch.tensor([[*VALUES, *(-value for value in VALUES)]], device=device)
    assert torch.equal(cast_back_from_fp4(*per_token_cast_to_fp4(x)), x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tie_goes_to_the_even_code_and_all_else_to_the_nearest(device: str) -> None:
    for code, (low, high) in enumerate(pairwise(VALUES)):
        middle = (low + high) / 2
        assert codes([middle, -middle], device) == [code + code % 2, 8 + code + code % 2]
        fp32 = torch.tensor([middle, middle]).nextafter(torch.tensor([0.0, 9.0])).tolist()
        assert codes(fp32, device) == [code, code + 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_with_a_nan_or_an_infinity_has_the_scale_nan(dtype: torch.dtype, use_ue8m0: bool, device: str) -> None:
    """E2M1 has neither NaN nor infinity, so the block's scale becomes NaN. The other blocks do not change."""
    x = torch.randn(9, 320, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    values, scales = per_token_cast_to_fp4(x, use_ue8m0, gran_k=32)
    places = [(0, 3), (2, 64), (2, 100), (8, 319)]
    for (row, column), strange in zip(places, [torch.nan, -torch.nan, torch.inf, -torch.inf], strict=True):
        x[row, column] = strange
    got, of_got = per_token_cast_to_fp4(x, use_ue8m0, gran_k=32)
    is_strange = ~x.isfinite().view(9, 10, 32).all(dim=-1)
    assert int(is_strange.sum()) == 4
    assert torch.equal(of_got.isnan(), is_strange)
    assert torch.equal(of_got[~is_strange], scales[~is_strange])
    assert torch.equal(got.view(9, 10, 16)[~is_strange], values.view(9, 10, 16)[~is_strange])
    assert torch.equal(cast_back_from_fp4(got, of_got, 32).view(9, 10, 32).isnan().all(dim=-1), is_strange)


def test_packed_scales_say_255_of_a_block_with_an_infinity() -> None:
    x = torch.ones(1, 128).index_fill(1, torch.tensor([40]), torch.inf)
    _, words = per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
    assert words.view(torch.uint8).tolist() == [[125, 255, 125, 125]]


def test_blocks_of_zeros_have_scale_1_and_each_block_its_own() -> None:
    x = torch.tensor([[0.0, 0.0, 6.0, -3.0, 60.0, 0.0]])
    values, scales = per_token_cast_to_fp4(x, gran_k=2)
    assert scales.tolist() == [[1.0, 1.0, 10.0]]
    assert torch.equal(cast_back_from_fp4(values, scales, gran_k=2), x)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([2, 16, 32, 128]), st.booleans())
def test_numbers_come_back_within_half_a_step(m: int, half_k: int, gran_k: int, use_ue8m0: bool) -> None:
    x = torch.randn(m, 2 * half_k, generator=torch.Generator().manual_seed(m * half_k))
    values, scales = per_token_cast_to_fp4(x, use_ue8m0, gran_k)
    assert values.shape == (m, half_k)
    assert values.dtype == torch.int8
    assert scales.shape == (m, -(-2 * half_k // gran_k))
    if use_ue8m0:
        assert bool((torch.frexp(scales)[0] == 0.5).all())
    spread = scales.repeat_interleave(gran_k, 1)[:, : 2 * half_k]
    steps = torch.where(x.abs() <= 2 * spread, 0.25, torch.where(x.abs() <= 4 * spread, 0.5, 1.0)) * spread
    back = cast_back_from_fp4(values, scales, gran_k)
    assert bool(((back - x).abs() <= steps * 1.0001).all())


@pytest.mark.parametrize("device", DEVICES)
def test_scales_may_be_packed(device: str) -> None:
    x = torch.randn(3, 5, 192, device=device)
    values, scales = per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32)
    same, packed = per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
    assert torch.equal(same, values)
    assert packed.shape == (3, 5, 2)
    assert torch.equal(unpack_ue8m0_from_int(packed)[..., :6], scales)
    assert torch.equal(cast_back_from_fp4(values, packed, 32), cast_back_from_fp4(values, scales, 32))


@pytest.mark.parametrize("device", DEVICES)
def test_a_transpose_is_that_of_the_numbers(device: str) -> None:
    x = torch.randn(2, 6, 10, device=device)
    values, _ = per_token_cast_to_fp4(x)
    turned = transpose_packed_fp4(values)
    ones = torch.ones(2, 10, 1, device=device), torch.ones(2, 6, 1, device=device)
    assert turned.shape == (2, 10, 3)
    assert torch.equal(cast_back_from_fp4(turned, ones[0]), cast_back_from_fp4(values, ones[1]).mT)
    assert torch.equal(transpose_packed_fp4(turned), values)


# MXFP4


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(3, 32), (2, 160), (2, 5, 288)]), st.integers(1, 100))
def test_weights_that_are_mxfp4_come_back_as_they_were(seed: int, shape: tuple[int, ...], least: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    *rows, k = shape
    packed = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, generator=generator)
    packed[..., 16:32] &= 0x88  # a group of zeros, of both signs
    scales = torch.randint(least, 253, (*rows, k // 32), dtype=torch.uint8, generator=generator)
    w = cast_back_from_fp4(packed, scales, 32)
    again = quantize_mxfp4(w)
    assert torch.equal(cast_back_from_fp4(*again, 32), w)
    for same in (w.bfloat16(), w.mT.contiguous().mT):
        assert all(torch.equal(one, other) for one, other in zip(quantize_mxfp4(same), again, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_is_cut_off_where_rounding_up_would_lose_more(device: str) -> None:
    """With a scale of 1 a largest number up to 7 becomes 6. Above 7 the 8 of the next scale, 2, is nearer."""
    w = torch.zeros(3, 32, device=device)
    w[:, 0], w[:, 1] = torch.tensor([7.0, 7.001, -6.9], device=device), 1.0
    packed, scales = quantize_mxfp4(w)
    assert scales.flatten().tolist() == [127, 128, 127]
    assert cast_back_from_fp4(packed, scales, 32)[:, :2].tolist() == [[6.0, 1.0], [8.0, 1.0], [-6.0, 1.0]]


@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_zeros_take_a_scale_that_folds(device: str) -> None:
    w = torch.ones(2, 288, device=device)
    w[0, 32:96], w[0, 96:128], w[0, 128:256] = 0.0, 2.0**-20, 0.0
    w[1, :256] = 0.0
    _, scales = quantize_mxfp4(w)
    assert scales.tolist() == [[125, 125, 125, 105, 127, 127, 127, 127, 125], [*[127] * 8, 125]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strange", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_group_without_a_scale_is_nan(strange: float, device: str) -> None:
    w = torch.ones(2, 128, device=device)
    w[1, 40], w[1, 64:96] = strange, 0.0
    packed, scales = quantize_mxfp4(w)
    assert scales.tolist() == [[125] * 4, [125, 255, 125, 125]]
    back = cast_back_from_fp4(packed, scales, 32)
    assert bool(back[1, 32:64].isnan().all())
    back[1, 32:64] = 1.0
    assert torch.equal(back[1, 64:96], torch.zeros(32, device=device))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_the_error_is_no_more_than_that_of_either_scale_that_might_be(seed: int, dtype: torch.dtype) -> None:
    """Values up to 6 times the scale round to the nearest code. Larger values lose at most 1/7 of the largest value."""
    w = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed, exponents = quantize_mxfp4(w)
    scales = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
    quotients = w.float() / scales
    assert float(quotients.abs().amax()) <= 7
    assert bool((quotients.view(5, 3, 32).abs().amax(-1) > 3.5).all())
    magnitude = quotients.abs()
    most = torch.where(magnitude <= 2, 0.25, torch.where(magnitude <= 4, 0.5, 1.0))
    assert bool(((cast_back_from_fp4(packed, exponents, 32) - w.float()).abs() <= most * scales).all())


def test_products_take_what_it_gives() -> None:
    w, x = torch.randn(24, 288), torch.randn(5, 288)
    d = torch.empty(5, 24, dtype=torch.bfloat16)
    fp8_fp4_gemm_nt(per_token_cast_to_fp8(x), quantize_mxfp4(w), d)
    right = x @ cast_back_from_fp4(*quantize_mxfp4(w), 32).T
    assert float((d.float() - right).norm() / right.norm()) < 0.04


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 4)])
def test_nothing_is_nothing(shape: tuple[int, ...]) -> None:
    values, scales = per_token_cast_to_fp4(torch.empty(shape))
    assert values.shape == (*shape[:-1], shape[-1] // 2)
    assert cast_back_from_fp4(values, scales).shape == shape


INT8, META = torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1, device="meta")
NOT_DENSE = "expected a dense tensor, got layout torch.sparse_coo"


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (per_token_cast_to_fp4, ([1.0],), "TypeError: x: expected a tensor, got a list of 1"),
        (per_token_cast_to_fp4, (torch.ones(2, 3),), "x: expected shape (..., m, k) with an even k, got "),
        (per_token_cast_to_fp4, (torch.ones(4),), "x: expected shape (..., m, k) with an even k, got (4,)"),
        (per_token_cast_to_fp4, (INT8,), "x: expected dtype float32, "),
        (per_token_cast_to_fp4, (torch.ones(2, 2), True, 0), "gran_k: expected a positive integer, got 0"),
        (per_token_cast_to_fp4, (torch.ones(2, 2), False, 2, True), "use_packed_ue8m0: expected use_ue8m0"),
        (cast_back_from_fp4, (None, torch.ones(2, 1)), "TypeError: packed: expected a tensor, got NoneType"),
        (cast_back_from_fp4, (torch.ones(2, 2), torch.ones(2, 1)), "packed: expected dtype torch.int8, "),
        (cast_back_from_fp4, (INT8.to_sparse(), torch.ones(2, 1)), f"packed: {NOT_DENSE}"),
        (cast_back_from_fp4, (INT8, torch.ones(2, 1).to_sparse()), f"sf: {NOT_DENSE}"),
        (cast_back_from_fp4, (INT8, META), "sf: expected device cpu, where packed is, got meta"),
        (cast_back_from_fp4, (INT8[0], torch.ones(1)), "packed: expected shape (..., m, k / 2), got (2,)"),
        (transpose_packed_fp4, (INT8.to_sparse(),), f"packed: {NOT_DENSE}"),
        (cast_back_from_fp4, (INT8, torch.ones(2, 2)), "sf: expected shape (2, 1) or (1, 1), got (2, 2)"),
        (cast_back_from_fp4, (INT8, INT8), "sf: expected dtype torch.float32, torch.int32 or torch.uint8, got"),
        (quantize_mxfp4, ([1.0],), "TypeError: w: expected a tensor, got a list of 1"),
        (quantize_mxfp4, (torch.ones(32),), "w: expected BF16, FP16 or FP32 of shape (n, k) or (groups, "),
        (quantize_mxfp4, (torch.ones(2, 32).double(),), "w: expected BF16, FP16 or FP32 of shape (n, k) "),
        (quantize_mxfp4, (torch.ones(2, 48),), "w: expected a k that is a multiple of 32, got 48"),
        (quantize_mxfp4, (torch.ones(1, 1, 2, 32),), "w: expected BF16, FP16 or FP32 of shape (n, k) or "),
        (transpose_packed_fp4, (INT8[:1],), "packed: expected shape (..., m, k / 2) with an even m, got "),
    ],
)
def test_mistakes_are_named(function: Any, arguments: Any, message: str) -> None:
    with refused(message):
        function(*arguments)


def test_half_precision_and_transposed_input_are_cast_as_they_are() -> None:
    x = torch.randn(8, 6, dtype=torch.bfloat16)
    right: tuple[Tensor, Tensor] = per_token_cast_to_fp4(x.float())
    for same in (x, x.t().contiguous().t(), x.double()):
        values, scales = per_token_cast_to_fp4(same)
        assert torch.equal(values, right[0])
        assert torch.equal(scales, right[1])
