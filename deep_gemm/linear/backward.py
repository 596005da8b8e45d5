"""The gradient of activations through a weight that was cast to FP8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..casts.by_kernels import can_turn_blocks, cast_turned_blocks_of, cast_turned_rows_of, has_kernels
from ..casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from ..core.call import Function, run
from ..core.check.checks import K_MULTIPLE, Operand
from ..core.check.layout import Recipe
from ..core.check.memory import empty
from ..gemm.api.dense import fp8_gemm_nt


def input_gradient(grad: Tensor, w: Operand, dtype: torch.dtype) -> Tensor:
    """Compute the gradient of the rows of x through a cast weight `[n, k]`, for any n.

    The n columns of `grad` are the depth of this product, so zeros extend them to a depth that products accept.
    """
    values, scales = w
    more = -values.shape[0] % K_MULTIPLE
    if more:
        grad = F.pad(grad, (0, more))
        values = F.pad(values.view(torch.uint8), (0, 0, 0, more)).view(values.dtype)
    return product_back(per_token_cast_to_fp8(grad, mn_major=True), transposed((values, scales)), dtype)


def product_back(a: Operand, w: Operand, dtype: torch.dtype, recipe: Recipe | None = None) -> Tensor:
    """Compute a @ w.T in type `dtype`, for a weight that is transposed already. `recipe`: of both operands."""
    d = empty("the gradient", (a[0].shape[0], w[0].shape[0]), output_type(dtype), a[0].device)
    fp8_gemm_nt(a, w, d, recipe_a=recipe, recipe_b=recipe)
    return d.to(dtype)


def bias_gradient(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum up rows in FP32 and round once. If the types are equal, torch does so in one launch."""
    return rows.sum(0) if rows.dtype == dtype else rows.sum(0, dtype=torch.float32).to(dtype)


def output_type(dtype: torch.dtype) -> torch.dtype:
    """Return the output type of a product whose final result has type `dtype`."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def transposed(w: Operand) -> Operand:
    """Transpose a cast weight `[..., n, k]` to `[..., k, n]`; its scales become a view.

    Products could transpose the values too, but then no record could be found by the call's tensors.
    """
    values, scales = w
    return values.mT.contiguous(), scales.mT


def cast_transposed(w: Tensor) -> Operand:
    """Compute `transposed` of `per_block_cast_to_fp8`; a GPU reads the weight once."""
    values, scales = run(TURNED, (w,), (False,))
    return values, scales.mT


def cast_turned_rows(x: Tensor) -> Operand:
    """Compute `per_token_cast_to_fp8` of a transposed matrix, with one scale for each row; a GPU makes no copy.

    On a GPU a row with a NaN or an infinity has an undefined scale: any scale makes its products NaN.
    """
    if not has_kernels(x):
        return per_token_cast_to_fp8(x.t().contiguous(), gran_k=0)
    return run(TURNED_ROWS, (x, torch.linalg.vector_norm(x, torch.inf, 0, dtype=torch.float32)))  # type: ignore[no-any-return]


def cast_both_ways(w: Tensor) -> tuple[Operand, Operand]:
    """Compute `per_block_cast_to_fp8` and `cast_transposed`; a GPU reads the weight once."""
    values, turned, scales = run(TURNED, (w,), (True,))
    return (values, scales), (turned, scales.mT)


def _cast_turned(w: Tensor, in_order: bool) -> tuple[Tensor, ...]:
    if can_turn_blocks(w):
        return cast_turned_blocks_of(w, in_order=in_order)
    values, scales = per_block_cast_to_fp8(w)
    turned = values.mT.contiguous(), scales
    return (values, *turned) if in_order else turned


TURNED = Function(_cast_turned, _cast_turned, lambda w: (w,))
TURNED_ROWS = Function(cast_turned_rows_of, cast_turned_rows_of, lambda x, amaxes: (x, amaxes))
