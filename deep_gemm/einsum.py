"""Products of heads, as einsum states them: a batch of products of one shape, FP8 operands with fine-grained scales."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .kernels import heads
from .kernels.product import Product, call_operator, run
from .problem import FORMS, EinsumProblem, Form, Operand, einsum_problem, form_of
from .problem.layout import RECIPE_1D2D, Recipe


def fp8_einsum(
    expr: str,
    a: Operand,
    b: Operand,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = RECIPE_1D2D,
) -> Tensor | None:
    """Compute one product for each head h, D = C + A * B summed as `expr` says, with FP8 operands and FP32 scales.

    - `expr`: "bhr,hdr->bhd", "bhd,hdr->bhr" (the same weights, transposed) or "bhd,bhr->hdr" (a weight gradient).
    - `a`, `b`: values (torch.float8_e4m3fn) with the axes that `expr` says, and scales with the same axes: one for 128
      along the axis that is summed over, and in `b` one for 128 along the axis that stays as well. With
      `recipe=(1, 1, 128)` `b` has one for each place along that axis.
    - `d`: torch.bfloat16 or torch.float32. Where it is given the function returns None; where it is left out the
      function makes it, of C's type, else BF16 (FP32 with `recipe=(1, 1, 128)`), and returns it.
    - `c`: added to the product in FP32; of D's shape and type, D itself or disjoint from it.

    Heads and rows may have any strides of whole 16 bytes; the last axis is contiguous. Values are copied where the sum
    goes over another axis than their last. The summed axis is a multiple of 16, D's last of 8 (BF16) or 4 (FP32).

    >>> x, w = torch.ones(2, 3, 128), torch.ones(3, 8, 128)
    >>> fp8_einsum("bhr,hdr->bhd", per_token_cast_to_fp8(x), per_block_cast_to_fp8(w)).shape
    torch.Size([2, 3, 8])
    """
    form = form_of(expr)
    return run(PRODUCTS[form], a, b, d, c, None if recipe is None else tuple(recipe))  # type: ignore[arg-type]


def _product(name: str, form: Form) -> Product:
    """State how a form is asked and computed."""

    def ask(a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe | None) -> EinsumProblem:
        return einsum_problem(form, a, b, d, c, recipe)

    def as_operator(a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe | None) -> Tensor | None:
        adds_to_d = {} if d is None else {"adds_to_d": c is d}
        c = None if c is d else c
        return call_operator("fp8_einsum", a, b, d, c, expr=name, recipe=recipe, **adds_to_d)

    return Product(ask, reference.einsum, heads.run, as_operator)


PRODUCTS = {form: _product(name, form) for name, form in FORMS.items()}
