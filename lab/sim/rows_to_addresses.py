"""Grouped rows whose results go to addresses, in the simulator: to this rank's memory and to a peer's, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm import launch
from deep_gemm.gemm.config.tall import BLOCK_K, GemmConfig
from deep_gemm.gemm.kernel import BF16_GEMM, FP8_GEMM, kernel_of
from deep_gemm.gemm.kinds.epilogues import TO_ADDRESSES
from deep_gemm.gemm.problem import Problem

from . import bf16_rows
from .launcher import How, Stage, is_on_gpu
from .library import HostKernel
from .product import Outcome, ids_of, outcome, right_and_allowed
from .rows import CANARY, random_problem
from .trial import Trial


def run(kernel: HostKernel | None, config: GemmConfig, problem: Problem, **how: Unpack[How]) -> Outcome:
    """Compute a product, and gather the rows from their addresses. One row of eight has no address."""
    p = launch.prepared(problem._replace(epilogue=TO_ADDRESSES), config)
    rows, n = problem.d.shape
    generator = torch.Generator().manual_seed(how.get("seed", 0))
    place = torch.randperm(rows, generator=generator)
    on_peer, nowhere = (torch.rand(rows, generator=generator, dtype=torch.float32) < part for part in (0.5, 0.125))
    results = torch.full((rows, n + 8), CANARY, dtype=torch.bfloat16)
    scales = {} if p.sfa is None else {"sfa": p.sfa, "sfb": p.sfb}
    read = {"a": p.a, "b": p.b, **scales, "c": p.c, "d": torch.zeros(rows, dtype=torch.int64)}
    written, aligned = {"here": results, "there": results}, dict.fromkeys(("a", "b", "sfa", "c", "here", "there"), 16)
    stage = Stage(config, read, written, aligned, ready=(*read, *written), ranks={"there": 1}, **how)
    rooms = [torch.tensor(stage.at[name].data_ptr(), dtype=torch.int64) for name in written]
    addresses = torch.where(on_peer, rooms[1], rooms[0]) + place * results.stride(0) * 2
    placed = stage.placed(p)
    placed.d.copy_(addresses.masked_fill(nowhere, 0))
    with stage.launches({kernel_of(config): kernel}):
        launch.start(placed, config, stage.num_sms)
    result = stage.result()
    found = [result.buffers[name] for name in written]
    _check_untouched(found, place, on_peer, n)
    pieces = int((on_peer & ~nowhere & (ids_of(problem) >= 0)).sum()) * n // 8
    if result.to_peers != pieces and not is_on_gpu(how):  # only the simulator counts
        raise ValueError(
            f"expected each row stored once, {pieces} pieces of 16 bytes to the peer, got {result.to_peers}"
        )
    d = torch.where(on_peer[:, None], found[1][place, :n], found[0][place, :n])
    right, allowed = right_and_allowed(problem, how)
    right[nowhere], allowed[nowhere] = CANARY, torch.finfo(allowed.dtype).tiny
    result.buffers["d"] = d
    return outcome(result, right, allowed)


def _check_untouched(found: list[Tensor], place: Tensor, on_peer: Tensor, n: int) -> None:
    """Raise an error if anything was written behind a row's columns, or at a place without a row."""
    for rank, results in enumerate(found):
        places = place[on_peer if rank else ~on_peer]
        is_used = torch.zeros(len(results), dtype=torch.bool)
        is_used[places] = True
        if not bool((results[:, n:] == CANARY).all()) or not bool((results[~is_used] == CANARY).all()):
            raise ValueError(f"results on rank {rank}: something lies where nothing goes")


@dataclass(frozen=True)
class AddressesTrial(Trial):
    """One configuration, sizes of groups, and rows without a group behind them."""

    kernel: ClassVar[Kernel[Any]] = FP8_GEMM
    config: Any
    n: int
    k: int
    seed: int = 0
    schedule: str | None = None
    sizes: tuple[int, ...] = (70, 0, 3, 129, 1)
    behind: int = 130
    any_scales: bool = False
    """Scales of FP4 weights that do not always fold."""

    @classmethod
    def takes(cls, config: GemmConfig) -> bool:
        """Accept products whose rows go to addresses."""
        return config.epilogue.has_row_addresses and not config.work.is_twice

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> AddressesTrial:
        """Draw groups, n and k."""
        draw = random.Random(seed)
        run = config.run_k_blocks
        blocks = draw.randint(1, 3) if config.has_tail or run == 1 else run
        sizes = tuple(draw.choice((0, 1, 65, 129, draw.randint(1, 100))) for _ in range(draw.randint(1, 3)))
        n = 8 * draw.randint(1, config.block_n // 8 + 4)
        behind, any_scales = draw.randint(1, 40), config.converts_b and draw.random() < 0.5
        return cls(config, n, blocks * BLOCK_K, seed, sizes=sizes, behind=behind, any_scales=any_scales)

    def problem(self) -> Problem:
        """Draw the operands."""
        of_rows: dict[str, Any] = {"rows": sum(self.sizes) + self.behind, "alignment": 1, "zero_padding": False}
        layout = tuple(accumulate(self.sizes))
        return random_problem(self.config, layout, self.n, self.k, self.seed, any_scales=self.any_scales, **of_rows)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare rows at their addresses with the reference's rows, within the error of rounding."""
        return run(kernel, self.config, self.problem(), **self.how).checked().worst


@dataclass(frozen=True)
class Bf16AddressesTrial(AddressesTrial):
    """The same trial for BF16 operands."""

    kernel = BF16_GEMM

    @classmethod
    def drawn(cls, config: GemmConfig, seed: int) -> AddressesTrial:
        """Draw groups, n and any k."""
        drawn = super().drawn(config, seed)
        return replace(drawn, k=8 * random.Random(seed).randint(1, 24))

    def problem(self) -> Problem:
        """Draw the operands."""
        of_rows: dict[str, Any] = {"rows": sum(self.sizes) + self.behind, "alignment": 1}
        layout = tuple(accumulate(self.sizes))
        return bf16_rows.random_problem(self.config, layout, self.n, self.k, self.seed, **of_rows)
