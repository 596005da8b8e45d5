"""The way of tokens to the experts of other processes and back, with gradients.

forward     x, p and ids --> rows here     mixture     BF16 sums --> tokens, added up
backward    dx, dp <-- gradients of rows   of them     gradients of tokens <-- d out

Tokens and gradients travel in their own type and are copied once, as they are stacked by rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .by_group import Plan
from .message import WORD, words_of_ids


class ToExperts(torch.autograd.Function):
    """Tokens and their routes go to the experts' processes; gradients come back, and are added up."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, ids: Tensor, plan: Plan, source: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send one row for each token and rank, and one of its routes. `source` is the plan's."""
        rows = plan.forth(x.index_select(0, source))
        routes = plan.forth(torch.cat([p.view(WORD), words_of_ids(ids)], dim=1).index_select(0, source))
        of_p, of_ids = (each.contiguous() for each in torch.split(routes, p.shape[1], dim=1))
        of_p = of_p.view(p.dtype)
        ctx.plan, ctx.source, ctx.dtype, ctx.tokens = plan, source, x.dtype, len(x)
        # What has no gradient here needs none there: it is neither computed nor sent.
        needs = zip((rows, of_p, of_ids), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(each for each, is_needed in needs if not is_needed))
        ctx.set_materialize_grads(False)
        return rows, of_p, of_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor | None, of_p: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Send the gradients of what came back where it came from."""
        plan: Plan = ctx.plan
        of_x = None if of_rows is None else plan.sum_up(plan.back(of_rows)).to(ctx.dtype)
        if of_p is not None:  # a route's expert is on one rank, so all other numbers that are added to it are 0
            of_p = of_p.new_zeros(ctx.tokens, of_p.shape[1]).index_add_(0, ctx.source, plan.back(of_p))
        return of_x, of_p, None, None, None


class ToTokens(torch.autograd.Function):
    """Sums go back to their tokens' processes, and are added up; the gradients of tokens go the other way."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, plan: Plan, source: Tensor) -> Tensor:
        """Send BF16: the sums are rounded to it already."""
        ctx.plan, ctx.source = plan, source
        return plan.sum_up(plan.back(sums.to(torch.bfloat16))).to(sums.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Send the gradient of each token to each rank that added to it."""
        return ctx.plan.forth(grad.index_select(0, ctx.source)), None, None
