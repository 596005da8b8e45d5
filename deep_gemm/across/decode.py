"""The decode form by peer memory, for calls like one before: by_peers.py at addresses, in one buffer.

    post_rows --> rooms --route_rows, gather_rows--> values, addresses --product, activation--> middle
    gather_weighted <-- meet_ranks <-- rooms <--rows_to_addresses-----------------------------'

The room fixes all sizes, so plans, grids and most parameters are stated once; tokens, `out`, weights and the buffer are
each call's own. It launches the kernels that the way by tensors launches (`Experts._decoded`), by ends where few rows
have ids there, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..casts.gating import Gating
from ..casts.rules import empty_scales
from ..core.check.layout import ADDRESS_ALIGNMENT, BF16_BYTES, WORD_BYTES, pitch_of_scales
from ..core.check.numbers import INT32_MAX
from ..core.meeting import Room
from ..core.seen import torch_compares
from ..gemm.packed import is_packed
from ..moe import rows_at
from ..moe.api import activates_in_product
from ..moe.check import ExpertRows
from ..moe.gather_weighted import sums_at
from ..moe.prepared import Kind, Parts, Weights, are_whole, has_aligned_rows, span_of_rows, touches
from ..moe.route_rows import RoutesAt
from ..moe.rows_at import FEW, MAX_EXPERTS
from . import rows_to_addresses
from .by_peers import Peers
from .check import Share
from .gather_rows import Gathered
from .message import ADDRESS_BYTES, WORD


class Places(Parts):
    """The places where the parts of a call's buffer begin."""

    def __init__(self, room: Room, share: Share, table_bytes: int, *, has_h: bool) -> None:
        """Place the parts. With `has_h` the first product comes in BF16, and is activated by a kernel of its own."""
        rows = room.slots * room.topk
        self.result_of = self.part(WORD_BYTES * room.max_tokens * room.topk)
        self.ids, self.token_of, self.row_of = (self.part(WORD_BYTES * rows) for _ in range(3))
        self.counts, self.ends = (self.part(WORD_BYTES * share.here) for _ in range(2))
        self.table, self.addresses = self.part(table_bytes), self.part(ADDRESS_BYTES * rows)
        self.h = self.part(BF16_BYTES * rows * 2 * share.intermediate if has_h else 0)
        first = self.end
        self.values, self.scales = self.operand(rows, share.hidden)
        behind = self.end
        if has_h:  # the middle is made of h, so it may take the place of what h was made of
            self.end = first
        self.middle, self.of_middle = self.operand(rows, share.intermediate)
        self.end = max(self.end, behind)


class Decode(Kind):
    """Calls of one kind. They are given x, ids, weights of routes, and `out` if the caller has it."""

    def __init__(
        self, peers: Peers, share: Share, limit: float | None, given: Sequence[Tensor], weights: Weights
    ) -> None:
        """Prepare for calls like this one, which was checked and `why_not` has nothing against."""
        super().__init__(given, weights)
        self.peers, self.rows, self.at_ids = peers, peers.ids.numel(), peers.ids.data_ptr()
        self.max_tokens, self.hidden = peers.room.max_tokens, peers.room.hidden
        self.activation = None
        if not is_packed(weights.w1) and activates_in_product(self.rows, share.intermediate):
            self.first = rows_at.activated(weights.w1, limit)
        else:
            self.first = rows_at.product(weights.w1, by_ends=True)
            self.activation = rows_at.activation(share.intermediate, share.here, Gating(limit=limit), self.place)
        self.second = rows_to_addresses.at_addresses(weights.w2)
        self.route = RoutesAt(peers.routes())
        self.places = Places(peers.room, share, self.route.table_bytes(self.rows), has_h=self.activation is not None)
        self._prepare(given)
        self.first.plan(self.rows, weights.w1)  # now, so that no graph captures how a plan is made
        self.second.plan(self.rows, weights.w2)

    def _prepare(self, given: Sequence[Tensor]) -> None:
        """State the parameters that stay, with tensors of a few rows in place of those that each call has."""
        room, results = self.peers.room, self.peers.results
        x, ids, p, *out = (
            torch.empty_strided((FEW, each.shape[1]), each.stride(), dtype=each.dtype, device=each.device)
            for each in given
        )
        y = out[0] if out else results.new_empty(FEW, room.hidden)
        self.pitch_of_middle = pitch_of_scales(self.rows) * WORD_BYTES
        self.row_bytes = tuple(each.shape[1] * each.element_size() for each in (x, ids, p, y))
        self.pitches = tuple(each.stride(0) * each.element_size() for each in (x, ids, p, y))
        result_of = torch.empty_like(ids, dtype=WORD)
        # Tensors of sizes that stay, without memory.
        slots = torch.empty(room.slots, room.topk, dtype=WORD, device="meta")
        values = torch.empty(self.rows, room.hidden, dtype=torch.float8_e4m3fn, device="meta")
        to = Gathered(values, empty_scales((self.rows,), room.hidden, values, mn_major=True))
        (self.post, self.ctas_of_post), (self.gather, self.ctas_of_gather), self.meet = self.peers.launches(
            (x, ids, p, result_of, None),
            ExpertRows(slots, slots, slots, slots, slots),
            to,
            ("x", "sf", "topk_ids", "topk_weights", "row_of", "tokens"),
            ("token_of", "row_of", "values", "sfa", "weights", "addresses"),
        )
        self.sum, self.at_results = sums_at(results, result_of, p, y), results.data_ptr()

    def is_right(self, given: Sequence[Tensor], weights: Weights) -> bool:
        """Tell whether a call that `is_like` is right, and nothing watches it: else it wants a closer look."""
        x, ids, p, *out = given
        tokens, addresses = x.shape[0], x.data_ptr() | weights.w1[0].data_ptr() | weights.w2[0].data_ptr()
        if out:
            (y,) = out
            if y.shape[0] != tokens or self._may_overlap(tokens, given):
                return False
            addresses |= y.data_ptr()
        return (
            tokens <= self.max_tokens
            and tokens == ids.shape[0] == p.shape[0]
            and addresses % ADDRESS_ALIGNMENT == 0
            and are_whole(ids, p)
            and weights.have_whole_scales()
            and self.is_straight()
        )

    def _may_overlap(self, tokens: int, given: Sequence[Tensor]) -> bool:
        """Tell whether `out` begins or ends among the rows of another tensor."""
        *inputs, (first, span) = (
            (each.data_ptr(), span_of_rows(tokens, pitch, row_bytes))
            for each, pitch, row_bytes in zip(given, self.pitches, self.row_bytes, strict=True)
        )
        return touches(first, span, inputs)

    def __call__(self, given: Sequence[Tensor], weights: Weights) -> Tensor | None:
        """Compute the mixture, into `out` if there is one."""
        self.peers.check()
        x, ids, p, *out = given
        tokens, rows, here, at_p = x.shape[0], self.rows, self.places, p.data_ptr()
        y = out[0] if out else torch.empty((tokens, self.hidden), dtype=torch.bfloat16, device=self.place)
        buffer = torch.empty(here.end, dtype=torch.uint8, device=self.place)
        at = buffer.data_ptr()

        result_of = at + here.result_of
        self.post.launch(self.ctas_of_post, x.data_ptr(), 0, ids.data_ptr(), at_p, result_of, tokens)
        counts, ends, of_rows = at + here.counts, at + here.ends, at + here.ids
        row_of, token_of = at + here.row_of, at + here.token_of
        self.route.launch(rows, self.at_ids, counts, ends, row_of, token_of, of_rows, at + here.table)

        w1, w2 = weights
        a, addresses = (at + here.values, at + here.scales), at + here.addresses
        middle, of_middle = at + here.middle, at + here.of_middle
        self.gather.launch(self.ctas_of_gather, token_of, row_of, *a, 0, addresses)
        if self.activation is None:
            self.first.launch(rows, w1, a, (middle, ends, 0, of_middle))
        else:
            h = at + here.h
            self.first.launch(rows, w1, a, (h, ends))
            self.activation.launch(rows, h, middle, of_middle, ends, self.pitch_of_middle)
        self.second.launch(rows, w2, (middle, of_middle), (addresses, ends))

        self.meet.launch(1)
        if tokens:
            self.sum.launch(tokens, self.at_results, result_of, at_p, y.data_ptr())
        return None if out else y


def why_not(peers: Peers, share: Share, given: Sequence[Tensor], weights: Weights) -> str | None:
    """Say why calls like this one, which was checked, go by tensors; None if they can be prepared."""
    x, ids, p, *out = given
    if not 0 < share.here <= MAX_EXPERTS:
        return "more experts than kernels think of"
    if not share.hidden or not share.intermediate or not 0 < peers.ids.numel() <= INT32_MAX:
        return "sizes that kernels do not take"
    if p.dtype != torch.float32 or any(each.stride() != (each.shape[1], 1) for each in (ids, p)):
        return "routes that are cast or copied first"
    if not has_aligned_rows(x) or any(each.stride(0) < share.hidden or not has_aligned_rows(each) for each in out):
        return "tokens that are copied first, or strides of `out` that suit a single row"
    if not weights.are_taken_as_they_lie():
        return "scales of weights that are copied first"
    return None if torch_compares() else "this torch compares tensors otherwise"
