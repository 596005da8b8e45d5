"""The linear_decode kernel's own source in the simulator: the bits of the cast and of fp8_gemm_decode, on all tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import same_bits
from thorough import one_in
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.linear.kernel import LinearDecodeConfig, serving
from lab.configs import reachable_decode
from lab.sim import linear_decode as sim
from lab.sim.linear_decode import LinearTrial

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

TILES = [(8, 1), (8, 2), (16, 1), (16, 2)]
"""Numbers of tokens, and of math warpgroups."""
CLUSTERS = [(1, 2), (2, 1), (2, 3), (4, 1), (4, 2)]
"""Numbers of CTAs along n, and along k."""


def config_of(
    tokens: int, warpgroups: int, cluster_n: int = 2, cluster_k: int = 1, with_c: bool = False, stages: int = 4
) -> LinearDecodeConfig:
    config = LinearDecodeConfig(DecodeConfig(tokens, stages, warpgroups, cluster_k, with_c=with_c), cluster_n)
    assert config.why_illegal() is None
    return config


def random_layer(m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Operand]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g) * torch.randn(m, 1, generator=g).exp()
    return x.to(torch.bfloat16), per_block_cast_to_fp8(torch.randn(n, k, generator=g))


def by_rows(config: LinearDecodeConfig) -> LinearDecodeConfig:
    """Return the configuration with the same tile for scales of whole rows."""
    return replace(config, tile=replace(config.tile, sfa=WHOLE, sfb=WHOLE))


def check(config: LinearDecodeConfig, x: Tensor, w: Operand, c: Tensor | None = None, **how: Any) -> None:
    d = sim.run(LinearTrial(config).compiled(), config, x, w, c, truncate=True, **how)
    assert same_bits(d, sim.by_parts(config.tile, x, w, c))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_on_ragged_layers(tile: tuple[int, int], cluster: tuple[int, int]) -> None:
    """Test fewer k-blocks than CTAs, a short last k-block, several groups of k-blocks, and CTAs without a tile."""
    config = config_of(*tile, *cluster)
    columns = config.tile.block_n * (config.cluster_n + 1) + 24
    for m, k in one_in(2, ((1, 144), (tile[0] - 3, 1200), (tile[0], 4112))):
        check(config, *random_layer(m, columns, k, seed=m + k), seed=cluster[0])


def test_rooms_go_round() -> None:
    """Each CTA has at least twenty groups of k-blocks, so CTAs must wait until memory of other CTAs is free."""
    for cluster in one_in(len(CLUSTERS), CLUSTERS):
        config = config_of(16, 1, *cluster)
        check(config, *random_layer(16, 136, 128 * 20 * cluster[1] * config.group_blocks // 16), seed=cluster[1])


@pytest.mark.parametrize("m", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("k", [16, 128, 784, 2176])
def test_any_rows_and_depth(m: int, k: int) -> None:
    for cluster in one_in(2, CLUSTERS):
        check(config_of(8 if m <= 8 else 16, 1, *cluster), *random_layer(m, 72, k, seed=m), seed=k)


@pytest.mark.parametrize("m", [1, 2, 3, 6, 8, 9, 16])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_scales_of_whole_rows_and_of_tensors(cluster: tuple[int, int], m: int) -> None:
    """Some rows hold numbers that are not ordinary. The bias is in FP32."""
    config = by_rows(config_of(8 if m <= 8 else 16, 1 + m % 2, *cluster, with_c=True))
    config = replace(config, tile=replace(config.tile, c_is_fp32=True))
    for k in one_in(2, (528, 4240)):
        x, (values, _) = random_layer(m, 200, k, seed=m)
        x[m // 2] *= 1e-38
        x[0, k - 1], x[m - 1, 3] = torch.inf, torch.nan
        g = torch.Generator().manual_seed(k)
        scales, bias = (torch.randn(shape, generator=g) for shape in ((200, 1), (200,)))
        for sf in (scales, scales[:1].expand(200, 1)):
            check(config, x, (values, sf), bias.expand(m, 200), seed=m)


@pytest.mark.parametrize("m", [1, 5, 8])
def test_a_bias_is_c_one_row_for_all(m: int) -> None:
    for cluster in ((1, 4), (4, 1)):
        x, w = random_layer(m, 136, 656)
        bias = torch.randn(136, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
        check(config_of(8, 1, *cluster, with_c=True), x, w, bias.expand(m, 136), seed=m)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf, 3.3895e38, 9.2e-41, 0.0, -0.0])
def test_special_values_are_those_of_the_cast(number: float) -> None:
    """Put the number beside ordinary blocks, into a single block, and into a whole row."""
    x, w = random_layer(7, 72, 656, seed=5)
    x[1, 5], x[2, 130], x[5, 128:256], x[6] = number, number, number, number
    for cluster in ((2, 1), (1, 2)):
        check(config_of(8, 1, *cluster), x, w, seed=1)


def test_rows_may_lie_apart() -> None:
    x, w = random_layer(5, 72, 400)
    room = torch.full((5, 424), torch.nan, dtype=torch.bfloat16)
    room[:, 8:408] = x
    config = config_of(8, 1)
    d = sim.run(LinearTrial(config).compiled(), config, room[:, 8:408], w, truncate=True)
    assert same_bits(d, sim.by_parts(config.tile, x, w, None))


@pytest.mark.parametrize(
    "schedule", ["slow_cta", "slow_warps", "slow_producer", "slow_math", "late_loads", "late_stores", "slow_lanes"]
)
@pytest.mark.parametrize("tile", [(8, 1, 2, 1), (8, 1, 1, 8), (16, 2, 2, 3), (16, 1, 4, 1)])
def test_biased_schedules(tile: tuple[int, int, int, int], schedule: str) -> None:
    config = config_of(*tile, stages=3)
    depth = 128 * (config.group_blocks // tile[0] * 3 + 1)
    for seed in one_in(2, (1, 2)):
        x, (values, scales) = random_layer(tile[0], 200, depth * tile[3] - 48, seed=seed)
        check(config, x, (values, scales), seed=seed, schedule=schedule)
        check(by_rows(config), x, (values, torch.rand(200, 1)), seed=seed, schedule=schedule)


def test_every_tile_of_products_can_be_had() -> None:
    for config in reachable_decode():
        if not config.is_fp32:
            assert serving(1, 1024, config) is not None, config.name
