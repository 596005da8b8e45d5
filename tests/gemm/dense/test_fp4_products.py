"""Products with FP4 weights (MXFP4): the forms in which callers pass them, the results, and refused arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp4_cases import FORMS, VALUES, operands, plain
from helpers import dequantize, refused
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.ue8m0 import numbers_of, words_of
from deep_gemm.gemm.packed import as_e4m3


def product(a: Any, b: Any, call: Any = deep_gemm.fp8_fp4_gemm_nt, **said: Any) -> Tensor:
    """Return the D that the function makes."""
    d = call(a, b, **said)
    assert isinstance(d, Tensor)
    return d


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [32, 288, 512])
def test_all_forms_of_scales_give_the_product(k: int, form: str) -> None:
    (a, sfa), values, scales = operands(5, 72, k)
    d = product((a, sfa), (values, FORMS[form](scales)), recipe_a=(1, 128), recipe_b=(1, 32))
    exact = dequantize(a, sfa) @ plain(values, scales).t()
    assert d.dtype == torch.bfloat16
    assert deep_gemm.calc_diff(d.double(), exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2])
def test_values_may_be_of_any_type_of_bytes(dtype: torch.dtype) -> None:
    a, values, scales = operands(3, 16, 96)
    expected = product(a, (values, scales))
    d = torch.empty(3, 16, dtype=torch.bfloat16)
    assert deep_gemm.fp8_fp4_gemm_nt(a, (values.view(dtype), scales), d) is None
    assert torch.equal(d, expected)
    assert torch.equal(product(a, (values.view(dtype).t(), scales.t()), deep_gemm.fp8_fp4_gemm_nn), expected)
    assert torch.equal(product(a, (values.view(dtype), scales), deep_gemm.fp8_gemm_nt), expected)


def test_c_is_added() -> None:
    a, values, scales = operands(3, 16, 96)
    c, d = torch.randn(3, 16), torch.empty(3, 16)
    deep_gemm.fp8_fp4_gemm_nt(a, (values, scales), d, c)
    assert deep_gemm.calc_diff(d - c, product(a, (values, scales))) < 1e-4


@pytest.mark.parametrize("packed", [False, True])
def test_scales_of_a_for_32_columns(packed: bool) -> None:
    (a, sfa), values, scales = operands(4, 24, 288, columns=32)
    sfa = 2.0 ** sfa.log2().ceil()
    exact = (a.double() * sfa.double().repeat_interleave(32, 1)) @ plain(values, scales).t()
    of_a = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sfa) if packed else sfa
    for said in ({"recipe": (1, 1, 32)}, {"recipe_a": (1, 32)}, {"recipe_a": (1, 32), "recipe_b": (1, 32)}):
        d = product((a, of_a), (values, scales), **said)
        assert deep_gemm.calc_diff(d.double(), exact) < 1e-5


def test_scales_of_a_may_be_words() -> None:
    (a, sfa), values, scales = operands(4, 24, 1312)
    sfa = 2.0 ** sfa.log2().ceil()
    words = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sfa)
    found = product((a, words), (values, scales), recipe_a=(1, 128), recipe_b=(1, 32))
    assert torch.equal(found, product((a, sfa), (values, scales)))


def test_scales_of_any_fp32_value() -> None:
    (a, sfa), values, _ = operands(4, 24, 288)
    scales = torch.rand(24, 9) + 0.1
    exact = dequantize(a, sfa) @ (as_e4m3(values).double() * scales.double().repeat_interleave(32, 1)).t()
    assert deep_gemm.calc_diff(product((a, sfa), (values, scales)).double(), exact) < 1e-5


def test_every_code_and_every_exponent_is_the_number_that_it_stands_for() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes[::2] | codes[1::2] << 4
    assert torch.equal(as_e4m3(packed).float(), VALUES)
    exponents = torch.arange(256, dtype=torch.uint8)
    numbers = numbers_of(words_of(exponents), 256)
    assert torch.equal(numbers[:255].double(), 2.0 ** (torch.arange(255.0, dtype=torch.float64) - 127))
    assert numbers[255].isnan()


def test_whole_words_are_not_copied() -> None:
    scales = torch.zeros(6, 8, dtype=torch.uint8)
    assert words_of(scales).data_ptr() == scales.data_ptr()
    wide = torch.zeros(6, 9, dtype=torch.uint8)
    for others in (scales[:, :7], scales[:, 1:5], wide[:, :8], scales.t()[:4], scales[0, ::2]):
        assert torch.equal(words_of(others).contiguous().view(torch.uint8)[..., : others.shape[-1]], others)
    assert words_of(behind_a_byte(scales)).data_ptr() % 4 == 0


def behind_a_byte(x: Tensor) -> Tensor:
    """Copy a tensor to an address where only one-byte elements may begin, as in a file that is mapped to memory."""
    buffer = bytearray(x.nbytes + 16)
    first = 1 - torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 4 & 3
    return torch.frombuffer(buffer, dtype=x.dtype, count=x.numel(), offset=first).view(x.shape).copy_(x)


REFUSED: dict[str, Callable[..., dict[str, Any]]] = {
    "recipe: expected (1, 1, 32) for packed FP4 values, got (1, 128, 128)": lambda b, sf: {"recipe": (1, 128, 128)},
    "recipe_b: expected (1, 32) for packed FP4 values, got (32, 32)": lambda b, sf: {"recipe_b": (32, 32)},
    "b: expected shape (n, k / 2) = (n, 48), got (16, 47)": lambda b, sf: {"b": (b[:, 1:], sf)},
    "sfb: expected shape (16, 3) of torch.uint8, got (16, 2)": lambda b, sf: {"b": (b, sf[:, 1:])},
    "sfb: expected shape (16, 1) of torch.int32": lambda b, sf: {"b": (b, words_of(sf).repeat(1, 2))},
    "sfb: expected dtype torch.float32 or torch.int32": lambda b, sf: {"b": (b, sf.half())},
    "sfb: expected an address that is a multiple of 4 bytes": lambda b, sf: {"b": (b, behind_a_byte(words_of(sf)))},
    "b: expected values contiguous along k": lambda b, sf: {"b": (b.t().contiguous().t(), sf)},
    "n: expected a multiple of 8": lambda b, sf: {"b": (b[:12], sf[:12])},
    "k: expected a multiple of 32 for packed FP4 values, got 80": lambda b, sf: {
        "a": deep_gemm.per_token_cast_to_fp8(torch.randn(3, 80)),
        "b": (b[:, :40], sf),
    },
}
"""The beginning of an error, and the change of a correct call's weight that causes it."""


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_said_in_words(message: str) -> None:
    a, values, scales = operands(3, 16, 96)
    with refused(message):
        deep_gemm.fp8_fp4_gemm_nt(**{"a": a, "b": (values, scales), **REFUSED[message](values, scales)})


def test_a_packed_weight_has_its_k_last() -> None:
    a, values, scales = operands(3, 16, 96)
    with pytest.raises(NotImplementedError, match=r"^b: packed FP4"):
        deep_gemm.fp8_fp4_gemm_tn(a, (values.view(torch.int8), scales))
