"""A linear layer with an FP8 weight, for activations as models have them."""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import fp8_gemm_nt
from .problem import Operand, linear_problem
from .quantize import per_token_cast_to_fp8


@torch.no_grad()
def linear(x: Tensor, w: Operand, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor | None:
    """Compute x @ w.T + bias: cast x to FP8 as `per_token_cast_to_fp8` does, and multiply as `fp8_gemm_nt` does.

    - `x`: `[..., k]`, BF16, FP16 or FP32, with any leading dimensions and strides.
    - `w`: values `[n, k]` (torch.float8_e4m3fn) and scales `[ceil(n / 128), ceil(k / 128)]`, as `per_block_cast_to_fp8`
      gives them. k is a multiple of 16 and n of 8.
    - `out`: BF16 `[..., n]`, its rows at equal distances. Where it is given the function returns None; where it is left
      out the function makes it and returns it.
    - `bias`: `[n]`, BF16, FP16 or FP32, added in FP32 before the one rounding to BF16.

    >>> w = per_block_cast_to_fp8(torch.ones(8, 128))
    >>> linear(torch.ones(2, 3, 128), w, bias=torch.ones(8)).shape
    torch.Size([2, 3, 8])
    """
    problem = linear_problem(x, w, out, bias)
    a = per_token_cast_to_fp8(problem.x)
    if problem.bias is None:
        fp8_gemm_nt(a, problem.w, problem.out)
    elif problem.bias.dtype == problem.out.dtype:
        add_product(a, problem.w, problem.out, problem.bias)
    else:  # C has the type of D
        exact = torch.empty_like(problem.out, dtype=torch.float32, memory_format=torch.contiguous_format)
        add_product(a, problem.w, exact, problem.bias)
        problem.out.copy_(exact)
    return problem.whole_out if out is None else None


def add_product(a: Operand, w: Operand, d: Tensor, bias: Tensor) -> None:
    """Write a @ w.T + bias; D holds the bias in each row first."""
    d.copy_(bias.expand_as(d))
    fp8_gemm_nt(a, w, d, d)
