"""Run the ranks of a group as threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fake_gpu import Launch
from torch import Tensor

from deep_gemm.across import by_group


class Ranks:
    """Runs ranks as threads of this process, and replaces their collectives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
        self.world, self.own = world, threading.local()
        self.meeting, self.sent = threading.Barrier(world, timeout=60), [()] * world
        self.own.rank = 0  # this thread's rank, if no other rank runs
        monkeypatch.setattr(torch.distributed, "get_rank", lambda _=None: self.own.rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda _=None: world)
        monkeypatch.setattr(by_group, "all_gather", self.all_gather)
        monkeypatch.setattr(by_group, "all_to_all", self.all_to_all)

    def run(self, call: Callable[[int], None]) -> None:
        def of_rank(rank: int) -> None:
            self.own.rank = rank
            call(rank)

        with ThreadPoolExecutor(self.world) as pool:
            for each in [pool.submit(of_rank, rank) for rank in range(self.world)]:
                each.result()

    def counted(self, launches: list[Launch], call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        """Call on all ranks at once; return this rank's result, and the launches of one rank if all launch the same."""
        self.meeting.wait()
        launches.clear()
        self.meeting.wait()
        got = call()
        self.meeting.wait()
        of_one = {name: n / self.world for name, n in Counter(each.kernel for each in launches).items()}
        self.meeting.wait()
        return got, of_one

    def _exchanged(self, *sent: Any) -> list[Any]:
        self.sent[self.own.rank] = sent
        self.meeting.wait()
        of_all = [*self.sent]
        self.meeting.wait()
        return of_all

    def all_gather(self, received: Tensor, sent: Tensor, group: Any = None) -> None:
        received.copy_(torch.cat([each for (each,) in self._exchanged(sent.clone())]))

    def all_to_all(self, received: Tensor, sent: Tensor, receives: Any, sends: Any, group: Any) -> None:
        each = [len(sent) // self.world] * self.world
        sends, receives = sends or each, receives or each
        assert len(sent) == sum(sends) and len(received) == sum(receives)
        of_all = self._exchanged(sent.clone(), sends)
        received.copy_(torch.cat([rows.split(parts)[self.own.rank] for rows, parts in of_all]))
