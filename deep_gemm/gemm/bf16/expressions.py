"""Products of several BF16 matrices at once, in the notation of `torch.einsum`."""

from __future__ import annotations

from torch import Tensor

from ...core.call import Key
from ..product import Product, run
from . import launch as bf16
from . import reference
from . import sums as bf16_sums
from .calls import bf16_product
from .check import ALONG_TOKENS, EXPRESSIONS, SUM, Bf16Problem, expression, heads_problem, sum_problem


def einsum(
    expr: str,
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    c: Tensor | None = None,
    use_cublaslt: bool = False,
) -> Tensor | None:
    """Compute one of four expressions of BF16 tensors, summed in FP32 in a fixed order and rounded once.

    - "bmk,bnk->mn": the sum over b of `a[b] @ b[b].T`; k is a multiple of 64. `d`: BF16, or FP32, to which the sum is
      added if `c` is `d`; there is no other C.
    - "bhr,hdr->bhd": each head's rows of tokens times its weights `[d, r]`; "bhd,hdr->bhr": the same with the weights
      transposed. `d`: BF16 or FP32.
    - "bhd,bhr->hdr": the gradient of the weights. `d`: FP32 or BF16, made as FP32.

    Operands lie in any strides that 16 bytes divide, if only one of the dimensions of a product is contiguous: a part
    of a wider tensor will do. The last dimension of D is contiguous. `c` is added in FP32: of D's type and shape, D
    itself or disjoint from it. Where `d` is given the function returns None; where it is left out the function makes it
    and returns it. `use_cublaslt` is accepted and changes nothing.

    >>> x, w = torch.ones(3, 2, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
    >>> einsum("bhr,hdr->bhd", x, w)[:, 0, 0].tolist()
    [16.0, 16.0, 16.0]
    """
    return run(PRODUCTS[expression(expr)], a, b, d, c)


def _product(expr: str) -> Product:
    def ask(a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, said: Key) -> Bf16Problem:
        return sum_problem(a, b, d, c) if expr == SUM else heads_problem(expr, a, b, d, c)

    if expr == SUM:
        return bf16_product("einsum", ask, reference.sum_of_products, bf16_sums.run, first=(expr,))
    heads_are_second = expr != ALONG_TOKENS
    return bf16_product("einsum", ask, reference.dense, bf16.run, heads_are_second=heads_are_second, first=(expr,))


PRODUCTS = {expr: _product(expr) for expr in EXPRESSIONS}
