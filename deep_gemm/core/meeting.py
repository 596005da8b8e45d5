"""The host's side of core/meeting.cuh: memory that the ranks of a node write to, and the parameters of a meeting."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from torch import Tensor

from .check.layout import ADDRESS_ALIGNMENT, BF16_BYTES, SCALE_BLOCK, WORD_BYTES, align, ceil_div
from .params import Params

MAX_RANKS = 8
"""The most ranks of a node: `kMaxRanks` in core/meeting.cuh."""
MAX_ROW_BYTES = 32768
"""The most bytes of a row in a room. gather_rows has shared memory for the scales of a row of this size."""
STORAGE_BYTES = 8
"""Size of `MeetingStorage`."""
STATE_WORDS = 5
"""Words of a rank's state: an epoch and a count of CTAs for each `Way`, then the rank that did not arrive."""
ERROR_WORD = STATE_WORDS - 1


class Way(Enum):
    """The two ways of rows in a call. A meeting ends each way. A value is the index of the way's flags and words."""

    THERE = 0
    """All rows have been sent to their experts."""
    BACK = 1
    """All results have been sent back."""


@dataclass(frozen=True)
class Room:
    """Memory of a rank that all ranks of its node write to: one allocation. Offsets are bytes from its start.

    rows [max_tokens] | ids [ranks, max_tokens, topk] | results [max_tokens, topk, hidden] | flags
    """

    ranks: int
    max_tokens: int
    """Tokens of each rank."""
    hidden: int
    topk: int
    gran_k: int | None = SCALE_BLOCK
    """Columns of an FP8 row that share a scale; None for BF16 rows, which have no scales."""

    @property
    def slots(self) -> int:
        """Slots for tokens: `max_tokens` for each rank."""
        return self.ranks * self.max_tokens

    @property
    def scales(self) -> int:
        """Byte of a row at which its scales begin, behind its values."""
        return self.hidden * (BF16_BYTES if self.gran_k is None else 1)

    @property
    def weights(self) -> int:
        """Byte of a row at which the weights of its routes begin, behind its scales."""
        return self.scales + (0 if self.gran_k is None else ceil_div(self.hidden, self.gran_k) * WORD_BYTES)

    @property
    def row_bytes(self) -> int:
        """The pitch: bytes from a row to the next."""
        return align(self.weights + self.topk * WORD_BYTES, ADDRESS_ALIGNMENT)

    @property
    def ids(self) -> int:
        """Byte at which the ids begin: int32, experts of this rank from 0, and -1 for a route to another rank."""
        return self.max_tokens * self.row_bytes

    @property
    def results(self) -> int:
        """Byte at which the results begin: BF16, the results of all ranks' experts for this rank's tokens."""
        return align(self.ids + self.slots * self.topk * WORD_BYTES, ADDRESS_ALIGNMENT)

    @property
    def flags(self) -> int:
        """Byte at which the flags begin: uint32, the epoch that each rank has reached, for each way."""
        return self.results + self.max_tokens * self.topk * self.hidden * BF16_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole room."""
        return self.flags + len(Way) * MAX_RANKS * WORD_BYTES

    def why_impossible(self) -> str | None:
        """Return the reason why such a room is impossible; None if it is possible."""
        if self.ranks > MAX_RANKS:
            return f"expected at most {MAX_RANKS} processes, all of one node, got {self.ranks}"
        if self.row_bytes > MAX_ROW_BYTES:
            return f"expected rows of at most {MAX_ROW_BYTES} bytes, got {self.row_bytes} for hidden = {self.hidden}"
        return None


@dataclass(frozen=True, eq=False)
class Node:
    """A rank of a node, with the addresses at which its GPU reaches the rooms of all ranks."""

    room: Room
    addresses: tuple[int, ...]
    rank: int
    state: Tensor
    """int32 `[STATE_WORDS]` on the GPU, zeros before the first call."""
    experts: int
    """Experts on each rank."""
    report: Tensor
    """int32 `[1]` in host memory that the GPU can write: 1 + the rank that did not arrive, or 0."""
    limit: int
    """The limit of a wait, in nanoseconds."""
    counts: Tensor
    """int32, zeros between calls: tasks and blocks of across/rows_twice.py."""

    def meeting(self, way: Way) -> dict[str, Any]:
        """Return the values of the struct `Meeting` within a kernel's parameters, by member."""
        return {
            "meeting.rooms": self.addresses,
            "meeting.flags": self.room.flags + way.value * MAX_RANKS * WORD_BYTES,
            "meeting.limit": self.limit,
            "meeting.reached": self.state.data_ptr() + way.value * 2 * WORD_BYTES,
            "meeting.error": self.state.data_ptr() + ERROR_WORD * WORD_BYTES,
            "meeting.report": self.report.data_ptr(),
            "meeting.rank": self.rank,
            "meeting.ranks": self.room.ranks,
        }


def alone(memory: Tensor) -> dict[str, Any]:
    """Return the values of `Meeting` for a kernel that meets no other rank and reads only `memory`."""
    return {**_nobody(), "meeting.rooms": (memory,)}


@cache
def _nobody() -> dict[str, Any]:
    of_meeting = Params.of_source('#include "meeting.cuh"\n', "Meeting", {"kMaxRanks": MAX_RANKS})
    return {f"meeting.{field.name}": b"" if field.is_bytes else 0 for field in of_meeting.fields}
