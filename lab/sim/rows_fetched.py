"""Both products of experts' rows by one kernel that fetches the rows from rooms, in the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_gemm.across import rows_twice
from deep_gemm.core.meeting import ERROR_WORD, STATE_WORDS, Node, Room
from deep_gemm.gemm import launch
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.problem import Problem
from deep_gemm.moe.check import ExpertRows

from .launcher import Stage
from .library import HostKernel
from .rows import CANARY
from .rows_twice import RowsTwiceTrial

POISON = 0xA5


@dataclass(frozen=True)
class RowsFetchedTrial(RowsTwiceTrial):
    """The same with rows in the rooms of two ranks. A token may have several rows."""

    topk: int = 3
    is_met: bool = True
    """False: this rank has missed another one, so that it may read no room, and results go nowhere."""

    @classmethod
    def takes(cls, config: GemmConfig) -> bool:
        """Take two products of rows that the kernel fetches."""
        return config.work.fetches_rows

    def room(self) -> Room:
        """Give the room of each rank, for more tokens than there are."""
        return Room(2, -(-sum(self.sizes) // (2 * (self.topk - 1))) + 1, self.hidden, self.topk)

    def most_rows(self) -> int:
        """Give the rows that there may be: one for each route of the rooms."""
        return self.room().slots * self.topk

    def results(self, kernel: HostKernel | None) -> tuple[torch.Tensor, float]:
        """Give the results of all rows, and the largest error of the middle and the results, if it is known."""
        first, second = self.problems()
        used, hidden, room = sum(self.sizes), self.hidden, self.room()
        routes = torch.randperm(room.slots * self.topk, generator=torch.Generator().manual_seed(self.seed))[:used]
        tokens = routes // self.topk
        first = self.of_tokens(first, tokens)
        token_of = torch.full((room.slots * self.topk,), -1, dtype=torch.int32)
        row_of = torch.full((room.slots, self.topk), -1, dtype=torch.int32)
        token_of[:used], row_of.view(-1)[routes] = tokens.int(), torch.arange(used, dtype=torch.int32)
        slots = first.d.shape[0] // rows_twice.BLOCK_M
        ring, state = rows_twice.ring(slots, hidden, first.a), torch.zeros(STATE_WORDS, dtype=torch.int32)
        state[ERROR_WORD] = 0 if self.is_met else 2
        read = {"b": first.b, "sfb": first.sfb, "c": first.c, "token_of": token_of, "row_of": row_of, "state": state}
        read |= {"b of second": second.b, "sfb of second": second.sfb}
        written = {
            **{"a": ring[0], "sfa": ring[1], "d": first.d, "scales": first.scales},
            "addresses": torch.full((len(token_of),), -1, dtype=torch.int64),
            "counts": torch.zeros(rows_twice.counts_for(len(token_of), len(self.sizes)), dtype=torch.int32),
            **{f"room {rank}": self.memory(room, rank, first, tokens) for rank in range(2)},
        }
        aligned = dict.fromkeys(("b", "b of second", *written), 16)
        stage = Stage(self.config, read, written, aligned, ready=(*read, *written), ranks={"room 1": 1}, **self.how)
        at = stage.at
        rooms = tuple(at[f"room {rank}"].data_ptr() for rank in range(2))
        node = Node(room, rooms, 0, at["state"], len(self.sizes), at["state"], 1 << 20, at["counts"])
        rows = ExpertRows(at["c"], at["c"], at["row_of"], at["token_of"], at["token_of"])
        placed = launch.prepared(stage.placed(first), self.config)
        of_second = second._replace(
            a=at["d"], sfa=at["scales"], b=at["b of second"], sfb=at["sfb of second"], c=at["c"], d=at["addresses"]
        )
        places = rows_twice.rooms_of(node, rows, placed, at["addresses"])
        with stage.launches({FP8_GEMM: kernel}):
            ctas = stage.num_sms + self.late_ctas
            rows_twice.start(placed, of_second, self.config, at["counts"], self.lag, ctas, self.share, places)
        result = stage.result()
        found = torch.cat([self.in_room(room, result.buffers[f"room {rank}"]) for rank in range(2)])
        is_used = torch.zeros(len(found), dtype=torch.bool)
        is_used[routes] = self.is_met
        if not bool((found[~is_used] == CANARY).all()):
            raise ValueError("results: something lies where nothing goes")
        if not self.is_met:
            return found[:0], 0.0
        d = torch.full((first.m, hidden), CANARY, dtype=torch.bfloat16)
        d[:used] = found[routes]
        return d, self.compared(first, second._replace(d=torch.zeros(first.m, dtype=torch.int64)), result, d)

    @staticmethod
    def of_tokens(first: Problem, tokens: torch.Tensor) -> Problem:
        """Give rows of the same token the same values."""
        same = (tokens[:, None] == tokens[None]).int().argmax(dim=1)
        a, sfa = first.a.clone(), first.sfa.clone()
        a.view(torch.uint8)[: len(same)] = first.a.view(torch.uint8)[same]
        sfa[: len(same)] = first.sfa[same]
        return first._replace(a=a, sfa=sfa)

    @staticmethod
    def memory(room: Room, rank: int, first: Problem, tokens: torch.Tensor) -> torch.Tensor:
        """Fill a rank's room: rows of its tokens, and no results."""
        memory = torch.full((room.num_bytes,), POISON, dtype=torch.uint8)
        rows = memory[: room.ids].view(room.max_tokens, room.row_bytes)
        values, scales = first.a.view(torch.uint8), first.sfa.contiguous().view(torch.uint8)
        for row, token in enumerate(tokens.tolist()):
            if token // room.max_tokens == rank:
                to = rows[token % room.max_tokens]
                to[: room.scales], to[room.scales : room.weights] = values[row], scales[row]
        RowsFetchedTrial.in_room(room, memory).fill_(CANARY)
        return memory

    @staticmethod
    def in_room(room: Room, memory: torch.Tensor) -> torch.Tensor:
        """Give the results of a rank's routes."""
        return memory[room.results : room.flags].view(torch.bfloat16).view(-1, room.hidden)
