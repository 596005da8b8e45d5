"""The way of mega MoE between the GPUs of a node, by kernels that use the memory of peers: see by_peers.py.

    post_rows:          tokens, FP8 already -> this rank's room; which experts want them -> all rooms
    route_rows:         a row for each route to an expert here
    gather_rows:        rooms -> rows of the experts here, their weights, and where each row's result goes
    the first product:  gate and up, activated, weighted, cast. With FP4 weights it gives
                        gate and up in BF16, and cast_rows does the rest
    rows_to_addresses:  the second one, each row -> the place of its route on the token's rank
    meet_ranks, gather_weighted: a token's results, summed up in order of its routes

The host waits for nothing. A rank of a group of one has the same way, so that a GPU gives the same bits in any group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..casts.gating import Gating
from ..core.call import Key, put
from ..core.check.checks import Operand, cuts_gradient
from ..core.check.layout import ADDRESS_ALIGNMENT, BF16_BYTES, WORD_BYTES, byte_span
from ..core.check.recipes import PER_64
from ..core.kernel import computes_on
from ..core.meeting import Room
from ..core.seen import torch_compares
from ..gemm import launch, rows_silu
from ..gemm.api.grouped import product_of_stacked_rows
from ..gemm.ask.silu import activated
from ..gemm.packed import is_packed, is_taken_as_it_lies
from ..gemm.plan import B, D, addresses_of
from ..gemm.problem import Problem
from ..moe import rows_at
from ..moe.gather_weighted import sums_at
from ..moe.prepared import MAX_KINDS, Kind, Weights, are_whole, find, has_aligned_rows, span_of_rows, touches
from ..moe.route_rows import MAX_EXPERTS, RoutesAt
from ..moe.rows_at import RowsAt
from . import rows_to_addresses
from .by_peers import Peers, connect, why_not
from .gather_rows import Gathered
from .mega_check import FILLED_TYPES, MegaProblem, MegaSizes, MegaTensors, mega_problem

SECONDS = 30.0
"""How long a GPU waits for another one."""


def room_of(sizes: MegaSizes) -> Room:
    """The memory of each rank that all ranks write to."""
    return Room(sizes.ranks, sizes.max_tokens, sizes.hidden, sizes.topk)


def why_not_by_peers(sizes: MegaSizes, device: torch.device) -> str | None:
    """Say why rows of this rank have to go through collectives; None if they need not."""
    if sizes.here > MAX_EXPERTS[-1]:
        return f"expected at most {MAX_EXPERTS[-1]} experts of a rank, got {sizes.here}"
    return why_not(device, sizes.ranks) or room_of(sizes).why_impossible()


def peers_of(sizes: MegaSizes, device: torch.device, group: dist.ProcessGroup | None) -> Peers | None:
    """Connect the ranks of a group, which all call it; None if rows have to go through collectives."""
    if why_not_by_peers(sizes, device) is not None:
        return None
    room = room_of(sizes)
    if sizes.ranks > 1:
        return connect(room, device, group, SECONDS, sizes.here)
    memory = torch.zeros(room.num_bytes, dtype=torch.uint8, device=device)
    return Peers(memory, (memory.data_ptr(),), room, 0, SECONDS, sizes.here)


class Calls:
    """The calls of one buffer. Sizes and most addresses stay, so launches are stated once.

    Calls follow each other, so what lies between kernels is one piece of memory for all of them.
    """

    def __init__(self, sizes: MegaSizes, tensors: MegaTensors, peers: Peers) -> None:
        self.sizes, self.tensors, self.peers = sizes, tensors, peers
        self._alike: list[Alike] = []
        self._launches: dict[object, Launches] = {}
        self._device, self._rows = tensors.x.get_device(), sizes.rows
        routes = peers.routes()
        self.rows = routes.rows
        self.weights = torch.empty_like(routes.ids, dtype=torch.float32)
        self.addresses = torch.empty_like(routes.ids, dtype=torch.int64)
        self.result_of = torch.empty_like(tensors.topk_idx, dtype=torch.int32)
        self._route = RoutesAt(routes)
        self._table = routes.ids.new_empty(self._route.table_bytes(sizes.rows) // WORD_BYTES)
        self._at_routes = tuple(each.data_ptr() for each in (peers.ids, *self.rows, self._table))
        self._at_results = peers.results.data_ptr(), self.result_of.data_ptr()
        given = tensors.x, tensors.topk_idx, tensors.topk_weights, self.result_of, tensors.x_sf
        to = Gathered(tensors.l1_acts, tensors.l1_acts_sf, self.weights, self.addresses)
        launches = peers.launches(given, self.rows, to, ("tokens",), ())
        (self._post, self._ctas_of_post), (self._gather, self._ctas_of_gather), self._meet = launches

    def __call__(
        self, y: Tensor, l1: Operand, l2: Operand, counts: Tensor | None, limit: float | None, *, is_fp4: bool
    ) -> None:
        """Compute a call of this rank, of which `limit` alone was checked, together with the others'."""
        given, weights = (y,) if counts is None else (y, counts), Weights(l1, l2)
        like = self._find(given, weights, (limit, is_fp4))
        if like is not None and like.is_right(given, weights):
            self._launch(like.launches, y, l1, l2, counts)
            return
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self(y, l1, l2, counts, limit, is_fp4=is_fp4)
            return
        p = mega_problem(y, l1, l2, self.sizes, self.tensors, counts, limit, is_fp4=is_fp4)
        launches = self._launches_of(p)
        self._launch(launches, y, p.l1, p.l2, counts)
        if like is None and why_not_alike(y, weights) is None:
            like = Alike(self, launches, given, weights, (limit, is_fp4))
            self._alike = [like, *self._alike[: MAX_KINDS - 1]]  # a new list: others may be reading the old

    def _find(self, given: Sequence[Tensor], weights: Weights, said: Key) -> Alike | None:
        """Find calls like one that nobody has checked: what it was given may be anything."""
        of_said = (each for each in self._alike if each.said == said)
        try:
            return find(of_said, given, weights)
        except (TypeError, ValueError):  # weights that are no pairs: the checks say how
            return None

    def _launches_of(self, p: MegaProblem) -> Launches:
        lie = p.limit, *((x.dtype, x.stride()) for x in (p.y, *p.l1, *p.l2))
        found = self._launches.get(lie)
        if found is None:
            found = (LaunchesOfFp4 if is_packed(p.l1) else Launches)(self, p)
            put(self._launches, lie, found, MAX_KINDS)
        return found

    def _launch(self, launches: Launches, y: Tensor, l1: Operand, l2: Operand, counts: Tensor | None) -> None:
        self.peers.check()
        tokens, rows = y.shape[0], self._rows
        self._post.launch(self._ctas_of_post, tokens)
        self._route.launch(rows, *self._at_routes)
        self._gather.launch(self._ctas_of_gather)
        if counts is not None and computes_on(self._device):
            counts.add_(self.rows.counts)
        launches.multiply(rows, l1, l2)
        self._meet.launch(1)
        if tokens:
            launches.sums.launch(tokens, *self._at_results, 0, y.data_ptr())


class Launches:
    """The launches that depend on how y and the weights lie, and on the limit: both products, and the sums."""

    def __init__(self, calls: Calls, p: MegaProblem) -> None:
        """Prepare the launches of a call that was checked. They keep neither y nor weights."""
        self.sums = sums_at(calls.peers.results, calls.result_of, None, p.y)
        self._prepare(calls, p)

    def _prepare(self, calls: Calls, p: MegaProblem) -> None:
        t, rows, limit = calls.tensors, calls.rows, p.limit
        a, middle = (t.l1_acts, t.l1_acts_sf), (t.l2_acts, t.l2_acts_sf)
        weights, addresses = calls.weights, calls.addresses  # functions that hold `calls` or `self` would keep both

        def silu(l1: Operand) -> Problem:
            return activated(a, l1, middle, rows.ends, weights, limit)

        def second(l2: Operand) -> Problem:
            return rows_to_addresses.problem(middle, l2, addresses, rows.ends, of_a=PER_64)

        self.first = RowsAt(p.l1, rows_silu.IN_TURN, lambda l1, *how: launch.plan_of(silu(l1), *how))
        self.second = RowsAt(p.l2, rows_to_addresses.OUTPUT_BY_64, lambda l2, *how: launch.plan_of(second(l2), *how))
        self.addresses = [(each[:B], each[D:]) for each in (addresses_of(silu(p.l1)), addresses_of(second(p.l2)))]

    def multiply(self, rows: int, l1: Operand, l2: Operand) -> None:
        """Launch both products."""
        (a, behind), (middle, to_addresses) = self.addresses
        self.first.launch(rows, l1, a, behind)
        self.second.launch(rows, l2, middle, to_addresses)


class LaunchesOfFp4(Launches):
    """The same for FP4 weights: the first product comes in BF16, and a kernel of its own activates and casts it."""

    def _prepare(self, calls: Calls, p: MegaProblem) -> None:
        rows_to_addresses.check_weight("l2_weights", p.l2)
        (experts, self._width, _), t = p.l1[0].shape, calls.tensors
        self._a, self._ids, ends = (t.l1_acts, t.l1_acts_sf), calls.rows.ids, calls.rows.ends
        self._is_asked = not is_taken_as_it_lies(p.l1)
        self.first, self.second = rows_at.product(p.l1, by_ends=True), rows_to_addresses.at_addresses(p.l2)
        self._activation = rows_at.activation(
            self._width // 2, experts, Gating(limit=p.limit), t.x.device, calls.weights
        )
        a, middle, to = self._a, (t.l2_acts, t.l2_acts_sf), (calls.addresses, ends)
        self._at_a, self._at_middle, self._to = (tuple(x.data_ptr() for x in each) for each in (a, middle, to))
        self._how = ends.data_ptr(), t.l2_acts_sf.stride(1) * WORD_BYTES

    def multiply(self, rows: int, l1: Operand, l2: Operand) -> None:
        """Launch all three. An l1 with scales in FP32, which no kernel takes, is asked in each call."""
        h = torch.empty(rows, self._width, dtype=torch.bfloat16, device=self._ids.device)
        at_h = h.data_ptr()
        if self._is_asked:
            product_of_stacked_rows(self._a, l1, h, self._ids)
        else:
            self.first.launch(rows, l1, self._at_a, (at_h, self._to[1]))
        self._activation.launch(rows, at_h, *self._at_middle, *self._how)
        self.second.launch(rows, l2, self._at_middle, self._to)


class Alike(Kind):
    """Calls with one limit, and a y, weights and counts of one kind. They are given y, and counts if any."""

    def __init__(self, calls: Calls, launches: Launches, given: Sequence[Tensor], weights: Weights, said: Key) -> None:
        """Prepare for calls like this one, which was checked and `why_not_alike` has nothing against."""
        super().__init__(given, weights)
        self.launches, self.said = launches, said
        self._most, self._here = calls.sizes.max_tokens, calls.sizes.here
        y = given[0]
        self._pitch, self._row_bytes = y.stride(0) * BF16_BYTES, y.shape[1] * BF16_BYTES
        self._spans_of_weights = [byte_span(x) for x in (*weights.w1, *weights.w2)]
        self._requires_grad = any(x.requires_grad for x in (y, *weights.w1, *weights.w2))
        self._filled = [(x.data_ptr(), byte_span(x)) for x in calls.tensors[: len(FILLED_TYPES)]]

    def is_right(self, given: Sequence[Tensor], weights: Weights) -> bool:
        """Tell whether a call that `is_like` is right, and nothing watches it: else it wants a closer look."""
        y, *counts = given
        tokens, first = y.shape[0], y.data_ptr()
        span = span_of_rows(tokens, self._pitch, self._row_bytes)
        at = [x.data_ptr() for x in (*weights.w1, *weights.w2)]
        inputs = [*zip(at, self._spans_of_weights, strict=True), *self._filled]
        for each in counts:
            if each.shape[0] != self._here:
                return False
            inputs.append((each.data_ptr(), self._here * WORD_BYTES))
        return (
            tokens <= self._most
            and (first | at[0] | at[2]) % ADDRESS_ALIGNMENT == 0
            and are_whole(*counts)
            and weights.have_whole_scales()
            and not touches(first, span, inputs)
            and self.is_straight()
            and not (self._requires_grad and cuts_gradient((*weights.w1, *weights.w2), (y,)))
        )


def why_not_alike(y: Tensor, weights: Weights) -> str | None:
    """Say why calls like this one, which was checked, are checked each; None if they need not be."""
    if y.stride(0) < y.shape[1] or not has_aligned_rows(y):
        return "strides that suit a single row"
    if not weights.are_taken_as_they_lie():
        return "scales of weights that are copied first"
    return None if torch_compares() else "this torch compares tensors otherwise"
