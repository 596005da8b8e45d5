"""Products that activate their rows, for trials and tests: the right results, and comparisons with them."""

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
"""Allowed relative error of a scale: a GPU's sigmoid is within 2^-17, and another order of sums changes less."""


def right(p: Problem) -> Quantized:
    """Compute values and scales on the CPU, in copies of the problem's tensors: rows without a group stay unchanged."""
    values = p.d.clone()
    scales = torch.empty_strided(p.scales.shape, p.scales.stride(), dtype=torch.float32).copy_(p.scales)
    b, d = (p.b, p.sfb), (values, scales)
    activation.activated_product_of_rows(
        (p.a, p.sfa), b, d, p.c, p.row_weights, limit=p.limit, gates_apart=p.epilogue.gates_apart
    )
    return values, scales


def right_on_gpu(p: Problem) -> Quantized:
    """Compute values and scales by torch from the FP32 product of grouped rows, which has the tested kernel's sums.

    Only the sigmoid differs.
    """
    groups, n, k = p.b.shape
    gates_first = p.b.view(torch.uint8)
    if not p.epilogue.gates_apart:
        gates_first = gates_first.reshape(groups, n // 16, 2, 8, k).transpose(1, 2).reshape(p.b.shape)
    product = torch.zeros(len(p.a), n, device=p.a.device, dtype=torch.float32)
    ids = ids_of_groups(p.c, len(p.a), 1)  # finds groups with different code than the tested kernel
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
    """Number E4M3 values in ascending order; both zeros have one number."""
    byte = values.view(torch.uint8).int()
    return torch.where(byte >= 128, 128 - byte, byte)


def scale_errors(got: Quantized, wanted: Quantized) -> Tensor:
    """Return the relative differences of scales."""
    return ((got[1] - wanted[1]) / wanted[1]).abs()


def checked(p: Problem, got: Quantized, device: str = "cpu") -> float:
    """Return the largest error of scales relative to the allowed error; raise a ValueError that describes a mistake.

    `device`: the device that computed the results.
    """
    values, scales = right(p) if device == "cpu" else right_on_gpu(placed(p, device))
    wanted = values.cpu(), scales.cpu()
    if (found := mistakes(p, got, wanted)) is not None:
        raise ValueError(found)
    return float(scale_errors(got, wanted).amax()) / SCALE_ERROR


def mistakes(p: Problem, got: Quantized, wanted: Quantized) -> str | None:
    """Describe the first mistake, or return None. A few values may be the FP8 number next to the right one.

    The limit is lower if gate and up are rounded to BF16, which hides another order of sums. Rows without a group, and
    NaNs, are compared bit for bit.
    """
    (values, scales), (right_values, right_scales) = got, wanted
    apart = (codes(values) - codes(right_values)).abs()
    # A scale that is rounded the other way moves a whole row slightly, but no value by more than one step.
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
    return f"{beside} of {apart.numel()} values are next to the right ones" if beside > share * apart.numel() else None
