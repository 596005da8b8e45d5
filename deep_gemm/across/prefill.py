"""The prefill form on a Hopper GPU, for calls like one before: the GPU waits for the host, so the host does little.

    host  plan_sends, all_gather, copy, pack_rows | waits | all_to_all, route_rows, gather_rows, products, ...
    GPU       plan_sends, all_gather, copy, pack_rows | idle |  all_to_all, route_rows, gather_rows, products, ...

It launches the kernels that the way by tensors launches (`Experts._computed`), by ends where few rows have ids there,
so results have the same bits, and ranks that go different ways understand each other. What is left out: checks of what
was checked, tensors that nobody but a kernel sees, and packing parameters that stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..casts.gating import Gating
from ..core.check.layout import ADDRESS_ALIGNMENT, BF16_BYTES, SCALE_BLOCK, WORD_BYTES, ceil_div, pitch_of_scales
from ..core.check.numbers import INT32_MAX
from ..core.meeting import MAX_ROW_BYTES
from ..core.seen import torch_compares
from ..gemm.packed import is_packed
from ..moe import route_rows, rows_at
from ..moe.gather_weighted import sums_at
from ..moe.mixture import MANY_ROWS
from ..moe.prepared import Kind, Tokens, Weights, apart, are_whole
from ..moe.route_rows import RoutesAt
from ..moe.rows_at import FEW, MAX_EXPERTS, few_in_fp8
from . import gather_rows, pack_rows, plan_sends
from .by_group import Facts, Planner, exchange
from .check import Share
from .gather_rows import Gathered, Slots
from .message import WORD, Arrived, row_bytes


class Prefill(Kind):
    """Calls of one kind."""

    def __init__(
        self, planner: Planner, share: Share, limit: float | None, facts: Facts, given: Tokens, weights: Weights
    ) -> None:
        """Prepare for calls like this one, which was checked and `why_not` has nothing against."""
        super().__init__(given, weights)
        self.planner, self.share, self.facts = planner, share, facts
        self.topk = given.topk_ids.shape[1]
        self.words = row_bytes(share.hidden, self.topk) // WORD_BYTES
        self.rows_of_token = min(self.topk, planner.world_size)
        self.product1, self.product2 = (rows_at.product(w, by_ends=True) for w in weights)
        activates = share.intermediate % SCALE_BLOCK == 0 and not is_packed(weights.w1)
        self.activated = rows_at.activated(weights.w1, limit) if activates else None
        self._prepare(given, limit)

    def _prepare(self, given: Tokens, limit: float | None) -> None:
        """State the parameters that stay, with tensors of a few rows in place of those that each call has."""
        planner, share, topk, device = self.planner, self.share, self.topk, self.device
        x, ids, p = (torch.empty(FEW, *each.shape[1:], dtype=each.dtype, device=each.device) for each in given)
        message, row_of = x.new_empty(FEW, self.words, dtype=WORD), x.new_empty(FEW, topk, dtype=torch.int32)
        arrived = Arrived(message, share.hidden, topk)
        self.ids_at, self.weights_at = (part.data_ptr() - message.data_ptr() for part in (arrived.ids, arrived.weights))
        self.plan = plan_sends.KERNEL.prepared(
            plan_sends.config_of(ids.element_size()),
            plan_sends.params_of(
                ids, planner.numbers(self.facts), row_of, planner.told, planner.count, planner.world_size
            ),
            ("topk_ids", "row_of", "tokens"),
            device,
        )
        self.pack = pack_rows.KERNEL.prepared(
            pack_rows.config_of(x.dtype, ids.element_size()),
            pack_rows.params_of(x, ids, p, row_of, message),
            ("x", "topk_ids", "topk_weights", "row_of", "rows", "tokens", "slots"),
            device,
        )
        routes = route_rows.RouteProblem.in_one_piece(arrived.ids, share.here, share.first)
        self.route = RoutesAt(routes)
        values, scales = few_in_fp8(share.hidden, self.place)
        self.gather = gather_rows.KERNEL.prepared(
            gather_rows.CONFIG,
            gather_rows.params_of(Slots(message, share.hidden), routes.rows, Gathered(values, scales)),
            ("token_of", "row_of", "values", "sfa", "num_slots", "rows", "pitch", "meeting.rooms"),
            device,
        )
        y = x.new_empty(FEW, share.hidden, dtype=torch.bfloat16)
        self.weigh, self.sum = sums_at(y, row_of, arrived.weights, y), sums_at(y, row_of, None, y)
        self.activation = rows_at.activation(share.intermediate, share.here, Gating(limit=limit), self.place)

    def is_right(self, given: Tokens, weights: Weights) -> bool:
        """Tell whether a call that `is_like` is right, and nothing watches it: else it wants a closer look."""
        x, ids, p = given
        addresses = x.data_ptr() | weights.w1[0].data_ptr() | weights.w2[0].data_ptr()
        return (
            x.shape[0] == ids.shape[0] == p.shape[0]
            and x.shape[0] * self.topk <= INT32_MAX
            and addresses % ADDRESS_ALIGNMENT == 0
            and are_whole(ids, p)
            and weights.have_whole_scales()
            and self.is_straight()
        )

    def __call__(self, given: Tokens, weights: Weights) -> Tensor:
        """Compute the mixture."""
        planner, tokens, hidden = self.planner, given.x.shape[0], self.share.hidden
        sent, row_of = self._ask(given)
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=self.place)  # here the host has time
        sends, receives, routes = planner.counts(self.facts)
        received = exchange(sent[: sum(sends)], sends, receives, planner.group)
        back = exchange(self._sums(received, routes, weights), receives, sends, planner.group)
        if not back.shape[0]:
            return out.zero_()
        self.sum.launch(tokens, back.data_ptr(), row_of, 0, out.data_ptr())
        return out

    def _ask(self, given: Tokens) -> tuple[Tensor, int]:
        """Tell how many rows go to each rank, and pack them; give room for all that may go, and where `row_of` is."""
        x, ids, p = given
        tokens, hidden = x.shape
        at_ids, most = ids.data_ptr(), tokens * self.rows_of_token
        sent = torch.empty((most + ceil_div(tokens * self.topk, self.words), self.words), dtype=WORD, device=self.place)
        at = sent.data_ptr()
        row_of = at + most * self.words * WORD_BYTES
        self.plan.launch(plan_sends.grid(self.plan.config, tokens), at_ids, row_of, tokens)
        self.planner.tell()
        if most:
            ctas = pack_rows.grid(self.pack.config, tokens, hidden)
            self.pack.launch(ctas, x.data_ptr(), at_ids, p.data_ptr(), row_of, at, tokens, tokens)
        return sent, row_of

    def _sums(self, received: Tensor, routes: int, weights: Weights) -> Tensor:
        """BF16 sums of the experts here, for each row that arrived; zeros for one without a route here."""
        slots, hidden, intermediate, here = received.shape[0], *self.share[3:], self.share.here
        if not routes:
            return torch.zeros((slots, hidden), dtype=torch.bfloat16, device=self.place)
        fused = None if routes < MANY_ROWS else self.activated
        pitch = pitch_of_scales(routes)
        # What the first product reads has room where the second one's result is then written.
        numbers = slots * self.topk
        at_table = apart(WORD_BYTES * (3 * numbers + 2 * here))
        at_values = at_table + apart(self.route.table_bytes(numbers))
        at_scales = at_values + apart(routes * hidden)
        at_h = at_scales + apart(WORD_BYTES * pitch * ceil_div(hidden, SCALE_BLOCK))
        behind_h = at_h + (0 if fused else apart(BF16_BYTES * routes * 2 * intermediate))
        at_middle = max(behind_h, at_values + apart(BF16_BYTES * routes * hidden))
        at_of_middle = at_middle + apart(routes * intermediate)
        end = at_of_middle + WORD_BYTES * pitch * ceil_div(intermediate, SCALE_BLOCK)
        buffer = torch.empty(end, dtype=torch.uint8, device=self.place)
        at, message = buffer.data_ptr(), received.data_ptr()

        ids, token_of, row_of = at, at + WORD_BYTES * numbers, at + 2 * WORD_BYTES * numbers
        counts = at + 3 * WORD_BYTES * numbers
        ends = counts + WORD_BYTES * here
        self.route.launch(numbers, message + self.ids_at, counts, ends, row_of, token_of, ids, at + at_table)
        values, scales = at + at_values, at + at_scales
        ctas = gather_rows.grid(gather_rows.CONFIG, slots, routes, hidden)
        self.gather.launch(ctas, token_of, row_of, values, scales, slots, routes, pitch, message)

        w1, w2 = weights
        middle, of_middle = at + at_middle, at + at_of_middle
        if fused is not None:
            fused.launch(routes, w1, (values, scales), (middle, ends, 0, of_middle))
        else:
            h = at + at_h
            self.product1.launch(routes, w1, (values, scales), (h, ends))
            self.activation.launch(routes, h, middle, of_middle, ends, pitch * WORD_BYTES)
        y = values
        self.product2.launch(routes, w2, (middle, of_middle), (y, ends))
        sums = torch.empty((slots, hidden), dtype=torch.bfloat16, device=self.place)
        self.weigh.launch(slots, y, row_of, message + self.weights_at, sums.data_ptr())
        return sums


def why_not(planner: Planner, share: Share, given: Tokens, weights: Weights) -> str | None:
    """Say why calls like this one, which was checked, go by tensors; None if they can be prepared."""
    _, ids, p = given
    if not planner.has_kernel:
        return "no Hopper GPU, or too many ranks"
    if not 0 < share.here <= MAX_EXPERTS:
        return "more experts than kernels think of"
    if not 0 < share.hidden <= MAX_ROW_BYTES or not share.intermediate or not ids.shape[1]:
        return "sizes that kernels do not take"
    if p.dtype != torch.float32 or any(each.stride() != (each.shape[1], 1) for each in given):
        return "tokens or routes that are cast or copied first"
    if any(each.requires_grad for each in (*given, *weights.w1, *weights.w2)):
        return "tensors that may want a gradient"
    if not weights.are_taken_as_they_lie():
        return "scales of weights that are copied first"
    return None if torch_compares() else "this torch compares tensors otherwise"
