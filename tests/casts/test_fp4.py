"""Casts to FP4 and back: every code, every tie, what has no code, and layouts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deep_gemm import cast_back_from_fp4, per_token_cast_to_fp4, transpose_packed_fp4, unpack_ue8m0_from_int

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def codes(x: list[float], device: str = "cpu") -> list[int]:
    """Codes of numbers in a block whose scale is 1."""
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


def test_what_has_no_code_saturates() -> None:
    values, scales = per_token_cast_to_fp4(torch.tensor([[torch.inf, -torch.inf, torch.nan, -torch.nan, 3.0, 12.0]]))
    assert scales.tolist() == [[2.0]]
    assert cast_back_from_fp4(values, scales).tolist() == [[12.0, -12.0, 12.0, 12.0, 3.0, 12.0]]


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


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 4)])
def test_nothing_is_nothing(shape: tuple[int, ...]) -> None:
    values, scales = per_token_cast_to_fp4(torch.empty(shape))
    assert values.shape == (*shape[:-1], shape[-1] // 2)
    assert cast_back_from_fp4(values, scales).shape == shape


INT8 = torch.zeros(2, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (per_token_cast_to_fp4, ([1.0],), TypeError, "x: expected a tensor, got list"),
        (per_token_cast_to_fp4, (torch.ones(2, 3),), ValueError, "x: expected shape (..., m, k) with an even k, got "),
        (per_token_cast_to_fp4, (torch.ones(4),), ValueError, "x: expected shape (..., m, k) with an even k, got (4,)"),
        (per_token_cast_to_fp4, (INT8,), ValueError, "x: expected dtype float32, "),
        (per_token_cast_to_fp4, (torch.ones(2, 2), True, 0), ValueError, "gran_k: expected a positive integer, got 0"),
        (per_token_cast_to_fp4, (torch.ones(2, 2), False, 2, True), ValueError, "use_packed_ue8m0: expected use_ue8m0"),
        (cast_back_from_fp4, (None, torch.ones(2, 1)), TypeError, "packed: expected a tensor, got NoneType"),
        (cast_back_from_fp4, (torch.ones(2, 2), torch.ones(2, 1)), ValueError, "packed: expected dtype torch.int8, "),
        (
            cast_back_from_fp4,
            (INT8.to_sparse(), torch.ones(2, 1)),
            ValueError,
            "packed: expected a dense tensor, got layout torch.sparse_coo",
        ),
        (
            cast_back_from_fp4,
            (INT8, torch.ones(2, 1).to_sparse()),
            ValueError,
            "sf: expected a dense tensor, got layout torch.sparse_coo",
        ),
        (
            cast_back_from_fp4,
            (INT8, torch.ones(2, 1, device="meta")),
            ValueError,
            "sf: expected device cpu, where packed is, got meta",
        ),
        (cast_back_from_fp4, (INT8[0], torch.ones(1)), ValueError, "packed: expected shape (..., m, k / 2), got (2,)"),
        (
            transpose_packed_fp4,
            (INT8.to_sparse(),),
            ValueError,
            "packed: expected a dense tensor, got layout torch.sparse_coo",
        ),
        (cast_back_from_fp4, (INT8, torch.ones(2, 2)), ValueError, "sf: expected shape (2, 1) or (1, 1), got (2, 2)"),
        (cast_back_from_fp4, (INT8, INT8), ValueError, "sf: expected dtype torch.float32 or torch.int32, got"),
        (transpose_packed_fp4, (INT8[:1],), ValueError, "packed: expected shape (..., m, k / 2) with an even m, got "),
    ],
)
def test_mistakes_are_named(function: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        function(*arguments)
    assert str(caught.value).startswith(message)


def test_half_precision_and_transposed_input_are_cast_as_they_are() -> None:
    x = torch.randn(8, 6, dtype=torch.bfloat16)
    right: tuple[Tensor, Tensor] = per_token_cast_to_fp4(x.float())
    for same in (x, x.t().contiguous().t(), x.double()):
        values, scales = per_token_cast_to_fp4(same)
        assert torch.equal(values, right[0])
        assert torch.equal(scales, right[1])
