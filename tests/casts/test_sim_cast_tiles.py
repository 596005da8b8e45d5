"""The cast_tiles kernel's own source in the simulator gives the reference's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thorough import sample
from torch import Tensor

from deep_gemm.casts import cast_tiles
from deep_gemm.casts.cast_tiles import KERNEL, Grain, TileCastConfig, tile_cast_config, turns_blocks
from deep_gemm.casts.rules import FP8
from deep_gemm.core.check.layout import ceil_div
from lab.casts import hard_quotients, wild
from lab.sim import cast_tiles as sim
from lab.sim.library import compiled

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
CONFIGS = [config for config in cast_tiles.reachable_tile_casts() if not turns_blocks(config)]
every_configuration = pytest.mark.parametrize("config", sample(CONFIGS), ids=lambda config: config.name)


def mixed(m: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Draw ordinary numbers, except one in 10 blocks of 32x128, whose numbers are of any size."""
    generator = torch.Generator().manual_seed(seed)
    is_wild = torch.rand(ceil_div(m, 32), ceil_div(k, 128), generator=generator) < 0.1
    is_wild = is_wild.repeat_interleave(32, 0)[:m].repeat_interleave(128, 1)[:, :k]
    ordinary = (torch.randn(m, k, generator=generator) * 3).to(dtype)
    return torch.where(is_wild, wild(m, k, dtype, seed, block_rows=32), ordinary)


def check(config: TileCastConfig, x: Tensor, seed: int = 0, **how: Any) -> None:
    sim.check(compiled(KERNEL, config), config, x, seed=seed, **how)


def sizes(config: TileCastConfig) -> list[tuple[int, int]]:
    """Return sizes that are ragged wherever the configuration permits ragged sizes."""
    rows, columns = 16 if config.column_bytes == 16 else 1, config.vector
    return [(128 + 3 * rows, 128 + 5 * columns), (rows, columns), (2 * rows, 264 - columns), (272 - rows, 2 * columns)]


@every_configuration
@pytest.mark.parametrize("rounds_up", [False, True])
@pytest.mark.parametrize("is_m_major", [False, True])
def test_every_configuration_on_ragged_matrices(config: TileCastConfig, is_m_major: bool, rounds_up: bool) -> None:
    for seed, (m, k) in enumerate(sizes(config)):
        x = wild(m, k, config.dtype, seed, block_rows=1 if seed % 2 else 128)
        check(config, x, seed, is_m_major=is_m_major, rounds_up=rounds_up)


@every_configuration
def test_tiles_of_ordinary_numbers_beside_others(config: TileCastConfig) -> None:
    for seed in range(3):
        check(config, mixed(272, 264, config.dtype, seed), seed)
    check(config, (torch.randn(144, 136) * 3).to(config.dtype))


@every_configuration
def test_rows_that_lie_further_apart(config: TileCastConfig) -> None:
    rows, offset = (48, 0) if config.column_bytes == 16 else (37, 0 if config.vector > 1 else 3)
    wide = wild(rows, 640, config.dtype, 1)
    check(config, wide[:, offset : offset + 256], padding=16)


@pytest.mark.parametrize("min_amax", [1e-4, 1.0, 1e30])
def test_the_largest_magnitude_has_a_floor(min_amax: float) -> None:
    config = tile_cast_config(torch.bfloat16, Grain.ROWS, with_columns=True, is_aligned=True)
    check(config, wild(48, 256, torch.bfloat16, 2), min_amax=min_amax)
    check(config, torch.zeros(16, 256, dtype=torch.bfloat16), min_amax=min_amax)


@pytest.mark.parametrize("block", FP8.blocks)
@pytest.mark.parametrize("grain", list(Grain), ids=lambda grain: grain.name)
def test_quotients_beside_where_fp8_rounds_the_other_way(grain: Grain, block: int) -> None:
    if grain == Grain.ROWS and block < 128:
        return
    x = hard_quotients(block=block)
    with_columns = grain == Grain.ROWS
    config = tile_cast_config(
        torch.float32, grain, with_columns=with_columns, is_aligned=True, has_aligned_columns=False, block=block
    )
    if grain == Grain.BLOCKS:
        for row in x[::5]:
            check(config, row.view(1, block))
    else:
        x = x if grain == Grain.ROWS else x.t().contiguous()
        check(config, x[:, : x.shape[1] // 4 * 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_columns_of_many_tiles_have_one_scale(dtype: torch.dtype) -> None:
    config = tile_cast_config(dtype, None, with_columns=True, is_aligned=True)
    sim.TileTrial(config, (304, 136), 1, is_whole=True).run()
    sim.TileTrial(config, (304, 136), 2, "slow_warps", rounds_up=True, is_whole=True).run()


@pytest.mark.parametrize("seed", range(4))
def test_many_schedules(seed: int) -> None:
    config = tile_cast_config(torch.float32, Grain.ROWS, with_columns=True, is_aligned=True)
    check(config, wild(144, 260, torch.float32, seed), seed)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TileCastConfig(torch.float64, 2, Grain.ROWS, 0), "needs BF16, FP16 or FP32"),
        (TileCastConfig(torch.bfloat16, 4, Grain.ROWS, 0), "needs 16 bytes, or one element, at once"),
        (TileCastConfig(torch.bfloat16, 8, Grain.ROWS, 8), "needs 16 bytes, or one, of columns at once"),
        (TileCastConfig(torch.bfloat16, 8, None, 0), "needs an output"),
        (TileCastConfig(torch.bfloat16, 8, Grain.CHANNELS, 16), "needs columns alone, beside rows or of blocks"),
        (TileCastConfig(torch.bfloat16, 8, Grain.BLOCKS, 16, block=64), "needs 16 bytes at once, and 128 rows"),
        (TileCastConfig(torch.bfloat16, 8, Grain.ROWS, 0), "needs columns beside rows"),
        (TileCastConfig(torch.bfloat16, 8, None, 16, num_threads=128), "needs a thread for each row"),
        (TileCastConfig(torch.bfloat16, 8, None, 16, block=16), "needs 32, 64 or 128 rows under a scale"),
        (TileCastConfig(torch.bfloat16, 8, Grain.ROWS, 16, block=32), "needs 128 columns under a scale of rows"),
    ],
)
def test_what_cannot_be_built_is_refused(config: TileCastConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compiled(KERNEL, config)
