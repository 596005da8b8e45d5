"""Rows that are activated on their way out, for trials and tests: what they must be, and what they are compared by."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.casts.rules import Quantized
from deep_gemm.gemm.rows.silu_check import SiluRowsProblem
from deep_gemm.moe import activation

SCALE_ERROR = 2.0**-16
"""A GPU's sigmoid is within 2^-17, and sums of other order are closer."""


def right(p: SiluRowsProblem) -> Quantized:
    """Values and scales by the CPU, in copies of the problem's: rows without a group keep what they have."""
    values, scales = p.d.clone(), torch.empty_strided(p.scales.shape, p.scales.stride()).copy_(p.scales)
    b, d = (p.b, p.sfb), (values, scales)
    activation.activated_product_of_rows(
        (p.a, p.sfa), b, d, p.ids, p.row_weights, limit=p.limit, gates_apart=p.gates_apart
    )
    return values, scales


def codes(values: Tensor) -> Tensor:
    """Number E4M3 values in their order, zeros alike."""
    byte = values.view(torch.uint8).int()
    return torch.where(byte >= 128, 128 - byte, byte)


def scale_errors(got: Quantized, wanted: Quantized) -> Tensor:
    """Relative differences of scales."""
    return ((got[1] - wanted[1]) / wanted[1]).abs()


def checked(p: SiluRowsProblem, got: Quantized) -> float:
    """Give the largest error of scales, as a part of what is allowed; a ValueError says what is wrong."""
    wanted = right(p)
    if (found := mistakes(p, got, wanted)) is not None:
        raise ValueError(found)
    return float(scale_errors(got, wanted).amax()) / SCALE_ERROR


def mistakes(p: SiluRowsProblem, got: Quantized, wanted: Quantized) -> str | None:
    """Say what is wrong; None if nothing is. Some values may be the FP8 number beside the right one.

    They are fewer where gate and up are rounded to BF16, which hides sums of another order. Rows without a group are
    compared to the bit, and so are NaN.
    """
    (values, scales), (right_values, right_scales) = got, wanted
    apart = (codes(values) - codes(right_values)).abs()
    # A scale on the other side of a rounding moves a whole row a little, never a value by more than one.
    off = scale_errors(got, wanted)
    unused = p.ids < 0
    for name, wrong in (
        ("rows without a group", apart[unused] > 0),
        ("scales of rows without a group", scales[unused] != right_scales[unused]),
        ("scales", ~(off[~unused] <= SCALE_ERROR)),
        ("values", apart > 1),
        ("NaN", (values.view(torch.uint8) == 0x7F) != (right_values.view(torch.uint8) == 0x7F)),
    ):
        if bool(wrong.any()):
            return f"{int(wrong.sum())} {name} are wrong, the first at {wrong.nonzero()[0].tolist()}"
    share = 0.002 if p.gates_apart else 0.01
    beside = int((apart > 0).sum())
    return f"{beside} of {apart.numel()} values are beside the right ones" if beside > share * apart.numel() else None
