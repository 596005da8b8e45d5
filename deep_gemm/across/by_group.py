"""Move rows between processes by collectives of `torch.distributed`: NCCL's on GPUs, Gloo's on the CPU.

`Plan` sends each process only its rows, in messages of exact size. `Everywhere` sends every token to every process,
in messages of fixed size. Both add up a token's sums in the order of ranks. `compute_mega` is mega MoE by a `Plan`.

`ToExperts` and `ToTokens` use a `Plan` and have gradients. Tokens and gradients travel in their own type, and are
copied once, into rows stacked by rank.

forward     x, p and ids --> rows here     mixture     BF16 sums --> tokens, added up
backward    dx, dp <-- gradients of rows   of them     gradients of tokens <-- d out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..casts.gating import Gating
from ..casts.rules import LAYER_TYPES
from ..core import call
from ..core.call import FREE_ROWS, Function, never
from ..core.check.layout import RECIPES_OF_A, SCALE_BLOCK
from ..core.check.memory import empty
from ..core.gpu import is_hopper
from ..core.jit.to_host import ToHost
from ..gemm.api.grouped import product_of_rows_by_64, product_of_stacked_rows
from ..gemm.packed import is_packed
from ..moe.activation import activated_product_of_rows, cast_activated
from ..moe.api import product_of_rows
from ..moe.check import ActivationProblem, ExpertRows
from ..moe.routing import expert_rows, gather_weighted, stack_routes, sum_rows
from . import plan_sends
from .collectives import all_gather, all_to_all, check_agreed
from .mega_check import MegaProblem, MegaSizes
from .message import WORD, Arrived, pack_parts, words_of_ids
from .owners import count_routes, owners_of_routes, owners_of_tokens, tokens_of_rows

UNLIMITED = 2**62
WITH_GRADIENTS = ("x", "topk_weights", "w1", "w2")
COLUMNS: tuple[int | None, ...] = *(columns for _, columns in RECIPES_OF_A), 0, None
KINDS_OF_X = tuple((dtype, columns) for columns in COLUMNS for dtype in LAYER_TYPES)
"""Types of x, each with the number of columns that share a scale in a message; 0: all; None: x is sent uncast."""
IS_FP8 = -1
"""The kind of an x that is FP8 already: `KINDS_OF_X` does not have it."""
NAMES_OF_FACTS = ("num_experts", "hidden", "topk", "dtype of x", "set of gradients")
"""Names of the facts in errors."""


class Facts(NamedTuple):
    """The facts of a call about which all processes must agree."""

    num_experts: int
    hidden: int
    topk: int
    """Routes of a token; negative in the batch invariant mode, which sends each route by itself."""
    kind_of_x: int
    """The number of x's type among `KINDS_OF_X`, or `IS_FP8`."""
    gradients: int
    """A bit for each tensor of `WITH_GRADIENTS` whose gradient is requested."""

    def said(self) -> tuple[object, ...]:
        """Return each fact in the form that an error states."""
        asked = [name for bit, name in enumerate(WITH_GRADIENTS) if self.gradients >> bit & 1]
        dtype, columns = ("FP8", SCALE_BLOCK) if self.kind_of_x == IS_FP8 else KINDS_OF_X[self.kind_of_x]
        kind = f"{dtype}" if columns == SCALE_BLOCK else f"{dtype} with scales of 1x{columns or 'k'}"
        kind = f"{dtype} uncast" if columns is None else kind
        topk = self.topk if self.topk > 0 else f"{-self.topk} in the batch invariant mode"
        return *self[:2], topk, kind, " and ".join(asked) or "none"


class Plan(NamedTuple):
    """The plan that says which rows go where."""

    row_of: Tensor
    """int32 `[tokens, topk]`: each token's rows among the sent rows, which are stacked by rank; then -1."""
    sends: list[int]
    """Number of rows that this process sends to each rank."""
    receives: list[int]
    """Number of rows that each rank sends to this process."""
    routes: int
    """Number of routes of the received rows whose experts are here."""
    group: dist.ProcessGroup | None

    def source(self) -> Tensor:
        """Return the token of each sent row."""
        return tokens_of_rows(self.row_of, sum(self.sends))

    def forth(self, rows: Tensor) -> Tensor:
        """Send the plan's rows, stacked by rank, and return the received rows. Rows after the plan's are not sent."""
        return exchange(rows[: sum(self.sends)], self.sends, self.receives, self.group)

    def back(self, received: Tensor) -> Tensor:
        """Send back a row for each received row; return the rows in the order in which this process sent its rows."""
        return exchange(received, self.receives, self.sends, self.group)

    def sum_up(self, y: Tensor) -> Tensor:
        """Add up the rows of each token in order of ranks, in FP32, and round the sum once to BF16."""
        if not y.shape[0]:
            return y.new_zeros(self.row_of.shape[0], y.shape[1], dtype=torch.bfloat16)
        return sum_rows(y, self.row_of)


class ToExperts(torch.autograd.Function):
    """Sends tokens and their routes to the experts' processes; backward returns the gradients and adds them up."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, ids: Tensor, plan: Plan, source: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send for each token and rank a row of x and a row of routes. `source`: the token of each sent row."""
        rows = plan.forth(x.index_select(0, source))
        routes = plan.forth(torch.cat([p.view(WORD), words_of_ids(ids)], dim=1).index_select(0, source))
        of_p, of_ids = (each.contiguous() for each in torch.split(routes, p.shape[1], dim=1))
        of_p = of_p.view(p.dtype)
        ctx.plan, ctx.source, ctx.dtype, ctx.tokens = plan, source, x.dtype, len(x)
        # If an input needs no gradient, the gradient of its output is neither computed nor sent.
        needs = zip((rows, of_p, of_ids), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(each for each, is_needed in needs if not is_needed))
        ctx.set_materialize_grads(False)
        return rows, of_p, of_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor | None, of_p: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Send the gradients of received rows and weights back to the processes that sent them."""
        plan: Plan = ctx.plan
        of_x = None if of_rows is None else plan.sum_up(plan.back(of_rows)).to(ctx.dtype)
        if of_p is not None:  # a route's expert is on one rank; gradients from other ranks are 0
            of_p = of_p.new_zeros(ctx.tokens, of_p.shape[1]).index_add_(0, ctx.source, plan.back(of_p))
        return of_x, of_p, None, None, None


class ToTokens(torch.autograd.Function):
    """Sends sums back to their tokens' processes and adds them up; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, plan: Plan, source: Tensor) -> Tensor:
        """Send the sums as BF16, which loses nothing: they are rounded to BF16 already."""
        ctx.plan, ctx.source = plan, source
        return plan.sum_up(plan.back(sums.to(torch.bfloat16))).to(sums.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Send the gradient of each token to each rank that sent a sum for the token."""
        return ctx.plan.forth(grad.index_select(0, ctx.source)), None, None


def routes_apart(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a row of x, an id and a weight of 1 for each route, so that no rank adds up routes of a token."""
    rows = (x.float() if x.dtype == torch.float16 else x)[:, None].expand(-1, ids.shape[1], -1)
    ids = ids.reshape(-1, 1)
    return rows.reshape(len(ids), x.shape[1]), ids, torch.ones_like(ids, dtype=torch.float32)


class OfRoutes(torch.autograd.Function):
    """Weights the results of the rows of `routes_apart`, and adds them up for each token, as `experts` does."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ids: Tensor, p: Tensor, num_experts: int, out: Tensor | None) -> Tensor:
        """Add up the rows of each token in order of the token's routes."""
        rows = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
        row_of = rows.masked_fill_((ids < 0) | (ids >= num_experts), -1)
        ctx.save_for_backward(y, p, row_of)
        return sum_rows(y.to(torch.bfloat16), row_of, p, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each route's row, and of its weight: the row times the token's gradient."""
        y, p, row_of = ctx.saved_tensors
        none, grad = (row_of < 0)[..., None], grad.float()[:, None]
        of_y = (grad * p[..., None]).masked_fill_(none, 0).view_as(y).to(y.dtype)
        of_p = (grad * y.view(*row_of.shape, y.shape[1])).masked_fill_(none, 0).sum(-1).to(p.dtype)
        return of_y, None, of_p, None, None


def exchange(sent: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send rows to all ranks, and return the received rows, stacked by rank."""
    received = sent.new_empty(sum(receives), sent.shape[1])
    all_to_all(received, sent.contiguous(), receives, sends, group)
    return received


class Planner:
    """Tells all processes how many rows they receive, and whether any process has an error. It serves many calls."""

    def __init__(self, count: int, room: int | None, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """`count`: experts of each process. `room`: the most rows that this process may receive, or None."""
        self.count, self.room, self.device, self.group = count, room, device, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        on_gpu = device.type == "cuda"
        self.has_kernel = on_gpu and is_hopper(device.index) and self.world_size <= plan_sends.MAX_RANKS
        # Calls share these tensors. The host waits for each call's numbers, so no two calls use them at once.
        numbers = plan_sends.NUM_FACTS + 2 * self.world_size
        self.told = torch.empty(numbers, dtype=torch.int64, device=device)
        self._of_all = torch.empty(self.world_size * numbers, dtype=torch.int64, device=device)
        self._on_host = self._of_all
        if on_gpu:
            self._on_host = torch.empty(self._of_all.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        # Views of all ranks' numbers: facts that must agree, rows from each rank to each rank, rows and routes to here.
        heard = self._on_host.view(self.world_size, numbers)
        self._heads = heard[:, : plan_sends.NUM_FACTS].t()
        self._rows = heard[:, plan_sends.NUM_FACTS :][:, : self.world_size]
        self._from_here = self._rows[self.rank]
        self._to_here = heard[:, plan_sends.NUM_FACTS + self.rank :: self.world_size].t()  # rows, and routes
        self._no_ids = torch.empty(0, 1, dtype=torch.int64, device=device)
        self._comes = ToHost(self._of_all, self._on_host) if on_gpu else None

    def plan(self, topk_ids: Tensor | None, mistake: Exception | None, facts: Facts) -> Plan:
        """Send this process's numbers, wait for the numbers of all processes, and return the plan."""
        return self.hear(self.ask(topk_ids, mistake, facts), mistake, facts)

    def ask(self, topk_ids: Tensor | None, mistake: Exception | None, facts: Facts) -> Tensor:
        """Give tokens their rows, and send the counts of rows to all processes. The host waits for nothing."""
        ids = self._no_ids if mistake is not None or topk_ids is None else topk_ids
        numbers = [int(mistake is not None), UNLIMITED if self.room is None else self.room, *facts]
        if self.has_kernel:
            row_of: Tensor = call.run(PLANNED, (ids, self.told), (tuple(numbers), self.count, self.world_size))
        else:
            owners = owners_of_routes(ids, self.count, self.world_size)
            rows = expert_rows(owners_of_tokens(owners, self.world_size), self.world_size)
            row_of, said = rows.row_of, torch.tensor(numbers, dtype=torch.int64).to(self.device)
            torch.cat([said, rows.counts.long(), count_routes(owners, self.world_size)], out=self.told)
        all_gather(self._of_all, self.told, self.group)
        if self._comes is not None:
            self._comes.begin()
        return row_of

    def hear(self, row_of: Tensor, mistake: Exception | None, facts: Facts) -> Plan:
        """Wait for the numbers of all processes. The host waits nowhere else.

        A mistake of one process is an error on each, in the same words, before anything else is sent.
        """
        if self._comes is not None:
            self._comes.wait()
        if mistake is not None:
            raise mistake
        mistakes, rooms, *told = self._heads.tolist()
        if any(mistakes):
            rank = next(rank for rank, is_wrong in enumerate(mistakes) if is_wrong)
            raise ValueError(f"experts across processes: the arguments of rank {rank} were refused there")
        if told != [[fact] * len(mistakes) for fact in facts]:
            check_agreed(NAMES_OF_FACTS, [Facts(*of_rank).said() for of_rank in zip(*told, strict=True)])
        if min(rooms) < UNLIMITED:
            for rank, (count, room) in enumerate(zip(self._rows.sum(dim=0).tolist(), rooms, strict=True)):
                if count > room:
                    expected = f"at least {count} rows on rank {rank}, which come there"
                    raise ValueError(f"room: expected {expected}, got {room}")
        receives, comes = self._to_here.tolist()
        return Plan(row_of, self._from_here.tolist(), receives, sum(comes), self.group)


def _planned(ids: Tensor, told: Tensor, numbers: Sequence[int], count: int, world_size: int) -> Tensor:
    row_of = empty("rows of tokens", ids.shape, torch.int32, ids.device)
    plan_sends.run(ids.contiguous(), numbers, row_of, told, count, world_size)
    return row_of


PLANNED = Function(_planned, _planned, lambda *tensors: tensors, never, free=[FREE_ROWS])


class Everywhere:
    """Sends every token to every process: sizes are fixed, so the host reads nothing."""

    def __init__(self, max_tokens: int, topk: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.max_tokens, self.topk, self.device, self.group = max_tokens, topk, device, group
        self.world_size = dist.get_world_size(group)
        # The row of each token on each rank, made here so that no graph captures the computation.
        ranks = torch.arange(self.world_size, device=device).expand(max_tokens, -1)
        self.rows = expert_rows(ranks, self.world_size)
        self.ones = torch.ones_like(self.rows.row_of, dtype=torch.float32)

    def dispatch(self, message: Tensor) -> Tensor:
        """Send `max_tokens` rows to all ranks; return the rows of all ranks, `max_tokens` from each rank."""
        received = message.new_empty(self.world_size * self.max_tokens, message.shape[1])
        all_gather(received, message, self.group)
        return received

    def combine(self, y: Tensor, tokens: int, out: Tensor | None) -> Tensor | None:
        """Send each rank the sums of its tokens, and add up the sums received in order of ranks."""
        back = torch.empty_like(y)
        all_to_all(back, y, [], [], self.group)
        rows = self.rows._replace(row_of=self.rows.row_of[:tokens])
        return gather_weighted(back, rows, self.ones[:tokens], out=out)


@torch.no_grad()
def compute_mega(asked: MegaProblem | Exception, sizes: MegaSizes, planner: Planner | None) -> None:
    """Compute a call of mega MoE on all ranks: FP8 rows go to their experts, and a BF16 row comes back for each route.

    A token's rank adds up the token's results in order of routes, so sums have the same bits for any number of ranks. A
    mistake of one rank is an error on each, before rows are sent. The host waits for the counts of all ranks. Without a
    planner this rank is alone: it sends nothing, and the host waits for nothing.
    """
    facts = Facts(sizes.num_experts, sizes.hidden, sizes.topk, IS_FP8, 0)
    if isinstance(asked, Exception):
        if planner is not None:
            planner.plan(None, asked, facts)
        raise asked
    x, x_sf, topk_ids, topk_weights, *_ = asked.tensors
    plan = None if planner is None else planner.plan(topk_ids, None, facts)
    message = pack_parts((x, x_sf), topk_ids, topk_weights)
    if plan is None:
        results, rows = experts_here(Arrived(message, sizes.hidden, sizes.topk), asked, sizes, None)
        sum_rows(results, rows.row_of, out=asked.y)
        return
    came = Arrived(plan.forth(message.index_select(0, plan.source())), sizes.hidden, sizes.topk)
    results, rows = experts_here(came, asked, sizes, plan.routes)
    # Ordered by received row, then by route: the tokens' ranks expect this order.
    is_here = rows.row_of >= 0
    routes = torch.cat([each.sum()[None] for each in torch.split(is_here, plan.receives)])
    own = stack_routes(owners_of_routes(topk_ids, sizes.here, sizes.ranks), sizes.ranks)
    comes, goes = torch.stack([routes, own.counts.long()]).tolist()
    back = exchange(results.index_select(0, rows.row_of[is_here]), comes, goes, plan.group)
    if len(back):
        sum_rows(back, own.row_of, out=asked.y)
    else:
        asked.y.zero_()


def experts_here(came: Arrived, p: MegaProblem, sizes: MegaSizes, routes: int | None) -> tuple[Tensor, ExpertRows]:
    """Compute BF16 results of the experts here, a row for each route. `routes`: their number if the host knows it."""
    rows = stack_routes(came.ids, sizes.here, sizes.first)
    if p.counts is not None:
        p.counts.add_(rows.counts)
    rows = rows._replace(token_of=rows.token_of[:routes], ids=rows.ids[:routes])
    num, tensors = len(rows.ids), p.tensors
    results = torch.empty(num, sizes.hidden, dtype=torch.bfloat16, device=rows.ids.device)
    if not num:
        return results, rows
    source = rows.token_of.clamp_min(0)  # rows without a token may hold anything
    a = tensors.l1_acts[:num], tensors.l1_acts_sf[:num]
    torch.index_select(came.values, 0, source, out=a[0].view(WORD))
    a[1].copy_(came.scales.index_select(0, source))
    row = rows.row_of.flatten().long()
    weights = came.weights.new_zeros(num + 1)  # the last element takes the weights of routes without a row
    weights = weights.scatter_(0, row.masked_fill(row < 0, num), came.weights.flatten())[:num]
    if is_packed(p.l1):
        h = ActivationProblem(product_of_rows(a, p.l1, rows), weights, None, rows.ends, 1, Gating(limit=p.limit))
        product_of_stacked_rows(cast_activated(h, mn_major=True), p.l2, results, rows.ids)
        return results, rows
    middles = tensors.l2_acts[:num], tensors.l2_acts_sf[:num]
    activated_product_of_rows(a, p.l1, middles, rows.ends, weights, limit=p.limit)
    product_of_rows_by_64(middles, p.l2, results, rows.ids)
    return results, rows
