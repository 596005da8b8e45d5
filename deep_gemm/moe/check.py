"""Checks of the arguments of rows of experts, of activations with gates, and of layers of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casts.gating import Gating
from ..casts.rules import LAYER_TYPES, Rows, check_counts
from ..core.check import checks
from ..core.check.checks import K_MULTIPLE, Operand, Sizes
from ..core.check.layout import Recipe, whole_elements
from ..core.check.memory import empty
from ..core.check.numbers import INT32_MAX, integer_in_range
from ..core.check.tracing import has_memory
from ..core.shadow import TENSORS
from ..gemm.ask.bf16 import MULTIPLE, laid_out
from ..gemm.kinds.output import BF16_OPERANDS, Operands
from ..linear.check import OF_ALL_K, weight

WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class ExpertRows(NamedTuple):
    """The row of each route, with the rows stacked by expert without gaps.

    A route is one expert of one token. The tensors have space for a row of each route, but a route without an expert
    uses no row, so the last rows may have no token.
    """

    counts: Tensor
    """int32 `[experts]`: the number of rows of each expert."""
    ends: Tensor
    """int32 `[experts]`: the row where each expert ends and the next expert begins."""
    row_of: Tensor
    """int32 `[tokens, topk]`: the row of each route, -1 for none."""
    token_of: Tensor
    """int32 `[rows]`: the token of each row, -1 after the last row of the last expert."""
    ids: Tensor
    """int32 `[rows]`: the expert of each row, -1 after the last row of the last expert."""


def present(*operands: Tensor | None) -> tuple[Tensor, ...]:
    """Return the operands that are not None."""
    return tuple([x for x in operands if x is not None])


def check_routes(topk_ids: Tensor, num_experts: int) -> int:
    """Check the experts of each token, and return `num_experts` as an int. The host reads no ids from a GPU."""
    checks.shaped("topk_ids", topk_ids, (torch.int32, torch.int64), ("tokens", "topk"), {})
    checks.supported_device("topk_ids", topk_ids)
    whole_elements("topk_ids", topk_ids)
    if has_memory(topk_ids) and topk_ids.numel() > INT32_MAX:
        raise ValueError(f"topk_ids: expected at most {INT32_MAX} routes, got {topk_ids.numel()}")
    num_experts = integer_in_range("num_experts", num_experts, 0)
    if checks.on_host(topk_ids):
        checks.in_range("topk_ids", topk_ids, -1, num_experts - 1)
    return num_experts


def check_rows(rows: ExpertRows) -> ExpertRows:
    """Check that `rows` are `ExpertRows`, from `expert_rows` or made by a caller."""
    if not isinstance(rows, ExpertRows):
        raise TypeError(f"rows: expected ExpertRows, got {type(rows).__name__}")
    return rows


def check_gather(x: Tensor, rows: ExpertRows) -> None:
    """Check tokens, and the rows that receive them."""
    checks.no_gradient("x", x)
    sizes = _row_sizes(rows, x, "x")
    checks.bind("x", x, ("tokens", "k"), sizes)
    if checks.on_host(rows.token_of):
        checks.in_range("rows.token_of", rows.token_of, -1, sizes["tokens"] - 1)


def check_weighted(y: Tensor, rows: ExpertRows, topk_weights: Tensor, out: Tensor | None) -> None:
    """Check rows of experts, and the weights and the output of their sums for each token."""
    checks.no_gradient("y", y)
    checks.no_gradient("topk_weights", topk_weights)
    sizes = _row_sizes(rows, y, "y")
    checks.bind("y", y, ("rows", "n"), sizes)
    inputs = {"y": y, "topk_weights": route_weights(topk_weights, sizes)}
    checks.same_device(inputs, y.device, "y")
    checks.columns(sizes["n"], torch.bfloat16)
    if checks.on_host(rows.row_of):
        checks.in_range("rows.row_of", rows.row_of, -1, sizes["rows"] - 1)
    if out is not None:
        layer_output(out, ("tokens", "n"), sizes, {**inputs, "rows.row_of": rows.row_of}, "y")


def route_weights(topk_weights: Tensor, sizes: Sizes) -> Tensor:
    """Check the weights of all routes."""
    checks.shaped("topk_weights", topk_weights, WEIGHT_TYPES, ("tokens", "topk"), sizes)
    whole_elements("topk_weights", topk_weights)
    return topk_weights


def layer_output(out: Tensor, axes: tuple[str, ...], sizes: Sizes, inputs: dict[str, Tensor], first: str) -> None:
    """Check a layer's BF16 output like a product's D. `first` names the input whose device it must share."""
    checks.written("out", out)
    checks.shaped("out", out, (torch.bfloat16,), axes, sizes)
    checks.same_device({"out": out}, inputs[first].device, first)
    checks.rows("out", out, axes[-1])
    checks.no_overlap(inputs, out, None, "out")


def _row_sizes(rows: ExpertRows, near: Tensor, name: str) -> Sizes:
    """Check the members of `rows` and the tensor `near` called `name`, and return their sizes."""
    checks.has_type(name, checks.tensor(name, near), LAYER_TYPES)
    checks.supported_device(name, near)
    rows = check_rows(rows)
    sizes: Sizes = {}
    axes = (("experts",), ("experts",), ("tokens", "topk"), ("rows",), ("rows",))
    for field, x, names in zip(ExpertRows._fields, rows, axes, strict=True):
        checks.shaped(f"rows.{field}", x, (torch.int32,), names, sizes)
        checks.same_device({f"rows.{field}": x}, near.device, name)
    return sizes


class ActivationProblem(NamedTuple):
    """Rows of gate and then up, for FP8 values of silu(gate) * up."""

    x: Tensor
    """`[..., m, 2 i]`"""
    row_weights: Tensor | None
    """FP32 `[..., m]`: factors of whole rows."""
    masked_m: Tensor | None
    """`[groups]`: the number of rows that each group uses, for x of shape `[groups, max_m, 2 i]`."""
    ends: Tensor | None
    """`[groups]`: the row where each group ends, for x of shape `[m, 2 i]`."""
    alignment: int
    """Group starts are multiples of this number of rows if `ends` is given."""
    gating: Gating


def activation_problem(
    x: Tensor, row_weights: Tensor | None, masked_m: Tensor | None, ends: Tensor | None, gating: Gating, alignment: int
) -> ActivationProblem:
    """Check the arguments of an activation with gates."""
    checks.no_gradient("x", x)
    checks.no_gradient("row_weights", row_weights)
    checks.has_type("x", checks.tensor("x", x), LAYER_TYPES)
    checks.supported_device("x", x)
    if masked_m is not None and ends is not None:
        raise ValueError("ends: expected None because masked_m is given, got both")
    axes = ("groups", "max_m", "2 i") if masked_m is not None else ("m", "2 i")
    sizes: Sizes = {}
    if masked_m is not None or ends is not None:
        checks.bind("x", x, axes, sizes)
    elif x.dim() < 2:
        raise ValueError(f"x: expected shape (..., m, 2 i), got {tuple(x.shape)}")
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even number of columns, gate and up, got {x.shape[-1]}")
    given: dict[str, Tensor] = {}
    if row_weights is not None:
        checks.has_type("row_weights", checks.tensor("row_weights", row_weights), (torch.float32,))
        if row_weights.shape != x.shape[:-1]:
            expected, got = tuple(x.shape[:-1]), tuple(row_weights.shape)
            raise ValueError(f"row_weights: expected shape (..., m) = {expected}, got {got}")
        given["row_weights"] = row_weights
    if masked_m is not None:
        check_counts(x, masked_m)
    if ends is not None:
        groups = checks.tensor("ends", ends).numel()
        given["ends"] = checks.int32("ends", ends, "groups", groups)
    checks.same_device(given, x.device, "x")
    if ends is not None and checks.on_host(ends):
        checks.ends(ends, sizes["m"], alignment, "ends")
    return ActivationProblem(x, row_weights, masked_m, ends, alignment, gating)


def bf16_weight(
    name: str, given: Any, axes: tuple[str, ...], sizes: Sizes, gran_k: int | None, recipe_b: Recipe | None
) -> tuple[Rows, Operands]:
    """Check a BF16 weight of experts as `weight` checks a weight with scales; return None as the scales."""
    if not isinstance(given, TENSORS):
        raise TypeError(f"{name}: expected a BF16 tensor, as w1 is a tensor, got {type(given).__name__}")
    for what, value in (("gran_k", gran_k), ("recipe_b", recipe_b)):
        checks.nothing(what, value, " beside BF16 weights, which have no scales")
    checks.no_gradient(name, given)
    checks.shaped(name, given, (torch.bfloat16,), axes, sizes)
    return (laid_out(name, given, axes[1], axes[2]), None), BF16_OPERANDS  # type: ignore[arg-type]


def expert_weights(
    w1: Any,
    w2: Any,
    sizes: Sizes,
    gran_k: int | None = None,
    recipe_b: Recipe | None = None,
    names: tuple[str, str] = ("w1", "w2"),
    axis: str = "experts",
    check: Callable[..., Any] = weight,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Check both weights of experts, and that they fit each other; return the result of `check` for each."""
    name1, name2 = names
    first = check(name1, w1, (axis, "2 intermediate", "hidden"), sizes, gran_k, recipe_b)
    second = check(name2, w2, (axis, "hidden", "intermediate"), sizes, gran_k, recipe_b)
    intermediate = sizes["intermediate"]
    if sizes["2 intermediate"] != 2 * intermediate:
        raise ValueError(
            f"{name1}: expected 2 * intermediate = {2 * intermediate} rows, gate and up, because {name2} has depth "
            f"{intermediate}, got {sizes['2 intermediate']}"
        )
    return first, second


class ExpertsProblem(NamedTuple):
    """A checked call of `experts`: tokens, their routes, and both weights."""

    x: Tensor
    """`[tokens, hidden]`"""
    topk_ids: Tensor
    """`[tokens, topk]`"""
    topk_weights: Tensor
    """`[tokens, topk]`"""
    w1: Rows
    """`[experts, 2 intermediate, hidden]`, the gate's rows first. A BF16 weight has no scales."""
    w2: Rows
    """`[experts, hidden, intermediate]`"""
    out: Tensor
    """`[tokens, hidden]` BF16."""
    num_experts: int
    gating: Gating
    first: Operands
    """The types of w1's values, and how x and w1 are scaled."""
    second: Operands
    """The types of w2's values, and how the activations and w2 are scaled."""
    w1_bias: Tensor | None
    """FP32 `[experts, 2 intermediate]`"""
    w2_bias: Tensor | None
    """FP32 `[experts, hidden]`"""


def experts_problem(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Operand | Tensor,
    w2: Operand | Tensor,
    out: Tensor | None,
    gating: Gating,
    gran_k: int | None,
    recipe_b: Recipe | None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> ExpertsProblem:
    """Check a layer of experts, and make its output if it was left out."""
    sizes: Sizes = {}
    checks.no_gradient("x", x)
    checks.no_gradient("topk_weights", topk_weights)
    checks.shaped("x", x, LAYER_TYPES, ("tokens", "hidden"), sizes)
    checks.supported_device("x", x)
    checks.bind("topk_ids", checks.tensor("topk_ids", topk_ids), ("tokens", "topk"), sizes)
    route_weights(topk_weights, sizes)
    of_weights: Sizes = {}
    is_bf16 = isinstance(w1, TENSORS) and w1.element_size() > 1
    check: Callable[..., Any] = bf16_weight if is_bf16 else partial(weight, also=OF_ALL_K)
    try:
        both = expert_weights(w1, w2, of_weights, gran_k, recipe_b, check=check)
    except ValueError:
        both = None
    # If both weights fit each other, x is compared with them; if they do not, x tells which weight is wrong.
    (of_w1, first), (of_w2, second) = both or expert_weights(w1, w2, sizes, gran_k, recipe_b, check=check)
    checks.bind("x", x, ("tokens", "hidden"), of_weights)
    for name in ("hidden", "intermediate"):
        checks.multiple(name, of_weights[name], MULTIPLE if is_bf16 else K_MULTIPLE)
    if not is_bf16:
        checks.weights("w1", of_w1[0])
        checks.weights("w2", of_w2[0])
    inputs = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    of_both = zip(("w1", "sfw1", "w2", "sfw2"), (*of_w1, *of_w2), strict=True)
    inputs.update({name: each for name, each in of_both if each is not None})
    w1_bias = checks.bias("w1_bias", w1_bias, ("experts", "2 intermediate"), of_weights, inputs)
    w2_bias = checks.bias("w2_bias", w2_bias, ("experts", "hidden"), of_weights, inputs)
    checks.same_device(inputs, x.device, "x")
    num_experts = check_routes(topk_ids, of_weights["experts"])
    if out is None:
        out = empty("the output", x.shape, torch.bfloat16, x.device)
    else:
        layer_output(out, ("tokens", "hidden"), sizes, inputs, "x")
    biases = w1_bias, w2_bias
    return ExpertsProblem(x, topk_ids, topk_weights, of_w1, of_w2, out, num_experts, gating, first, second, *biases)


def flops_of_rows(rows: int, x: Tensor, w1: Tensor) -> int:
    """Count the operations of both products for every route: only a GPU knows the routes without an expert."""
    return 3 * rows * x.shape[1] * w1.shape[1]
