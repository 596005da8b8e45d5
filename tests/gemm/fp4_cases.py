"""Helpers for tests of FP4 weights (MXFP4): random weights, their numbers, and the forms of their scales."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.ue8m0 import words_of

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_weight(*shape: int, seed: int = 0) -> Operand:
    """Draw the packed values of a weight `[..., n, k]`, and its scales as bytes."""
    *rows, k = shape
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (*rows, k // 2), generator=g, dtype=torch.uint8)
    return values, torch.randint(110, 135, (*rows, k // 32), generator=g, dtype=torch.uint8)


def operands(m: int, n: int, k: int, columns: int = 128) -> tuple[Operand, Tensor, Tensor]:
    """Draw A, the packed values of B, and B's scales as bytes."""
    a = torch.randn(m, k, generator=torch.Generator().manual_seed(1))
    return deep_gemm.per_token_cast_to_fp8(a, gran_k=columns), *random_weight(n, k)


def plain(values: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of a weight, in FP64."""
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    return VALUES[codes.int()].double() * 2.0 ** (scales.double() - 127).repeat_interleave(32, -1)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bytes": lambda scales: scales,
    "e8m0": lambda scales: scales.view(torch.float8_e8m0fnu),
    "words": words_of,
    "words, MN-major": lambda scales: words_of(scales).mT.contiguous().mT,
    "powers of two in FP32": lambda scales: 2.0 ** (scales.float() - 127),
}
