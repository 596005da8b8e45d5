"""Bounds the difference that rounding may cause between each element of a kernel's D and the reference's.

Let u = 2^-24, and S the sum of an element's magnitudes, |sfa * sfb| * sum |a * b| over all blocks of k. Kernel and
reference round once for each block that they promote, and once when they add C; the reference also rounds its partial
sums. A kernel's partial sums have an error relative to S that depends on the arithmetic unit. At the end both round to
D's type, which may separate them by one unit in the last place. (This assumes that nothing underflows.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import E2M1, MX, PER_ROW, WHOLE, Scales
from deep_gemm.core.check.ue8m0 import numbers_of
from deep_gemm.gemm.kinds.output import values_of
from deep_gemm.gemm.packed import as_e4m3
from deep_gemm.gemm.problem import Problem

FP32_UNIT = 2.0**-24

EXACT_STEPS = 4 * FP32_UNIT
"""The simulator's error relative to S: it sums 32 products exactly, and rounds after each of a block's 4 steps."""

TENSOR_CORES = 4 * 33 * 2.0**-13
"""The error of Hopper's FP8 tensor cores relative to S.

A step of depth 32 aligns 32 products and the accumulator to the largest of them and keeps 13 bits below it, so each
of the 33 loses less than 2^-13 of it. Four steps make a block, and no number exceeds the sum of magnitudes.
"""

UNITS_OF_STEP = 3.0
"""On Hopper, a step of 16 along k, of BF16 or TF32, may have an error of this many units of the magnitudes' sum.

Tensor cores cut off bits of the addends and of the sum; the simulator rounds once instead.
"""


def sum_of_magnitudes(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, of_b: Scales, of_a: Scales = PER_ROW) -> Tensor:
    """Return S for every element of A `[m, k]` @ B `[n, k]`.T, in FP64."""
    m, k, n = *a.shape, b.shape[0]
    if of_a == WHOLE:
        return (a.double().abs() @ b.double().abs().mT) * (sfa.double() * sfb.double().mT).abs()
    sfa = numbers_of(sfa, ceil_div(k, of_a.columns))
    if values_of(b) == E2M1:
        b, sfb = as_e4m3(b), numbers_of(sfb, k // MX.columns)
        sfa, of_a = sfa.repeat_interleave(PER_ROW.columns // MX.columns, 1), MX
    sfb = numbers_of(sfb, ceil_div(k, of_b.columns)).repeat_interleave(of_b.rows, 0)[:n]
    total = torch.zeros(m, n, dtype=torch.float64, device=a.device)
    columns = min(of_a.columns, of_b.columns)
    for first in range(0, k, columns):
        ks = slice(first, first + columns)
        products = a[:, ks].double().abs() @ b[:, ks].double().abs().t()
        scale = sfa[:, first // of_a.columns, None].double() * sfb[None, :, first // of_b.columns].double()
        total += products * scale.abs()
    return total


def allowed_difference(p: Problem, right: Tensor, partial_sums: float) -> Tensor:
    """Return the allowed difference of each element of D from the reference's, `right`; in FP64.

    `partial_sums` is EXACT_STEPS or TENSOR_CORES.
    """
    assert p.of_a is not None and p.of_b is not None
    columns = min(p.of_a.columns, p.of_b.columns)
    if p.of_a == WHOLE:
        columns = PER_ROW.columns
    share = partial_sums + (2 * ceil_div(p.k, columns) + 1) * FP32_UNIT
    bound = sum_of_magnitudes(p.a, p.sfa, p.b, p.sfb, p.of_b, p.of_a) * (share / (1 - share))
    bound += 2 * FP32_UNIT * right.double().abs()
    return within_units(right, bound)


def within_units(right: Tensor, bound: Tensor) -> Tensor:
    """Add one unit in the last place of D's type to a bound of the sums' error, because both sides round to D."""
    # frexp's mantissa is between 0.5 and 1, hence eps / 2.
    info = torch.finfo(right.dtype)
    largest = (right.double().abs() + bound).clamp_min(info.tiny)
    return bound + largest / torch.frexp(largest).mantissa * (info.eps / 2)


def excess(d: Tensor, right: Tensor, allowed: Tensor) -> Tensor:
    """Return each element's difference relative to the allowed one: above 1 is wrong.

    NaN counts as infinite, unless the right element is NaN too.
    """
    ratio = (d.double() - right.double()).abs() / allowed
    return torch.where(d.isnan() & right.isnan(), 0.0, torch.where(ratio.isnan(), torch.inf, ratio))


def describe_mistakes(d: Tensor, right: Tensor, allowed: Tensor, tile: tuple[int, int] | None = None) -> str | None:
    """Count the wrong elements and name the worst, with its tile if `tile` gives a tile's rows and columns."""
    ratio = excess(d, right, allowed)
    count = int((ratio > 1).sum())
    if count == 0:
        return None
    i, j = divmod(int(ratio.argmax()), d.shape[1])
    where = f"({i}, {j})" + (f" in tile ({i // tile[0]}, {j // tile[1]})" if tile else "")
    return (
        f"{count} of {d.numel()} elements are wrong, {int(d.isnan().sum())} of them NaN; the worst, {where}: "
        f"{d[i, j].item():.9g} instead of {right[i, j].item():.9g}, where rounding explains {allowed[i, j].item():.2g}"
    )


def largest_part(name: str, got: Tensor, expected: Tensor, allowed: Tensor) -> float:
    """Return the largest difference relative to the allowed one; raise a ValueError if it is above 1.

    Elements that are not finite, or whose allowed error is zero, must be equal.
    """
    found, right = got.double(), expected.double()
    is_same = (found == right) | (found.isnan() & right.isnan())
    parts = torch.where(right.isfinite(), (found - right).abs() / allowed, torch.inf).nan_to_num(torch.inf)
    parts = torch.where(is_same, 0, parts)
    wrong = parts > 1
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{int(wrong.sum())} of {wrong.numel()} elements of {name} are wrong, the first at {at}: "
            f"expected {right[at]:.9g}, got {found[at]:.9g}"
        )
    return float(parts.amax()) if parts.numel() else 0.0
