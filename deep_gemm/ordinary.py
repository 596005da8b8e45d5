"""All kernels of ordinary loads and stores, for those who look at every kernel: tools, and tests of machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .across import gather_rows, meet_ranks, pack_rows, plan_sends, post_rows
from .casts import cast_rows, cast_tiles, lay_scales
from .casts.config import reachable_cast, reachable_tile_casts
from .core.kernel import Config
from .gemm.bf16 import sum_slices
from .indexer import plan_paged_contexts
from .moe import gather_weighted, route_rows

Reachable = tuple[Any, Sequence[Config]]
"""A kernel, and every configuration that it can be launched with."""


def reachable_ordinary() -> list[Reachable]:
    """Each kernel with its configurations. One that is not listed here no gate looks at; a test finds it."""
    return [
        (cast_rows.KERNEL, reachable_cast()),
        (cast_tiles.KERNEL, reachable_tile_casts()),
        (route_rows.KERNEL, route_rows.reachable_route()),
        (route_rows.COUNTER, route_rows.reachable_count()),
        (gather_weighted.KERNEL, gather_weighted.reachable_gather()),
        (gather_weighted.MANY, gather_weighted.reachable_many()),
        (plan_sends.KERNEL, plan_sends.reachable_plan_sends()),
        (pack_rows.KERNEL, pack_rows.reachable_pack()),
        (post_rows.KERNEL, post_rows.reachable_post()),
        (gather_rows.KERNEL, [gather_rows.CONFIG]),
        (meet_ranks.KERNEL, [meet_ranks.CONFIG]),
        (sum_slices.KERNEL, sum_slices.reachable_slices()),
        (lay_scales.KERNEL, [lay_scales.CONFIG]),
        (plan_paged_contexts.KERNEL, [plan_paged_contexts.CONFIG]),
    ]
