"""Both products of experts' rows by one kernel: gemm/work/rows_twice.cuh.

The second product of a block of rows follows its first one some tasks later, so that results leave for other GPUs while
first products are computed. The bits are those of two launches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from ..casts.rules import Rows, empty_scales
from ..core.check.checks import Operand
from ..core.check.layout import ceil_div
from ..core.check.memory import empty
from ..core.gpu import gpu_of
from ..core.meeting import Node
from ..core.settings import num_sms_of
from ..gemm import launch
from ..gemm.ask.silu import activated
from ..gemm.config.of_tile import tile_config
from ..gemm.config.tall import BLOCK_K, GemmConfig
from ..gemm.kernel import FP8_GEMM, params_of
from ..gemm.kinds.epilogues import SILU_THEN_ROWS
from ..gemm.kinds.output import Output
from ..gemm.kinds.works import TWICE
from ..gemm.packed import is_packed
from ..gemm.problem import Problem
from . import rows_to_addresses

OUTPUT = Output(work=TWICE, epilogue=SILU_THEN_ROWS)
BLOCK_M, BLOCK_N = 128, 256
LAG = 132
"""Tiles of the first product before the first one of the second: one for each SM."""
SHARE = 0.70
"""The part of CTAs that take the first product as long as there is any: on four H200 calls took least by it."""
IS_ON = True
"""Both products are one kernel; False takes two launches, to compare."""


@cache
def config_for(k: int, k_of_second: int, band: int = TWICE.band) -> GemmConfig:
    """Give the configuration for two depths: their blocks of k go in runs of two if both are even.

    `band`: tiles along the rows that are taken before the raster moves on along columns.
    """
    is_odd = any(ceil_div(each, BLOCK_K) % 2 for each in (k, k_of_second))
    return replace(tile_config(BLOCK_M, BLOCK_N, OUTPUT, k=BLOCK_K * (1 if is_odd else 2)), raster_group=band)


def counts_for(rows: int, groups: int) -> int:
    """Count the words that a call needs, zeros before and after: three, and one for each block of rows there may be."""
    return 3 + groups + rows // BLOCK_M


def problems(
    a: Operand, w1: Operand, middle: Operand, w2: Operand, ends: Tensor, addresses: Tensor, limit: float | None
) -> tuple[Problem, Problem]:
    """State both products."""
    first = activated(a, w1, middle, ends, None, limit, gates_apart=True)
    return first, rows_to_addresses.problem(middle, w2, addresses, ends)


def values_of(
    first: Problem, second: Problem, config: GemmConfig, counts: Tensor, lag: int, first_ctas: int
) -> dict[str, Any]:
    """Give the members of the kernel's parameters for two problems that are `prepared`."""
    columns, names = ceil_div(first.n, config.block_n), {each.name for each in params_of(config).fields}
    of_second = {f"second.{name}": value for name, value in launch.values_of(second, config, **NOTHING).items()}
    return {
        **launch.values_of(first, config, **NOTHING),
        **{name: value for name, value in of_second.items() if name in names},
        "second_sfb_stride": of_second["second.groups.sfb_stride"],
        "counts": counts.data_ptr(),
        "blocks": counts.numel() - 3,
        "lag": lag if first_ctas else max(lag, config.raster_group * columns),
        "first_ctas": first_ctas,
    }


NOTHING: dict[str, Any] = {"counts": None, "blocks": 0, "lag": 0, "first_ctas": 0, "second_sfb_stride": 0}


def start(
    first: Problem, second: Problem, config: GemmConfig, counts: Tensor, lag: int, num_sms: int, share: float = 0.0
) -> None:
    """Launch the kernel for two problems that are `prepared`. `counts`: int32 `[counts_for(...)]`, zeros."""
    ctas = min(num_sms, first.groups * first.m * ceil_div(max(first.n, second.n), config.block_n))
    first_ctas = max(round(share * ctas), int(share > 0))
    FP8_GEMM.run(config, values_of(first, second, config, counts, lag, first_ctas), ctas, second.d.get_device())


def takes(node: Node, w2: Rows) -> bool:
    """Tell whether both products of these ranks, whose first one activates in any case, are one kernel."""
    return IS_ON and node.room.ranks >= rows_to_addresses.LEAST_RANKS and not is_packed(w2)


def run(
    a: Operand,
    w1: Operand,
    w2: Operand,
    ends: Tensor,
    addresses: Tensor,
    counts: Tensor,
    *,
    limit: float | None = None,
    lag: int = LAG,
    share: float = SHARE,
    config: GemmConfig | None = None,
) -> None:
    """Multiply each row by its group's `w1`, activate, cast, multiply by `w2`; store the result at the row's address.

    `counts`: int32 `[counts_for(...)]`, zeros before and after. `share`: 0 lets all CTAs take a wave of one product,
    then a wave of the other.
    """
    rows, intermediate = a[0].shape[0], w2[0].shape[2]
    values = empty("activations", (rows, intermediate), a[0].dtype, a[0].device)
    middle = values, empty_scales((rows,), intermediate, values, mn_major=True)
    first, second = problems(a, w1, middle, w2, ends, addresses, limit)
    config = config or config_for(first.k, second.k)
    device = addresses.get_device()
    num_sms = num_sms_of(gpu_of(device).num_sms)
    start(launch.prepared(first, config), launch.prepared(second, config), config, counts, lag, num_sms, share)
