"""Checks of the arguments of `linear`. `weight` also checks the weights of experts."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..casts.rules import LAYER_TYPES, granularity
from ..core.check import checks, ue8m0
from ..core.check.checks import Operand, Sizes
from ..core.check.layout import RECIPES_OF_A, SCALE_BLOCK, UE8M0_PER_WORD, Recipe, ceil_div, either
from ..core.check.memory import empty
from ..core.check.numbers import as_integer
from ..core.check.recipes import BLOCKS_OF_32, BLOCKS_OF_64, E2M1, E4M3, MX, PER_BLOCK, TENSOR, WHOLE, Scales, scales_of
from ..gemm import packed
from ..gemm.kinds.output import ScaledOperands

SCALES_OF_WEIGHTS = PER_BLOCK, BLOCKS_OF_64, BLOCKS_OF_32, MX
"""Allowed scales of FP8 weights, from coarse to fine."""
OF_ALL_K = WHOLE, TENSOR
"""Further scales for weights of `linear` and `experts`: one for each row, or one for a matrix."""


class LinearProblem(NamedTuple):
    """A checked call of `linear`: rows, an FP8 or FP4 weight, and a bias."""

    x: Tensor
    """`[m, k]`"""
    w: Operand
    """`[n, k]`, as `weight` returns it."""
    bias: Tensor | None
    """`[n]`"""
    out: Tensor
    """`[m, n]` BF16."""
    whole_out: Tensor
    """`out` with the leading dimensions of the caller's x."""
    operands: ScaledOperands
    """The types of w's values, and how x and w are scaled."""


def linear_problem(
    x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None, gran_k: int | None, recipe_b: Recipe | None
) -> LinearProblem:
    """Check a linear layer, and make its output if it was left out."""
    checks.has_type("x", checks.tensor("x", x), LAYER_TYPES)
    checks.supported_device("x", x)
    if x.dim() < 1:
        raise ValueError(f"x: expected shape (..., k), got {tuple(x.shape)}")
    *leading, k = x.shape
    m, sizes = prod(leading), Sizes()
    (values, scales), operands = weight("w", w, ("n", "k"), sizes, gran_k, recipe_b, OF_ALL_K)
    n = sizes["n"]
    if k != sizes["k"]:
        raise ValueError(f"x: expected shape (..., k) = (..., {sizes['k']}), got {tuple(x.shape)}")
    inputs = {"x": x, "w": values, "sfw": scales}
    if bias is not None:
        checks.shaped("bias", bias, LAYER_TYPES, ("n",), sizes)
        inputs["bias"] = bias
    checks.same_device(inputs, x.device, "x")
    checks.depth(k)
    checks.columns(n, torch.bfloat16)
    checks.k_major("w", values)
    if out is None:
        out = empty("the output", (*leading, n), torch.bfloat16, x.device)
    else:
        checks.written("out", out)
        if checks.wants_gradient(x, bias):
            raise ValueError(
                "out: expected None, because x or bias requires a gradient: leave it out, or call under torch.no_grad()"
            )
        checks.has_type("out", checks.tensor("out", out), (torch.bfloat16,))
        if out.shape != (*leading, n):
            raise ValueError(f"out: expected shape (..., n) = {(*leading, n)}, got {tuple(out.shape)}")
        checks.same_device({"out": out}, x.device, "x")
        checks.rows("out", out, "n")
        checks.no_overlap(inputs, out, None, "out")
    try:
        rows = out.view(m, n)
    except RuntimeError:
        raise ValueError(f"out: expected rows at equal distances, got strides {out.stride()}") from None
    return LinearProblem(x.reshape(m, k), (values, scales), bias, rows, out, operands)


def weight(
    name: str,
    given: Operand,
    axes: tuple[str, ...],
    sizes: Sizes,
    gran_k: int | None = None,
    recipe_b: Recipe | None = None,
    also: tuple[Scales, ...] = (),
) -> tuple[Operand, ScaledOperands]:
    """Check a weight `[n, k]` or `[groups, n, k]`. Return the weight, and the types and scales of both operands.

    Scales of FP8 are one of `SCALES_OF_WEIGHTS` or `also`. FP32 scales are returned unchanged, UE8M0 as words. FP4
    (gemm/packed.py) is returned as bytes, with scales as words unless they are FP32. `gran_k`: columns of rows that
    share a scale; None: the weight's columns, or 128 for an FP4 weight. `recipe_b`: rows and columns of the weight
    that share a scale.
    """
    if packed.is_packed(given):
        packed.scales_beside((None, None, recipe_b))
        operands = E2M1, _scales_of_rows(gran_k, SCALE_BLOCK), MX
        return packed.weight(name, given, axes, sizes, depth=axes[-1]), operands
    values, scales = checks.operand(name, given, axes, sizes)
    operands = _, of_rows, of_w = operands_of(name, values, scales, gran_k, recipe_b, also)
    *outer, k = values.shape
    checked = ue8m0.scales(f"sf{name}", scales, axes[-2], tuple(outer), k, of_w, of_rows)
    return (values, checked if of_w.columns else scales), operands


def operands_of(
    name: str, values: Tensor, sf: Tensor, gran_k: int | None, recipe_b: Recipe | None, also: tuple[Scales, ...] = ()
) -> ScaledOperands:
    """Return the types and scales of an FP8 weight and its rows, like `weight`, from shapes and types alone."""
    of_w = _scales_of_weight(f"sf{name}", sf, values.shape, recipe_b, also)
    return E4M3, _scales_of_rows(gran_k, of_w.columns), of_w


def _scales_of_rows(gran_k: int | None, usual: int) -> Scales:
    """Check the number of activation columns that share a scale."""
    columns = granularity(usual, 0) if gran_k is None else as_integer(gran_k)
    if (1, columns) not in RECIPES_OF_A and not columns == usual == 0:
        allowed = sorted(columns for _, columns in RECIPES_OF_A)
        raise ValueError(f"gran_k: expected {either(allowed)} columns for each scale, got {gran_k!r}")
    return Scales(1, columns)  # type: ignore[arg-type]


def _scales_of_weight(
    name: str, sf: Tensor, shape: torch.Size, recipe_b: Recipe | None, also: tuple[Scales, ...]
) -> Scales:
    """Return the scales of an FP8 weight: `recipe_b`, or else the scales that fit the shape of `sf`.

    A single scale for a matrix fits blocks of any size. A word holds four exponents, even for rows with fewer.
    """
    if recipe_b is not None:
        _, stated = scales_of((None, None, recipe_b))
        if stated not in SCALES_OF_WEIGHTS + also:
            allowed = either([*map(tuple, SCALES_OF_WEIGHTS + also)])
            raise NotImplementedError(f"recipe_b: expected {allowed}, got {tuple(stated)}")
        return stated
    if sf.dtype not in (torch.float32, torch.int32, *ue8m0.EXPONENTS):
        checks.fp32_scales(name, sf)  # raises an error with the expected dtype
    *groups, n, k = shape
    if sf.dtype == torch.float32 and sf.shape == (*groups, ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)):
        return PER_BLOCK
    if TENSOR in also and sf.dtype == torch.float32 and sf.dim() < 2:
        return TENSOR
    of_word = UE8M0_PER_WORD if sf.dtype == torch.int32 else 1
    shapes = {of: (*groups, ceil_div(n, of.rows), ceil_div(k, of.columns * of_word)) for of in SCALES_OF_WEIGHTS}
    if WHOLE in also and sf.dtype == torch.float32 and k > MX.columns:
        shapes[WHOLE] = (*groups, n, 1)
        if groups:
            shapes[TENSOR] = (*groups, 1, 1)
    found = [of for of, shape in shapes.items() if sf.shape == shape]
    if not found:
        each = either([f"{shape} of {of.rows or 'n'}x{of.columns or 'k'} values" for of, shape in shapes.items()])
        raise ValueError(f"{name}: expected shape {each} with {sf.dtype}, got {tuple(sf.shape)}")
    if of_word > 1 and len(found) > 1 and k > found[-1].columns and sf.numel():
        raise ValueError(f"recipe_b: expected {either([*map(tuple, found)])}: {name} fits each of them, got None")
    return found[-1]
