"""Scales packed as UE8M0: bytes, order, layouts, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import deep_gemm
from deep_gemm import pack_ue8m0_to_int, per_channel_cast_to_fp8, per_token_cast_to_fp8, unpack_ue8m0_from_int

PACKED: Any = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor
DEPTHS: Any = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
REQUIRED = deep_gemm.transform_sf_into_required_layout
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def powers(*shape: int, device: str = "cpu") -> Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.ldexp(torch.ones(shape), torch.randint(-126, 128, shape, generator=g)).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_every_power_of_two_is_its_exponent_and_comes_back(device: str) -> None:
    exponents = torch.arange(-126, 126, device=device)
    x = torch.ldexp(torch.ones(len(exponents), device=device), exponents)
    packed = pack_ue8m0_to_int(x)
    assert packed.dtype == torch.int32
    assert packed.contiguous().view(torch.uint8).tolist() == (exponents + 127).tolist()
    assert torch.equal(unpack_ue8m0_from_int(packed), x)


def test_the_first_of_four_is_the_lowest_byte() -> None:
    (word,) = pack_ue8m0_to_int(torch.tensor([2.0**-126, 1.0, 2.0, 2.0**127])).tolist()
    assert word & 0xFFFFFFFF == 0xFE807F01


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
def test_packed_scales_lie_as_tma_loads_them(groups: int, mn: int, blocks: int) -> None:
    sf = powers(groups, mn, blocks)
    out = PACKED(sf)
    words, pitch = -(-blocks // 4), -(-mn // 4) * 4
    assert out.shape == (groups, mn, words)
    assert out.stride() == (words * pitch, 1, pitch)
    numbers = unpack_ue8m0_from_int(out)
    assert torch.equal(numbers[..., :blocks], sf)
    assert not numbers[..., blocks:].any()
    of_one = PACKED(sf[0].mT.contiguous().mT, psum_layout=None)
    assert of_one.stride() == (1, pitch)
    assert torch.equal(of_one, out[0])


@pytest.mark.parametrize("device", DEVICES)
def test_groups_along_k_share_no_word(device: str) -> None:
    ks = [640, 0, 128, 512]
    x = torch.randn(sum(ks), 10, device=device)
    sf = per_channel_cast_to_fp8(x, use_ue8m0=True)[1]
    out = DEPTHS(sf, None, ks, 128, 128)
    assert out.shape == (2 + 1 + 1, 10)
    assert out.stride() == (12, 1)
    numbers = unpack_ue8m0_from_int(out.t())
    assert torch.equal(numbers[:, :5], sf[:5].t())
    assert torch.equal(numbers[:, 8], sf[5])
    assert torch.equal(numbers[:, 12:], sf[6:].t())
    depths = torch.tensor(ks, dtype=torch.int32, device=device)
    ends = depths.cumsum(0).int()
    for layout, is_ends in ((depths, False), (ends, True)):
        same = DEPTHS(sf, layout, None, 128, 128, is_ends)
        assert torch.equal(same, out)


def test_packed_scales_of_groups_along_k_are_words_by_mn_as_the_scales_are_blocks_by_mn() -> None:
    sf = powers(10, 40)
    out = DEPTHS(sf, None, [128, 640, 512], 128, 128)
    assert (out.shape, out.stride()) == ((1 + 2 + 1, 40), (40, 1))
    for words, blocks in ((slice(0, 1), slice(0, 1)), (slice(1, 3), slice(1, 6)), (slice(3, 4), slice(6, 10))):
        numbers = unpack_ue8m0_from_int(out[words].t()).t()
        count = blocks.stop - blocks.start
        assert torch.equal(numbers[:count], sf[blocks])
        assert not numbers[count:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_cast_gives_packed_scales(device: str) -> None:
    x = torch.randn(2, 5, 700, device=device)
    values, scales = per_token_cast_to_fp8(x, True)
    same, packed = per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=128, use_packed_ue8m0=True)
    assert torch.equal(same.view(torch.uint8), values.view(torch.uint8))
    assert packed.shape == (2, 5, 2)
    assert torch.equal(unpack_ue8m0_from_int(packed)[..., :6], scales)
    with pytest.raises(ValueError, match=r"^use_packed_ue8m0: expected use_ue8m0 and no masked_m with packed scales"):
        per_token_cast_to_fp8(x, use_packed_ue8m0=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gran_k", [32, 64, 96, 128])
def test_a_cast_lays_packed_scales_as_tma_loads_them(device: str, gran_k: int) -> None:
    for shape in ((5, 700), (3, 6, 160)):
        x = torch.randn(shape, device=device)
        scales = per_token_cast_to_fp8(x, True, gran_k)[1]
        packed = per_token_cast_to_fp8(x, True, gran_k, mn_major=True, use_packed_ue8m0=True)[1]
        right = PACKED(scales)
        assert torch.equal(packed, right)
        assert packed.stride() == right.stride()
        assert PACKED(packed) is packed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_exponents_are_packed_as_the_numbers_they_stand_for(device: str, dtype: torch.dtype) -> None:
    for shape in ((5, 9), (2, 7, 8)):
        exponents = torch.randint(1, 255, shape, dtype=torch.uint8, device=device)
        words = PACKED(exponents.view(dtype))
        numbers = torch.ldexp(torch.ones(shape, device=device), exponents.int() - 127)
        right = PACKED(numbers)
        assert torch.equal(words, right)
        assert words.stride() == right.stride()
        assert torch.equal(PACKED(words.contiguous()), right)


ONES, META = torch.ones(3, 8), torch.empty(2, dtype=torch.int32, device="meta")
NOT_DENSE = "expected a dense tensor, got layout torch.sparse_coo"
NOT_THERE = "expected a CPU or CUDA tensor, got device meta"


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (pack_ue8m0_to_int, (1.0,), "TypeError: x: expected a tensor, got float"),
        (pack_ue8m0_to_int, (torch.ones(4).double(),), "x: expected dtype torch.float32, got torch.f"),
        (pack_ue8m0_to_int, (torch.ones(6),), "x: expected a multiple of 4 columns, got shape (6,)"),
        (pack_ue8m0_to_int, (torch.tensor([[1, 1, 3.0, 1]]),), "x: expected powers of two, got 3.0 at (0,"),
        (pack_ue8m0_to_int, (-torch.ones(4),), "x: expected powers of two, got -1.0 at (0,)"),
        (pack_ue8m0_to_int, (torch.full((4,), 1e-40),), "x: expected powers of two, got "),
        (pack_ue8m0_to_int, (torch.ones(1, 4).to_sparse(),), "x: expected a dense tensor, got layout"),
        (unpack_ue8m0_from_int, (torch.ones(1, 4).int().to_sparse(),), f"packed: {NOT_DENSE}"),
        (PACKED, (ONES.to_sparse(),), f"sf: {NOT_DENSE}"),
        (DEPTHS, (ONES.to_sparse(), None, [384], 128, 128), f"sf: {NOT_DENSE}"),
        (DEPTHS, (ONES, None, META, 128, 128), f"ks_cpu: {NOT_THERE}"),
        (DEPTHS, (ONES, META, None, 128, 128, False), f"grouped_layout: {NOT_THERE}"),
        (DEPTHS, (ONES, META, None, 128, 128, True), f"grouped_layout: {NOT_THERE}"),
        (REQUIRED, (torch.ones(1, 3).to_sparse(), 8, 384, (1, 128, 128), None, False), f"sf: {NOT_DENSE}"),
        (unpack_ue8m0_from_int, (None,), "TypeError: packed: expected a tensor, got NoneType"),
        (unpack_ue8m0_from_int, (torch.ones(4),), "packed: expected dtype torch.int32, got torch.float32"),
        *((PACKED, (torch.ones(4).to(of),), "sf: expected sh") for of in (torch.float32, torch.uint8, torch.int32)),
        (PACKED, (ONES * 3,), "sf: expected powers of two, got 3.0"),
        (DEPTHS, (ONES, None, None, 128, 128), "ks_cpu: expected a list, or grouped_layout with the "),
        (DEPTHS, (ONES, None, [384, 64], 128, 128), "ks_cpu: expected multiples of k_alignment = 128, "),
        (DEPTHS, (ONES, None, [384], 0, 128), "gran_k: expected an integer in 1..2147483647, got 0"),
        (DEPTHS, (ONES, None, [512], 128, 128), "sf: expected shape (sum(ceil(k / gran_k)), mn) = (4, mn), got (3, 8)"),
    ],
)
def test_mistakes_are_named(function: Any, arguments: Any, message: str) -> None:
    with refused(message):
        function(*arguments)
