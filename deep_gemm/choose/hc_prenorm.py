"""Which kernel multiplies rows with few columns, and in which configuration: that for few rows, or that with a ring."""

from __future__ import annotations

from functools import lru_cache

from ..gpus import H200
from ..problem.hyper_connections import BLOCK_K, COLUMNS
from ..problem.layout import ceil_div
from .config_hc_prenorm import MAX_CLUSTER, HcConfig, estimated_us, hc_config, reachable_hc
from .config_hc_prenorm_few import AHEAD, STEP, HcFewConfig, tiles

FEW_ROWS = 256
"""More rows than this are never few."""
RING_US, RING_COLUMN_US = 1.3, 0.07
"""Microseconds that the kernel with a ring takes to begin and end beside its estimate, and more for each column."""
FEW_US, CLUSTER_US = 2.0, 0.5
"""The same for few rows, and for the sums of a cluster."""
STEP_US, COLUMN_US = 0.28, 0.0145
"""Microseconds that a CTA takes for a step of each of its warps, and more for each column."""
ROUND_US = 1.8
"""Microseconds from the end of a CTA to the first loads of the one that takes its place."""
SHARED_US, SHARED_STEP = 0.6, 0.25
"""Microseconds that it costs if each SM has a CTA more, and by what part a step takes longer."""
CTAS_PER_SM = {8: 2, 16: 1, 24: 1, 32: 1}
"""By columns of a tile: for how many there are registers."""
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
"""How many clusters of a size run at a time on an H200, if an SM has one CTA."""
USUAL_N, USUAL_M, USUAL_K = 24, (13, 137, 1024, 4096, 8192), (7168, 16384, 28672)


@lru_cache(4096)
def select_hc(
    m: int,
    n: int,
    k: int,
    splits: int,
    num_sms: int,
    batch_invariant: bool = False,
    max_cluster: int = MAX_CLUSTER,
    leaves_sms: bool = False,
) -> HcConfig | HcFewConfig:
    """Choose for a problem: what is estimated to take the least time.

    If a row's bits must not depend on the rows around it, all rows are for one kernel. `leaves_sms`: the GPU has more
    SMs than `num_sms`, which are somebody else's, so the grid may have no more CTAs.
    """
    ring = hc_config(m, n, k, splits, num_sms, batch_invariant, max_cluster)
    if batch_invariant or m > FEW_ROWS:
        return ring
    few = [config for config in _few(n) if config.cluster <= min(max_cluster, num_sms)]
    if leaves_sms:
        few = [config for config in few if tiles(config, m, n, splits) * config.cluster <= num_sms]
    if not few:
        return ring
    best = min(few, key=lambda config: few_us(config, m, n, k, splits, num_sms))
    ring_us = RING_US + RING_COLUMN_US * ring.block_n + estimated_us(ring, m, n, k, splits, num_sms)
    return best if few_us(best, m, n, k, splits, num_sms) < ring_us else ring


def few_us(config: HcFewConfig, m: int, n: int, k: int, splits: int, num_sms: int) -> float:
    """Estimate microseconds of the kernel for few rows."""
    ctas_per_sm = CTAS_PER_SM[config.block_n]
    at_once = max(CLUSTERS_AT_ONCE[config.cluster] * num_sms // H200.num_sms, 1) * ctas_per_sm
    clusters = tiles(config, m, n, splits)
    rounds = ceil_div(clusters, at_once)
    more = max(min(clusters, at_once) * config.cluster / num_sms - 1, 0)  # CTAs that share an SM
    blocks = ceil_div(k // BLOCK_K, splits)
    steps = ceil_div(blocks * BLOCK_K // STEP, config.cluster * config.warps)
    step_us = (STEP_US + COLUMN_US * config.block_n) * (1 + SHARED_STEP * more)
    begin_us = FEW_US + SHARED_US * more + (CLUSTER_US if config.cluster > 1 else 0)
    return begin_us + rounds * steps * step_us + (rounds - 1) * ROUND_US


@lru_cache(len(COLUMNS))
def _few(n: int) -> tuple[HcFewConfig, ...]:
    columns = dict.fromkeys((n, COLUMNS[0]))
    return tuple(
        HcFewConfig(block_n, cluster, ahead=AHEAD[block_n]) for block_n in columns for cluster in CLUSTERS_AT_ONCE
    )


def reachable_few() -> list[HcFewConfig]:
    """Every configuration for few rows that `select_hc` can give."""
    return list(dict.fromkeys(config for n in COLUMNS for config in _few(n)))


def reachable() -> list[HcConfig | HcFewConfig]:
    """Every configuration that `select_hc` can give."""
    return [*reachable_hc(), *reachable_few()]


def usual_hc() -> list[HcConfig | HcFewConfig]:
    """Give what is chosen at the sizes of models that exist, on a GPU of 132 SMs."""
    sizes = ((m, k, splits) for m in USUAL_M for k in USUAL_K for splits in (1, 16))
    return list(dict.fromkeys(select_hc(m, USUAL_N, k, splits, H200.num_sms) for m, k, splits in sizes))
