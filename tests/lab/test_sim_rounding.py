"""The simulator's comparison accepts rounding, which it judges for each element separately, and no other difference."""

from __future__ import annotations

import pytest
import torch
from helpers import random_fp8, random_scales, some
from torch import Tensor

from deep_gemm.gemm import reference
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.problem import Problem
from lab.sim.rounding import EXACT_STEPS, TENSOR_CORES, allowed_difference, describe_mistakes, excess

M, N, K = 24, 136, 400


def solved(dtype: torch.dtype, with_c: bool = False) -> tuple[Problem, Tensor]:
    """Make a problem whose elements differ greatly in size, and compute the reference's result."""
    g = torch.Generator().manual_seed(1)
    a = random_fp8((M, K), g), random_scales((M, 4), g, -20, 4)
    b = random_fp8((N, K), g), random_scales((2, 4), g, -20, 4)
    c = torch.randn(M, N, generator=g).to(dtype) if with_c else None
    p = dense_problem(a, b, torch.empty(M, N, dtype=dtype), c)
    reference.compute(p)
    return p, p.d


def in_steps(p: Problem) -> Tensor:
    """Compute the product as the simulator does: each step adds 32 exact products, and its sum is rounded to FP32."""
    acc = torch.zeros(M, N, dtype=torch.float64)
    for block in range(4):
        partial = torch.zeros(M, N, dtype=torch.float64)
        for k in range(block * 128, min(block * 128 + 128, K), 32):
            step = p.a[:, k : k + 32].double() @ p.b[:, k : k + 32].double().t()
            partial = (partial + step).float().double()
        scale = (p.sfa[:, block, None] * p.sfb.repeat_interleave(128, 0)[None, :N, block]).double()
        acc = (partial * scale + acc).float().double()
    acc = acc if p.c is None else (acc + p.c.double()).float()
    return acc.to(p.d.dtype)


@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_order_of_rounding_is_right(dtype: torch.dtype, with_c: bool) -> None:
    p, right = solved(dtype, with_c)
    allowed = allowed_difference(p, right, EXACT_STEPS)
    assert describe_mistakes(in_steps(p), right, allowed) is None
    assert describe_mistakes(right, right, allowed) is None


@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_single_small_element_that_is_wrong_is_found(dtype: torch.dtype, with_c: bool) -> None:
    """A small element is wrong by 2%. This is little beside the largest elements, but must be found."""
    p, right = solved(dtype, with_c)
    i = int(right.abs().amax(1).argmin())
    j = int(right[i].abs().argmax())
    d = right.clone()
    d[i, j] *= 1.02
    mistakes = some(describe_mistakes(d, right, allowed_difference(p, right, EXACT_STEPS), (8, 64)))
    assert mistakes.startswith(
        f"1 of {M * N} elements are wrong, 0 of them NaN; the worst, ({i}, {j}) in tile ({i // 8}, "
    )


def test_bf16_may_be_one_unit_away_but_not_two() -> None:
    p, right = solved(torch.bfloat16)
    allowed = allowed_difference(p, right, EXACT_STEPS)
    # These elements are about as large as their terms, so the unit of D's type is nearly all of the allowed difference.
    unit = right.double().abs().log2().floor().exp2() * 2.0**-7
    plain = allowed < 1.1 * unit
    assert plain.double().mean() > 0.9
    away = [(right.view(torch.int16) + steps).view(torch.bfloat16) for steps in (1, 2)]  # away from zero
    assert bool((excess(away[0], right, allowed)[plain] <= 1).all())
    assert bool((excess(away[1], right, allowed)[plain] > 1).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_wrong(bad: float) -> None:
    p, right = solved(torch.bfloat16)
    d = right.clone()
    d[3, 100] = bad
    mistakes = some(describe_mistakes(d, right, allowed_difference(p, right, TENSOR_CORES)))
    assert f"the worst, (3, 100): {bad} instead of" in mistakes


def test_the_smallest_numbers_have_a_unit_too() -> None:
    zeros = torch.zeros(16, 128).to(torch.float8_e4m3fn)
    p = dense_problem((zeros, torch.ones(16, 1)), (zeros, torch.ones(1, 1)), torch.zeros(16, 16), None)
    allowed = allowed_difference(p, p.d, EXACT_STEPS)
    assert bool((allowed == 2.0**-149).all())
