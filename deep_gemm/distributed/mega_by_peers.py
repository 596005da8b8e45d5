"""The way of mega MoE between the GPUs of a node, by kernels that use the memory of peers: see by_peers.py.

    post_rows:          tokens, FP8 already -> this rank's room; which experts want them -> all rooms
    gather_rows:        rooms -> rows of the experts here, their weights, and where each row's result goes
    the first product:  gate and up, activated, weighted, cast; it fetches many rows itself
    rows_to_addresses:  the second one, each row -> the place of its route on the token's rank
    gather_weighted:    a token's results, summed up in order of its routes

The host waits for nothing. A rank of a group of one has the same way, so that a GPU gives the same bits in any group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..activation import activated_product_of_rows
from ..kernels import gather_rows, rows_to_addresses
from ..kernels.gather_rows import Gathered
from ..kernels.meeting import Room
from ..problem.mega_moe import MegaProblem, MegaSizes
from ..problem.rows_silu import SILU_COLUMNS
from .by_peers import Peers, connect, why_not

SECONDS = 30.0
"""How long a GPU waits for another one."""


def room_of(sizes: MegaSizes) -> Room:
    """The memory of each rank that all ranks write to."""
    return Room(sizes.ranks, sizes.max_tokens, sizes.hidden, sizes.topk)


def why_not_by_peers(sizes: MegaSizes, device: torch.device) -> str | None:
    """Say why rows of this rank have to go through collectives; None if they need not."""
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


@torch.no_grad()
def compute(p: MegaProblem, sizes: MegaSizes, peers: Peers) -> None:
    """Compute one call of this rank, together with the others'."""
    peers.check()
    tensors, device = p.tensors, p.y.device
    row_of, rows = peers.post(tensors.x, tensors.topk_idx, tensors.topk_weights, tensors.x_sf), peers.rows()
    if p.counts is not None:
        p.counts.add_(rows.counts)
    weights = torch.empty(sizes.rows, dtype=torch.float32, device=device)
    addresses = torch.empty(sizes.rows, dtype=torch.int64, device=device)
    a, middles = (tensors.l1_acts, tensors.l1_acts_sf), (tensors.l2_acts, tensors.l2_acts_sf)
    to = Gathered(*a, weights, addresses)
    if peers.fetches(sizes.intermediate):
        peers.fetch(p.l1, rows, to, middles, p.limit)
    else:
        gather_rows.run(peers.node, rows, to)
        activated_product_of_rows(a, p.l1, middles, rows.ids, weights, limit=p.limit)
    rows_to_addresses.run(middles, p.l2, rows.ids, addresses, sfa_columns=SILU_COLUMNS)
    peers.combine(row_of, None, p.y)
