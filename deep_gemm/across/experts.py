"""A gated mixture of experts over the processes of a group. docs/experts_across_gpus.md has the picture.

tokens --FP8 or BF16, one copy for each rank--> rows --expert_rows of the experts here--> products, sums by weight
out <--added up in order of ranks-- BF16, one row for each received row <----------'
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..casts.fp8 import per_block_cast_to_fp8
from ..casts.gating import Gating
from ..casts.rules import Rows
from ..core.call import FREE_ROWS, Function, never, run
from ..core.check.checks import Operand, no_gradient, written
from ..core.check.layout import Recipe
from ..core.check.numbers import integer_in_range, positive
from ..core.meeting import Room
from ..core.settings import get_batch_invariant
from ..gemm.ask.bf16 import laid_out
from ..gemm.kinds.output import BF16_OPERANDS, FP4_OPERANDS, USUAL_OPERANDS, Operands, recipes_for
from ..moe import experts_few
from ..moe.api import activations_of_rows, product_of_rows
from ..moe.check import ExpertRows, ExpertsProblem, present
from ..moe.routing import gather_and_cast, stack_routes, sum_rows
from ..nn.experts import BF16, FP8, mixture
from ..nn.frozen import Holder
from ..nn.gradients import Trained, as_autocast_says
from .by_group import KINDS_OF_X, Everywhere, Facts, OfRoutes, Plan, Planner, ToExperts, ToTokens, routes_apart
from .by_peers import Peers, connect, why_not
from .check import check_tokens, share_of_experts
from .collectives import agree_about_decode, place_in
from .message import Arrived, gather, pack
from .rows_to_addresses import check_weight

MISTAKES = (ValueError, TypeError, NotImplementedError)
FEW_ROWS = 2
"""The most rows of all ranks together for which the kernel of few tokens is faster (two H200, 2026-11-29)."""


class Experts(Holder, Trained):
    """A mixture of experts, with an equal share of them on each process of a group: `experts` for all tokens.

    - `num_experts`: the number of experts of all processes together, a multiple of the number of processes.
    - `w1`, `w2`: weights of this process's experts, `[num_experts / processes, 2 intermediate, hidden]` and
      `[..., hidden, intermediate]`: pairs of FP8 or FP4 values and scales, as `experts` takes them, or tensors in FP32,
      BF16 or FP16. Tensors become parameters, are cast in each call, and get gradients.
    - `group`: the default group if it is None.
    - `limit`, `gran_k`, `recipe_b`: as for `experts`; the last two apply only to pairs. Tokens are sent with a scale
      for each `gran_k` columns. With `peer_memory` a scale covers 128 columns of a token, 128x128 of an FP8 weight.
    - `products`: "bf16" computes with tensors in BF16, as for `nn.Experts`: tokens are sent uncast.
    - `room`: the most rows that this process may receive in the prefill form; no limit if it is None.
    - `max_tokens`: the most tokens of any process in the decode form, the same on each process.
    - `peer_memory`: the decode form uses no collectives: GPUs, all of one node, read and write each other's memory, and
      wait for each other at most `seconds`.

    Every process of the group makes every call, even without tokens. With `set_batch_invariant(True)` each route is
    sent by itself, and counts as a row of `room`; results then have the bits of `experts` for any number of processes.
    """

    products = FP8
    w1_values: Tensor
    w1_scales: Tensor
    w2_values: Tensor
    w2_scales: Tensor

    def __init__(
        self,
        num_experts: int,
        w1: Tensor | Operand,
        w2: Tensor | Operand,
        group: dist.ProcessGroup | None = None,
        *,
        limit: float | None = None,
        room: int | None = None,
        max_tokens: int | None = None,
        peer_memory: bool = False,
        seconds: float = 30.0,
        gran_k: int | None = None,
        recipe_b: Recipe | None = None,
        products: str = FP8,
    ) -> None:
        super().__init__()
        self.group = group
        self.gran_k, self.recipe_b = gran_k, recipe_b
        if products not in (FP8, BF16):
            raise ValueError(f"products: expected {FP8!r} or {BF16!r}, got {products!r}")
        self.products, said = products, (gran_k, recipe_b)
        self.share, self.operands = share_of_experts(
            num_experts, w1, w2, *place_in(group), *said, is_bf16=products == BF16
        )
        self.limit = None if limit is None else positive("limit", limit)
        self.room = None if room is None else integer_in_range("room", room, 0)
        self.w1: torch.nn.Parameter | None = None
        self.w2: torch.nn.Parameter | None = None
        if isinstance(w1, Tensor) and isinstance(w2, Tensor):
            self.w1, self.w2 = (
                w if isinstance(w, torch.nn.Parameter) else torch.nn.Parameter(w.detach()) for w in (w1, w2)
            )
        else:
            for name, w in (("w1", w1), ("w2", w2)):
                assert not isinstance(w, Tensor)  # by `share_of_experts` both are pairs
                self.hold(name, w)
        device = (w1 if isinstance(w1, Tensor) else w1[0]).device
        most = None if max_tokens is None else integer_in_range("max_tokens", max_tokens, 1)
        if peer_memory:
            reason = why_not(device, dist.get_world_size(group))
            if most is None:
                reason = "expected max_tokens beside it, got None"
            elif any(each not in (USUAL_OPERANDS, FP4_OPERANDS, BF16_OPERANDS) for each in self.operands):
                sides = [[f"{x.rows or 'n'}x{x.columns or 'k'}" for x in each[1:] if x] for each in self.operands]
                scaled = map(" beside ".join, sides)
                reason = f"expected scales of 1x128 beside 128x128, or beside FP4, got {' and '.join(scaled)}"
            if reason is not None:
                raise ValueError(f"peer_memory: {reason}")
        self._seconds = positive("seconds", seconds) if peer_memory else None
        self._most = most
        self._everywhere: dict[bool, Everywhere] = {}
        self._peers: Peers | None = None
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Give the attributes that a copy keeps. Memory and plans of calls are left out: the copy makes its own."""
        return {**self.__dict__, "_everywhere": {}, "_peers": None, "_planner": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        """Copy everything except the group, which the copy shares."""
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        share = self.share
        return (
            f"num_experts={share.num_experts}, here={share.first}..{share.first + share.here - 1}, "
            f"hidden={share.hidden}, intermediate={share.intermediate}"
        )

    def weights(self) -> tuple[Operand | Tensor, Operand | Tensor]:
        """Return both weights in the form that `experts` takes."""
        if self.w1 is None or self.w2 is None:
            return self.held("w1"), self.held("w2")
        w1, w2 = self.w1.detach(), self.w2.detach()
        if self.products == BF16:
            return w1.to(torch.bfloat16), w2.to(torch.bfloat16)
        return per_block_cast_to_fp8(w1), per_block_cast_to_fp8(w2)

    def _operands(self) -> list[Rows]:
        """Return both weights in the form that products take."""
        both = zip(("w1", "w2"), self.weights(), strict=True)
        return [(laid_out(name, w, "n"), None) if isinstance(w, Tensor) else w for name, w in both]

    @property
    def _columns(self) -> Any:
        """Return the number of columns of a sent token that share a scale; None if tokens are sent uncast."""
        _, of_x, _ = self.operands[0]
        return None if of_x is None else of_x.columns

    def _device(self) -> torch.device:
        return self.w1_values.device if self.w1 is None else self.w1.device

    def planner(self) -> Planner:
        """Return the planner of the prefill form's calls; the first call makes it."""
        device = self._device()
        if self._planner is None or self._planner.device != device:
            with torch.inference_mode(False):  # calls of any mode write into its tensors
                self._planner = Planner(self.share.here, self.room, device, self.group)
        return self._planner

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the mixture of this process's tokens, with messages of exact size: the prefill form.

        `x` is `[tokens, hidden]`, ids are int32 or int64 `[tokens, topk]`, numbered over all processes, -1 for none.
        The host waits for the counts of all processes once. The result is BF16; if the weights are parameters
        it is rounded to BF16 too, but has the type of x. A mistake of one process is an error on each.
        """
        x = as_autocast_says(x) if isinstance(x, Tensor) else x
        mistake: Exception | None = None
        facts = Facts(self.share.num_experts, self.share.hidden, -1, -1, 0)
        try:
            self._check_weights()
            check_tokens(x, topk_ids, topk_weights, self.share, self._device())
            needs = [
                torch.is_grad_enabled() and each is not None and each.requires_grad
                for each in (x, topk_weights, self.w1, self.w2)
            ]
            if any(needs) and self.w1 is None:
                raise ValueError("x: expected tensors without a gradient, because the weights are cast, for inference")
            gradients = sum(2**index for index, need in enumerate(needs) if need)
            kind_of_x = KINDS_OF_X.index((x.dtype, self._columns))
            facts = facts._replace(topk=topk_ids.shape[1], kind_of_x=kind_of_x, gradients=gradients)
        except MISTAKES as caught:
            mistake = caught
        given, is_apart = (x, topk_ids, topk_weights), mistake is None and get_batch_invariant()
        if is_apart:
            facts = facts._replace(topk=-facts.topk)
            x, topk_ids, topk_weights = routes_apart(x, topk_ids)
        if mistake is not None or facts.gradients or self.products == BF16:
            plan = self.planner().plan(topk_ids, mistake, facts)
            out = self._trained(x, topk_ids, topk_weights, plan)
        else:
            out = self._computed(x, topk_ids, topk_weights, facts)
        if is_apart:
            out = OfRoutes.apply(out, *given[1:], self.share.num_experts, None)  # type: ignore[no-untyped-call]
        return out if self.w1 is None else out.to(given[0].dtype)

    @torch.no_grad()
    def _computed(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, facts: Facts) -> Tensor:
        """Compute the mixture where no gradient is needed."""
        planner, (tokens, topk) = self.planner(), topk_ids.shape
        row_of = planner.ask(topk_ids, None, facts)
        # The GPU packs while the host waits for counts, so `sent` has room for the most rows that may be needed.
        sent = pack(x, topk_ids, topk_weights, row_of, tokens * min(topk, planner.world_size), self._columns)
        plan = planner.hear(row_of, None, facts)
        arrived = Arrived(plan.forth(sent), self.share.hidden, topk, self._columns)
        return plan.sum_up(plan.back(self._sums(arrived, plan.routes)))

    def _trained(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, plan: Plan) -> Tensor:
        """Compute the mixture with gradients, or in BF16. Tokens travel in their own type, which gradients need.

        The cast sees the same rows as in `_computed`, so the result has the same bits.
        """
        source = plan.source()
        rows_x, p, ids = ToExperts.apply(x, topk_weights.float(), topk_ids, plan, source)  # type: ignore[no-untyped-call]
        if rows_x.dtype == torch.float16:
            rows_x = rows_x.float()  # so that sums are not rounded to FP16, whose range is smaller than BF16's
        rows = self._rows(ids, plan.routes)
        assert self.w1 is not None and self.w2 is not None
        sums = mixture(rows_x, p, self.w1, self.w2, rows, self.limit, self.products)
        return ToTokens.apply(sums, plan, source)  # type: ignore[no-any-return, no-untyped-call]

    def _rows(self, ids: Tensor, routes: int | None) -> ExpertRows:
        """Stack the routes of the experts here: `routes` rows if the host knows the number."""
        return stack_routes(ids, self.share.here, self.share.first, routes)

    def _sums(self, arrived: Arrived, routes: int | None) -> Tensor:
        """Return the BF16 sum of the experts here for each received row; zeros for a row without a route here."""
        message, *sizes = arrived
        count = arrived.ids.numel() if routes is None else routes
        if not count:
            return torch.zeros(message.shape[0], self.share.hidden, dtype=torch.bfloat16, device=message.device)
        message = message if self.products == FP8 else message.view(torch.bfloat16)  # a record sees no smaller elements
        said = *sizes, self.share.here, self.share.first, self.operands, self.limit, routes is None
        return run(SUMS, (message, *self._operands(), None if routes is None else [routes]), said)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _decoded(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None) -> Tensor | None:
        if self._most is None:
            raise ValueError("max_tokens: expected a number of tokens for the decode form, got None")
        check_tokens(x, topk_ids, topk_weights, self.share, self._device(), out)
        tokens, topk = topk_ids.shape
        if tokens > self._most:
            raise ValueError(f"x: expected at most max_tokens = {self._most} tokens, got {tokens}")
        self._check_weights()
        if self._seconds is not None:
            w1, w2 = self._operands()
            check_weight("w2", w2)
            peers = self.connected(topk)
            return peers.decode(x, topk_ids, topk_weights, w1, w2, self.limit, out)
        given, is_apart = (topk_ids, topk_weights), get_batch_invariant()
        everywhere = self.everywhere(topk, is_apart)
        if is_apart:
            x, topk_ids, topk_weights = routes_apart(x, topk_ids)
        rows = everywhere.max_tokens
        message = everywhere.dispatch(pack(x, topk_ids, topk_weights, rows=rows, columns=self._columns))
        sums = self._sums(Arrived(message, self.share.hidden, topk_ids.shape[1], self._columns), None)
        made = everywhere.combine(sums, len(x), None if is_apart else out)
        if is_apart:
            made = OfRoutes.apply(made, *given, self.share.num_experts, out)  # type: ignore[no-untyped-call]
        return made if out is None else None

    def decode(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor | None:
        """Compute the mixture of at most `max_tokens` tokens of this process with messages of fixed size.

        The host reads no value, so a CUDA graph is captured once and replayed with other tokens and other routes.
        Memory is for the worst case (`decode_bytes`). The result has the bits of the prefill form; with `peer_memory`,
        the bits of `experts` in one process. `out`, BF16 `[tokens, hidden]`, is as for `experts`. There is no gradient:
        an input that would lose its gradient is refused, as by `experts`. A mistake is an error on this process alone.
        With `peer_memory` calls of one module follow each other on one stream. If a GPU does not come in time, results
        of the other GPUs are undefined, and their next call, or `check` after a graph's replay, raises a RuntimeError.
        """
        if torch.is_grad_enabled():
            no_gradient("x", x)
            no_gradient("topk_weights", topk_weights)
            written("out", out)
        x = as_autocast_says(x) if isinstance(x, Tensor) else x
        return self._decoded(x, topk_ids, topk_weights, out)

    def everywhere(self, topk: int, is_apart: bool) -> Everywhere:
        """Return the `Everywhere` of tokens or of single routes. The first call makes it, and keeps it for graphs.

        Later calls must have the same number of routes for each token.
        """
        device, made = self._device(), self._everywhere.get(is_apart)
        if made is None or made.device != device:
            assert self._most is not None
            sizes = self._most * (topk if is_apart else 1), self.share.hidden, topk, self.share.here
            agree_about_decode(*sizes, False, device, self.group, self._columns)
            with torch.inference_mode(False):  # calls of any mode use its tensors
                made = self._everywhere[is_apart] = Everywhere(sizes[0], topk, device, self.group)
        _check_topk(topk, made.topk)
        return made

    def _check_weights(self) -> None:
        """Check weights that each call casts: the module may have been moved or cast since it was made."""
        if self.w1 is None:
            share = self.share
            where = share.rank, share.ranks
            share_of_experts(share.num_experts, *self.weights(), *where, self.gran_k, self.recipe_b)

    def connected(self, topk: int) -> Peers:
        """Return the peers, connected in the first call. Later calls must have as many routes for each token."""
        if self._peers is None:
            assert self._most is not None and self._seconds is not None
            room = Room(dist.get_world_size(self.group), self._most, self.share.hidden, topk, self._columns)
            self._peers = connect(room, self._device(), self.group, self._seconds, self.share.here)
        _check_topk(topk, self._peers.room.topk)
        self._peers.check()
        return self._peers

    def check(self) -> None:
        """Raise an error if, with `peer_memory`, another GPU came too late to a call that has run: see `decode`."""
        if self._peers is not None:
            torch.cuda.synchronize(self._device())
            self._peers.check()


@torch.no_grad()
def _summed(
    message: Tensor,
    w1: Rows,
    w2: Rows,
    routes: Sequence[int] | None,
    hidden: int,
    topk: int,
    columns: int | None,
    here: int,
    first: int,
    operands: tuple[Operands, Operands],
    limit: float | None,
    _: bool,
) -> Tensor:
    arrived, gating = Arrived(message, hidden, topk, columns), Gating(limit=limit)
    of_first, of_second = operands
    x, ids, weights = message[:, :hidden], arrived.ids, arrived.weights
    if columns is None and len(x) <= FEW_ROWS:
        asked = ExpertsProblem(x, ids, weights, w1, w2, x, here, gating, of_first, of_second, None, None)
        if experts_few.serves(asked):
            y, row_of = experts_few.run(asked, first)
            return sum_rows(y, row_of, weights, is_dependent=True)
    rows = stack_routes(ids, here, first, None if routes is None else routes[0])
    a = gather(arrived, rows) if columns is not None else gather_and_cast(x, rows, None)
    middle = activations_of_rows(a, w1, rows, gating, recipes_for(of_first), of_second[1], by_ends=True)
    y = product_of_rows(middle, w2, rows, recipes_for(of_second), by_ends=True)
    return sum_rows(y, rows.row_of, weights)


SUMS = Function(_summed, _summed, lambda rows, w1, w2, _: present(rows, *w1, *w2), never, free=[FREE_ROWS], numbers=3)


def _check_topk(topk: int, first: int) -> None:
    if topk != first:
        raise ValueError(f"topk_ids: expected {first} columns, as in the first call, got {topk}")
