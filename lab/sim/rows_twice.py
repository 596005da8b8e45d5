"""Both products of experts' rows by one kernel in the simulator: source and parameters are a GPU's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_gemm.across import rows_twice
from deep_gemm.casts.fp8 import per_block_cast_to_fp8
from deep_gemm.casts.lay_scales import mn_major
from deep_gemm.gemm import launch
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM
from deep_gemm.gemm.problem import Problem

from ..silu import checked
from .launcher import Stage
from .library import HostKernel
from .product import depth, draws, outcome, right_and_allowed, sizes
from .rows import CANARY
from .rows_silu import random_problem, room
from .simulate import Result
from .trial import Trial

OPERANDS = "a", "sfa", "b", "sfb", "c", "d", "scales"


@dataclass(frozen=True)
class RowsTwiceTrial(Trial):
    """One layout of rows. Results of all rows lie in this rank's memory and a peer's by turns, in another order."""

    kernel = FP8_GEMM
    config: GemmConfig
    sizes: tuple[int, ...] = (2, 0, 1)
    seed: int = 0
    schedule: str | None = None
    hidden: int = 256
    intermediate: int = 256
    lag: int = 0
    share: float = 0.5
    slots: int | None = None
    """Blocks of the ring at most; None: as many as blocks of rows, so that no slot is used again."""
    late_ctas: int = 0
    """CTAs of the grid that start when others have ended."""
    limit: float | None = None

    @classmethod
    def takes(cls, config: GemmConfig) -> bool:
        """Take two products of rows that lie in A."""
        return config.work.is_twice and not config.work.fetches_rows

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> RowsTwiceTrial:
        """Draw groups, depths and a lag."""
        draw = draws(config, seed)
        slots = draw.choice((None, 1))
        return cls(
            config,
            tuple(sizes(draw, draw.randint(1, 4), config.block_m + 70)),
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

    def problems(self) -> tuple[Problem, Problem]:
        """Draw the operands; results are to lie one behind another, with room for 8 columns between rows."""
        rows: Any = {"limit": self.limit, "has_weights": False, "gates_apart": True}
        first = random_problem(self.sizes, 2 * self.intermediate, self.hidden, self.seed, **rows)
        generator = torch.Generator().manual_seed(self.seed)
        w2 = torch.randn(len(self.sizes), self.hidden, self.intermediate, generator=generator, dtype=torch.float32)
        slots = rows_twice.slots_for(self.most_rows(), len(self.sizes), self.slots, self.config.raster_group)
        middle = rows_twice.ring(slots, self.intermediate, first.a)
        operands = (first.a, first.sfa), (first.b, first.sfb), middle, per_block_cast_to_fp8(w2), first.c
        return rows_twice.problems(*operands, torch.zeros(first.m, dtype=torch.int64), self.limit)

    def most_rows(self) -> int:
        """Give the rows that there may be."""
        return sum(self.sizes)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare results with the CPU's, or with the bits of a ring in which no slot is used again."""
        if self.slots is None:
            return self.results(kernel)[1]
        right, found = replace(self, slots=None).results(None)[0], self.results(kernel)[0]
        if not torch.equal(right.view(torch.int16), found.view(torch.int16)):
            raise ValueError(f"results: expected the bits of a larger ring in {right.shape[0]} rows, got others")
        return 0.0

    def results(self, kernel: HostKernel | None) -> tuple[torch.Tensor, float]:
        """Give the results of all rows, and the largest error of the middle and the results, if it is known."""
        first, second = (launch.prepared(p, self.config) for p in self.problems())
        generator = torch.Generator().manual_seed(self.seed)
        place = torch.randperm(first.m, generator=generator)
        on_peer = torch.rand(first.m, generator=generator, dtype=torch.float32) < 0.5
        results = torch.full((first.m, second.n + 8), CANARY, dtype=torch.bfloat16)
        counts = torch.zeros(rows_twice.counts_for(first.m, len(self.sizes)), dtype=torch.int32)
        read = {name: getattr(first, name) for name in ("a", "sfa", "b", "sfb", "c")}
        read |= {"b of second": second.b, "sfb of second": second.sfb, "addresses": second.d}
        written = {"d": first.d, "scales": first.scales, "here": results, "there": results, "counts": counts}
        aligned = dict.fromkeys(("a", "sfa", "b", "b of second", "d", "scales", "here", "there", "counts"), 16)
        stage = Stage(self.config, read, written, aligned, ready=(*read, *written), ranks={"there": 1}, **self.how)
        at = stage.at
        rooms = [torch.tensor(at[name].data_ptr(), dtype=torch.int64) for name in ("here", "there")]
        at["addresses"].copy_(torch.where(on_peer, rooms[1], rooms[0]) + place * results.stride(0) * 2)
        placed = (
            stage.placed(first),
            second._replace(
                a=at["d"], sfa=at["scales"], b=at["b of second"], sfb=at["sfb of second"], c=at["c"], d=at["addresses"]
            ),
        )
        with stage.launches({FP8_GEMM: kernel}):
            ctas = stage.num_sms + self.late_ctas
            rows_twice.start(*placed, self.config, at["counts"], self.lag, ctas, self.share)
        result = stage.result()
        found = [result.buffers[name] for name in ("here", "there")]
        for rank, each in enumerate(found):
            is_used = torch.zeros(first.m, dtype=torch.bool)
            is_used[place[on_peer if rank else ~on_peer]] = True
            if not bool((each[:, second.n :] == CANARY).all()) or not bool((each[~is_used] == CANARY).all()):
                raise ValueError(f"results on rank {rank}: something lies where nothing goes")
        d = torch.where(on_peer[:, None], found[1][place, : second.n], found[0][place, : second.n])
        return d, self.compared(first, second, result, d)

    def compared(self, first: Problem, second: Problem, result: Result, d: torch.Tensor) -> float:
        """Give the largest error of the middle and of `d`, if each block has a slot of its own."""
        if bool(result.buffers["counts"].any()):
            raise ValueError(f"counts: expected zeros afterwards, got {result.buffers['counts'].tolist()}")
        if self.slots is not None:
            return 0.0
        middle = room(first.m, first.n, gates_apart=True)
        of_rows = self.rows_of_ring()
        middle[0].view(torch.uint8)[: len(of_rows)] = result.buffers["d"].view(torch.uint8)[of_rows]
        middle[1][: len(of_rows)] = result.buffers["scales"][of_rows]
        worst = checked(first._replace(d=middle[0], scales=middle[1]), middle, self.device)
        expected = second._replace(a=middle[0], sfa=mn_major(middle[1]), d=torch.full_like(d, CANARY))
        result.buffers["d"] = d
        return max(worst, outcome(result, *right_and_allowed(expected, self.how)).checked().worst)

    def rows_of_ring(self) -> torch.Tensor:
        """Give the row of the middle for each row, if each block has a slot."""
        blocks = [min(128, rows - first) for rows in self.sizes for first in range(0, rows, 128)]
        return torch.cat([torch.arange(rows) + 128 * block for block, rows in enumerate(blocks)])
