"""Operators of a mixture of experts."""

from __future__ import annotations

from torch import Tensor

from ..core.check.checks import Operand
from ..core.operators import Kernel, operator
from ..gemm.ops import Compute
from .api import experts
from .check import experts_problem


def kernels(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give a mixture of experts as its two operators take it."""

    def new(
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        sfw1: Tensor,
        w2: Tensor,
        sfw2: Tensor,
        limit: float | None = None,
    ) -> Tensor | None:
        return compute(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out=None, limit=limit)

    def into(
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
        compute(x, topk_ids, topk_weights, (w1, sfw1), (w2, sfw2), out=out, limit=limit)

    return new, into


def ask_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Operand,
    w2: Operand,
    out: Tensor | None,
    limit: float | None,
) -> Tensor | None:
    """Ask what `experts` computes, without an answer."""
    problem = experts_problem(x, topk_ids, topk_weights, w1, w2, out, limit)
    return problem.out if out is None else None


TENSORS = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor sfw1, Tensor w2, Tensor sfw2"
(new, into), (fake_new, fake_into) = kernels(experts), kernels(ask_experts)
operator(f"experts({TENSORS}, float? limit=None) -> Tensor", new, fake_new)
operator(f"experts.into({TENSORS}, Tensor(out!) out, float? limit=None) -> ()", into, fake_into)
