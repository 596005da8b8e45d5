"""The way of rows between the GPUs of a node by our own kernels, which read and write the memory of their peers.

    post_rows:          tokens, cast to FP8 -> this rank's room; which experts want them -> all rooms
    route_rows:         a row for each route to an expert here
    gather_rows:        rooms -> rows of the experts here, and where the result of each row goes
    rows_to_addresses:  the second product, each row -> the place of its route on the token's rank
    meet_ranks, gather_weighted: a token's results, summed up by weight in order of its routes

`Peers` takes addresses, wherever they are from; `connect` gets them from torch's symmetric memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..casts.gating import Gating
from ..casts.rules import Quantized, empty_scales
from ..core.check.checks import Operand
from ..core.check.layout import ADDRESS_ALIGNMENT, WORD_BYTES
from ..core.gpu import gpu_of, is_hopper
from ..core.kernel import Prepared
from ..core.meeting import STATE_WORDS, Node, Room
from ..moe import gather_weighted, route_rows
from ..moe.api import activations_of_rows
from ..moe.check import ExpertRows
from ..moe.route_rows import RouteProblem
from ..moe.routing import expert_rows
from . import gather_rows, meet_ranks, post_rows, rows_to_addresses
from .collectives import agree_about_decode
from .gather_rows import Gathered
from .message import WORD, with_aligned_rows

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Peers:
    """Each rank fetches the tokens of its experts alone. Sizes are fixed, and the host reads nothing."""

    def __init__(
        self, memory: Tensor, addresses: tuple[int, ...], room: Room, rank: int, seconds: float, experts: int
    ) -> None:
        """`memory` is this rank's room, zeros, uint8; `addresses` are those of all ranks' rooms, its own too.

        Each rank has so many `experts`.
        """
        device = memory.device
        self.memory, self.room, self.seconds = memory, room, seconds
        state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        report = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        self.node = Node(room, addresses, rank, state, experts, report, round(seconds * 1e9))
        self._missed = ctypes.c_int32.from_address(report.data_ptr())
        of_slots = memory[room.ids : room.ids + room.slots * room.topk * WORD_BYTES]
        self.ids = of_slots.view(WORD).view(room.slots, room.topk)
        """Experts here that each slot goes to, numbered from 0, -1 for none. A slot without any may hold anything."""
        self.results = memory[room.results : room.flags].view(torch.bfloat16).view(-1, room.hidden)

    def post(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Lay tokens out, and wait until all ranks have; give where the result of each route will lie."""
        x = with_aligned_rows(x)
        row_of = torch.empty_like(topk_ids, dtype=torch.int32, memory_format=torch.contiguous_format)
        post_rows.run(x, topk_ids.contiguous(), topk_weights.float().contiguous(), row_of, self.node)
        return row_of

    def routes(self) -> RouteProblem:
        """The request that `rows` makes: rows of all ranks' tokens, none of which has come."""
        return RouteProblem(self.ids, self.node.experts)

    def rows(self) -> ExpertRows:
        """Give the routes of all ranks' tokens to the experts here as rows."""
        if self.node.experts > route_rows.MAX_EXPERTS[-1]:
            return expert_rows(self.ids, self.node.experts)
        routes = self.routes()
        route_rows.run(routes)
        return routes.rows

    def activations(self, w: Operand, rows: ExpertRows, limit: float | None) -> tuple[Quantized, Tensor]:
        """Compute the first product, activated, and give the address that the result of each row goes to."""
        count, hidden, device = self.ids.numel(), self.room.hidden, self.memory.device
        values = torch.empty(count, hidden, dtype=torch.float8_e4m3fn, device=device)
        scales = empty_scales((count,), hidden, values, mn_major=True)
        addresses = torch.empty(count, dtype=torch.int64, device=device)
        gather_rows.run(self.node, rows, Gathered(values, scales, addresses=addresses))
        return activations_of_rows((values, scales), w, rows, Gating(limit=limit)), addresses

    def product(self, a: Quantized, w: Operand, rows: ExpertRows, addresses: Tensor) -> None:
        """Multiply, and store each result on its token's rank."""
        rows_to_addresses.run(a, w, rows.ends, addresses)

    def combine(self, row_of: Tensor, topk_weights: Tensor, out: Tensor | None) -> Tensor | None:
        """Wait for the results of all ranks, and sum up each token's by weight, in order of routes."""
        meet_ranks.run(self.node, self.memory.get_device())
        made = (
            torch.empty(len(row_of), self.room.hidden, dtype=torch.bfloat16, device=row_of.device)
            if out is None
            else out
        )
        gather_weighted.run(self.results, row_of, topk_weights.contiguous(), made)
        return made if out is None else None

    def launches(
        self, given: Given, rows: ExpertRows, to: Gathered, of_post: Sequence[str], of_gather: Sequence[str]
    ) -> tuple[tuple[Prepared[Any], int], tuple[Prepared[Any], int], Prepared[Any]]:
        """Prepare launches of post_rows and gather_rows but for these members, with their CTAs, and of meet_ranks.

        `given` are x, ids, weights of routes, the place of each result, and scales of an x that is FP8 already.
        """
        (x, ids, p, row_of, sf), node, device = given, self.node, self.memory.get_device()
        config, gather = post_rows.config_of(x, ids), gather_rows.CONFIG
        params = post_rows.params_of(x, ids, p, row_of, node, sf), gather_rows.params_of(node, rows, to)
        post = post_rows.KERNEL.prepared(config, params[0], of_post, device)
        ctas_of_post = post_rows.grid(config, node, gpu_of(device).num_sms)
        gathers = gather_rows.KERNEL.prepared(gather, params[1], of_gather, device)
        ctas_of_gather = gather_rows.grid(gather, node.room.slots, *to.values.shape)
        meet = meet_ranks.KERNEL.prepared(meet_ranks.CONFIG, meet_ranks.params_of(node), (), device)
        return (post, ctas_of_post), (gathers, ctas_of_gather), meet

    def check(self) -> None:
        """Raise if a rank did not come in time, so far as this rank's kernels have run."""
        missed = self._missed.value
        if missed:
            raise RuntimeError(
                f"experts across GPUs: rank {missed - 1} did not come within {self.seconds} s, so results since then "
                f"are undefined; make a new layer, or buffer, on all ranks"
            )


def why_not(device: torch.device, ranks: int) -> str | None:
    """Say why ranks cannot write into each other's memory; None if nothing is known against it."""
    if device.type != "cuda" or not is_hopper(device.index):
        return f"expected weights on a Hopper GPU, got {device}"
    return Room(ranks, 1, ADDRESS_ALIGNMENT, 1).why_impossible()


def connect(room: Room, device: torch.device, group: dist.ProcessGroup | None, seconds: float, experts: int) -> Peers:
    """Make the rooms of all ranks, and tell each where the others' are. All ranks call it together.

    Each has so many `experts`.
    """
    from torch.distributed import _symmetric_memory  # which takes long, and few need

    reason = room.why_impossible()
    if reason is not None:
        raise ValueError(f"peer_memory: {reason}")
    rank = dist.get_rank(group)
    agree_about_decode(room.max_tokens, room.hidden, room.topk, experts, True, device, group)
    try:
        everyone = dist.distributed_c10d._get_default_group() if group is None else group
        memory = _symmetric_memory.empty(room.num_bytes, dtype=torch.uint8, device=device)
        handle = _symmetric_memory.rendezvous(memory, everyone)
        starts = tuple(handle.buffer_ptrs)
    except RuntimeError as error:
        raise RuntimeError(
            "peer_memory: torch's symmetric memory could not map the memory of the other GPUs, which must be of one "
            f"node and reach each other by NVLink: {error}"
        ) from error
    within = memory.data_ptr() - starts[rank]  # where the tensor lies in its allocation, on each rank the same
    peers = Peers(memory.zero_(), tuple(start + within for start in starts), room, rank, seconds, experts)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody writes to a room before it is zeros
    return peers
