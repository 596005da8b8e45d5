"""Memory that kernels need besides their operands: room for partial sums, and counters that are zero between launches.

Launches on one stream follow each other, so they share a workspace, which is kept. A launch that a graph captures may
be replayed beside any other: it gets room from the graph's own memory, and counters that nobody else ever gets.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

ARENA_BYTES, COUNTER_BYTES = 1 << 20, 1024
"""Counters of one device, and of one launch at a time."""


class Workspaces:
    """All workspaces of one device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._arena: Tensor | None = None
        self._given = 0
        self._counters: dict[int, int] = {}
        self._rooms: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def of_launch(self, stream: int, room_bytes: int, counter_bytes: int) -> tuple[int, int]:
        """Give the addresses of room and of counters for a launch on a stream, which is the current one."""
        if counter_bytes > COUNTER_BYTES:
            raise ValueError(f"counter_bytes: expected at most {COUNTER_BYTES}, got {counter_bytes}")
        with self._lock:
            if torch.cuda.is_current_stream_capturing():
                return self._empty(room_bytes).data_ptr(), self._new_counters() or self._zeros().data_ptr()
            room = self._rooms.get(stream)
            if room is None or room.numel() < room_bytes:
                room = self._rooms[stream] = self._empty(room_bytes)
            if stream not in self._counters:
                if self._arena is None:
                    self._arena = torch.zeros(ARENA_BYTES, dtype=torch.uint8, device=self._place)
                    torch.cuda.current_stream(self.device).synchronize()  # other streams use it too
                self._counters[stream] = self._new_counters() or self._keep(self._zeros())
            return room.data_ptr(), self._counters[stream]

    @property
    def _place(self) -> torch.device:
        return torch.device("cuda", self.device)

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self._place)

    def _zeros(self) -> Tensor:
        """Counters where there are no others: set to zero by each replay of a graph that captures this."""
        return torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device=self._place)

    def _keep(self, counters: Tensor) -> int:
        self._kept.append(counters)
        return counters.data_ptr()

    def _new_counters(self) -> int | None:
        """Take counters from the arena; None if it does not exist or has no more."""
        if self._arena is None or self._given + COUNTER_BYTES > ARENA_BYTES:
            return None
        address = self._arena.data_ptr() + self._given
        self._given += COUNTER_BYTES
        return address


_DEVICES: dict[int, Workspaces] = {}


def workspaces_of(device: int) -> Workspaces:
    """Give the workspaces of a device."""
    found = _DEVICES.get(device)
    return found if found is not None else _DEVICES.setdefault(device, Workspaces(device))
