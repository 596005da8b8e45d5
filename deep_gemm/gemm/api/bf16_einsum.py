"""Products of several BF16 matrices at once, in the notation of `torch.einsum`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...core.check import checks
from .. import sum_slices
from ..ask.bf16 import EXPRESSIONS, SUMMED, heads_problem, sum_problem
from ..ask.heads import ALONG_TOKENS, BY_HEADS, expression
from ..product import Product, by_operator, run
from .bf16_dense import bf16_product


def _product(expr: str) -> Product:
    as_operator = partial(by_operator, expr=expr)
    if expr == SUMMED:
        return bf16_product("einsum", sum_problem, as_operator=as_operator, on_gpu=sum_slices.run)
    ask = partial(heads_problem, expr)
    if expr == ALONG_TOKENS:
        return bf16_product("einsum", ask, as_operator=as_operator)
    return bf16_product("einsum", ask, as_operator=as_operator, output_of=lambda problem: problem.d.transpose(0, 1))


PRODUCTS = {expr: _product(expr) for expr in EXPRESSIONS}


def einsum(
    expr: str,
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    c: Tensor | None = None,
    use_cublaslt: bool = False,
    epilogue: None = None,
) -> Tensor | None:
    """Compute one of four expressions of BF16 tensors, summed in FP32 in a fixed order and rounded once.

    - "bmk,bnk->mn": the sum over b of `a[b] @ b[b].T`; k is a multiple of 64. `d`: BF16 or FP32. If `c` is `d`, in
      FP32, the sum is added to D; there is no other C.
    - "bhr,hdr->bhd": each head's rows of tokens times its weights `[d, r]`; "bhd,hdr->bhr": the same with the weights
      transposed. `d`: BF16 or FP32.
    - "bhd,bhr->hdr": the gradient of the weights. `d`: FP32 or BF16, made as FP32.

    Operands lie in any strides that 16 bytes divide, if only one of the dimensions of a product is contiguous: a part
    of a wider tensor will do. The last dimension of D is contiguous. `c` is added in FP32: of D's type and shape, D
    itself or disjoint from it. Where `d` is given the function returns None; where it is left out the function makes it
    and returns it. `use_cublaslt` is accepted and changes nothing, `epilogue` is accepted as None.

    >>> x, w = torch.ones(3, 2, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
    >>> einsum("bhr,hdr->bhd", x, w)[:, 0, 0].tolist()
    [16.0, 16.0, 16.0]
    """
    if epilogue is not None:
        checks.nothing("epilogue", epilogue)
    return run(PRODUCTS[expression(expr, EXPRESSIONS)], a, b, d, c)


def batched_syrk(a: Tensor, d: Tensor) -> None:
    """Compute D = A @ A.T of each matrix of a batch, as optimizers that orthogonalize gradients do.

    `a`: BF16 `[batch, n, k]`, n and k multiples of 8; `d`: BF16 or FP32 `[batch, n, n]`, apart from A.

    >>> a, d = torch.ones(2, 8, 16).bfloat16(), torch.empty(2, 8, 8)
    >>> batched_syrk(a, d)
    >>> d[:, 0, 7].tolist()
    [16.0, 16.0]
    """
    _batched(a, a, d)


def batched_symm(a: Tensor, b: Tensor, d: Tensor) -> None:
    """Compute D = A @ B of symmetric matrices whose product is symmetric too, such as two powers of one.

    `a`, `b`: BF16 `[batch, n, n]`, n a multiple of 8; `d`: BF16 or FP32 of that shape, apart from both. Whether A and B
    are symmetric is checked on the CPU alone, because the host reads no value of a GPU.

    >>> a, d = torch.ones(2, 8, 8).bfloat16(), torch.empty(2, 8, 8)
    >>> batched_symm(a, a, d)
    >>> d[:, 0, 7].tolist()
    [8.0, 8.0]
    """
    for name, x in (("a", a), ("b", b)):
        if checks.tensor(name, x).dim() != 3 or x.shape[1] != x.shape[2]:
            raise ValueError(f"{name}: expected shape (batch, n, n), got {tuple(x.shape)}")
        if checks.on_host(x) and not torch.equal(x, x.mT):
            raise ValueError(f"{name}: expected symmetric matrices, got others; einsum multiplies those")
    _batched(a, b, d)


def _batched(a: Tensor, b: Tensor, d: Tensor) -> None:
    """Multiply each A with the transpose of its B: the matrices of a batch are heads, and their rows tokens."""
    for name, x in (("a", a), ("d", d)):
        if checks.tensor(name, x).dim() != 3:
            raise ValueError(f"{name}: expected shape (batch, rows, columns), got {tuple(x.shape)}")
    run(PRODUCTS[BY_HEADS], a.transpose(0, 1), b, d.transpose(0, 1), None)
