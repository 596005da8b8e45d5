"""The way of rows between the GPUs of a node by our own kernels, which store them into the memory of their peers.

    send_rows:       tokens, cast to FP8 -> slots of the ranks that have their experts
    return_sums:     sums of the experts here -> slots of the tokens' ranks
    gather_weighted: what the ranks sent of a token, added up in order of ranks

`Peers` takes addresses, wherever they are from; `connect` gets them from torch's symmetric memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from ..gpus import is_hopper
from ..kernels import return_sums, send_rows
from ..kernels.meeting import STATE_WORDS, Node, Room
from ..problem.layout import ADDRESS_ALIGNMENT
from ..routing import expert_rows, gather_weighted
from .by_group import ones
from .collectives import all_gather
from .message import WORD, WORD_BYTES, Arrived, with_aligned_rows


class Peers:
    """Every token goes to the ranks of its experts alone. Sizes are fixed, and the host reads nothing."""

    def __init__(self, memory: Tensor, addresses: tuple[int, ...], room: Room, rank: int, seconds: float) -> None:
        """`memory` is this rank's room, zeros, uint8; `addresses` are those of all ranks' rooms, its own too."""
        device = memory.device
        self.memory, self.room, self.seconds = memory, room, seconds
        state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        report = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.node = Node(room, addresses, rank, state, report, round(seconds * 1e9))
        # Made here, so that no graph captures it.
        self.rows = expert_rows(torch.arange(room.ranks, device=device).expand(room.max_tokens, -1), room.ranks)
        self.ones = ones(self.rows.row_of)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts_here: int) -> tuple[Arrived, Tensor]:
        """Give what comes, ids being numbered from this rank's first expert, and where each token's sums will lie."""
        x = with_aligned_rows(x)
        goes_to = torch.empty(len(x), self.room.ranks, dtype=torch.int32, device=x.device)
        send_rows.run(x, topk_ids.contiguous(), topk_weights.float().contiguous(), goes_to, experts_here, self.node)
        return self.arrived(), goes_to

    def arrived(self) -> Arrived:
        """See the slots for rows. One whose ids are all -1 may hold anything."""
        room = self.room
        ids = self.memory[room.ids : room.ids + room.slots * room.topk * WORD_BYTES].view(WORD)
        rows = self.memory[: room.ids].view(WORD).view(room.slots, -1)
        scales, weights = room.scales // WORD_BYTES, room.weights // WORD_BYTES
        return Arrived(
            rows[:, :scales],
            rows[:, scales:weights].view(torch.float32),
            ids.view(room.slots, -1),
            rows[:, weights : weights + room.topk].view(torch.float32),
        )

    def combine(self, y: Tensor, row_of: Tensor, goes_to: Tensor, out: Tensor | None) -> Tensor | None:
        """Send each rank the sums of its tokens, and add up what comes in order of ranks."""
        return_sums.run(y, row_of.contiguous(), self.node)
        sums = self.memory[self.room.sums : self.room.flags].view(torch.bfloat16).view(self.room.slots, -1)
        return gather_weighted(sums, self.rows._replace(row_of=goes_to), self.ones[: len(goes_to)], out)

    def check(self) -> None:
        """Raise if a rank did not come in time, so far as this rank's kernels have run."""
        missed = int(self.node.report)
        if missed:
            raise RuntimeError(
                f"experts across GPUs: rank {missed - 1} did not come within {self.seconds} s, so results since then "
                f"are undefined; make a new layer on all ranks"
            )


def why_not(device: torch.device, ranks: int) -> str | None:
    """Say why ranks cannot write into each other's memory; None if nothing is known against it."""
    if device.type != "cuda" or not is_hopper(device.index):
        return f"expected weights on a Hopper GPU, got {device}"
    return Room(ranks, 1, ADDRESS_ALIGNMENT, 1).why_impossible()


def connect(room: Room, device: torch.device, group: dist.ProcessGroup | None, seconds: float) -> Peers:
    """Make the rooms of all ranks, and tell each where the others' are. All ranks call it together."""
    reason = room.why_impossible()
    if reason is not None:
        raise ValueError(f"peer_memory: {reason}")
    rank = dist.get_rank(group)
    _all_agree(room, device, group)
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
    peers = Peers(memory.zero_(), tuple(start + within for start in starts), room, rank, seconds)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody writes to a room before it is zeros
    return peers


def _all_agree(room: Room, device: torch.device, group: dist.ProcessGroup | None) -> None:
    names = ("max_tokens", "hidden", "topk")
    mine = torch.tensor([getattr(room, name) for name in names], dtype=torch.int64, device=device)
    of_all = mine.new_empty(room.ranks * len(names))
    all_gather(of_all, mine, group=group)
    for name, values in zip(names, of_all.view(room.ranks, -1).t().tolist(), strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"experts across processes: expected one {name} on all ranks, got {values} by rank")
