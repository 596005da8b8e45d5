"""Layers of experts: what is asked, checked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..casts.check import LAYER_TYPES
from ..core.check import checks
from ..core.check.checks import K_MULTIPLE, Operand, Sizes
from ..core.check.numbers import positive
from ..linear.check import weight
from .routing_check import check_routes, layer_output, route_weights


class ExpertsProblem(NamedTuple):
    """Tokens, each through the experts of its routes."""

    x: Tensor
    """`[tokens, hidden]`"""
    topk_ids: Tensor
    """`[tokens, topk]`"""
    topk_weights: Tensor
    """`[tokens, topk]`"""
    w1: Operand
    """`[experts, 2 intermediate, hidden]`, the gate's rows first."""
    w2: Operand
    """`[experts, hidden, intermediate]`"""
    out: Tensor
    """`[tokens, hidden]` BF16."""
    num_experts: int
    limit: float | None


def experts_problem(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Operand,
    w2: Operand,
    out: Tensor | None,
    limit: float | None,
) -> ExpertsProblem:
    """Check a layer of experts, and make its output if it was left out."""
    sizes: Sizes = {}
    checks.no_gradient("x", x)
    checks.no_gradient("topk_weights", topk_weights)
    checks.has_type("x", checks.tensor("x", x), LAYER_TYPES)
    checks.supported_device("x", x)
    checks.bind("x", x, ("tokens", "hidden"), sizes)
    checks.bind("topk_ids", checks.tensor("topk_ids", topk_ids), ("tokens", "topk"), sizes)
    route_weights(topk_weights, sizes)
    w1 = weight("w1", w1, ("experts", "2 intermediate", "hidden"), sizes)
    w2 = weight("w2", w2, ("experts", "hidden", "intermediate"), sizes)
    hidden, intermediate = sizes["hidden"], sizes["intermediate"]
    if sizes["2 intermediate"] != 2 * intermediate:
        raise ValueError(
            f"w1: expected 2 * intermediate = {2 * intermediate} rows, gate and up, where w2 has depth {intermediate}, "
            f"got {sizes['2 intermediate']}"
        )
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % K_MULTIPLE:
            raise ValueError(f"{name}: expected a multiple of {K_MULTIPLE}, got {size}")
    checks.weights("w1", w1[0])
    checks.weights("w2", w2[0])
    inputs = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    inputs.update(zip(("w1", "sfw1", "w2", "sfw2"), (*w1, *w2), strict=True))
    checks.same_device(inputs, x.device, "x")
    num_experts = check_routes(topk_ids, sizes["experts"])
    limit = None if limit is None else positive("limit", limit)
    if out is None:
        out = torch.empty((sizes["tokens"], hidden), dtype=torch.bfloat16, device=x.device)
    else:
        layer_output(out, ("tokens", "hidden"), sizes, inputs, "x")
    return ExpertsProblem(x, topk_ids, topk_weights, w1, w2, out, num_experts, limit)
