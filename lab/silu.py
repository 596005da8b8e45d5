"""Rows that are activated on their way out, for trials and tests: their right results, and the comparison with them."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.layout import ids_of_groups, rows_of_groups
from deep_gemm.gemm.api.grouped import m_grouped_fp8_gemm_nt_contiguous
from deep_gemm.gemm.problem import Problem
from deep_gemm.moe import activation

SCALE_ERROR = 2.0**-16
"""A GPU's sigmoid is within 2^-17, and sums of other order are closer."""


def right(p: Problem) -> Quantized:
    """Compute values and scales on the CPU, in copies of the problem's: rows without a group keep their contents."""
    values = p.d.clone()
    scales = torch.empty_strided(p.scales.shape, p.scales.stride(), dtype=torch.float32).copy_(p.scales)
    b, d = (p.b, p.sfb), (values, scales)
    activation.activated_product_of_rows(
        (p.a, p.sfa), b, d, p.c, p.row_weights, limit=p.limit, gates_apart=p.epilogue.gates_apart
    )
    return values, scales


def right_on_gpu(p: Problem) -> Quantized:
    """Compute values and scales by torch from the FP32 product of ordinary rows; tensor cores sum both alike.

    Only the sigmoid is another one.
    """
    groups, n, k = p.b.shape
    gates_first = p.b.view(torch.uint8)
    if not p.epilogue.gates_apart:
        gates_first = gates_first.reshape(groups, n // 16, 2, 8, k).transpose(1, 2).reshape(p.b.shape)
    product = torch.zeros(len(p.a), n, device=p.a.device, dtype=torch.float32)
    ids = ids_of_groups(p.c, len(p.a), 1)  # finds groups in another way than the tried kernel
    m_grouped_fp8_gemm_nt_contiguous((p.a, p.sfa), (gates_first.view(p.b.dtype), p.sfb), product, ids)
    product = product.bfloat16().float() if p.epilogue.gates_apart else product
    y = activation.silu_mul(product, p.limit)
    if p.row_weights is not None:
        y *= p.row_weights[:, None]
    values, scales = per_token_cast_to_fp8(y, gran_k=128 if p.epilogue.gates_apart else 64)
    is_defined = (ids >= 0)[:, None]
    kept = torch.where(is_defined, values.view(torch.uint8), p.d.view(torch.uint8)).view(p.d.dtype)
    return kept, torch.where(is_defined, scales, p.scales)


def placed(p: Problem, device: str) -> Problem:
    """Copy a problem to a device."""
    tensors = {name: x.to(device) for name, x in p._asdict().items() if isinstance(x, Tensor) and name != "scales"}
    scales = torch.empty_strided(p.scales.shape, p.scales.stride(), device=device, dtype=torch.float32).copy_(p.scales)
    return p._replace(**tensors, scales=scales)  # type: ignore[arg-type]


def codes(values: Tensor) -> Tensor:
    """Number E4M3 values in their order, zeros alike."""
    byte = values.view(torch.uint8).int()
    return torch.where(byte >= 128, 128 - byte, byte)


def scale_errors(got: Quantized, wanted: Quantized) -> Tensor:
    """Relative differences of scales."""
    return ((got[1] - wanted[1]) / wanted[1]).abs()


def checked(p: Problem, got: Quantized, device: str = "cpu") -> float:
    """Give the largest error of scales, as a part of the allowed one; a ValueError describes a mistake.

    `device`: where the results were computed.
    """
    values, scales = right(p) if device == "cpu" else right_on_gpu(placed(p, device))
    wanted = values.cpu(), scales.cpu()
    if (found := mistakes(p, got, wanted)) is not None:
        raise ValueError(found)
    return float(scale_errors(got, wanted).amax()) / SCALE_ERROR


def mistakes(p: Problem, got: Quantized, wanted: Quantized) -> str | None:
    """Describe the first mistake, or return None. Some values may be the FP8 number beside the right one.

    Fewer may be if gate and up are rounded to BF16, which hides sums of another order. Rows without a group are
    compared to the bit, and so are NaN.
    """
    (values, scales), (right_values, right_scales) = got, wanted
    apart = (codes(values) - codes(right_values)).abs()
    # A scale on the other side of a rounding moves a whole row a little, never a value by more than one.
    off = scale_errors(got, wanted)
    unused = ~rows_of_groups(p.c, len(p.a), 1)
    for name, wrong in (
        ("rows without a group", apart[unused] > 0),
        ("scales of rows without a group", scales[unused] != right_scales[unused]),
        ("scales", ~(off[~unused] <= SCALE_ERROR)),
        ("values", apart > 1),
        ("NaN", (values.view(torch.uint8) == 0x7F) != (right_values.view(torch.uint8) == 0x7F)),
    ):
        if bool(wrong.any()):
            return f"{int(wrong.sum())} {name} are wrong, the first at {wrong.nonzero()[0].tolist()}"
    share = 0.002 if p.epilogue.gates_apart else 0.01
    beside = int((apart > 0).sum())
    return f"{beside} of {apart.numel()} values are beside the right ones" if beside > share * apart.numel() else None
