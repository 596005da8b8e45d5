"""Operands of the product of hyper-connections, and what is wrong with its results."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.hyper_connections import reference, to_tf32
from deep_gemm.problem.hyper_connections import BLOCK_K, HcProblem

FP32_UNIT = 2.0**-24
LEFT_OVER = 2.0**-133
"""Of a value of B that is less than 2^-123 a smaller part is lost."""


def operands(m: int, n: int, k: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Normally distributed; half of B's values lie in the middle between two of TF32."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=g).bfloat16(), torch.randn(n, k, generator=g)
    in_the_middle = ((b.view(torch.int32) & ~0x1FFF) | 0x1000).view(torch.float32)
    b = torch.where(torch.rand(n, k, generator=g) < 0.5, in_the_middle, b)
    return a.to(device), b.to(device)


def special_operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Zeros of both signs, infinities, NaN, numbers that round to infinity, the smallest; beside whole numbers."""
    a, b = operands(m, n, k)
    a, b = (a * 4).round(), (b * 4).round()
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-126
    b[0, :7] = torch.tensor([0.0, -0.0, 1.0, -2.0, largest / 2, smallest, -smallest * 2.0**-7])
    b[1, 5], b[2, 6], b[3, 7] = torch.inf, -torch.inf, torch.nan
    b[4, 8] = largest
    b[5, 9] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    a[0] = 0
    a[1, 2], a[2, 3] = torch.inf, -torch.inf
    a[3, 4] = torch.nan
    a[4, 0] = torch.inf  # meets 0
    a[5, 5:9] = torch.tensor([2.0**-120, 2.0**120, 0, 0])
    return a, b


def right_results(a: Tensor, b: Tensor, splits: int) -> HcProblem:
    """The reference's results."""
    outputs = torch.empty(splits, len(a), len(b), device=a.device), torch.empty(splits, len(a), device=a.device)
    p = HcProblem(a, b, *outputs)
    reference(p)
    return p


def mistakes(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, of_step: float = 1.0) -> str | None:
    """Say what is wrong with results `[splits, m, n]` and `[splits, m]`; None if nothing is.

    A product of 16 along k, one of high and one of low parts, may be off by `of_step` units of the magnitudes' sum.
    """
    splits, k = len(d), a.shape[1]
    right = right_results(a, b, splits)
    wide, vectors = a.double().nan_to_num(0, 0, 0).abs(), to_tf32(b).double().nan_to_num(0, 0, 0).abs()
    steps = -(-k // BLOCK_K // splits) * (BLOCK_K // 16)
    allowed = {
        "d": (wide @ vectors.t()) * ((steps * of_step + 20) * FP32_UNIT) + wide.sum(1, keepdim=True) * LEFT_OVER,
        "sqr_sum": wide.square().sum(1) * ((steps + 20) * FP32_UNIT),
    }
    for name, got, expected in (("d", d, right.d), ("sqr_sum", sqr_sum, right.sqr_sum)):
        is_near = (got.double() - expected.double()).abs() <= allowed[name]
        same = torch.where(expected.isfinite(), is_near, (got == expected) | (got.isnan() & expected.isnan()))
        if not same.all():
            at = (~same).nonzero()[0].tolist()
            return (
                f"{int((~same).sum())} of {same.numel()} elements of {name} are wrong, the first at {at}: "
                f"{got[tuple(at)].item():.9g} instead of {expected[tuple(at)].item():.9g}"
            )
    return None
