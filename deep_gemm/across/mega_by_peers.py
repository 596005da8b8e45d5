"""Compute mega MoE between the GPUs of a node, by kernels that use the memory of other GPUs: see by_peers.py.

    post_rows:          tokens, FP8 already -> this rank's room; ids of the tokens' experts -> all rooms
    route_rows:         a row for each route to an expert here
    gather_rows:        rooms -> rows of the experts here, their weights, and the address of each row's result
    the first product:  gate and up, activated, weighted, cast. With FP4 weights it gives
                        gate and up in BF16, and cast_rows does the other steps
    rows_to_addresses:  each row of the second product -> its route's place on the token's rank
    rows_twice:         with many ranks and rows, in place of gather_rows and both products of FP8 weights
    meet_ranks, gather_weighted: a token's results, added up in order of its routes

The host waits for nothing. One kernel gives the bits of two, so a GPU gives the same bits in any group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..casts import cast_rows
from ..casts.cast_rows import RowCast
from ..casts.gating import Gating
from ..core.call import FREE_ROWS, Function, run
from ..core.check.checks import Operand, cuts_gradient
from ..core.check.memory import empty
from ..core.check.recipes import PER_64
from ..core.meeting import Node, Room
from ..core.replay import FIXED
from ..core.settings import get_compile_mode
from ..gemm.api.grouped import product_of_stacked_groups, product_of_stacked_rows
from ..gemm.ask.silu import activated
from ..gemm.launch import run as multiply
from ..gemm.packed import is_taken_as_it_lies
from ..moe import gather_weighted
from ..moe.check import ExpertRows, present
from ..moe.route_rows import MAX_EXPERTS
from ..moe.routing import stack_routes
from . import gather_rows, meet_ranks, post_rows, rows_to_addresses, rows_twice
from .by_peers import Peers, connect, why_not
from .gather_rows import Gathered
from .mega_check import MegaProblem, MegaSizes, MegaTensors, mega_problem

SECONDS = 30.0
"""The time that a GPU waits for another GPU, in seconds."""
LEAST_RANKS, LEAST_ROWS = 4, 64
"""One kernel computes both products from 4 ranks on if each expert may expect 64 rows: with even routes, and with
`max_tokens` tokens on each rank. On fewer ranks, or with fewer rows, it saves no time (log, 2026-11-30)."""


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
    """Runs the calls of one buffer."""

    def __init__(self, sizes: MegaSizes, tensors: MegaTensors, peers: Peers) -> None:
        self.sizes, self.tensors, self.peers = sizes, tensors, peers

    def __call__(
        self, y: Tensor, l1: Operand, l2: Operand, counts: Tensor | None, limit: float | None, *, is_fp4: bool
    ) -> None:
        """Run this rank's part of a call. Only `limit` has been checked."""
        self.peers.check()
        operands = y, l1, l2, counts, self.tensors, self.peers.ids, self.peers.results
        came = run(MEGA, operands, (self.sizes, self.peers.node, limit, is_fp4, counts is None))
        if counts is not None and get_compile_mode() == 0:
            counts.add_(came)


def _answer(
    y: Tensor,
    l1: Operand,
    l2: Operand,
    counts: Tensor | None,
    tensors: MegaTensors,
    ids: Tensor,
    results: Tensor,
    sizes: MegaSizes,
    node: Node,
    limit: float | None,
    is_fp4: bool,
    _: bool,
) -> Tensor | None:
    """Check and compute a call; return the number of tokens that each expert here received, if the call counts them."""
    p = mega_problem(y, l1, l2, sizes, tensors, counts, limit, is_fp4=is_fp4)
    with torch.no_grad():
        result_of = empty("places of results", tensors.topk_idx.shape, torch.int32, y.device)
        filled = p.tensors
        post_rows.run(filled.x, filled.topk_idx, filled.topk_weights, result_of, node, filled.x_sf)
        rows = stack_routes(ids, node.experts)
        if not is_fp4 and sizes.ranks >= LEAST_RANKS and sizes.rows >= LEAST_ROWS * sizes.num_experts:
            rows_twice.run(node, rows, p.l1, p.l2, p.limit, rows_twice.OUTPUT_IN_TURN)
        else:
            _multiply(p, rows, node, is_fp4)
        meet_ranks.run(node, y.get_device())
        gather_weighted.run(results, result_of[: y.shape[0]], None, y)
    return None if counts is None else rows.counts


def _multiply(p: MegaProblem, rows: ExpertRows, node: Node, is_fp4: bool) -> None:
    """Multiply the rows of experts, which gather_rows copies from the rooms."""
    of, device = p.tensors, p.y.device
    a, middle, count = (of.l1_acts, of.l1_acts_sf), (of.l2_acts, of.l2_acts_sf), of.l1_acts.shape[0]
    weights = empty("weights of rows", (count,), torch.float32, device)
    addresses = empty("addresses of results", (count,), torch.int64, device)
    gather_rows.run(node, rows, Gathered(*a, weights, addresses))
    if not is_fp4:
        multiply(activated(a, p.l1, middle, rows.ends, weights, p.limit))
        rows_to_addresses.run(middle, p.l2, rows.ends, addresses, of_a=PER_64)
        return
    rows_to_addresses.check_weight("l2_weights", p.l2)
    h = empty("a product", (count, p.l1[0].shape[1]), torch.bfloat16, device)
    if is_taken_as_it_lies(p.l1):
        product_of_stacked_groups(a, p.l1, h, rows.ends)
    else:
        product_of_stacked_rows(a, p.l1, h, rows.ids)
    cast_rows.run(RowCast(h, *middle, gating=Gating(limit=p.limit), row_weights=weights, ends=rows.ends))
    rows_to_addresses.run(middle, p.l2, rows.ends, addresses)


MEGA = Function(
    _answer,
    _answer,
    lambda y, l1, l2, counts, filled, *more: (*l1, *l2, *filled, *more, *present(counts, y)),
    lambda tensors: cuts_gradient(tensors[:4], tensors[-1:]),
    free=[*[FIXED] * 14, FREE_ROWS, FREE_ROWS],
    outputs=1,
)
