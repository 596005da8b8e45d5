"""Operators of layers."""

from __future__ import annotations

from torch import Tensor

from .. import layers
from ..problem import experts_problem, linear_problem
from .library import operator


def linear(x: Tensor, w: Tensor, sfw: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute a linear layer."""
    return layers.linear(x, (w, sfw), None, bias)


def fake_linear(x: Tensor, w: Tensor, sfw: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stand for a linear layer."""
    return linear_problem(x, (w, sfw), None, bias).whole_out


def linear_into(x: Tensor, w: Tensor, sfw: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Compute a linear layer."""
    layers.linear(x, (w, sfw), out, bias)


def fake_linear_into(x: Tensor, w: Tensor, sfw: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Stand for a linear layer."""
    linear_problem(x, (w, sfw), out, bias)


WEIGHTED = "Tensor x, Tensor w, Tensor sfw"
operator(f"linear({WEIGHTED}, Tensor? bias=None) -> Tensor", linear, fake_linear)
operator(f"linear.into({WEIGHTED}, Tensor(out!) out, Tensor? bias=None) -> ()", linear_into, fake_linear_into)


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    sfw1: Tensor,
    w2: Tensor,
    sfw2: Tensor,
    limit: float | None = None,
) -> Tensor | None:
    """Compute a mixture of experts."""
    return layers.experts(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), None, limit)


def fake_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    sfw1: Tensor,
    w2: Tensor,
    sfw2: Tensor,
    limit: float | None = None,
) -> Tensor:
    """Stand for a mixture of experts."""
    return experts_problem(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), None, limit).out


def experts_into(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    sfw1: Tensor,
    w2: Tensor,
    sfw2: Tensor,
    out: Tensor,
    limit: float | None = None,
) -> None:
    """Compute a mixture of experts."""
    layers.experts(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out, limit)


def fake_experts_into(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    sfw1: Tensor,
    w2: Tensor,
    sfw2: Tensor,
    out: Tensor,
    limit: float | None = None,
) -> None:
    """Stand for a mixture of experts."""
    experts_problem(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out, limit)


ROUTED = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor sfw1, Tensor w2, Tensor sfw2"
operator(f"experts({ROUTED}, float? limit=None) -> Tensor", experts, fake_experts)
operator(f"experts.into({ROUTED}, Tensor(out!) out, float? limit=None) -> ()", experts_into, fake_experts_into)
