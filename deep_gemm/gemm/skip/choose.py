"""Choose the configuration of a product whose D has columns between the parts of each head: the plain product's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ...core.gpu import Gpu
from ..config import GemmConfig
from ..config_decode import DecodeConfig
from ..dense.choose import reachable, reachable_decode, select
from ..output import Output, other_fields

PANELS = (64, 32, 16)
"""Columns of a panel. Parts of heads must be whole panels; the widest that fits is stored fastest."""


@cache
def skipping(config: GemmConfig | DecodeConfig, panel_columns: int) -> GemmConfig | DecodeConfig:
    """Give a plain product's configuration the other way out, in panels of at most so many columns.

    It must not split k but by the decode kernel, which stores without panels.
    """
    if isinstance(config, DecodeConfig):
        return replace(config, skips_mid=True)
    narrower = max(config.panel_columns // panel_columns, 1)
    return replace(
        config,
        skips_mid=True,
        panel_columns=config.panel_columns // narrower,
        panels_per_store=config.panels_per_store * narrower,
    )


def select_skipping(
    m: int, n: int, k: int, part_multiple: int, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> GemmConfig | DecodeConfig:
    """Choose as `select` does for the plain product, but no `fp8_gemm` splits k: few columns alone would want it.

    Parts of heads are multiples of `part_multiple` columns.
    """
    config = select(m, n, k, Output(), gpu, split_k=split_k, whole_gpu=whole_gpu)
    if isinstance(config, GemmConfig) and config.cluster_k > 1:
        config = select(m, n, k, Output(), gpu, split_k=False, whole_gpu=whole_gpu)
    return skipping(config, next(columns for columns in PANELS if part_multiple % columns == 0))


def reachable_skipping() -> list[GemmConfig | DecodeConfig]:
    """Every configuration that `select_skipping` can give."""
    plain: list[GemmConfig | DecodeConfig] = [
        config for config in reachable() if config.cluster_k == 1 and not other_fields(config, Output())
    ]
    plain += [config for config in reachable_decode() if not (config.is_fp32 or config.with_c)]
    return list(dict.fromkeys(skipping(config, columns) for config in plain for columns in PANELS))
