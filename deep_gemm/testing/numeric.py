"""Functions that compare tensors, and count their bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.check.checks import same_device, tensor


def calc_diff(x: Tensor, y: Tensor) -> Tensor:
    """Measure the difference of two tensors, 1 - 2 <x, y> / (<x, x> + <y, y>), in FP64: 0 if they are equal.

    The result is about half the square of the relative error: 1e-3 means an error of 4.5%. Two zero tensors return 0.

    >>> calc_diff(torch.ones(4), torch.ones(4)).item()
    0.0
    """
    same_device({"y": tensor("y", y)}, tensor("x", x).device, "x")
    if x.shape != y.shape:  # broadcasting would compare an output of a wrong shape, and might find it right
        raise ValueError(f"y: expected shape {tuple(x.shape)}, which x has, got {tuple(y.shape)}")
    x, y = x.double(), y.double()
    denominator = (x * x + y * y).sum()
    return torch.where(denominator == 0, 0.0, 1 - 2 * (x * y).sum() / denominator)


def count_bytes(*tensors: Any) -> int:
    """Count the bytes of tensors, also of tensors in tuples and lists; None counts 0.

    >>> count_bytes(torch.ones(4), (torch.ones(2), None))
    24
    """
    total = 0
    for x in tensors:
        if isinstance(x, tuple | list):
            total += count_bytes(*x)
        elif x is not None:
            total += x.numel() * x.element_size()
    return total


def assert_bitwise_equal(x: Tensor, y: Tensor, label: str = "") -> None:
    """Raise an AssertionError unless two tensors have the same type, shape and bytes; NaNs of equal bytes are equal.

    The error's text begins with `label` and names the first element that differs.

    >>> assert_bitwise_equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "gate")
    Traceback (most recent call last):
    AssertionError: gate: 1 of 2 elements differ, the first at (1,): 2.0 and 3.0
    """
    told = f"{label}: " if label else ""
    if x.dtype != y.dtype or x.shape != y.shape:
        raise AssertionError(f"{told}{x.dtype} {tuple(x.shape)} is not {y.dtype} {tuple(y.shape)}")
    if x.numel() == 0:
        return
    bytes_of_x, bytes_of_y = (each.detach().contiguous().flatten().view(torch.uint8) for each in (x, y))
    if torch.equal(bytes_of_x, bytes_of_y):
        return
    differs = (bytes_of_x != bytes_of_y).view(x.numel(), -1).any(dim=1)
    flat = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, dtype=torch.int64), x.shape))
    raise AssertionError(
        f"{told}{int(differs.sum())} of {x.numel()} elements differ, the first at {index}: {x[index].item()!r} and "
        f"{y[index].item()!r}"
    )
