"""Products into the parts of heads in the simulator: both kernels' code for it, parts of any size, ragged edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_gemm.gemm.choose.fp8 import PANELS
from deep_gemm.gemm.choose.tiles import skipping
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import epilogues
from deep_gemm.gemm.problem import HeadParts
from lab.sim.skip_head_mid import Config, of_config

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]

WIDE = GemmConfig(128, 128, 3)
PAIRS = GemmConfig(64, 32, 3, 1, panel_columns=32, cluster_n=2)
UNITS = GemmConfig(128, 128, 2, unit_n=32, panel_columns=32, panels_per_store=2)
TALL = GemmConfig(256, 64, 3)
SPLIT = DecodeConfig(16, 4, 2, 3)
ALONE = DecodeConfig(64, 4, 1, 1)
SPLITS = [(128, 64, 128), (64, 32, 192), (16, 8, 16), (32, 8, 48)]
SPLITS += [(16, 0, 32), (96, 16, 32), (192, 128, 64), (16, 64, 208)]


def check(config: Config, m: int, splits: tuple[int, int, int], seed: int, schedule: str | None = None) -> None:
    """Check a product with heads for one tile and a bit. D's rows continue behind its last column."""
    heads = (config.block_n + 8) // (splits[0] + splits[2]) + 1
    part_multiple = HeadParts(*splits).part_multiple
    config = skipping(config, next(columns for columns in PANELS if part_multiple % columns == 0))
    of_config(config, m, heads, splits, seed, schedule).run()


@pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: "-".join(map(str, splits)))
@pytest.mark.parametrize("config", [WIDE, PAIRS, UNITS, TALL, SPLIT, ALONE], ids=lambda config: config.name)
def test_parts_of_any_size(config: Config, splits: tuple[int, int, int]) -> None:
    rows = config.block_tokens if isinstance(config, DecodeConfig) else config.block_m
    check(config, rows + 5, splits, seed=1)
    check(config, rows - 3, splits, seed=2)


@pytest.mark.parametrize("schedule", ["slow_cta", "slow_warps", "late_loads", "late_stores", "slow_lanes"])
@pytest.mark.parametrize("config", [WIDE, PAIRS, SPLIT], ids=lambda config: config.name)
def test_biased_schedules(config: Config, schedule: str) -> None:
    check(config, 140, (32, 8, 48), seed=3, schedule=schedule)


@pytest.mark.parametrize("config", [WIDE, SPLIT], ids=lambda config: config.name)
def test_the_kernel_ahead_may_still_be_at_work(config: Config) -> None:
    of_config(skipping(config, 16), 13, 3, (48, 8, 16), 4, is_dependent=True).run()


def test_what_cannot_be_built() -> None:
    with_c: list[Config] = [GemmConfig(128, 64, 3, with_c=True), DecodeConfig(8, 4, with_c=True)]
    for config in (GemmConfig(64, 64, 3, 1, cluster_k=2), *with_c):
        assert "columns of D are skipped" in (replace(config, epilogue=epilogues.TO_HEADS).why_illegal() or "")
