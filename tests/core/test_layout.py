"""Sizes and layouts of scales: layouts that TMA can load, equal values in them, and errors that say what is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor, transform_sf_into_required_layout
from deep_gemm.core.check.layout import (
    RECIPES,
    RECIPES_OF_A,
    RECIPES_OF_B,
    align,
    ceil_div,
    either,
    get_tma_aligned_size,
    is_mn_major_tma_aligned,
)
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.gemm import launch
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds.output import Output

PER_ROW, PER_BLOCK = (1, 128, 128), (128, 128)


def scales(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def assert_loads_directly(sf: Tensor) -> None:
    """Check TMA's rules: columns of 4-byte scales are contiguous; pitches and addresses are multiples of 16 bytes."""
    mn, blocks = sf.shape[-2:]
    assert mn <= 1 or sf.stride(-2) == 1
    assert blocks <= 1 or (sf.stride(-1) % 4 == 0 and sf.stride(-1) >= mn)
    assert sf.dim() == 2 or sf.shape[0] <= 1 or sf.stride(0) % 4 == 0
    assert sf.data_ptr() % 16 == 0


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_ceil_div_and_align_are_exact(x: int, y: int) -> None:
    assert (ceil_div(x, y) - 1) * y < x <= ceil_div(x, y) * y
    assert align(x, y) % y == 0
    assert x <= align(x, y) < x + y


@pytest.mark.parametrize("element_size", [1, 2, 3, 4, 8, 12, 16, 32, 48])
@pytest.mark.parametrize("x", [0, 1, 3, 15, 16, 17, 33, 4096])
def test_tma_aligned_size_is_the_next_multiple_of_16_bytes(x: int, element_size: int) -> None:
    size = get_tma_aligned_size(x, element_size)
    sizes = (y for y in range(x, x + 16) if y * element_size % 16 == 0)
    assert size == next(sizes)


@pytest.mark.parametrize(
    ("x", "element_size", "message"),
    [
        (33, 0, "element_size: expected an integer in 1..2147483647, got 0"),
        (33, 4.0, "element_size: expected an integer in 1..2147483647, got 4.0"),
        (-1, 4, "mn: expected an integer in 0..2147483647, got -1"),
        ("x", 4, "mn: expected an integer in 0..2147483647, got 'x'"),
    ],
)
def test_a_size_that_is_no_integer_is_refused(x: Any, element_size: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        get_tma_aligned_size(x, element_size)
    assert str(caught.value) == message


SHAPES = [(1, 1), (5, 3), (8, 3), (4, 2), (1, 7), (129, 56), (0, 3), (3, 0), (2, 5, 3), (2, 7, 2), (3, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_become_mn_major_with_the_same_values_and_then_stay(shape: tuple[int, ...]) -> None:
    sf = scales(*shape)
    out = get_mn_major_tma_aligned_tensor(sf)
    assert torch.equal(out, sf)
    assert is_mn_major_tma_aligned(out)
    assert_loads_directly(out)
    assert get_mn_major_tma_aligned_tensor(out) is out


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 1), (1, 1)),  # row-major
        ((5, 1), (1, 5)),  # a column of an m-major matrix with an odd pitch
        ((1, 1), (1, 1)),
        ((1, 1), (3, 3)),
        ((1, 5, 1), (5, 1, 1)),
        ((2, 8, 1), (8, 1, 1)),
    ],
)
def test_one_column_is_never_copied_because_it_has_no_pitch(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    sf = lay_in(shape, strides)
    out = get_mn_major_tma_aligned_tensor(sf)
    assert out.data_ptr() == sf.data_ptr()
    assert torch.equal(out, sf)
    assert_loads_directly(sf)


def test_tma_takes_one_column_as_it_lies(gpu: FakeGpu) -> None:
    a, b = torch.zeros(5, 128).to(torch.float8_e4m3fn), torch.zeros(256, 128).to(torch.float8_e4m3fn)
    p = dense_problem((a, scales(5, 1)), (b, scales(2, 1)), None, None)
    config = tile_config(64, 64, Output())
    launch.start(p, config, 132)
    assert [tensor_map.why_illegal() for tensor_map in gpu.last.maps] == [None] * 4


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 1), (1, 8)),
        ((8, 1), (1, 8)),
        ((1, 1), (1, 4)),
        ((1, 3), (1, 4)),
        ((2, 5, 1), (8, 1, 8)),  # copied, because the distance between groups is no multiple of 16 bytes
        ((2, 4, 1), (4, 1, 4)),
        ((1, 5, 3), (24, 1, 8)),
        ((1, 1, 1), (4, 1, 4)),
    ],
)
def test_sizes_of_1_have_the_strides_of_any_other_size(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    sf = scales(*shape)
    mn, k = shape[-2], shape[-1] * 128
    groups = shape[0] if len(shape) == 3 else None
    x = torch.ones(*shape[:-1], k)
    for out in (
        get_mn_major_tma_aligned_tensor(sf),
        transform_sf_into_required_layout(sf, mn, k, (1, 128), groups),
        per_token_cast_to_fp8(x, mn_major=True)[1],
    ):
        assert out.stride() == strides
    out = get_mn_major_tma_aligned_tensor(sf)
    assert torch.equal(out, sf)
    assert get_mn_major_tma_aligned_tensor(out) is out


def lay_in(shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> Tensor:
    """Copy scales into a buffer with any strides."""
    size = 1 + first + sum((x - 1) * stride for x, stride in zip(shape, strides, strict=True))
    return torch.zeros(size).as_strided(shape, strides, first).copy_(scales(*shape))


@pytest.mark.parametrize(
    ("shape", "strides", "first"),
    [
        ((8, 3), (3, 1), 0),  # row-major
        ((6, 3), (1, 6), 0),  # a pitch of 24 bytes
        ((8, 3), (1, 8), 1),  # an address that is no multiple of 16 bytes
        ((4, 3), (2, 8), 0),  # every other row
        ((2, 8, 3), (26, 1, 8), 0),  # a distance between groups that is no multiple of 16 bytes
        ((2, 8, 3), (3, 6, 1), 0),  # groups are the second innermost dimension
    ],
)
def test_scales_that_tma_cannot_load_are_copied(shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> None:
    sf = lay_in(shape, strides, first)
    assert not is_mn_major_tma_aligned(sf)
    out = get_mn_major_tma_aligned_tensor(sf)
    assert out.data_ptr() != sf.data_ptr()
    assert torch.equal(out, scales(*shape))
    assert_loads_directly(out)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4)),
    strides=st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)),
    first=st.integers(0, 5),
)
def test_any_strides_give_the_same_values_in_a_layout_that_loads(
    shape: tuple[int, int, int], strides: tuple[int, int, int], first: int
) -> None:
    sf = torch.arange(200.0).as_strided(shape, strides, first)
    for same in (sf, sf[0]):
        out = get_mn_major_tma_aligned_tensor(same)
        assert torch.equal(out, same)
        assert_loads_directly(out)


def test_scales_that_require_a_gradient_give_no_graph() -> None:
    assert not get_mn_major_tma_aligned_tensor(scales(5, 3).requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("sf", "message"),
    [
        (None, "TypeError: sf: expected a tensor, got NoneType"),
        (torch.ones(5, 3, dtype=torch.int32), "sf: expected dtype torch.float32, got torch.int32"),
        (torch.ones(5), "sf: expected shape (mn, k_blocks) or (groups, mn, k_blocks), got (5,)"),
        (torch.ones(1, 1, 5, 3), "sf: expected shape (mn, k_blocks) or (groups, mn, k_blocks), got (1, 1,"),
    ],
)
def test_what_are_no_scales_is_refused(sf: Tensor, message: str) -> None:
    with refused(message):
        get_mn_major_tma_aligned_tensor(sf)


# Scales against a recipe


@pytest.mark.parametrize(
    "recipe", [(1, 128, 128), (1, 1, 128), (1, 128), [1, 128], (1, 32, 32), (1, 64, 64), (1, 1, 32), (1, 32), (1, 64)]
)
@pytest.mark.parametrize("groups", [None, 2])
def test_one_scale_for_each_row_becomes_mn_major(recipe: Any, groups: int | None) -> None:
    columns = math.ceil(272 / recipe[-1])
    sf = scales(5, columns) if groups is None else scales(groups, 5, columns)
    out = transform_sf_into_required_layout(sf, 5, 272, recipe, groups, is_sfa=True)
    assert torch.equal(out, sf)
    assert_loads_directly(out)


@pytest.mark.parametrize(
    ("recipe", "is_sfa"),
    [((1, 128, 128), False), ((128, 128), None), ((128, 128), True), ((1, 32, 32), False), ((64, 64), None)],
)
@pytest.mark.parametrize("groups", [None, 2])
def test_one_scale_for_each_block_is_kept_as_it_is(recipe: Any, is_sfa: bool | None, groups: int | None) -> None:
    blocks = math.ceil(200 / recipe[-1]), math.ceil(272 / recipe[-1])
    sf = scales(*blocks) if groups is None else scales(groups, *blocks)
    assert transform_sf_into_required_layout(sf, 200, 272, recipe, groups, is_sfa) is sf


def test_no_recipe_means_one_scale_for_each_row_of_a_and_each_block_of_b() -> None:
    assert_loads_directly(transform_sf_into_required_layout(scales(5, 3), 5, 272, None, is_sfa=True))
    blocks = scales(2, 3)
    assert transform_sf_into_required_layout(blocks, 200, 272, None, is_sfa=False) is blocks


def test_sizes_may_be_numpys() -> None:
    mn, k, groups, row, block = (np.int64(x) for x in (5, 272, 2, 1, 128))
    sizes: Any = (mn, k, (row, block), groups)
    assert_loads_directly(transform_sf_into_required_layout(scales(2, 5, 3), *sizes))


def test_the_side_need_not_be_said_where_both_have_one_recipe() -> None:
    assert_loads_directly(transform_sf_into_required_layout(scales(5, 3), 5, 272, (1, 1, 128)))


def test_fp32_scales_are_never_rounded() -> None:
    sf = scales(5, 3) + 0.3
    for disable_ue8m0_cast in (False, True):
        out = transform_sf_into_required_layout(sf, 5, 272, PER_ROW, None, True, disable_ue8m0_cast, torch.ones(2))
        assert torch.equal(out, sf)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((scales(5, 4), 5, 272, PER_ROW, None, True), "sf: expected shape (5, 3), got (5, 4)"),
        ((scales(3, 5), 5, 272, PER_ROW, None, True), "sf: expected shape (5, 3), got (3, 5)"),
        ((scales(200, 3), 200, 272, PER_ROW, None, False), "sf: expected shape (2, 3), got (200, 3)"),
        ((scales(5, 3), 5, 272, PER_ROW, 2, True), "sf: expected shape (2, 5, 3), got (5, 3)"),
        ((scales(5, 3), 5, 272, PER_ROW), "is_sfa: expected True or False with the recipe (1, 128, 128)"),
        ((scales(5, 3), 5, 272, None), "is_sfa: expected True or False with the recipe (1, 128, 128)"),
        ((scales(5, 3), 5, 272, 128), "recipe: expected a tuple of integers, got 128"),
        *[
            (
                (scales(5, 3), 5, 272, recipe, None, True),
                f"NotImplementedError: recipe: expected {either(RECIPES)}, or "
                f"{either(sorted({*RECIPES_OF_A, *RECIPES_OF_B}))} for one side, got {recipe}",
            )
            for recipe in ((), (128,), (1, 1, 64), (1, 16), (128, 128, 128), ([1], 128, 128))
        ],
        ((scales(5, 3), "5", 272, PER_ROW, None, True), "mn: expected an integer in 0.."),
        ((scales(5, 3), 5, 272.0, PER_ROW, None, True), "k: expected an integer in 0.."),
        ((scales(5, 3), 5, 272, PER_ROW, "2", True), "num_groups: expected an integer in 0.."),
        ((scales(5, 3).double(), 5, 272, PER_ROW, None, True), "sf: expected dtype torch.float32, got torch.float64"),
        (([1.0], 5, 272, PER_ROW, None, True), "TypeError: sf: expected a tensor, got a list of 1"),
        (  # each int32 holds four exponents, so these have a quarter of the columns
            (torch.ones(5, 1, dtype=torch.int32), 5, 272, PER_ROW, None, True),
            "NotImplementedError: sf: packed UE8M0 scales (torch.int32) are not supported, pass torch.float32 scales",
        ),
        (
            (torch.ones(2, 3, dtype=torch.int32), 200, 272, PER_BLOCK),
            "NotImplementedError: sf: packed UE8M0 scales (torch.int32) are not supported, pass torch.float32 scales",
        ),
    ],
)
def test_scales_that_do_not_follow_the_recipe_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with refused(message):
        transform_sf_into_required_layout(*arguments)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("k", [288, 512])
@pytest.mark.parametrize("groups", [None, 3])
def test_exponents_of_fp4_weights_become_the_words_that_products_take(
    groups: int | None, k: int, dtype: torch.dtype
) -> None:
    """Exponents whose rows are whole words are not copied. Words are returned as they are."""
    lead = () if groups is None else (groups,)
    exponents = torch.randint(100, 140, (*lead, 24, k // 32), dtype=torch.uint8)
    words = transform_sf_into_required_layout(exponents.view(dtype), 24, k, (1, 32), groups)
    assert words.dtype == torch.int32
    assert words.shape == (*lead, 24, -(-k // 128))
    assert torch.equal(words.view(torch.uint8)[..., : k // 32], exponents)
    assert (words.data_ptr() == exponents.data_ptr()) == (k == 512)
    assert transform_sf_into_required_layout(words, 24, k, (1, 32), groups) is words
    assert words_of(exponents.view(-1)[:16].as_strided((1, 16), (1, 1))).shape == (1, 4), "one row may have any stride"
    with pytest.raises(ValueError, match=r"^sf: expected shape"):
        transform_sf_into_required_layout(words[..., :1], 24, k, (1, 32), groups)
    with pytest.raises(ValueError, match=r"^sf: expected dtype torch.float32"):
        transform_sf_into_required_layout(exponents.view(dtype), 24, k, (1, 128), groups)


@pytest.mark.parametrize("recipe", [(1, 64), (32, 32), (64, 64)])
@pytest.mark.parametrize("k", [288, 576, 2880])
@pytest.mark.parametrize("groups", [None, 3])
def test_scales_of_any_form_become_the_same_numbers(groups: int | None, k: int, recipe: tuple[int, int]) -> None:
    """Convert FP32 numbers, exponents of either type, and words of four exponents to the scales of an E4M3 operand."""
    mn, (rows, columns) = 80, recipe
    shape = (*(() if groups is None else (groups,)), -(-mn // rows), -(-k // columns))
    exponents = torch.randint(0, 256, shape, dtype=torch.uint8)
    numbers = torch.where(exponents == 255, torch.nan, torch.exp2(exponents.double() - 127).float())
    right = transform_sf_into_required_layout(numbers, mn, k, recipe, groups)
    words = words_of(exponents)
    for sf in (exponents, exponents.view(torch.float8_e8m0fnu), words, words.mT.contiguous().mT):
        out = transform_sf_into_required_layout(sf, mn, k, recipe, groups)
        assert torch.equal(out.view(torch.int32), right.view(torch.int32))
        assert out.stride() == right.stride()
        with pytest.raises(ValueError, match=r"^sf: expected shape"):
            transform_sf_into_required_layout(sf, mn, k + 256, recipe, groups)
