"""Two products beside each other, of which the second multiplies the rows that the first stores: work/beside.cuh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.check.layout import WORD_BYTES, ceil_div
from ..core.gpu import WGMMA_ROWS, gpu_of
from ..core.settings import num_sms_of
from ..core.shadow import Behind
from . import launch
from .problem import Problem

FIRST_PART = 2 / 3
"""The part of all SMs that the first product has: it has two thirds of the work of a layer's two products."""
COUNTS_OF_TILE = 2
"""Counts of a warp that has stored its rows of a whole tile."""
WARPS = 4
"""Warps of a warpgroup, which has 64 rows."""


def num_counts(rows: int, groups: int) -> int:
    """Say how many numbers two products of these rows need."""
    return 1 + ceil_div(rows, WGMMA_ROWS) + groups


def run(first: Problem, second: Problem, counts: Tensor) -> None:
    """Compute two products of the same groups of rows. The D and the scales of `first` are the A of `second`.

    `counts`: int32 `[num_counts(...)]`, zeros when the first product starts. The D of `second` are addresses.
    """
    gpu = gpu_of(first.d.get_device())
    num_sms = num_sms_of(gpu.num_sms)
    configs = launch.fitting(None, first, gpu), launch.fitting(None, second, gpu)
    places = {"stored": Behind(counts, WORD_BYTES), "next_tile": counts}
    start(first, second, configs, places, num_sms, max(1, round(num_sms * FIRST_PART)))


def start(
    first: Problem,
    second: Problem,
    configs: tuple[Any, Any],
    places: Mapping[str, Any],
    num_sms: int,
    sms_of_first: int,
) -> None:
    """Launch both products, the first on this many SMs. `places` has `stored` and `next_tile` of work/beside.cuh."""
    of_first, of_second = configs
    arrivals = ceil_div(first.n, of_first.block_n) * WARPS * COUNTS_OF_TILE
    beside = {**places, "block_rows": of_first.block_m, "arrivals": arrivals}
    launch.start(launch.prepared(first, of_first), of_first, sms_of_first, **beside)
    launch.start(launch.prepared(second, of_second), of_second, num_sms, is_dependent=True, **beside)
