"""The way of mega MoE by collectives: FP8 rows go to the ranks of their experts, a BF16 row comes back for each route.

A result is added up at its token's rank in order of routes. So it has the same bits for any number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..problem import ExpertRows
from ..problem.mega_moe import MegaProblem, MegaSizes
from ..routing import expert_rows, gather_weighted
from .by_group import Facts, Plan, exchange, make_plan, ones
from .mega_products import activated_product, product_of_middles
from .message import WORD, Arrived, pack_fp8, unpack
from .owners import local_ids, owners_of_routes

IS_FP8 = -1
"""The type of x, among those of `Facts`."""


@torch.no_grad()
def compute(
    asked: MegaProblem | Exception, sizes: MegaSizes, device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Compute one call on all ranks. A mistake of one is an error on each, before rows are sent.

    The host waits for the counts of all ranks, once; a single rank waits for nothing.
    """
    if sizes.ranks > 1:
        facts = Facts(sizes.num_experts, sizes.hidden, sizes.topk, IS_FP8, 0)
        ids, mistake = (None, asked) if isinstance(asked, Exception) else (asked.tensors.topk_idx, None)
        plan = make_plan(ids, mistake, facts, sizes.here, None, device, group)
    if isinstance(asked, Exception):
        raise asked
    if sizes.ranks > 1:
        _compute_by(plan, asked, sizes)
    else:
        _compute_alone(asked, sizes)


def _compute_alone(asked: MegaProblem, sizes: MegaSizes) -> None:
    """Compute without a group. A routed row is read where the caller put it."""
    tensors = asked.tensors
    came = Arrived(tensors.x.view(WORD), tensors.x_sf, tensors.topk_idx, tensors.topk_weights)
    results, rows = experts_here(came, asked, sizes, None)
    gather_weighted(results, rows, ones(rows.row_of), asked.y)


def _compute_by(plan: Plan, asked: MegaProblem, sizes: MegaSizes) -> None:
    """Send rows to their experts, and a result back for each route."""
    tensors = asked.tensors
    message = pack_fp8((tensors.x, tensors.x_sf), tensors.topk_idx, tensors.topk_weights)
    came = unpack(plan.dispatch(message), sizes.hidden, sizes.topk)
    results, rows = experts_here(came, asked, sizes, plan.routes)
    # By row that came, then by route, as the ranks of tokens count them.
    is_here = rows.row_of >= 0
    back = results.index_select(0, rows.row_of[is_here])
    comes = [int(each.sum()) for each in torch.split(is_here, plan.receives)]
    owners = owners_of_routes(tensors.topk_idx, sizes.here, sizes.ranks)
    own = expert_rows(owners.masked_fill(owners == sizes.ranks, -1), sizes.ranks)
    goes = own.counts.tolist()
    returned = exchange(back, comes, goes, plan.group)
    own = own._replace(token_of=own.token_of[: sum(goes)], ids=own.ids[: sum(goes)])
    if len(returned):
        gather_weighted(returned, own, ones(own.row_of), asked.y)
    else:
        asked.y.zero_()


def experts_here(came: Arrived, p: MegaProblem, sizes: MegaSizes, routes: int | None) -> tuple[Tensor, ExpertRows]:
    """BF16 results of the experts here, for each of their rows; as many as there are routes if the host knows it."""
    rows = expert_rows(local_ids(came.ids, sizes.first, sizes.here), sizes.here)
    if p.counts is not None:
        p.counts.add_(rows.counts)
    rows = rows._replace(token_of=rows.token_of[:routes], ids=rows.ids[:routes])
    num = len(rows.ids)
    results = torch.empty(num, sizes.hidden, dtype=torch.bfloat16, device=came.values.device)
    if num == 0:
        return results, rows
    source = rows.token_of.clamp_min(0)  # rows without a token may hold anything
    a, middles = (
        (p.tensors.l1_acts[:num], p.tensors.l1_acts_sf[:num]),
        (p.tensors.l2_acts[:num], p.tensors.l2_acts_sf[:num]),
    )
    torch.index_select(came.values, 0, source, out=a[0].view(WORD))
    a[1].copy_(came.scales.index_select(0, source))
    activated_product(a, p.l1, rows.ids, weights_of(rows, came.weights), p.limit, middles)
    product_of_middles(middles, p.l2, rows.ids, results)
    return results, rows


def weights_of(rows: ExpertRows, weights: Tensor) -> Tensor:
    """Weight of each row's route. The host reads nothing."""
    num = len(rows.ids)
    row = rows.row_of.flatten().long()
    found = weights.new_zeros(num + 1)  # those of routes without a row come behind
    return found.scatter_(0, row.masked_fill(row < 0, num), weights.flatten())[:num]
