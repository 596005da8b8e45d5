"""Products of BF16 matrices, one or several of a shape: what is asked, checked.

Kernels get views, whatever the caller's notation: A `[m, k]`, B `[n, k]`, either dimension contiguous. Only strides
tell how an operand lies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Axes, Sizes
from ...core.check.layout import ADDRESS_ALIGNMENT, align
from ...core.check.tracing import has_memory

MULTIPLE = ADDRESS_ALIGNMENT // 2
"""Elements of BF16 in what TMA counts strides by."""
K_OF_SUM = 64
"""k of the sum over products is a multiple of this many."""


class Bf16Problem(NamedTuple):
    """D = C + A @ B.T; or as many products, if all have a dimension more, in front."""

    a: Tensor
    """`[m, k]`, with either dimension contiguous."""
    b: Tensor
    """`[n, k]`, with either dimension contiguous."""
    d: Tensor
    """`[m, n]`, BF16 or FP32."""
    c: Tensor | None
    """`[m, n]`, of the type of D: D itself, or apart from it."""


EXPRESSIONS = ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")
SUM, BY_HEADS, BY_HEADS_TURNED, ALONG_TOKENS = EXPRESSIONS


def bf16_problem(a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, major: str) -> Bf16Problem:
    """Check a dense product. `major` "nt" means A `[m, k]` and B `[n, k]`; "tn" means that both are transposed."""
    sizes: Sizes = {}
    turn_a, turn_b = major[0] == "t", major[1] == "n"
    a = operand("a", a, ("k", "m") if turn_a else ("m", "k"), sizes)
    b = operand("b", b, ("k", "n") if turn_b else ("n", "k"), sizes)
    d, c = checks.outputs({"a": a, "b": b}, d, c, ("m", "n"), sizes, torch.bfloat16)
    a, b = laid_out("a", a.mT if turn_a else a, "m"), laid_out("b", b.mT if turn_b else b, "n")
    depth(a, b)
    return Bf16Problem(a, b, d, c)


def expression(expr: object) -> str:
    """Check which products are meant."""
    stated = expr.replace(" ", "") if isinstance(expr, str) else expr
    if stated not in EXPRESSIONS:
        raise NotImplementedError(f"expr: expected {', '.join(EXPRESSIONS[:-1])} or {EXPRESSIONS[-1]}, got {expr!r}")
    return str(stated)


def heads_problem(expr: str, a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None) -> Bf16Problem:
    """Check a product for each head. The problem has its heads first; a D that is made lies as `expr` says."""
    of_a, of_b = expr.partition("->")[0].split(",")
    sizes: Sizes = {}
    a, b = operand("a", a, tuple(of_a), sizes), operand("b", b, tuple(of_b), sizes)
    inputs = {"a": a, "b": b}
    if expr == ALONG_TOKENS:  # [b, h, d], [b, h, r] -> [h, d, b], [h, r, b]
        named = {"h": sizes["h"], "d": sizes["d"], "n": sizes["r"]}
        d, c = checks.outputs(inputs, d, c, ("h", "d", "n"), named, torch.float32)
        a, b = laid_out("a", a.permute(1, 2, 0), "d"), laid_out("b", b.permute(1, 2, 0), "r")
        depth(a, b, "b")
        return Bf16Problem(a, b, d, c)
    inner, outer = ("r", "d") if expr == BY_HEADS else ("d", "r")
    named = {"b": sizes["b"], "h": sizes["h"], "n": sizes[outer]}
    d, c = checks.outputs(inputs, d, c, ("b", "h", "n"), named, torch.bfloat16)
    a, b = laid_out("a", a.transpose(0, 1), "b"), laid_out("b", b if expr == BY_HEADS else b.mT, outer)
    depth(a, b, inner)
    return Bf16Problem(a, b, d.transpose(0, 1), None if c is None else c.transpose(0, 1))


def sum_problem(a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None) -> Bf16Problem:
    """Check a sum over products: D `[m, n]` alone has no dimension in front."""
    sizes: Sizes = {}
    a, b = operand("a", a, ("b", "m", "k"), sizes), operand("b", b, ("b", "n", "k"), sizes)
    if c is not None and (d is None or d.dtype != torch.float32 or c is not d):
        raise ValueError(f"c: expected None or an FP32 d itself for {SUM}, got another tensor")
    d, c = checks.outputs({"a": a, "b": b}, d, c, ("m", "n"), sizes, torch.bfloat16)
    if sizes["k"] % K_OF_SUM:
        raise ValueError(f"k: expected a multiple of {K_OF_SUM} for {SUM}, got {sizes['k']}")
    return Bf16Problem(laid_out("a", a, "m"), laid_out("b", b, "n"), d, c)


def operand(name: str, x: Tensor, axes: Axes, sizes: Sizes) -> Tensor:
    """Check an operand's type, and give its sizes the names of their axes."""
    checks.has_type(name, checks.tensor(name, x), (torch.bfloat16,))
    checks.bind(name, x, axes, sizes)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor without a gradient, got one that requires it; call under torch.no_grad(), or "
            "for gradients a product of grouped rows that makes its d"
        )
    return x


def laid_out(name: str, x: Tensor, rows: str, k: str = "k") -> Tensor:
    """Check that one of the last two dimensions is contiguous, and that TMA can address what lies along the other.

    A dimension of size 1 may have any stride. The view that is returned has one there that a kernel can take.
    """
    if x.numel() == 0:
        return x
    *outer, num_rows, depth_ = x.shape
    *outer_strides, row_stride, k_stride = x.stride()
    is_k_major = (num_rows > 1 and row_stride != 1) if depth_ == 1 else k_stride == 1
    if is_k_major:
        k_stride = 1 if depth_ == 1 else k_stride
        row_stride = align(depth_, MULTIPLE) if num_rows == 1 else row_stride
        inner, pitch, extent = k_stride, row_stride, depth_
    else:
        row_stride = 1 if num_rows == 1 else row_stride
        k_stride = align(num_rows, MULTIPLE) if depth_ == 1 else k_stride
        inner, pitch, extent = row_stride, k_stride, num_rows
    if inner != 1:
        raise ValueError(f"{name}: expected values contiguous along {rows} or {k}, got strides {x.stride()}")
    if pitch % MULTIPLE or pitch < extent:
        raise ValueError(
            f"{name}: expected a stride that is a multiple of {MULTIPLE} elements, and at least {extent}, "
            f"across what is contiguous, got strides {x.stride()}"
        )
    for i, size in enumerate(outer):
        if size == 1:
            outer_strides[i] = align(num_rows * depth_, MULTIPLE)
        elif outer_strides[i] % MULTIPLE:
            raise ValueError(f"{name}: expected strides that are multiples of {MULTIPLE}, got strides {x.stride()}")
    if has_memory(x) and x.data_ptr() % ADDRESS_ALIGNMENT:
        raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got {x.data_ptr():#x}")
    strides = (*outer_strides, row_stride, k_stride)
    return x if strides == x.stride() else x.as_strided(x.shape, strides)


def depth(a: Tensor, b: Tensor, k: str = "k") -> None:
    """Check the depth of a product whose operands are laid out."""
    size = a.shape[-1]
    if size % MULTIPLE and a.numel() and b.numel() and (a.stride(-1) == 1 or b.stride(-1) == 1):
        raise ValueError(f"{k}: expected a multiple of {MULTIPLE} where an operand is contiguous along it, got {size}")
