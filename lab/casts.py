"""Matrices with every kind of floating-point number, and bitwise comparisons, for trials and tests of casts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.rules import FP8_MAX, Quantized, Target
from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div

MOST_OTHERS = 2e-3
"""At most this fraction of activated values may be the FP8 number next to the reference's value."""


def cast_by_torch(x: Tensor, rows: int, columns: int) -> Quantized:
    """Cast by torch, also on a GPU, with one scale for each `rows` x `columns` block; kernels are compared with it."""
    return cast_blocks(x, Target(rows, columns))


def wild(m: int, k: int, dtype: torch.dtype, seed: int, *, block_rows: int = 1) -> Tensor:
    """Draw magnitudes from the smallest to the largest, and all special numbers.

    Each block of `block_rows` rows and 128 columns has magnitudes of similar size.
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-150, 128, (ceil_div(m, block_rows), ceil_div(k, 128)), generator=generator)
    exponents = exponents.repeat_interleave(block_rows, dim=0)[:m].repeat_interleave(128, dim=1)[:, :k]
    x = torch.randn(m, k, generator=generator, dtype=torch.float64) * 2.0 ** exponents.double()
    x = x.to(dtype)
    strange = torch.tensor(
        [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 448.0, 1e-45], dtype=torch.float32
    )
    where = torch.randint(0, m * k, (max(m * k // 50, 1),), generator=generator)
    where = where.unique()  # type: ignore[no-untyped-call] # threads write in any order
    x.view(-1)[where] = strange[torch.randint(0, len(strange), where.shape, generator=generator)].to(dtype)
    x[:: max(m // 3, 1), : min(k, 128)] = 0
    return x


def wider(x: Tensor, gap: int, filling: float = 0.0) -> Tensor:
    """Copy rows to a wider matrix: `gap` other elements follow each row."""
    room = torch.full((*x.shape[:-1], x.shape[-1] + gap), filling, dtype=x.dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def spread(values: Tensor, scales: Tensor, rows: int, columns: int = SCALE_BLOCK) -> Tensor:
    """Multiply values `[..., m, k]` by a scale for each `rows` rows and `columns` columns, in FP64."""
    m, k = values.shape[-2:]
    scales = scales.double().repeat_interleave(rows, -2)[..., :m, :].repeat_interleave(columns, -1)[..., :k]
    return values.double() * scales


def hard_quotients(largest: float = FP8_MAX, block: int = SCALE_BLOCK, downs: Sequence[int] = (0, 10)) -> Tensor:
    """Make FP32 rows whose quotients by their scales are as close as possible to a rounding boundary of FP8 or FP4.

    An element X and a scale's significand S are integers of 24 bits. T holds the few bits of a number between two FP8
    numbers. X / S is close to T / 16 + half a unit in its last place only if S is close to a multiple of 2^20.
    Quotients are in [1, 2) over 2^down.
    """
    rows = []
    for eighths in range(8, 17):
        for off in range(-6, 7):
            significand = eighths * 2**20 + off
            if not 2**23 <= significand < 2**24:
                continue
            amax = torch.tensor(significand * largest / 2**23, dtype=torch.float64).float()
            near = [
                (significand * t // 16 + more) / 2.0 ** (23 + down)
                for t in range(16, 32)
                for more in range(-1, 3)
                for down in downs
            ]
            for first in range(0, len(near) - 1, block - 1):
                row = torch.zeros(block, dtype=torch.float64)
                part = near[first : first + block - 1]
                row[1 : 1 + len(part)] = torch.tensor(part, dtype=torch.float64)
                row[0] = amax
                rows.append(row.float())
    return torch.stack(rows)


def assert_same_bits(found: Quantized, right: Quantized) -> None:
    """Assert that values and scales are the reference's, including NaNs."""
    (values, scales), (right_values, right_scales) = found, right
    assert values.shape == right_values.shape
    assert scales.shape == right_scales.shape
    assert torch.equal(scales.cpu().view(torch.int32), right_scales.contiguous().view(torch.int32))
    assert torch.equal(values.cpu().view(torch.uint8), right_values.view(torch.uint8))


def assert_near(found: Quantized, right: Quantized, of_scales: float = 2.0**-16) -> float:
    """Assert that scales are within `of_scales` of the reference's, and values within one step of FP8.

    Return the fraction of different values; a single one does not count.
    """
    scales, right_scales = (scales.reshape(-1, scales.shape[-1]) for scales in (found[1], right[1]))
    assert torch.equal(scales.isnan(), right_scales.isnan()), "other scales are written"
    assert torch.allclose(scales, right_scales, rtol=of_scales, atol=0, equal_nan=True), "other scales"
    values, right_values = (values.view(torch.uint8).int() for values in (found[0], right[0]))
    is_nan = right_values & 0x7F == 0x7F
    assert torch.equal(values[is_nan], right_values[is_nan]), "other NaN"
    # Bytes of one sign have the order of their numbers; if signs differ, both numbers are zeros.
    steps = (values - right_values)[~is_nan].abs()
    assert bool((steps <= 1).all()), f"values {int(steps.max())} steps of FP8 away"
    others = int((steps > 0).sum())
    return others / steps.numel() if others > 1 else 0.0


def assert_near_bf16(found: Tensor, right: Tensor, within: float = 0.0) -> None:
    """Assert that BF16 numbers are within a relative error `within`; 0 means equal bits. A NaN may be any NaN."""
    assert torch.equal(found.isnan(), right.isnan()), "other NaN"
    found, right = (x.nan_to_num(0.0, torch.inf, -torch.inf) for x in (found, right))
    if within:
        assert torch.allclose(found.float(), right.float(), rtol=within, atol=2.0**-14), "other numbers"
    else:
        assert torch.equal(found.view(torch.int16), right.view(torch.int16)), "other bits"
