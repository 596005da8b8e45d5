"""Choose the kernel of a product with few columns (one is for few rows, one has a ring), and its configuration."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..core.gpu import H200, gpu_of
from ..core.jit import driver
from ..core.settings import get_batch_invariant, num_sms_of
from . import kernel, kernel_few
from .check import HcProblem
from .kernel import MAX_CLUSTER, HcConfig, estimated_us, hc_config
from .kernel_few import HcFewConfig, few_configs, few_us, tiles

Chosen = HcConfig | HcFewConfig
FEW_ROWS = 320
"""The most rows for which the kernel for few rows is a candidate."""
RING_US, RING_COLUMN_US = 1.485, 0.103
"""Microseconds of the kernel with a ring besides its estimate: a constant, and more for each column."""
USUAL_N, USUAL_M, USUAL_K = 24, (13, 137, 1024, 4096, 8192), (7168, 16384, 28672)


def run(p: HcProblem, config: Chosen | None = None) -> None:
    """Compute the product and the sums of squares on the GPU of the operands."""
    device = p.a.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(p, config)
        return
    m, n, k, splits = p.sizes
    all_sms = gpu_of(device).num_sms
    num_sms = num_sms_of(all_sms)
    if config is None:
        how = (m, n, k, splits, num_sms, get_batch_invariant())
        leaves_sms = num_sms < all_sms
        config = select_hc(*how, leaves_sms=leaves_sms)
        if config.cluster_size > driver.PORTABLE_CLUSTER and not kernel_of(config).KERNEL.fits(config, device):
            config = select_hc(*how, driver.PORTABLE_CLUSTER, leaves_sms)
    of = kernel_of(config)
    of.KERNEL.run(config, of.values_of(config, p), of.grid(config, m, n, splits, num_sms), device)


def kernel_of(config: Chosen) -> Any:
    """Return the module of a configuration's kernel."""
    return kernel_few if isinstance(config, HcFewConfig) else kernel


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
) -> Chosen:
    """Choose the kernel and configuration of the least estimated time for a problem.

    If a row's bits must not depend on the rows around it, one kernel computes any number of rows. `leaves_sms`: SMs
    beyond `num_sms` belong to other work, so the grid must have at most `num_sms` CTAs.
    """
    ring = hc_config(m, n, k, splits, num_sms, batch_invariant, max_cluster)
    if batch_invariant or m > FEW_ROWS:
        return ring
    few = [config for config in few_configs(n) if config.cluster_size <= min(max_cluster, num_sms)]
    if leaves_sms:
        few = [config for config in few if tiles(config, m, n, splits) * config.cluster_size <= num_sms]
    if not few:
        return ring
    best = min(few, key=lambda config: few_us(config, m, n, k, splits, num_sms))
    ring_us = RING_US + RING_COLUMN_US * ring.block_n + estimated_us(ring, m, n, k, splits, num_sms)
    return best if few_us(best, m, n, k, splits, num_sms) < ring_us else ring


def usual_hc() -> list[Chosen]:
    """Return the choices at the sizes of existing models, on a GPU of 132 SMs."""
    sizes = ((m, k, splits) for m in USUAL_M for k in USUAL_K for splits in (1, 16))
    return list(dict.fromkeys(select_hc(m, USUAL_N, k, splits, H200.num_sms) for m, k, splits in sizes))
