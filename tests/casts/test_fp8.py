"""Rules of casts, each for every cast: round trips within half a unit, saturation, special values, ragged sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deep_gemm.casts.fp8 import (
    cast_back_from_fp8,
    cast_both_to_fp8,
    k_grouped_cast_to_fp8,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_tensor_cast_to_fp8,
    per_token_cast_to_fp8,
)
from deep_gemm.casts.rules import ceil_to_ue8m0
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.testing import calc_diff
from lab.casts import assert_same_bits

FP8_MAX = 448.0
MIN_SCALE = 2.0**-126
FLT_MAX = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-149


class Cast(NamedTuple):
    """A cast, and the rows and columns of its blocks, each either `gran_k` or 1."""

    function: Callable[..., tuple[Tensor, Tensor]]
    by_rows: bool
    by_columns: bool

    def block(self, gran_k: int = 128) -> tuple[int, int]:
        return (gran_k if self.by_rows else 1), (gran_k if self.by_columns else 1)


CASTS = {
    "per token": Cast(per_token_cast_to_fp8, False, True),
    "per channel": Cast(per_channel_cast_to_fp8, True, False),
    "per block": Cast(per_block_cast_to_fp8, True, True),
}
every_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
fp32_or_ue8m0 = pytest.mark.parametrize("use_ue8m0", [False, True], ids=["FP32", "UE8M0"])


def spread(scales: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """Return the scale of each value, in FP64."""
    rows, columns = block
    wide = scales.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : shape[-2], : shape[-1]]


def half_unit(magnitude: Tensor) -> Tensor:
    """Return half the distance between the two E4M3 numbers next to a magnitude. Subnormal numbers are 2^-9 apart."""
    exponent = (torch.frexp(magnitude).exponent - 1).clamp_min(-6)
    return torch.ldexp(torch.full_like(magnitude, 0.5), exponent - 3)


def assert_nearest(x: Tensor, values: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
    """Check that |x - v s| is at most half a unit of x / s, times s. The FP32 quotient may be off by 1 part in 2^24."""
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert tuple(values.shape) == tuple(x.shape)
    assert tuple(scales.shape) == (*x.shape[:-2], ceil_div(x.shape[-2], block[0]), ceil_div(x.shape[-1], block[1]))
    assert values.is_contiguous() and scales.is_contiguous()
    scale, exact = spread(scales, block, x.shape), x.double()
    error = (exact - values.double() * scale).abs()
    quotient = exact.abs() / scale
    assert bool((quotient <= FP8_MAX * (1 + 2.0**-23)).all()), "every finite input fits"
    assert bool((error <= half_unit(quotient) * scale + exact.abs() * 2.0**-24).all())


def block_maxima(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block, one block at a time."""
    bands = [torch.split(band, block[1], -1) for band in torch.split(x, block[0], -2)]
    return torch.stack([torch.stack([part.abs().amax((-2, -1)) for part in band], -1) for band in bands], -2)


def assert_scales(x: Tensor, scales: Tensor, block: tuple[int, int], use_ue8m0: bool) -> None:
    amax = block_maxima(x.float(), block)
    if not use_ue8m0:
        expected = torch.where(amax == 0, 1.0, (amax / FP8_MAX).clamp_min(MIN_SCALE))
        assert torch.equal(scales, expected)
        return
    assert bool((torch.frexp(scales).mantissa == 0.5).all()), "a power of two"
    used, fit = scales.double()[amax != 0], amax.double()[amax != 0] / FP8_MAX
    assert bool((used >= fit).all())
    assert bool(((used < 2 * fit) | (used == MIN_SCALE)).all())
    assert bool((scales[amax == 0] == 1).all())


def numbers(shape: Sequence[int], seed: int = 0, low: int = -20, high: int = 10, dtype: Any = torch.float32) -> Tensor:
    """Draw numbers of very different magnitudes, with exponents from `low` to `high`. Some numbers are zero."""
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high + 1, tuple(shape), generator=g)
    x = torch.ldexp(torch.rand(tuple(shape), generator=g, dtype=torch.float64) * 2 - 1, exponents)
    return torch.where(torch.rand(tuple(shape), generator=g) < 0.1, 0.0, x).to(dtype)


SHAPES = [(1, 1), (1, 128), (128, 1), (5, 300), (129, 127), (130, 257), (2, 3, 200), (2, 2, 131, 5)]


@pytest.mark.few
@every_cast
@fp32_or_ue8m0
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_round_trip_is_within_half_a_unit_whatever_the_sizes_and_types(
    cast: Cast, use_ue8m0: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = numbers(shape, dtype=dtype)
    before = x.clone()
    values, scales = cast.function(x, use_ue8m0)
    assert torch.equal(x, before)
    assert_scales(x, scales, cast.block(), use_ue8m0)
    assert_nearest(x.float(), values, scales, cast.block())


@every_cast
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    gran_k=st.sampled_from([1, 7, 16, 32, 128]),
    exponents=st.tuples(st.integers(-149, 127), st.integers(-149, 127)).map(sorted),
    use_ue8m0=st.booleans(),
)
def test_round_trip_is_within_half_a_unit_over_the_whole_range_of_fp32(
    cast: Cast, seed: int, shape: tuple[int, int], gran_k: int, exponents: list[int], use_ue8m0: bool
) -> None:
    x = numbers(shape, seed, exponents[0], exponents[1])
    values, scales = cast.function(x, use_ue8m0, gran_k)
    assert_scales(x, scales, cast.block(gran_k), use_ue8m0)
    assert_nearest(x, values, scales, cast.block(gran_k))


@every_cast
@fp32_or_ue8m0
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_not_finite_becomes_one_byte_and_leaves_scales_alone(cast: Cast, dtype: Any, use_ue8m0: bool) -> None:
    x = numbers((130, 260), dtype=dtype)
    x[3, 5], x[129, 259], x[64, 130] = torch.inf, -torch.inf, -torch.inf
    x[3, 6] = x[128, 0] = x[64, 131] = torch.nan
    x[128:] = x[128:].copysign(-x.new_ones(()))
    assert bool(x[128, 0].signbit())
    values, scales = cast.function(x, use_ue8m0)
    expected_values, expected_scales = cast.function(torch.where(x.isfinite(), x, 0.0), use_ue8m0)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8) == 0x7F, ~x.isfinite())
    assert torch.equal(values.float()[x.isfinite()], expected_values.float()[x.isfinite()])


# min_amax, the least maximum of a block


@every_cast
@fp32_or_ue8m0
@pytest.mark.parametrize("min_amax", [2.0**-140, 1e-10, 0.25, 448.0, FLT_MAX])
def test_each_block_counts_as_at_least_min_amax(cast: Cast, use_ue8m0: bool, min_amax: float) -> None:
    x = numbers((130, 260))
    x[:, :128] = 0.0
    x[5, 200] = torch.nan
    values, scales = cast.function(x, use_ue8m0, min_amax=min_amax)
    amax = block_maxima(x.nan_to_num(0.0), cast.block()).clamp_min(min_amax)
    # The expected scale is the scale of a block that holds this maximum alone.
    _, wanted = per_block_cast_to_fp8(amax.flatten()[:, None], use_ue8m0, 1)
    assert torch.equal(scales, wanted.view(scales.shape))
    quotients = (x.double() / spread(scales, cast.block(), x.shape)).float()
    near = (values.float() - quotients).abs() <= half_unit(quotients.abs()) + quotients.abs() * 2.0**-23
    assert bool((near | x.isnan()).all())


@every_cast
@fp32_or_ue8m0
def test_a_min_amax_of_zero_changes_nothing(cast: Cast, use_ue8m0: bool) -> None:
    x = numbers((130, 260))
    x[:, :128], x[3, 200], x[4, 201] = 0.0, torch.nan, torch.inf
    for zero in (0.0, 0, 1e-60):  # the last is 0 in FP32
        assert_same_bits(cast.function(x, use_ue8m0, min_amax=zero), cast.function(x, use_ue8m0))


def test_groups_along_k_count_as_at_least_min_amax() -> None:
    x = numbers((3, 192))
    values, scales = k_grouped_cast_to_fp8(x, [64, 128], min_amax=1e4)
    assert torch.equal(scales, torch.full((3, 2), 1e4) / 448)
    assert torch.equal(values[3 * 64 :].float(), per_token_cast_to_fp8(x[:, 64:], min_amax=1e4)[0].float().flatten())


@every_cast
@fp32_or_ue8m0
@pytest.mark.parametrize("filler", [0.0, -0.0, torch.inf, -torch.inf, torch.nan])
def test_a_block_without_a_finite_non_zero_value_has_scale_1(cast: Cast, use_ue8m0: bool, filler: float) -> None:
    values, scales = cast.function(torch.full((128, 256), filler), use_ue8m0)
    assert bool((scales == 1).all())
    assert torch.allclose(values.float(), torch.tensor(0.0 * filler), 0.0, 0.0, equal_nan=True)


@every_cast
@fp32_or_ue8m0
@pytest.mark.parametrize("amax", [SUBNORMAL, 3 * SUBNORMAL, 2.0**-127, 2.0**-126, 2.0**-118, 447 * MIN_SCALE])
def test_no_scale_is_below_the_smallest_normal_number(cast: Cast, use_ue8m0: bool, amax: float) -> None:
    x = torch.full((4, 140), amax)
    x[1], x[2] = -amax, 0.0
    values, scales = cast.function(x, use_ue8m0)
    assert bool((scales[:, :1] >= MIN_SCALE).all())
    assert_nearest(x, values, scales, cast.block())
    assert_scales(x, scales, cast.block(), use_ue8m0)


@every_cast
@fp32_or_ue8m0
@pytest.mark.parametrize("amax", [FLT_MAX, FP8_MAX * 2.0**119, math.nextafter(448.0, 449.0), 448.0, 449.0])
def test_the_largest_numbers_fit(cast: Cast, use_ue8m0: bool, amax: float) -> None:
    x = torch.tensor([[amax, -amax, amax / 3]])
    values, scales = cast.function(x, use_ue8m0)
    assert bool(scales.isfinite().all())
    assert_nearest(x, values, scales, cast.block())
    if not use_ue8m0:
        assert values[0, :2].tolist() == [448, -448]


@pytest.mark.parametrize("amax", [448.0, 224.0, 448.0 * 2.0**-100, 448.0 * 2.0**119])
def test_ue8m0_scale_is_exact_where_the_maximum_is_448_times_a_power_of_two(amax: float) -> None:
    (values, scales) = per_token_cast_to_fp8(torch.tensor([[amax]]), use_ue8m0=True)
    assert scales.item() == amax / 448
    assert values.item() == 448
    _, above = per_token_cast_to_fp8(torch.tensor([[amax]]).nextafter(torch.tensor(torch.inf)), use_ue8m0=True)
    assert above.item() == 2 * amax / 448


@every_cast
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 4, 128), (3, 0, 128), (3, 128, 0)])
def test_empty_tensors_give_empty_values_and_as_many_scales_as_blocks(cast: Cast, shape: tuple[int, ...]) -> None:
    assert_nearest(torch.empty(shape), *cast.function(torch.empty(shape)), cast.block())


@every_cast
@fp32_or_ue8m0
def test_a_batch_is_cast_matrix_by_matrix(cast: Cast, use_ue8m0: bool) -> None:
    x = numbers((3, 2, 140, 150))
    values, scales = cast.function(x, use_ue8m0)
    for i, j in product(range(3), range(2)):
        assert_same_bits((values[i, j], scales[i, j]), cast.function(x[i, j], use_ue8m0))


@every_cast
def test_strides_change_nothing(cast: Cast) -> None:
    x = numbers((140, 150))
    right = cast.function(x)
    for same in (x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2], torch.cat([x, x], 1)[:, :150]):
        found = cast.function(same)
        assert_same_bits(found, right)
        assert found[0].is_contiguous()


def test_per_channel_is_per_token_of_the_transposed() -> None:
    x = numbers((200, 30))
    values, scales = per_token_cast_to_fp8(x.t())
    assert_same_bits(per_channel_cast_to_fp8(x), (values.t(), scales.t()))


@fp32_or_ue8m0
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (5, 300), (0, 5), (5, 0)])
@pytest.mark.parametrize("min_amax", [0.0, 1e-3])
def test_both_are_casts_of_rows_and_of_the_transpose(use_ue8m0: bool, shape: tuple[int, int], min_amax: float) -> None:
    x = numbers(shape)
    both = cast_both_to_fp8(x, use_ue8m0, min_amax=min_amax)
    for (values, scales), of in zip(both, (x, x.t()), strict=True):
        assert_same_bits((values, scales), per_token_cast_to_fp8(of, use_ue8m0, min_amax=min_amax))
        assert values.is_contiguous()
        assert get_mn_major_tma_aligned_tensor(scales) is scales


@every_cast
def test_inputs_that_require_a_gradient_give_no_graph(cast: Cast) -> None:
    x = numbers((4, 130)).requires_grad_()
    assert not any(result.requires_grad for result in cast.function(x))
    assert not any(result.requires_grad for result in k_grouped_cast_to_fp8(x, [128, 2]))
    assert not any(result.requires_grad for result in k_grouped_cast_to_fp8(x[:, :0], []))


# Groups along k


@fp32_or_ue8m0
@pytest.mark.parametrize("ks", [[128, 128], [16, 144, 0, 272], [0], [0, 16], [300], []])
def test_groups_along_k_are_cast_one_by_one(ks: list[int], use_ue8m0: bool) -> None:
    x = numbers((5, sum(ks)))
    values, scales = k_grouped_cast_to_fp8(x, ks, use_ue8m0)
    assert (scales.shape, scales.dtype) == ((5, sum(ceil_div(k, 128) for k in ks)), torch.float32)
    assert (values.shape, values.dtype) == ((x.numel(),), torch.float8_e4m3fn)
    first_k = first_block = 0
    for k in ks:
        one_values, one_scales = per_token_cast_to_fp8(x[:, first_k : first_k + k], use_ue8m0)
        assert torch.equal(values[5 * first_k : 5 * (first_k + k)].float().view(5, k), one_values.float())
        assert torch.equal(scales[:, first_block : first_block + one_scales.shape[1]], one_scales)
        first_k, first_block = first_k + k, first_block + one_scales.shape[1]


@pytest.mark.parametrize("ks", [[128, 128], [16, 144, 0, 272], [0], [300]])
def test_scales_of_groups_along_k_lie_as_products_load_them(ks: list[int]) -> None:
    x = numbers((5, sum(ks)))
    (values, scales), right = k_grouped_cast_to_fp8(x, ks, mn_major=True), k_grouped_cast_to_fp8(x, ks)
    assert get_mn_major_tma_aligned_tensor(scales) is scales
    assert_same_bits((values, scales), right)


# Mistakes


TYPES = "x: expected dtype float32, bfloat16, float16 or float64, got"


@every_cast
@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1.0]], "x: expected a tensor, got a list of 1"),
        (torch.ones(2, 2, dtype=torch.int32), TYPES),
        (torch.ones(2, 2, dtype=torch.complex64), TYPES),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), TYPES),
        (torch.ones(2), "x: expected at least 2 dimensions, got shape (2,)"),
        (torch.ones(2, 2).to_sparse(), "x: expected a dense tensor, got layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_cast_is_refused(cast: Cast, x: Any, message: str) -> None:
    with pytest.raises(TypeError if isinstance(x, list) else ValueError, match=f"^{re.escape(message)}"):
        cast.function(x)


@every_cast
@pytest.mark.parametrize("min_amax", [-1.0, torch.nan, torch.inf, 1e39, True, "1", None, torch.ones(())])
def test_min_amax_is_a_magnitude(cast: Cast, min_amax: Any) -> None:
    message = "min_amax: expected a finite FP32 number that is not negative, got "
    with pytest.raises(ValueError, match=message):
        cast.function(torch.ones(2, 2), min_amax=min_amax)
    for ks in ([], [2]):
        with pytest.raises(ValueError, match=message):
            k_grouped_cast_to_fp8(torch.ones(2, sum(ks)), ks, min_amax=min_amax)


@every_cast
@pytest.mark.parametrize("gran_k", [0, -128, 128.0, "x", None, True])
def test_blocks_have_a_positive_size(cast: Cast, gran_k: Any) -> None:
    is_per_token = cast.function is per_token_cast_to_fp8
    if is_per_token and gran_k == 0:  # one scale for the whole row
        return
    or_all = ", or 0 for all" * is_per_token
    with pytest.raises(ValueError, match=f"gran_k: expected a positive integer{or_all}, got {gran_k!r}"):
        cast.function(torch.ones(2, 2), gran_k=gran_k)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([[1.0]],), "x: expected a tensor, got a list of 1"),
        ((torch.ones(2, 2, dtype=torch.int32),), "x: expected dtype"),
        ((torch.ones(2),), "x: expected shape (m, k), got (2,)"),
        ((torch.ones(2, 2, 2),), "x: expected shape (m, k), got (2, 2, 2)"),
        ((torch.ones(2, 32), [16]), "x: expected shape (m, sum(ks)) = (m, 16), got (2, 32)"),
        ((torch.ones(32), [32]), "x: expected shape (m, sum(ks)) = (m, 32), got (32,)"),
        ((torch.ones(2, 128), [256, -128]), "ks: expected "),
        ((torch.ones(2, 5), 5), "ks: expected a list of integers, got 5"),
        ((torch.ones(2, 16), [16.0]), "ks: expected a list of integers, got [16.0]"),
        ((torch.ones(2, 16), "16"), "ks: expected a list of integers, got '16'"),
        (([[1.0]], [1]), "x: expected a tensor, got a list of 1"),
        ((torch.empty(2, 0, dtype=torch.int32), []), "x: expected dtype"),
    ],
)
def test_matrices_and_group_sizes_that_do_not_fit_are_refused(given: tuple[Any, ...], message: str) -> None:
    function: Any = cast_both_to_fp8 if len(given) == 1 else k_grouped_cast_to_fp8
    with pytest.raises(TypeError if isinstance(given[0], list) else ValueError, match=f"^{re.escape(message)}"):
        function(*given)


# By chosen dimensions, and back

FP8 = torch.ones(2, 4).to(torch.float8_e4m3fn)
ONES = torch.ones(2, 4)
SCALE_TYPES = "torch.float32, torch.int32 or torch.uint8"


@pytest.mark.parametrize("dims", [(0,), (1,), (-1,), (0, 2), (2, 0), (0, 1, 2), ()])
def test_a_scale_for_each_index_of_chosen_dimensions(dims: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 6)
    values, scales = per_custom_dims_cast_to_fp8(x, dims)
    kept = sorted(dim % 3 for dim in dims)
    others = [dim for dim in range(3) if dim not in kept]
    amax = x.abs().amax(dim=others, keepdim=True) if others else x.abs()
    assert scales.shape == tuple(x.shape[dim] for dim in kept)
    assert torch.equal(scales, (amax / torch.tensor(448.0)).squeeze(others))
    assert values.shape == x.shape
    assert values.is_contiguous()
    spread = scales.view([x.shape[dim] if dim in kept else 1 for dim in range(3)])
    assert bool(((values.float() * spread - x).abs() <= x.abs() * 2**-4 + spread * 2**-10).all())


def test_slices_without_elements_have_scale_1() -> None:
    values, scales = per_custom_dims_cast_to_fp8(torch.empty(3, 0), (0,))
    assert values.shape == (3, 0)
    assert scales.tolist() == [1.0, 1.0, 1.0]
    values, scales = per_custom_dims_cast_to_fp8(torch.empty(0, 3), (0,))
    assert (values.shape, scales.shape) == ((0, 3), (0,))


@pytest.mark.parametrize("dims", [(2,), (-3,), (0, 5)])
def test_dimensions_that_are_not_there_are_named(dims: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^dims: expected some of the 2 dimensions of x, got "):
        per_custom_dims_cast_to_fp8(torch.ones(2, 2), dims)


def test_numbers_that_the_host_cannot_read_are_named() -> None:
    nowhere = torch.empty(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"^ks: expected a CPU or CUDA tensor, got device meta$"):
        k_grouped_cast_to_fp8(torch.ones(2, 4), nowhere)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dims: expected a CPU or CUDA tensor, got device meta$"):
        per_custom_dims_cast_to_fp8(torch.ones(2, 2), nowhere)  # type: ignore[arg-type]


def test_casts_come_back_by_rows_by_blocks_and_by_packed_scales() -> None:
    x = torch.randn(2, 130, 300, generator=torch.Generator().manual_seed(2))
    for values, scales, gran_k in (
        (*per_token_cast_to_fp8(x), 128),
        (*per_token_cast_to_fp8(x, True, 32), 32),
        (*per_block_cast_to_fp8(x), 128),
        (*per_token_cast_to_fp8(x, True, use_packed_ue8m0=True), 128),
    ):
        back = cast_back_from_fp8(values, scales, gran_k)
        assert back.dtype == torch.float32
        assert calc_diff(back, x) < 1e-3
    assert cast_back_from_fp8(torch.empty(0, 4).to(torch.float8_e4m3fn), torch.empty(0, 1)).shape == (0, 4)


@pytest.mark.parametrize(
    ("x", "sf", "gran_k", "message"),
    [
        (ONES, torch.ones(2, 1), 128, "x: expected dtype torch.float8_e4m3fn, got torch.float32"),
        (FP8, torch.ones(2, 2), 128, "sf: expected shape (2, 1) or (1, 1), got (2, 2)"),
        (FP8, ONES[:, :1].double(), 128, f"sf: expected dtype {SCALE_TYPES}, got torch.float64"),
        (FP8, torch.ones(2, 1), -1, "gran_k: expected a positive integer, or 0 for all, got -1"),
        (FP8, torch.ones(2, 2), 0, "sf: expected shape (2, 1) or (1,), got (2, 2)"),
        (FP8, torch.ones(2, 1, device="meta"), 128, "sf: expected device cpu, where x is, got meta"),
        (FP8.to("meta"), torch.ones(2, 1), 128, "sf: expected device meta, where x is, got cpu"),
        (FP8, torch.ones(2, 1).to_sparse(), 128, "sf: expected a dense tensor, got layout torch.sparse_coo"),
        (ONES.to_sparse(), torch.ones(2, 1), 128, "x: expected a dense tensor, got layout torch.sparse_coo"),
        (FP8[0], torch.ones(1), 128, "x: expected at least 2 dimensions, got shape (4,)"),
    ],
)
def test_what_cannot_come_back_is_named(x: Tensor, sf: Tensor, gran_k: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cast_back_from_fp8(x, sf, gran_k)


# Whole rows, and all of a tensor


@fp32_or_ue8m0
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (3, 20000), (2, 3, 200), (2, 2, 131, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_under_one_scale(shape: tuple[int, ...], dtype: torch.dtype, use_ue8m0: bool) -> None:
    x, whole = numbers(shape, dtype=dtype), (1, shape[-1])
    values, scales = per_token_cast_to_fp8(x, use_ue8m0, 0)
    assert_scales(x, scales, whole, use_ue8m0)
    assert_nearest(x.float(), values, scales, whole)
    as_one_block = per_token_cast_to_fp8(x, use_ue8m0, shape[-1])
    assert_same_bits((values, scales), as_one_block)
    assert torch.equal(cast_back_from_fp8(values, scales, 0), values.float() * scales)
    if len(shape) < 4:
        assert_same_bits(per_token_cast_to_fp8(x, use_ue8m0, 0, mn_major=True), as_one_block)


@fp32_or_ue8m0
@pytest.mark.parametrize("shape", [(1,), (300,), (5, 300), (2, 3, 200)])
def test_a_tensor_under_one_scale(shape: tuple[int, ...], use_ue8m0: bool) -> None:
    x = numbers(shape, dtype=torch.bfloat16)
    values, scale = per_tensor_cast_to_fp8(x, use_ue8m0=use_ue8m0, min_amax=1e-3)
    of_row = per_token_cast_to_fp8(x.view(1, -1), use_ue8m0, 0, min_amax=1e-3)
    assert_same_bits((values.view(1, -1), scale.view(1, 1)), of_row)
    if len(shape) > 1:
        assert torch.equal(cast_back_from_fp8(values, scale, 0), values.float() * scale)
        assert torch.equal(cast_back_from_fp8(values, scale.view(()), 0), values.float() * scale)


def test_zeros_what_is_not_finite_and_nothing_at_all_have_scales_too() -> None:
    x = torch.tensor([[0.0, -0.0], [torch.nan, 2.0], [torch.inf, -448.0], [1e-45, 0.0]], dtype=torch.float32)
    values, scales = per_token_cast_to_fp8(x, gran_k=0)
    assert scales.flatten().tolist() == [1.0, torch.tensor(2.0 / 448).item(), 1.0, MIN_SCALE]
    assert values.float().nan_to_num(-1.0).tolist() == [[0.0, -0.0], [-1.0, 448.0], [-1.0, -448.0], [0.0, 0.0]]
    assert per_token_cast_to_fp8(x[:1], gran_k=0, min_amax=448.0)[1].item() == 1.0
    values, scale = per_tensor_cast_to_fp8(x)
    assert scale.item() == 1.0
    assert values.float().nan_to_num(-1.0).tolist() == [[0.0, -0.0], [-1.0, 2.0], [-1.0, -448.0], [0.0, 0.0]]
    assert per_tensor_cast_to_fp8(torch.zeros(2, 3))[1].item() == 1.0
    for shape in ((0,), (0, 4), (4, 0), (2, 0, 4)):
        values, scale = per_tensor_cast_to_fp8(torch.empty(shape))
        assert (values.shape, scale.tolist()) == (torch.Size(shape), [1.0])
    assert [each.shape for each in per_token_cast_to_fp8(torch.empty(0, 4), gran_k=0)] == [(0, 4), (0, 1)]
    assert per_token_cast_to_fp8(torch.empty(2, 0), gran_k=0)[1].tolist() == [[1.0], [1.0]]
    assert per_token_cast_to_fp8(torch.empty(2, 0))[1].shape == (2, 0)


@pytest.mark.parametrize(
    ("scale", "right"),
    [
        (0.5, [448.0, 2.0, -448.0, 0.0, torch.nan, torch.nan]),
        (1e-40, [448.0, 448.0, -448.0, 0.0, torch.nan, torch.nan]),
        (0.0, [448.0, 448.0, -448.0, torch.nan, torch.nan, torch.nan]),
        (-1.0, [-448.0, -1.0, 448.0, 0.0, torch.nan, torch.nan]),
        (torch.inf, [0.0, 0.0, 0.0, 0.0, torch.nan, torch.nan]),
        (torch.nan, [torch.nan] * 6),
    ],
)
def test_a_given_scale_divides_whatever_it_is(scale: float, right: list[float]) -> None:
    x, given = torch.tensor([3e38, 1.0, -900.0, 0.0, torch.inf, torch.nan]), torch.tensor(scale, dtype=torch.float32)
    values, same = per_tensor_cast_to_fp8(x, given)
    assert same is given
    assert torch.allclose(values.float(), torch.tensor(right), rtol=0, atol=0, equal_nan=True)
    folded, _ = per_tensor_cast_to_fp8(x.view(2, 3), given.view(1, 1))
    assert torch.equal(folded.view(torch.uint8).flatten(), values.view(torch.uint8))


SCALE, ONE_SCALE = torch.ones(1), "scale: expected one element, without use_ue8m0 and min_amax, got shape "


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"scale": 1.0}, "scale: expected a tensor, got float"),
        ({"scale": SCALE.double()}, "scale: expected dtype torch.float32, got torch.float64"),
        ({"scale": torch.ones(2)}, f"{ONE_SCALE}(2,)"),
        ({"scale": torch.ones(2, 1)}, f"{ONE_SCALE}(2, 1)"),
        ({"scale": SCALE.to("meta")}, "scale: expected device cpu, where x is, got meta"),
        ({"scale": torch.ones(1, requires_grad=True) * 2}, "scale: expected a tensor without a gradient"),
        ({"scale": SCALE, "use_ue8m0": True}, f"{ONE_SCALE}(1,), use_ue8m0="),
        ({"scale": SCALE, "min_amax": 1.0}, f"{ONE_SCALE}(1,), use_ue8m0="),
        ({"min_amax": -1.0}, "min_amax: expected a finite FP32 number that is not negative, got -1.0"),
        ({"x": torch.ones(2, dtype=torch.int32)}, "x: expected dtype float32"),
        ({"x": torch.ones(2, requires_grad=True) * 2}, "x: expected a tensor without a gradient"),
    ],
)
def test_what_is_no_scale_of_a_tensor_is_named(said: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        per_tensor_cast_to_fp8(**{"x": torch.ones(2), **said})


def test_a_rows_scale_fills_no_word() -> None:
    with pytest.raises(ValueError, match="use_packed_ue8m0: expected gran_k above 0, got 0"):
        per_token_cast_to_fp8(torch.ones(2, 2), True, 0, use_packed_ue8m0=True)


# Powers of two


@settings(deadline=None)
@given(st.floats(min_value=SUBNORMAL, max_value=2.0**127, width=32))
def test_ceil_to_ue8m0_is_the_smallest_power_of_two_that_is_not_below(x: float) -> None:
    got = ceil_to_ue8m0(torch.tensor([x])).item()
    assert math.frexp(got)[0] == 0.5
    assert got / 2 < x <= got


def test_packed_scales_may_be_insisted_on() -> None:
    x = torch.randn(3, 256)
    values, packed = per_token_cast_to_fp8(x, use_ue8m0=True, use_packed_ue8m0=True)
    same, scales = per_token_cast_to_fp8(x, use_ue8m0=True)
    assert torch.equal(cast_back_from_fp8(values, packed, 128, True), cast_back_from_fp8(same, scales))
    with pytest.raises(ValueError, match=r"^sf: expected dtype torch.int32 with use_packed_ue8m0, got torch.float32"):
        cast_back_from_fp8(same, scales, use_packed_ue8m0=True)
