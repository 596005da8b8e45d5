from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from helpers import assert_within, captured, product_and_bound, random_fp8, random_scales, rounding_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.recipes import PER_ROW, Scales
from deep_gemm.gemm import reference
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.problem import Problem, padding_rows
from deep_gemm.gemm.reference import block_scaled_product, fma_fp32


def round_to_fp32(x: Fraction) -> float:
    """Return the nearest FP32 number, ties to even, in exact arithmetic."""
    if x == 0:
        return 0.0
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    value = round(x / ulp) * ulp
    return float(value) if abs(value) < 2**128 else float("inf") * (1 if value > 0 else -1)


def exact_fma(x: float, y: float, z: float) -> float:
    return round_to_fp32(Fraction(x) * Fraction(y) + Fraction(z))


def fma(x: float, y: float, z: float) -> float:
    x32, y32 = torch.tensor([x]), torch.tensor([y])
    return float(fma_fp32(x32, y32, torch.tensor([z], dtype=torch.float64)))


fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(fp32, fp32, fp32)
@settings(max_examples=300)
def test_fma_rounds_once_for_any_numbers(x: float, y: float, z: float) -> None:
    assert fma(x, y, z) == exact_fma(x, y, z)


MANTISSAS = st.integers(1, 2**24 - 1)


@given(MANTISSAS, MANTISSAS, st.integers(2**23, 2**24 - 1), st.integers(-80, 8), st.integers(-149, 60))
@settings(max_examples=300)
def test_fma_rounds_once_where_exponents_are_near(x: int, y: int, z: int, shift: int, scale: int) -> None:
    terms = (float(x), float(y) * 2.0**shift, float(z))
    if scale >= -126 - 23:
        terms = (terms[0], terms[1] * 2.0 ** max(scale, -149 - shift), terms[2] * 2.0 ** max(scale, -149))
    x32, y32, z32 = (round_to_fp32(Fraction(t)) for t in terms)
    assert fma(x32, y32, z32) == exact_fma(x32, y32, z32)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [0, 60, -100, -125, -126])
def test_fma_rounds_once_where_rounding_twice_would_show(sign: int, scale: int) -> None:
    """The exact result is below (above) the middle of two FP32 numbers by less than FP64 can hold."""
    x, y, z = 1 + sign * 2.0**-23, (1 - sign * 2.0**-23) * 2.0**-24, 1 + 2.0**-23
    x, z = x * 2.0**scale, z * 2.0**scale
    twice = float(torch.tensor(x * y + z, dtype=torch.float64).float())
    assert fma(x, y, z) == exact_fma(x, y, z)
    if y * 2.0**scale >= 2.0**-126:
        assert twice != exact_fma(x, y, z), "this example proves nothing"


def test_fma_of_subnormal_sums_rounds_once() -> None:
    smallest = 2.0**-149
    for units in (0.5, 1.5, 2.5):
        for lost in (-(2.0**-60), 0.0, 2.0**-60):
            y = units * (1 + (2.0**-23 if lost > 0 else -(2.0**-23) if lost < 0 else 0))
            assert fma(y, smallest, 3 * smallest) == exact_fma(y, smallest, 3 * smallest)


def naive_product(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, sfb_rows: int) -> Tensor:
    """Compute the contract's arithmetic in rational numbers, one element at a time."""
    m, k, n = *a.shape, b.shape[0]
    out = torch.zeros(m, n)
    av, bv = a.double().tolist(), b.double().tolist()
    for i in range(m):
        for j in range(n):
            acc = 0.0
            for block, first in enumerate(range(0, k, 128)):
                ks = range(first, min(first + 128, k))
                partial = round_to_fp32(sum((Fraction(av[i][x]) * Fraction(bv[j][x]) for x in ks), Fraction(0)))
                sa, sb = float(sfa[i, block]), float(sfb[j // sfb_rows, block])
                acc = exact_fma(partial, round_to_fp32(Fraction(sa) * Fraction(sb)), acc)
            out[i, j] = acc
    return out


@given(st.integers(0, 2**31), st.sampled_from([16, 144, 384, 400]), st.sampled_from([1, 128]), st.integers(0, 63))
@settings(max_examples=25)
def test_product_is_the_contracts_arithmetic_to_the_bit(seed: int, k: int, sfb_rows: int, exponent: int) -> None:
    g = torch.Generator().manual_seed(seed)
    m, n, blocks = 3, 5, -(-k // 128)
    a, b = random_fp8((m, k), g), random_fp8((n, k), g)
    sfa = random_scales((m, blocks), g, -exponent, max(exponent - 12, -exponent))
    sfb = random_scales((-(-n // sfb_rows), blocks), g, -exponent, max(exponent - 12, -exponent))
    got = block_scaled_product(a, sfa, b, sfb, Scales(sfb_rows, 128))
    assert torch.equal(got, naive_product(a, sfa, b, sfb, sfb_rows))


@given(
    seed=st.integers(0, 2**31),
    m=st.integers(1, 40),
    n8=st.integers(1, 40),
    k16=st.integers(1, 40),
    recipe=st.sampled_from([None, (1, 1, 128)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    exponents=st.tuples(st.integers(-126, 126), st.integers(-126, 126)),
    with_c=st.booleans(),
)
@settings(max_examples=60)
def test_dense_is_within_the_derived_bound_of_float64(
    seed: int, m: int, n8: int, k16: int, recipe: Any, dtype: torch.dtype, exponents: tuple[int, int], with_c: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    n, k, rows = n8 * 8, k16 * 16, 1 if recipe else 128
    blocks = -(-k // 128)
    low, high = min(exponents), max(exponents)
    high = min(high, 90 - low) if high + low > 90 else high  # keeps the sums below FP32's largest number
    a, b = random_fp8((m, k), g), random_fp8((n, k), g)
    sfa, sfb = random_scales((m, blocks), g, low, low), random_scales((-(-n // rows), blocks), g, high, high)
    exact, bound = product_and_bound(a, sfa, b, sfb, rows)
    c = torch.randn(m, n, generator=g).to(dtype) if with_c else None
    if c is not None:
        exact = exact + c.double()
        bound = bound + (exact.abs() + bound) * 2.0**-24
    d = deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), c=c, recipe=recipe, d=(d := torch.empty(m, n, dtype=dtype))) or d
    assert_within(d, exact, rounding_to(dtype, exact, bound))


def test_result_does_not_depend_on_where_tiles_begin() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = random_fp8((300, 256), g), random_fp8((1160, 256), g)
    sfa, sfb = random_scales((300, 2), g), random_scales((10, 2), g)
    whole = block_scaled_product(a, sfa, b, sfb)
    assert torch.equal(whole[255:258], block_scaled_product(a[255:258], sfa[255:258], b, sfb))
    assert torch.equal(whole[:, 1024:], block_scaled_product(a, sfa, b[1024:], sfb[8:]))


def test_one_scale_a_row_equals_one_scale_a_block_where_the_scales_do() -> None:
    g = torch.Generator().manual_seed(2)
    a, b = random_fp8((9, 400), g), random_fp8((200, 400), g)
    sfa, sfb = random_scales((9, 4), g), random_scales((2, 4), g)
    spread = sfb.repeat_interleave(128, 0)[:200]
    assert torch.equal(block_scaled_product(a, sfa, b, sfb), block_scaled_product(a, sfa, b, spread, PER_ROW))


def test_nan_and_infinity_reach_exactly_their_own_rows_and_columns() -> None:
    g = torch.Generator().manual_seed(3)
    a, b = random_fp8((6, 256), g), random_fp8((160, 256), g)
    sfa, sfb = random_scales((6, 2), g), random_scales((2, 2), g)
    clean = block_scaled_product(a, sfa, b, sfb)
    a[1, 200], b[7, 3] = float("nan"), float("nan")
    sfa[4, 1] = float("inf")
    sfb[1, 0] = float("nan")
    got = block_scaled_product(a, sfa, b, sfb)
    poisoned = torch.zeros(6, 160, dtype=torch.bool)
    poisoned[1], poisoned[4], poisoned[:, 7], poisoned[:, 128:] = True, True, True, True
    assert bool((~got[poisoned].isfinite()).all())
    assert torch.equal(got[~poisoned], clean[~poisoned])


def test_infinite_scales_give_infinity_with_the_partial_sums_sign() -> None:
    one = torch.ones(1, 128).to(torch.float8_e4m3fn)
    inf = torch.full((1, 1), float("inf"))
    assert block_scaled_product(one, inf, one, torch.ones(1, 1), PER_ROW).item() == float("inf")
    assert block_scaled_product(one, -inf, one, torch.ones(1, 1), PER_ROW).item() == -float("inf")


def test_scales_that_overflow_give_infinity_and_those_that_underflow_vanish() -> None:
    one = torch.ones(1, 128).to(torch.float8_e4m3fn)
    big, small = torch.full((1, 1), 2.0**126), torch.full((1, 1), 2.0**-126)
    assert block_scaled_product(one, big, one, big, PER_ROW).item() == float("inf")
    assert block_scaled_product(one, small, one, small, PER_ROW).item() == 0.0
    assert block_scaled_product(one, small, one, torch.full((1, 1), 2.0**-20), PER_ROW).item() == 2.0**-139


def test_zero_blocks_and_subnormal_values_are_exact() -> None:
    tiny = torch.full((1, 256), 2.0**-9).to(torch.float8_e4m3fn)  # E4M3's smallest subnormal number
    tiny[0, 128:] = 0
    got = block_scaled_product(tiny, torch.ones(1, 2), tiny, torch.ones(1, 2), PER_ROW)
    assert got.item() == 128 * 2.0**-18


@given(st.lists(st.integers(-1, 2), max_size=40), st.sampled_from([1, 4, 128]))
def test_padding_rows_are_those_without_a_group_in_a_block_with_one(ids: list[int], alignment: int) -> None:
    block_of = [ids[row // alignment * alignment :][:alignment] for row in range(len(ids))]
    expected = [group < 0 and any(x >= 0 for x in block) for group, block in zip(ids, block_of, strict=True)]
    assert padding_rows(torch.tensor(ids, dtype=torch.int32), alignment).tolist() == expected


def without_values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor that is not on the host and whose elements cannot be read: each attempt raises an error."""
    return torch.empty(shape, dtype=dtype, device="meta")


def problem_without_values(product: str) -> Problem:
    m, n, k, groups, fp8 = 300, 1160, 272, 2, torch.float8_e4m3fn
    gpu = without_values
    b, sfb = gpu(groups, n, k, dtype=fp8), gpu(groups, 10, 3)
    if product == "dense":
        rows = (gpu(m, k, dtype=fp8), gpu(m, 3))
        return Problem(*rows, b[0], gpu(n, 3), gpu(m, n), of_b=PER_ROW)
    if product == "masked":
        rows = (gpu(groups, m, k, dtype=fp8), gpu(groups, m, 3))
        d, counts = gpu(groups, m, n, dtype=torch.bfloat16), gpu(groups, dtype=torch.int32)
        return Problem(*rows, b, sfb, d, counts, works.COUNTS)
    sides = (gpu(m * k, dtype=fp8), gpu(m, 3), gpu(n * k, dtype=fp8), gpu(n, 3))
    ks = (144, 128) if product == "k-grouped" else None
    sizes = gpu(groups, dtype=torch.int32)
    return Problem(*sides, gpu(groups, m, n), None, works.DEPTHS, PER_ROW, ks=ks, ks_tensor=sizes)


@pytest.mark.parametrize("product", ["dense", "masked", "k-grouped"])
def test_the_host_reads_nothing_of_a_gpus_so_that_a_graph_can_be_captured(product: str) -> None:
    reference.compute(problem_without_values(product))


def test_the_host_reads_the_groups_depths_where_only_the_gpu_has_them() -> None:
    problem = problem_without_values("k-grouped of a device's sizes")
    with pytest.raises(RuntimeError, match="meta tensor"):
        reference.compute(problem)


@pytest.mark.gpu
def test_a_captured_graph_of_masked_products_follows_the_counts() -> None:
    g = torch.Generator().manual_seed(4)
    groups, max_m, n, k = 3, 40, 208, 336
    a, sfa = random_fp8((groups, max_m, k), g), random_scales((groups, max_m, 3), g)
    b, sfb = random_fp8((groups, n, k), g), random_scales((groups, 2, 3), g)
    d, counts = torch.zeros(groups, max_m, n), torch.zeros(groups, dtype=torch.int32)
    p = Problem(a.cuda(), sfa.cuda(), b.cuda(), sfb.cuda(), d.cuda(), counts.cuda(), works.COUNTS)
    reference.compute(p)  # the first call makes what cuBLAS needs
    graph, _ = captured(reference.compute, p)
    for numbers in ((0, 40, 7), (3, 0, 40)):
        p.c.copy_(torch.tensor(numbers))
        p.d.fill_(7)
        p.a.view(torch.uint8).copy_(a.view(torch.uint8))
        for group, rows in enumerate(numbers):
            p.a[group, rows:] = float("nan")
        graph.replay()
        expected = torch.full_like(d, 7)
        on_cpu = Problem(a, sfa, b, sfb, expected, torch.tensor(numbers), works.COUNTS)
        reference.compute(on_cpu)
        assert torch.equal(p.d.cpu(), expected)
