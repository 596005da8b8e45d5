"""Faults of one operand of a bad call. Each fault turns a right operand into a similar wrong one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

REFUSALS = (ValueError, NotImplementedError, TypeError)
"""The errors that a bad call must raise."""
OTHER_TYPE = {
    torch.float8_e4m3fn: torch.float8_e4m3fnuz,
    torch.bfloat16: torch.float16,
    torch.float32: torch.int32,
    torch.int32: torch.float32,
    torch.uint8: torch.int8,
}


def _dtype(x: Tensor) -> Tensor:
    return x.view(OTHER_TYPE[x.dtype])


def _address(x: Tensor) -> Tensor:
    """Move an operand one element past an aligned address, with the same strides: a record for these strides exists."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    room = torch.zeros(span + 16, dtype=torch.uint8 if x.dtype.itemsize == 1 else x.dtype, device=x.device)
    return room.view(x.dtype).as_strided(x.shape, x.stride(), 1)


def _stride(x: Tensor) -> Tensor:
    """Leave a gap after each element of a row."""
    *outer, columns = x.shape
    return torch.zeros((*outer, columns, 2), device=x.device, dtype=torch.float32).to(x.dtype)[..., 0]


def _shape(x: Tensor) -> Tensor:
    """Add one element to each row."""
    *outer, columns = x.shape
    return torch.zeros((*outer, columns + 1), device=x.device, dtype=torch.float32).to(x.dtype)


def _device(x: Tensor) -> Tensor:
    return x.cpu()


def _expanded(x: Tensor) -> Tensor:
    """Make all rows share one row's memory."""
    return x[..., :1, :].expand(x.shape)


def _cast_type(x: Tensor) -> Tensor:
    """Pass integers to a cast, which requires floating-point numbers."""
    return torch.zeros(x.shape, dtype=torch.int32, device=x.device)


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": _dtype,
    "address": _address,
    "stride": _stride,
    "shape": _shape,
    "device": _device,
    "expanded": _expanded,
    "cast_type": _cast_type,
}


def applies(fault: str, x: Tensor) -> bool:
    """Tell whether a fault makes this operand wrong: a tensor of zero or one element cannot have wrong strides."""
    if x.numel() == 0:
        return False
    if fault == "device":
        return x.is_cuda
    if fault == "stride":
        return x.shape[-1] > 1
    return fault != "expanded" or (x.dim() > 1 and x.shape[-2] > 1)
