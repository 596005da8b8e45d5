"""The way of mega MoE by collectives: FP8 rows go to the ranks of their experts, a BF16 row comes back for each route.

A result is added up at its token's rank in order of routes. So it has the same bits for any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.rows.api import product_of_rows_by_64
from ..moe.activation import activated_product_of_rows
from ..moe.check import ExpertRows
from ..moe.routing import stack_routes, sum_rows
from .by_group import IS_FP8, Facts, Plan, Planner, exchange
from .mega_check import MegaProblem, MegaSizes
from .message import WORD, Arrived, pack_fp8
from .owners import owners_of_routes


@torch.no_grad()
def compute(asked: MegaProblem | Exception, sizes: MegaSizes, planner: Planner | None) -> None:
    """Compute one call on all ranks. A mistake of one is an error on each, before rows are sent.

    The host waits for the counts of all ranks. Without a planner this rank is alone, and waits for nothing.
    """
    if planner is None:
        if isinstance(asked, Exception):
            raise asked
        _compute_alone(asked, sizes)
        return
    facts = Facts(sizes.num_experts, sizes.hidden, sizes.topk, IS_FP8, 0)
    if isinstance(asked, Exception):
        planner.plan(None, asked, facts)
        raise asked
    _compute_by(planner.plan(asked.tensors.topk_idx, None, facts), asked, sizes)


def _compute_alone(asked: MegaProblem, sizes: MegaSizes) -> None:
    """Compute without a group: what is sent has come."""
    results, rows = experts_here(_came(_message(asked), sizes), asked, sizes, None)
    sum_rows(results, rows.row_of, out=asked.y)


def _message(asked: MegaProblem) -> Tensor:
    tensors = asked.tensors
    return pack_fp8((tensors.x, tensors.x_sf), tensors.topk_idx, tensors.topk_weights)


def _came(message: Tensor, sizes: MegaSizes) -> Arrived:
    return Arrived(message, sizes.hidden, sizes.topk)


def _compute_by(plan: Plan, asked: MegaProblem, sizes: MegaSizes) -> None:
    """Send rows to their experts, and a result back for each route."""
    came = _came(plan.dispatch(_message(asked)), sizes)
    results, rows = experts_here(came, asked, sizes, plan.routes)
    # By row that came, then by route, as the ranks of tokens stack them.
    is_here = rows.row_of >= 0
    routes = torch.cat([each.sum()[None] for each in torch.split(is_here, plan.receives)])
    own = stack_routes(owners_of_routes(asked.tensors.topk_idx, sizes.here, sizes.ranks), sizes.ranks)
    comes, goes = torch.stack([routes, own.counts.long()]).tolist()
    back = exchange(results.index_select(0, rows.row_of[is_here]), comes, goes, plan.group)
    if len(back):
        sum_rows(back, own.row_of, out=asked.y)
    else:
        asked.y.zero_()


def experts_here(came: Arrived, p: MegaProblem, sizes: MegaSizes, routes: int | None) -> tuple[Tensor, ExpertRows]:
    """BF16 results of the experts here, for each of their rows; as many as there are routes if the host knows it."""
    rows = stack_routes(came.ids, sizes.here, sizes.first)
    if p.counts is not None:
        p.counts.add_(rows.counts)
    rows = rows._replace(token_of=rows.token_of[:routes], ids=rows.ids[:routes])
    num, tensors = len(rows.ids), p.tensors
    results = torch.empty(num, sizes.hidden, dtype=torch.bfloat16, device=rows.ids.device)
    if num:
        source = rows.token_of.clamp_min(0)  # rows without a token may hold anything
        a = tensors.l1_acts[:num], tensors.l1_acts_sf[:num]
        torch.index_select(came.values, 0, source, out=a[0].view(WORD))
        a[1].copy_(came.scales.index_select(0, source))
        middles = tensors.l2_acts[:num], tensors.l2_acts_sf[:num]
        activated_product_of_rows(a, p.l1, middles, rows.ids, weights_of(rows, came.weights), limit=p.limit)
        product_of_rows_by_64(middles, p.l2, results, rows.ids)
    return results, rows


def weights_of(rows: ExpertRows, weights: Tensor) -> Tensor:
    """Weight of each row's route. The host reads nothing."""
    num = len(rows.ids)
    row = rows.row_of.flatten().long()
    found = weights.new_zeros(num + 1)  # those of routes without a row come behind
    return found.scatter_(0, row.masked_fill(row < 0, num), weights.flatten())[:num]
