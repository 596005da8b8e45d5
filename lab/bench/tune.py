"""Tests whether the chosen tile is the fastest: every promising tile is timed too, cold, in rotating order.

The first of two rounds times every tile whose modelled cost is near the lowest, with a few calls each. The second
round times the best tiles and the chosen tile again, with more calls. Only its times decide: luck cannot win.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import torch

from deep_gemm.casts.by_torch import cast_blocks
from deep_gemm.casts.fp4 import per_token_cast_to_fp4
from deep_gemm.casts.fp8 import per_token_cast_to_fp8
from deep_gemm.casts.rules import Target
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.recipes import E2M1, PER_BLOCK, PER_ROW, WHOLE
from deep_gemm.core.gpu import Gpu
from deep_gemm.core.settings import get_batch_invariant
from deep_gemm.gemm import launch as dense
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.choose.cost import Estimate
from deep_gemm.gemm.choose.fp8 import chosen_tile
from deep_gemm.gemm.choose.tiles import Tile
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import BLOCK_K, GemmConfig
from deep_gemm.gemm.explain import Question
from deep_gemm.gemm.kernel import kernel_of
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.problem import Problem

from .cases import Case
from .timing import L2Flush, Spread, cold

FIRST_REPEATS, REPEATS = 5, 11
HOPEFUL = 1.6
"""A tile is timed if its modelled cost is up to this multiple of the lowest."""
FINALISTS = 4


@dataclass(frozen=True)
class Contest:
    """A dense product, and the tiles to time for it, the chosen tile first."""

    case: Case
    output: Output
    entrants: tuple[Estimate, ...]

    @classmethod
    def of(cls, case: Case, output: Output, gpu: Gpu) -> Contest:
        """Enter the chosen tile, and all tiles that may be faster."""
        m, n, k = case.shape
        split_k = not get_batch_invariant()
        able = [
            one
            for one in Question(m, n, k, output, 1, gpu).candidates()
            if one.why_not is None and (split_k or one.tile.cluster_k == 1)
        ]
        chosen = chosen_tile(Sizes(m, n, k), output, gpu, split_k=split_k)
        entrants = [one for one in able if one.tile == chosen or one.cost_us <= HOPEFUL * able[0].cost_us]
        return cls(case, output, tuple(sorted(entrants, key=lambda one: one.tile != chosen)))


@dataclass(frozen=True)
class Time:
    """The measured time of one tile."""

    tile: Tile
    config: str
    spread: Spread


@dataclass(frozen=True)
class Judgement:
    """The times of a contest's last round."""

    contest: Contest
    chosen: Time
    rivals: tuple[Time, ...]

    @property
    def best(self) -> Time:
        """Return the fastest tile, which may be the chosen tile."""
        return min((self.chosen, *self.rivals), key=lambda time: time.spread.us)

    @property
    def ratio(self) -> float:
        """Return the chosen tile's time divided by the best tile's."""
        return self.chosen.spread.us / self.best.spread.us


def configurations(contests: Iterable[Contest]) -> list[GemmConfig | DecodeConfig]:
    """List all configurations that the contests need, each once."""
    return list(dict.fromkeys(entrant.config for contest in contests for entrant in contest.entrants))


def compile_all(configs: Sequence[GemmConfig | DecodeConfig], announce: Callable[[str], None]) -> None:
    """Compile these configurations on all processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in as_completed([pool.submit(build, config) for config in configs]):
            done.result()
            announce("compiling")


def build(config: GemmConfig | DecodeConfig) -> None:
    """Compile a configuration, or load it from the cache."""
    kernel_of(config).build(config)


def judge(contest: Contest, flush: L2Flush) -> Judgement:
    """Time the contest's tiles with new operands, which are freed afterwards."""
    p = random_problem(contest.case.shape, contest.output)

    def times(entrants: Sequence[Estimate], repeats: int) -> list[Time]:
        timed = cold({one.config.name: partial(dense.run, p, one.config) for one in entrants}, flush, repeats)
        return [Time(one.tile, one.config.name, timed[one.config.name][0]) for one in entrants]

    chosen, *rivals = contest.entrants
    if len(rivals) > FINALISTS:
        first = {time.tile: time.spread.us for time in times(contest.entrants, FIRST_REPEATS)}
        rivals = sorted(rivals, key=lambda one: first[one.tile])[:FINALISTS]
    of_chosen, *of_rivals = times([chosen, *rivals], REPEATS)
    return Judgement(contest, of_chosen, tuple(of_rivals))


def random_problem(shape: Sequence[int], output: Output, device: str = "cuda") -> Problem:
    """Make a dense product of random numbers; fine scales of B fold, as the scales of checkpoints do."""
    m, n, k = shape
    with torch.device(device):
        x, w = (torch.randn(rows, k, dtype=torch.bfloat16) for rows in (m, n))
        of_a, of_b = output.sfa or PER_ROW, output.sfb or PER_BLOCK
        a, sfa = per_token_cast_to_fp8(x, gran_k=of_a.columns or BLOCK_K)
        if output.sfa == WHOLE:
            (a, sfa), (b, sfb) = (cast_blocks(each.float(), Target(1, k)) for each in (x, w))
        elif output.b == E2M1:
            b, sfb = per_token_cast_to_fp4(w, use_ue8m0=True, gran_k=of_b.columns, use_packed_ue8m0=True)
        else:
            b, sfb = cast_blocks(w, Target(*of_b, use_ue8m0=output.scale_parts_of_b > 1))
            b = b.to(output.b.dtype)
        if output.loads_sfb:
            sfb = get_mn_major_tma_aligned_tensor(sfb)
        d = torch.randn(m, n, dtype=torch.float32).to(torch.float32 if output.is_fp32 else torch.bfloat16)
        c = d if output.adds_to_d else torch.randn_like(d) if output.with_c else None
        c = torch.randn(n, dtype=torch.float32) if output.c_is_fp32 else c
    return dense_problem((a, get_mn_major_tma_aligned_tensor(sfa)), (b, sfb), d, c, recipes=(None, of_a, of_b))
