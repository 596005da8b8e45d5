"""Move rows between the GPUs of a node by our own kernels, which read and write the memory of other GPUs.

    post_rows:          tokens, cast to FP8 or in BF16 -> this rank's room; ids of the tokens' experts -> all rooms
    route_rows:         a row for each route to an expert here
    gather_rows:        rooms -> rows of the experts here, and the address of each row's result
    rows_to_addresses:  each row of the second product -> its route's place on the token's rank
    rows_twice:         from 4096 rows on, in place of gather_rows and both products of FP8 weights
    meet_ranks, gather_weighted: a token's results, weighted and added up in order of its routes

`Peers` takes addresses from any source; `connect` gets them from torch's symmetric memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..casts.gating import Gating
from ..casts.rules import Rows, empty_scales
from ..core.call import FREE_ROWS, Function, never, run
from ..core.check.checks import Operand
from ..core.check.layout import ADDRESS_ALIGNMENT, WORD_BYTES
from ..core.check.memory import empty
from ..core.check.recipes import PER_ROW
from ..core.gpu import is_hopper
from ..core.meeting import STATE_WORDS, Node, Room
from ..core.replay import FIXED
from ..gemm.packed import is_packed
from ..moe import gather_weighted
from ..moe.api import activates_in_product, activations_of_rows
from ..moe.check import ExpertRows, present
from ..moe.routing import stack_routes
from . import gather_rows, meet_ranks, post_rows, rows_to_addresses, rows_twice
from .collectives import agree_about_decode
from .gather_rows import Gathered
from .message import WORD, with_aligned_rows


class Peers:
    """Lets each rank fetch only the tokens of its experts. Sizes are fixed, and the host reads nothing."""

    def __init__(
        self, memory: Tensor, addresses: tuple[int, ...], room: Room, rank: int, seconds: float, experts: int
    ) -> None:
        """`memory` is this rank's room, uint8 zeros. `addresses`: the addresses of all ranks' rooms.

        `experts` is the number of experts of each rank.
        """
        device = memory.device
        self.memory, self.room, self.seconds = memory, room, seconds
        state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        report = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        counts = torch.zeros(rows_twice.counts_for(room.slots * room.topk, experts), dtype=torch.int32, device=device)
        self.node = Node(room, addresses, rank, state, experts, report, round(seconds * 1e9), counts)
        self._missed = ctypes.c_int32.from_address(report.data_ptr())
        of_slots = memory[room.ids : room.ids + room.slots * room.topk * WORD_BYTES]
        self.ids = of_slots.view(WORD).view(room.slots, room.topk)
        """The experts here of each slot's token, from 0 on; -1: none. A slot without experts may hold anything."""
        self.results = memory[room.results : room.flags].view(torch.bfloat16).view(-1, room.hidden)

    def decode(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w1: Rows,
        w2: Rows,
        limit: float | None,
        out: Tensor | None,
    ) -> Tensor | None:
        """Compute the mixture of this rank's tokens, which were checked, together with the other ranks."""
        made, into = (MADE, INTO) if w1[1] is not None else (MADE_BY_BF16, INTO_BY_BF16)
        function = made if out is None else into
        operands = x, topk_ids, topk_weights, w1, w2, self.ids, self.results, out
        return run(function, operands, (self.node, limit))  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise if a rank did not come in time. Covers the kernels of this rank that have already run."""
        missed = self._missed.value
        if missed:
            raise RuntimeError(
                f"experts across GPUs: rank {missed - 1} did not come within {self.seconds} s, so results since then "
                f"are undefined; make a new layer, or buffer, on all ranks"
            )


@torch.no_grad()
def _decoded(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Rows,
    w2: Rows,
    ids: Tensor,
    results: Tensor,
    out: Tensor | None,
    node: Node,
    limit: float | None,
) -> Tensor | None:
    device, hidden = x.device, node.room.hidden
    result_of, p = empty("places of results", topk_ids.shape, torch.int32, device), topk_weights.to(torch.float32)
    x = x if w1[1] is not None or x.dtype == torch.bfloat16 else x.to(torch.bfloat16)
    post_rows.run(with_aligned_rows(x), topk_ids.contiguous(), p.contiguous(), result_of, node)
    rows = stack_routes(ids, node.experts)
    is_fp8 = w1[1] is not None and not (is_packed(w1) or is_packed(w2))
    if is_fp8 and activates_in_product(ids.numel(), w1[0].shape[1] // 2):  # the one kernel activates
        rows_twice.run(node, rows, *cast("tuple[Operand, Operand]", (w1, w2)), limit)
    else:
        _multiply(rows, w1, w2, node, limit)
    meet_ranks.run(node, x.get_device())
    made = empty("the output", (topk_ids.shape[0], hidden), torch.bfloat16, device) if out is None else out
    gather_weighted.run(results, result_of, topk_weights.contiguous(), made)
    return made if out is None else None


def _multiply(rows: ExpertRows, w1: Rows, w2: Rows, node: Node, limit: float | None) -> None:
    """Multiply the rows of experts, which gather_rows copies from the rooms."""
    device, hidden, count = rows.token_of.device, node.room.hidden, rows.token_of.shape[0]
    dtype, of_middle = (torch.bfloat16, None) if w1[1] is None else (torch.float8_e4m3fn, PER_ROW)
    values = empty("rows of experts", (count, hidden), dtype, device)
    scales = None if w1[1] is None else empty_scales((count,), hidden, values, mn_major=True)
    addresses = empty("addresses of results", (count,), torch.int64, device)
    gather_rows.run(node, rows, Gathered(values, scales, addresses=addresses))
    middle = activations_of_rows((values, scales), w1, rows, Gating(limit=limit), of_middle=of_middle, by_ends=True)
    rows_to_addresses.run(middle, w2, rows.ends, addresses)


def _tensors(
    x: Tensor, ids: Tensor, p: Tensor, w1: Rows, w2: Rows, of_slots: Tensor, results: Tensor, out: Tensor | None
) -> tuple[Tensor, ...]:
    return present(x, ids, p, *w1, *w2, of_slots, results, out)


INTO = Function(_decoded, _decoded, _tensors, never, free=[*[FREE_ROWS] * 3, *[FIXED] * 6, FREE_ROWS], outputs=1)
INTO_BY_BF16 = replace(INTO, free=[*[FREE_ROWS] * 3, *[FIXED] * 4, FREE_ROWS])
MADE, MADE_BY_BF16 = replace(INTO, outputs=0), replace(INTO_BY_BF16, outputs=0)


def why_not(device: torch.device, ranks: int) -> str | None:
    """Say why ranks cannot write into each other's memory; None if no reason is known."""
    if device.type != "cuda" or not is_hopper(device.index):
        return f"expected weights on a Hopper GPU, got {device}"
    return Room(ranks, 1, ADDRESS_ALIGNMENT, 1).why_impossible()


def connect(room: Room, device: torch.device, group: dist.ProcessGroup | None, seconds: float, experts: int) -> Peers:
    """Make the room of each rank, and tell all ranks the rooms' addresses. All ranks call this function together.

    `experts` is the number of experts of each rank.
    """
    from torch.distributed import _symmetric_memory  # its import takes long, and few programs need it

    reason = room.why_impossible()
    if reason is not None:
        raise ValueError(f"peer_memory: {reason}")
    rank = dist.get_rank(group)
    agree_about_decode(room.max_tokens, room.hidden, room.topk, experts, True, device, group, room.gran_k)
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
    within = memory.data_ptr() - starts[rank]  # the tensor's offset in its allocation, the same on each rank
    peers = Peers(memory.zero_(), tuple(start + within for start in starts), room, rank, seconds, experts)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank writes to a room before the room holds zeros
    return peers
