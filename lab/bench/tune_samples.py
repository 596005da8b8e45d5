"""List the products that are timed to fit the cost model: real weights and random ones, batches of every size.

Half of the weights are held back: the fit never sees them, and the choices are judged by them. All samples come in an
order in which any beginning has its fair share of everything, so that a run that is cut short is still of use.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deep_gemm.core.check.layout import align
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.config import BLOCK_K
from deep_gemm.gemm.output import Groups, Output
from deep_gemm.gemm.tiles import OUTPUTS_BY_NAME

FITTED_WEIGHTS = (
    (2112, 7168), (576, 7168), (4096, 7168), (7168, 2048), (7168, 16384), (24576, 1536),
    (6144, 4096), (28672, 4096), (10240, 8192), (8192, 28672), (3584, 18944), (4608, 3584),
    (1536, 2048), (2048, 768), (4096, 1024), (5120, 17920), (1280, 5120),
)  # fmt: skip
"""n and k of linear layers in use: hidden sizes 1024 to 8192, intermediate sizes 768 to 28672."""
HELD_BACK_WEIGHTS = (
    (32768, 512), (4096, 4096), (4096, 14336), (28672, 8192), (8192, 8192), (37888, 3584),
    (3584, 3584), (5120, 25600), (10240, 5120), (1024, 3072), (6144, 1024), (2304, 9216),
    (18432, 2304), (4096, 1408), (1280, 8192), (8192, 3584), (7168, 4608),
)  # fmt: skip
RANDOM_WEIGHTS = 17
"""Random weights of each half."""
BATCHES = ((1, 8), (9, 32), (33, 128), (129, 512), (513, 2048), (2049, 8192))
"""Ranges of m. Each weight is taken once with an m of each."""
MOST_OPERATIONS = 1e12
"""Operations of one product, so that the slowest tile takes a millisecond or two."""
OTHER_OUTPUTS = {"fp32": 12, "bf16+c": 6, "fp32+d": 6, "1d1d bf16": 12, "1d1d fp32": 6, "1d1d fp32+d": 24}
"""How many samples there are of each kind of dense product besides BF16."""
FINE_OUTPUTS = {"1x128 32x32 bf16": 24, "1x32 32x32 bf16": 24, "1x64 64x64 bf16": 12, "1x32 1x32 bf16": 24}
"""The same with scales finer than 128x128, of real weights alone."""
GROUPED_ROWS = {
    Output(groups=Groups.IDS): 36,
    Output(groups=Groups.COUNTS): 36,
    Output(sfb=PER_ROW, groups=Groups.IDS): 6,
    Output(sfb=PER_ROW, groups=Groups.COUNTS): 6,
}
GROUPED_DEPTHS = 28
LAUNCH_SIZES = ((1, 64, 128), (64, 64, 128))
"""Products of next to nothing: what a launch takes."""
BANDWIDTH_WEIGHTS = (
    (1024, 1024), (2048, 2048), (4096, 4096), (7168, 4096), (8192, 8192), (16384, 8192), (28672, 8192), (57344, 8192),
)  # fmt: skip
"""1 to 470 MB, read by products of few rows."""
RATE_DEPTHS = (4096, 8192, 16384)
"""Depths of a product that gives each SM one tile: what a block of k takes is the slope."""

PITCHES = (16, 32, 64)
"""Bytes beyond a multiple of 128 from one row to the next."""
PITCH_SIZES = ((100, 4096, 4096), (1000, 4096, 4096), (333, 8192, 2048), (4000, 2048, 4096))
"""Products that are timed with k longer by each of these."""


@dataclass(frozen=True)
class Sample:
    """A product to be timed with each tile that may suit it."""

    output: Output
    m: int
    """Rows of A: of all groups by ids, of the average group by counts."""
    n: int
    k: int
    """Depth; of the average group along k."""
    num_groups: int = 0
    """0: a dense product."""
    is_fitted: bool = True
    """True if the fit may see it; it is judged by the others."""
    purpose: str = "choice"
    """"choice", or the fact of the GPU that it shows: "launch", "bandwidth", "rate", "pitch"."""

    @property
    def name(self) -> str:
        """Short, for people."""
        groups = f"{self.num_groups} groups, " if self.num_groups else ""
        return f"{groups}{self.m}x{self.n}x{self.k} {self.output.name}"

    def sizes(self) -> list[int]:
        """Rows of each group, or depths, at random, the same each time.

        Stacked groups are as uneven as the tokens of experts are; counts are 0.7 to 1.3 times what is expected; depths
        are 0.5 to 1.5 times the average, in whole blocks.
        """
        rng = random.Random(self.name)
        if self.output.groups == Groups.COUNTS:
            return [round(self.m * rng.uniform(0.7, 1.3)) for _ in range(self.num_groups)]
        if self.output.groups == Groups.DEPTHS:
            return [round(self.k * rng.uniform(0.5, 1.5) / BLOCK_K) * BLOCK_K for _ in range(self.num_groups)]
        shares = [rng.expovariate(1) for _ in range(self.num_groups)]
        ends = [0, *(round(self.m * sum(shares[: i + 1]) / sum(shares)) for i in range(self.num_groups))]
        return [end - begin for begin, end in pairwise(ends)]


def samples(num_sms: int) -> list[Sample]:
    """All of them: first those that show facts of the GPU, then the choices."""
    return [*fact_samples(num_sms), *choice_samples()]


def fact_samples(num_sms: int) -> list[Sample]:
    """Products that show what a launch, reading a weight, multiplying, and rows across lines of the L2 take."""
    bf16 = Output()
    high = max(i for i in range(1, num_sms + 1) if num_sms % i == 0 and i * i <= num_sms)  # 11 x 12 tiles for 132 SMs
    rows, columns = 128 * (num_sms // high), 256 * high
    return [
        *(Sample(bf16, *sizes, purpose="launch") for sizes in LAUNCH_SIZES),
        *(Sample(bf16, 8, n, k, purpose="bandwidth") for n, k in BANDWIDTH_WEIGHTS),
        *(Sample(bf16, rows, columns, k, purpose="rate") for k in RATE_DEPTHS),
        *(Sample(bf16, m, n, k + more, purpose="pitch") for m, n, k in PITCH_SIZES for more in PITCHES),
    ]


def choice_samples() -> list[Sample]:
    """Products whose tiles compete, in an order in which each kind has its share of any beginning."""
    rng, rng_fine = random.Random(0), random.Random(1)  # which random weights are fitted stays as it was
    streams: list[Sequence[Sample]] = []
    for is_fitted, real in ((True, FITTED_WEIGHTS), (False, HELD_BACK_WEIGHTS)):
        for weights in (real, tuple(_random_weights(rng, RANDOM_WEIGHTS))):
            streams.append([_dense(rng, Output(), weight, i, is_fitted) for weight, i in _each_batch(weights)])
        for name, count in OTHER_OUTPUTS.items():
            weights = (*real, *_random_weights(rng, RANDOM_WEIGHTS))
            picked = [rng.choice(weights) for _ in range(count // 2)]
            output = OUTPUTS_BY_NAME[name]
            streams.append([_dense(rng, output, weight, i, is_fitted) for i, weight in enumerate(picked)])
        for name, count in FINE_OUTPUTS.items():
            picked = [rng_fine.choice(real) for _ in range(count // 2)]
            output = OUTPUTS_BY_NAME[name]
            streams.append([_dense(rng_fine, output, weight, i, is_fitted) for i, weight in enumerate(picked)])
        for output, count in GROUPED_ROWS.items():
            streams.append([_grouped_rows(rng, output, i, real, is_fitted) for i in range(count // 2)])
        streams.append([_grouped_depths(rng, i, real, is_fitted) for i in range(GROUPED_DEPTHS // 2)])
    places = [((i + 0.5) / len(stream), number, i) for number, stream in enumerate(streams) for i in range(len(stream))]
    return [streams[number][i] for _, number, i in sorted(places)]


def _each_batch(weights: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int]]:
    """Each weight with each range of m, weights and ranges both changing from one to the next."""
    for turn in range(len(BATCHES)):
        for place, weight in enumerate(weights):
            yield weight, (turn + place) % len(BATCHES)


def _dense(rng: random.Random, output: Output, weight: tuple[int, int], batch: int, is_fitted: bool) -> Sample:
    n, k = weight
    low, high = BATCHES[batch % len(BATCHES)]
    m = _between(rng, low, high) if rng.random() < 0.8 else high  # some powers of two too, as programs choose them
    return Sample(output, max(min(m, int(MOST_OPERATIONS / (2 * n * k))), 1), n, k, is_fitted=is_fitted)


def _grouped_rows(
    rng: random.Random, output: Output, i: int, weights: Sequence[tuple[int, int]], is_fitted: bool
) -> Sample:
    """1 to 256 groups of 1 to 2048 rows on average, and weights of experts."""
    n, k = rng.choice([(n, k) for n, k in weights if n * k <= 4096 * 7168])
    low, high = BATCHES[i % (len(BATCHES) - 1)]
    rows = _between(rng, low, high)
    num_groups = _between(rng, 1, 256)
    while 2 * num_groups * rows * n * k > MOST_OPERATIONS or num_groups * n * k > 1 << 32:
        num_groups = (num_groups + 1) // 2
    m = rows if output.groups == Groups.COUNTS else rows * num_groups
    return Sample(output, m, n, k, num_groups, is_fitted=is_fitted)


def _grouped_depths(rng: random.Random, i: int, weights: Sequence[tuple[int, int]], is_fitted: bool) -> Sample:
    """Weight gradients of 2 to 64 experts, of 128 to 8192 tokens each on average."""
    output = Output(is_fp32=True, adds_to_d=i % 4 != 3, sfb=PER_ROW, groups=Groups.DEPTHS)
    m, n = rng.choice([(n, k) for n, k in weights if n * k <= 4096 * 7168])
    depth = align(_between(rng, 64, 8192), BLOCK_K)
    num_groups = _between(rng, 2, 64)
    while 2 * num_groups * m * n * depth > MOST_OPERATIONS or num_groups * m * n > 1 << 30:
        num_groups = (num_groups + 1) // 2
    return Sample(output, m, n, depth, num_groups, is_fitted=is_fitted)


def _random_weights(rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Sizes as likely between 512 and 1024 as between 8192 and 16384; a tenth of k are no multiples of 128."""
    for _ in range(count):
        n = align(_between(rng, 256, 16384), rng.choice((8, 64, 64, 128)))
        k = align(_between(rng, 512, 16384), 16 if rng.random() < 0.1 else BLOCK_K)
        yield n, k


def _between(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
