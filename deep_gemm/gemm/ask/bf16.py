"""Checks of calls of BF16 products: of matrices, of grouped rows and of groups along k.

Kernels get views, whatever the caller's notation: A `[m, k]`, B `[n, k]`, either dimension contiguous. Only strides
tell how an operand lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Axes, Sizes
from ...core.check.layout import ADDRESS_ALIGNMENT, align
from ...core.check.numbers import INT32_MAX, integer_in_range
from ...core.check.tracing import has_memory
from ...core.settings import get_mk_alignment_for_contiguous_layout
from ...core.shadow import plain
from ..kinds.epilogues import SILU_IN_BF16, TO_D
from ..kinds.works import COUNTS, DENSE, ENDS, HEADS, IDS, PARTS, SUM, Work
from ..problem import Problem
from .heads import ALONG_TOKENS, BY_HEADS
from .heads import EXPRESSIONS as OF_HEADS
from .rows import check_groups

MULTIPLE = ADDRESS_ALIGNMENT // 2
"""Elements of BF16 in TMA's unit of strides."""
K_OF_SUM = 64
"""k of the sum over products is a multiple of this many."""

SUMMED = "bmk,bnk->mn"
EXPRESSIONS = (SUMMED, *OF_HEADS)


def bf16_problem(a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, major: str) -> Problem:
    """Check a dense product. `major` "nt" means A `[m, k]` and B `[n, k]`; "tn" means that both are transposed."""
    sizes: Sizes = {}
    turn_a, turn_b = major[0] == "t", major[1] == "n"
    a = operand("a", a, ("k", "m") if turn_a else ("m", "k"), sizes)
    b = operand("b", b, ("k", "n") if turn_b else ("n", "k"), sizes)
    d, c = checks.outputs({"a": a, "b": b}, d, c, ("m", "n"), sizes, torch.bfloat16)
    a, b = laid_out("a", a.mT if turn_a else a, "m"), laid_out("b", b.mT if turn_b else b, "n")
    depth(a, b)
    return _unscaled(a, b, d, c)


def _unscaled(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, work: Work = DENSE, **more: Any) -> Problem:
    return Problem(a, None, b, None, d, c, work, None, None, **more)


def heads_problem(expr: str, a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None) -> Problem:
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
        return _unscaled(a, b, d, c, HEADS)
    inner, outer = ("r", "d") if expr == BY_HEADS else ("d", "r")
    named = {"b": sizes["b"], "h": sizes["h"], "n": sizes[outer]}
    d, c = checks.outputs(inputs, d, c, ("b", "h", "n"), named, torch.bfloat16)
    a, b = laid_out("a", a.transpose(0, 1), "b"), laid_out("b", b if expr == BY_HEADS else b.mT, outer)
    depth(a, b, inner)
    return _unscaled(a, b, d.transpose(0, 1), None if c is None else c.transpose(0, 1), HEADS)


def sum_problem(a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None) -> Problem:
    """Check a sum over products: D `[m, n]` alone has no dimension in front."""
    sizes: Sizes = {}
    a, b = operand("a", a, ("b", "m", "k"), sizes), operand("b", b, ("b", "n", "k"), sizes)
    if c is not None and (d is None or d.dtype != torch.float32 or c is not d):
        raise ValueError(f"c: expected None or an FP32 d itself for {SUMMED}, got another tensor")
    d, c = checks.outputs({"a": a, "b": b}, d, c, ("m", "n"), sizes, torch.bfloat16)
    if sizes["k"] % K_OF_SUM:
        raise ValueError(f"k: expected a multiple of {K_OF_SUM} for {SUMMED}, got {sizes['k']}")
    return _unscaled(laid_out("a", a, "m"), laid_out("b", b, "n"), d, c, SUM)


def bf16_contiguous_problem(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    grouped_layout: Tensor | None,
    *,
    major: str,
    use_psum_layout: bool,
    ensure_zero_padding: bool,
    bias: Tensor | None = None,
    alignment: int | None = None,
    activates: bool = False,
    limit: float | None = None,
) -> Problem:
    """Check a product of stacked rows. With an `alignment` of group starts no zeros are written behind ids.

    `activates`: B has gate's rows first, and D `[m, n / 2]` is silu(gate) * up.
    """
    sizes: Sizes = {}
    a = operand("a", a, ("m", "k"), sizes)
    b = operand("b", b, ("groups", "k", "n") if major[1] == "n" else ("groups", "n", "k"), sizes)
    axis = "groups" if use_psum_layout else "m"
    layout = checks.int32("grouped_layout", grouped_layout, axis, sizes[axis])
    inputs = {"a": a, "b": b, "grouped_layout": layout}
    bias = checks.bias("bias", bias, ("groups", "n"), sizes, inputs)
    if activates:
        sizes["n"] //= 2
    d, _ = checks.outputs(inputs, d, None, ("m", "n"), sizes, torch.bfloat16)
    a, b = _operands_of_rows(a, b.mT if major[1] == "n" else b)
    zero_padding = ensure_zero_padding or not (use_psum_layout or alignment)
    work = ENDS if use_psum_layout else IDS
    alignment = check_groups(work, layout, sizes, alignment)
    expected_m = plain(sizes["m"]) / max(sizes["groups"], 1)
    more = {"expected_m": expected_m, "alignment": alignment, "zero_padding": zero_padding, "bias": bias}
    epilogue = SILU_IN_BF16 if activates else TO_D
    return _unscaled(a, b, d, layout, work, epilogue=epilogue, limit=limit, **more)


def bf16_masked_problem(
    a: Tensor, b: Tensor, d: Tensor | None, masked_m: Tensor | None, expected_m: int | None, bias: Tensor | None = None
) -> Problem:
    """Check a product of rows that are counted for each group."""
    sizes: Sizes = {}
    a, b = operand("a", a, ("groups", "max_m", "k"), sizes), operand("b", b, ("groups", "n", "k"), sizes)
    masked_m = checks.int32("masked_m", masked_m, "groups", sizes["groups"])
    max_m = sizes["max_m"]
    expected_m = max_m if expected_m is None else integer_in_range("expected_m", expected_m, 0, INT32_MAX)
    inputs = {"a": a, "b": b, "masked_m": masked_m}
    bias = checks.bias("bias", bias, ("groups", "n"), sizes, inputs)
    d, _ = checks.outputs(inputs, d, None, ("groups", "max_m", "n"), sizes, torch.bfloat16)
    if checks.on_host(masked_m):
        checks.in_range("masked_m", masked_m, 0, max_m)
    a, b = _operands_of_rows(a, b)
    return _unscaled(a, b, d, masked_m, COUNTS, expected_m=expected_m, bias=bias)


def _operands_of_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = laid_out("a", a, "m"), laid_out("b", b, "n")
    if a.numel() and a.stride(-1) != 1:
        raise ValueError(f"a: expected values contiguous along k, got strides {a.stride()}")
    depth(a, b)
    return a, b


def bf16_depths_problem(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    c: Tensor | None,
    grouped_layout: Tensor | None,
    ks: Sequence[int] | None,
    use_psum_layout: bool,
) -> Problem:
    """Check a product of groups along k."""
    layout = grouped_layout
    if ks is None and layout is None:
        raise ValueError("ks_cpu: expected a list, or grouped_layout with the same numbers, got neither")
    sizes: Sizes = {}
    a, b = operand("a", a, ("sum_k", "m"), sizes), operand("b", b, ("sum_k", "n"), sizes)
    inputs = {"a": a, "b": b}
    counts = None
    host_ks = None if ks is None else checks.integers("ks_cpu", ks)
    if layout is not None:
        groups = checks.tensor("grouped_layout", layout).numel() if host_ks is None else len(host_ks)
        layout = checks.int32("grouped_layout", layout, "groups", groups)
        inputs["grouped_layout"] = layout
        counts = layout
        if use_psum_layout:
            counts = checks.depths_of_ends(layout, get_mk_alignment_for_contiguous_layout(), "grouped_layout")
        if checks.on_host(counts):
            of_layout = tuple(counts.tolist())
            if host_ks is not None and of_layout != host_ks:
                raise ValueError(f"grouped_layout: expected the numbers of ks_cpu, {host_ks}, got {of_layout}")
            host_ks = of_layout
    for index, k in enumerate(host_ks or ()):
        if k < 0:
            raise ValueError(f"ks_cpu: expected numbers of rows, got {k} at index {index}")
    if host_ks is not None and sum(host_ks) > (rows := sizes["sum_k"]):
        raise ValueError(f"ks_cpu: expected numbers that add up to {rows}, the rows of a, or less, got {sum(host_ks)}")
    sizes["groups"] = len(host_ks) if host_ks is not None else counts.numel()  # type: ignore[union-attr]
    d, c = checks.outputs(inputs, d, c, ("groups", "m", "n"), sizes, torch.float32)
    for name, x, axis in (("a", a, "m"), ("b", b, "n")):
        checks.rows(name, x, axis)
    return _unscaled(a.mT, b.mT, d, c, PARTS, ks=host_ks, ks_tensor=counts, layout=layout)


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
    """Check that one of the last two dimensions is contiguous, and that TMA can step along the other.

    A dimension of size 1 may have any stride. The returned view has a stride there that a kernel can take.
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
