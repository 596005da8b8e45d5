"""The kernel that fetches experts' rows and computes both of their products, in the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_gemm.across import rows_twice
from deep_gemm.casts.fp8 import per_block_cast_to_fp8
from deep_gemm.casts.lay_scales import mn_major
from deep_gemm.core.meeting import ERROR_WORD, STATE_WORDS, Node, Room
from deep_gemm.gemm import launch
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.problem import Problem
from deep_gemm.moe.check import ExpertRows

from ..silu import checked
from .launcher import Stage
from .library import HostKernel
from .product import depth, draws, outcome, right_and_allowed, sizes
from .rows import CANARY
from .rows_silu import random_problem
from .rows_silu import room as room_of
from .simulate import Result
from .trial import Trial

POISON = 0xA5


@dataclass(frozen=True)
class RowsTwiceTrial(Trial):
    """One layout of rows, whose tokens are in the rooms of this rank and a peer. A token may have several rows."""

    kernel = FP8_GEMM
    config: GemmConfig
    sizes: tuple[int, ...] = (2, 0, 1)
    seed: int = 0
    schedule: str | None = None
    hidden: int = 256
    intermediate: int = 256
    lag: int = 0
    share: float = 0.5
    """The largest fraction of the CTAs in the first role."""
    slots: int | None = None
    """The most blocks of rows that the ring holds; None: each block has its own slot."""
    late_ctas: int = 0
    """Number of the grid's CTAs that start only when other CTAs have ended."""
    limit: float | None = None
    topk: int = 3
    is_met: bool = True
    """False: another rank did not come in time, so this rank may read no room, and results go nowhere."""

    @classmethod
    def takes(cls, config: GemmConfig) -> bool:
        """Tell whether the configuration computes both products in one kernel."""
        return config.work.is_twice

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> RowsTwiceTrial:
        """Draw groups, depths and a lag."""
        draw = draws(config, seed)
        slots = draw.choice((None, 1))
        of_groups = tuple(sizes(draw, draw.randint(1, 4), config.block_m + 70))
        return cls(
            config,
            of_groups if any(of_groups) else (1,),
            seed,
            hidden=128 * config.run_k_blocks * draw.randint(1, 2) if config.run_k_blocks > 1 else depth(draw, config),
            intermediate=128 * config.run_k_blocks * draw.randint(1, 2),
            lag=draw.randint(0, 8),
            share=draw.choice((0.0, 0.5, 1.0)),
            slots=slots,
            late_ctas=draw.randint(0, 2) if slots is None else 0,
            limit=draw.choice((None, 0.5)),
            num_sms=draw.randint(1 if slots is None else 2, 4),
        )

    @property
    def room(self) -> Room:
        """Return the layout of each rank's room. It has space for more routes than there are rows."""
        return Room(2, -(-sum(self.sizes) // (2 * (self.topk - 1))) + 1, self.hidden, self.topk)

    def problems(self) -> tuple[Problem, Problem]:
        """Draw the operands of both products; rows are in the order of experts."""
        apart = self.config.epilogue.gates_apart
        rows: Any = {"limit": self.limit, "has_weights": not apart, "gates_apart": apart}
        first = random_problem(self.sizes, 2 * self.intermediate, self.hidden, self.seed, **rows)
        generator = torch.Generator().manual_seed(self.seed)
        w2 = torch.randn(len(self.sizes), self.hidden, self.intermediate, generator=generator, dtype=torch.float32)
        most = self.room.slots * self.topk
        slots = rows_twice.slots_for(most, len(self.sizes), self.slots, self.config.raster_group)
        middle = rows_twice.ring(slots, self.intermediate, first.a, self.config.columns_of_a)
        operands = (first.a, first.sfa), (first.b, first.sfb), middle, per_block_cast_to_fp8(w2), first.c
        of_second = rows_twice.problems(self.config, *operands, torch.zeros(first.m, dtype=torch.int64), self.limit)[1]
        return first._replace(d=middle[0], scales=middle[1]), of_second

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare results with the CPU's, or bit for bit with the results of a ring whose slots are used once."""
        if self.slots is None:
            return self.results(kernel)[1]
        right, found = replace(self, slots=None).results(None)[0], self.results(kernel)[0]
        if not torch.equal(right.view(torch.int16), found.view(torch.int16)):
            raise ValueError(f"results: expected the bits of a larger ring in {right.shape[0]} rows, got others")
        return 0.0

    def results(self, kernel: HostKernel | None) -> tuple[torch.Tensor, float]:
        """Return the results of all rows, and the largest error of the middle and the results, if it is known."""
        first, second = self.problems()
        used, room = sum(self.sizes), self.room
        routes = torch.randperm(room.slots * self.topk, generator=torch.Generator().manual_seed(self.seed))[:used]
        tokens = routes // self.topk
        first = self.of_tokens(first, tokens)
        weights = None if first.row_weights is None else torch.full((first.d.shape[0],), torch.nan, dtype=torch.float32)
        token_of = torch.full((room.slots * self.topk,), -1, dtype=torch.int32)
        row_of = torch.full((room.slots, self.topk), -1, dtype=torch.int32)
        token_of[:used], row_of.view(-1)[routes] = tokens.int(), torch.arange(used, dtype=torch.int32)
        if not self.is_met:  # a late rank may change ids while rows get tokens
            token_of.fill_(-1)
        slots = first.d.shape[0] // rows_twice.BLOCK_M
        ring, state = rows_twice.ring(slots, self.hidden, first.a), torch.zeros(STATE_WORDS, dtype=torch.int32)
        state[ERROR_WORD] = 0 if self.is_met else 2
        read = {"b": first.b, "sfb": first.sfb, "c": first.c, "token_of": token_of, "row_of": row_of, "state": state}
        read |= {"b of second": second.b, "sfb of second": second.sfb}
        written = {} if weights is None else {"row_weights": weights}
        written |= {
            **{"a": ring[0], "sfa": ring[1], "d": first.d, "scales": first.scales},
            "addresses": torch.full((len(token_of),), -1, dtype=torch.int64),
            "counts": torch.zeros(rows_twice.counts_for(len(token_of), len(self.sizes)), dtype=torch.int32),
            **{f"room {rank}": self.memory(rank, first, routes) for rank in range(2)},
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
        found = torch.cat([self.in_room(result.buffers[f"room {rank}"]) for rank in range(2)])
        is_used = torch.zeros(len(found), dtype=torch.bool)
        is_used[routes] = self.is_met
        if not bool((found[~is_used] == CANARY).all()):
            raise ValueError("results: something lies where nothing goes")
        if bool(result.buffers["counts"].any()):
            raise ValueError(f"counts: expected zeros afterwards, got {result.buffers['counts'].tolist()}")
        if not self.is_met:
            return found[:0], 0.0
        d = torch.full((first.m, self.hidden), CANARY, dtype=torch.bfloat16)
        d[:used] = found[routes]
        return d, 0.0 if self.slots is not None else self.compared(first, second, result, d)

    def compared(self, first: Problem, second: Problem, result: Result, d: torch.Tensor) -> float:
        """Return the largest error of the middle and of `d`, if each block has its own slot."""
        middle = room_of(first.m, first.n, first.epilogue.gates_apart)
        of_rows = self.rows_of_ring()
        middle[0].view(torch.uint8)[: len(of_rows)] = result.buffers["d"].view(torch.uint8)[of_rows]
        middle[1][: len(of_rows)] = result.buffers["scales"][of_rows]
        worst = checked(first._replace(d=middle[0], scales=middle[1]), middle, self.device)
        expected = second._replace(a=middle[0], sfa=mn_major(middle[1]), d=torch.full_like(d, CANARY))
        result.buffers["d"] = d
        return max(worst, outcome(result, *right_and_allowed(expected, self.how)).checked().worst)

    def rows_of_ring(self) -> torch.Tensor:
        """Return the row of the middle for each row, if each block has its own slot."""
        if not any(self.sizes):
            return torch.empty(0, dtype=torch.int64)
        blocks = [min(128, rows - first) for rows in self.sizes for first in range(0, rows, 128)]
        return torch.cat([torch.arange(rows) + 128 * block for block, rows in enumerate(blocks)])

    @staticmethod
    def of_tokens(first: Problem, tokens: torch.Tensor) -> Problem:
        """Give rows of the same token the same values."""
        same = (tokens[:, None] == tokens[None]).int().argmax(dim=1) if len(tokens) else tokens
        a, sfa = first.a.clone(), first.sfa.clone()
        a.view(torch.uint8)[: len(same)] = first.a.view(torch.uint8)[same]
        sfa[: len(same)] = first.sfa[same]
        return first._replace(a=a, sfa=sfa)

    def memory(self, rank: int, first: Problem, routes: torch.Tensor) -> torch.Tensor:
        """Fill a rank's room: rows of its tokens, weights of their routes, and no results."""
        room, memory = self.room, torch.full((self.room.num_bytes,), POISON, dtype=torch.uint8)
        rows = memory[: room.ids].view(room.max_tokens, room.row_bytes)
        values, scales = first.a.view(torch.uint8), first.sfa.contiguous().view(torch.uint8)
        for row, (token, route) in enumerate(divmod(each, self.topk) for each in routes.tolist()):
            if token // room.max_tokens == rank:
                to = rows[token % room.max_tokens]
                to[: room.scales], to[room.scales : room.weights] = values[row], scales[row]
                if first.row_weights is not None:
                    to[room.weights :].view(torch.float32)[route] = first.row_weights[row]
        self.in_room(memory).fill_(CANARY)
        return memory

    def in_room(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the results of a rank's routes."""
        return memory[self.room.results : self.room.flags].view(torch.bfloat16).view(-1, self.hidden)
