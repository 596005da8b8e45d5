"""The fp8_gemm_decode kernel's own source in the simulator: every tile and split, ragged edges, seeds, schedules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.decode import BLOCK_TOKENS, DecodeConfig, decode_config
from lab.sim import product as simulated
from lab.sim.dense import random_problem
from lab.sim.fp8_gemm_decode import DecodeTrial
from lab.sim.product import compile_config

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


def check(config: DecodeConfig, m: int, n: int, k: int, seed: int, schedule: str | None = None, **how: Any) -> None:
    DecodeTrial(config, m, n, k, seed, schedule, **how).run()


@pytest.mark.parametrize("num_math_warpgroups", [1, 2])
@pytest.mark.parametrize("block_tokens", BLOCK_TOKENS)
def test_every_tile_on_ragged_problems(block_tokens: int, num_math_warpgroups: int) -> None:
    for cluster_k in (1, 2, 5, 8):
        config = DecodeConfig(block_tokens, 4, num_math_warpgroups, cluster_k)
        assert config.why_illegal() is None
        check(config, block_tokens - 3, config.block_n + 24, 1200, seed=cluster_k)
        check(config, block_tokens + 5, config.block_n + 8, 400, seed=cluster_k + 1)


@pytest.mark.parametrize("cluster_k", range(1, 9))
def test_every_cluster_whatever_the_number_of_k_blocks(cluster_k: int) -> None:
    """Fewer k-blocks than CTAs, as many, and some more; rings that wrap."""
    config = DecodeConfig(16, 2, 1, cluster_k, is_fp32=True)
    for num_k_blocks in {1, cluster_k - 1, cluster_k, cluster_k + 1, 6 * cluster_k - 1} - {0}:
        check(config, 13, 72, 128 * num_k_blocks - 48, seed=num_k_blocks)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("tile", [(8, 1, 1), (8, 1, 8), (24, 2, 3), (64, 1, 2), (128, 2, 1)])
def test_every_kind_of_output(tile: tuple[int, int, int], with_c: bool, is_fp32: bool, seed: int) -> None:
    config = DecodeConfig(tile[0], 4, *tile[1:], is_fp32=is_fp32, with_c=with_c)
    check(config, tile[0] + 3, 136 + 4 * is_fp32, 528, seed)


def test_c_may_be_d() -> None:
    for is_fp32 in (False, True):
        config = DecodeConfig(16, 4, 2, 3, is_fp32=is_fp32, with_c=True)
        p = random_problem(config, 11, 200, 720, seed=1, in_place=True)
        assert p.c is p.d
        simulated.run(compile_config(config), config, p, seed=1).checked()


@pytest.mark.parametrize("k", [16, 128, 4080, 4224, 8208, 12304])
def test_any_depth(k: int) -> None:
    """Below one block, and past each 32 blocks whose scales are in shared memory."""
    check(DecodeConfig(16, 5, 1, 1), 5, 72, k, seed=k)
    check(DecodeConfig(8, 5, 2, 3), 5, 72, k, seed=k)


@pytest.mark.parametrize("m", [1, 2, 8, 9, 15, 17, 33])
@pytest.mark.parametrize("n", [8, 56, 64, 72, 120, 136, 200])
def test_any_rows_and_columns(m: int, n: int) -> None:
    """Boxes of A and B with fewer rows than the tile, and boxes that hang out of the last one."""
    check(DecodeConfig(16, 3, 2, 2), m, n, 272, seed=m * n)


@pytest.mark.parametrize(
    "schedule", ["slow_cta", "slow_warps", "slow_producer", "slow_math", "late_loads", "late_stores", "slow_lanes"]
)
@pytest.mark.parametrize("tile", [(8, 1, 1), (8, 1, 8), (16, 2, 3), (64, 1, 2)])
def test_biased_schedules(tile: tuple[int, int, int], schedule: str) -> None:
    config = DecodeConfig(tile[0], 3, *tile[1:])
    for seed in (1, 2):
        check(config, tile[0] + 1, 200, 1296, seed=seed, schedule=schedule)


def test_the_kernel_ahead_may_still_be_at_work() -> None:
    config = DecodeConfig(8, 4, 1, 2, with_c=True)
    check(config, 5, 72, 1296, 1, is_dependent=True)


def test_the_weight_may_be_loaded_while_the_kernel_ahead_is_at_work() -> None:
    """Fewer k-blocks than slots, as many, and more; CTAs without any."""
    for cluster_k, num_k_blocks, schedule in itertools.product(
        (1, 3), (1, 4, 13), (None, "slow_math", "slow_producer")
    ):
        config = DecodeConfig(8, 4, 1, cluster_k, with_c=True)
        check(config, 5, 136, 128 * num_k_blocks - 16, 1, schedule, is_dependent=True, weight_is_ready=True)


def test_c_may_be_one_row_for_all() -> None:
    """A bias."""
    for cluster_k in (1, 2):
        config = DecodeConfig(16, 4, 1, cluster_k, with_c=True)
        p = random_problem(config, 19, 136, 400, seed=2)
        assert p.c is not None
        p = p._replace(c=p.c[0].clone().expand_as(p.d))
        simulated.run(compile_config(config), config, p, seed=2).checked()


def test_scales_may_have_any_strides() -> None:
    config = DecodeConfig(16, 4, 1, 2)
    p = random_problem(config, 11, 264, 720, seed=3)
    column_major = p._replace(sfa=p.sfa.t().contiguous().t(), sfb=p.sfb.t().contiguous().t())
    assert column_major.sfb.stride() != p.sfb.stride()
    padded = torch.empty(11, 16)
    padded[:, : p.sfa.shape[1]] = p.sfa
    for problem in (p, column_major, p._replace(sfa=padded[:, : p.sfa.shape[1]])):
        simulated.run(compile_config(config), config, problem, seed=3).checked()


def test_a_cta_that_is_alone_gives_the_references_bits() -> None:
    """One chain over all k-blocks in order. Small integers, whose sums of a block are exact."""
    g = torch.Generator().manual_seed(1)
    for tokens, warpgroups in ((8, 1), (48, 2)):
        config = DecodeConfig(tokens, 4, warpgroups, 1, is_fp32=True)
        a, b = (torch.randint(-2, 3, (rows, 4240), generator=g).to(torch.float8_e4m3fn) for rows in (7, 136))
        sfa, sfb = torch.rand(7, 34, generator=g), torch.rand(2, 34, generator=g)
        outcome = simulated.run(
            compile_config(config), config, dense_problem((a, sfa), (b, sfb), torch.empty(7, 136), None)
        )
        assert torch.equal(outcome.d, outcome.right)


def test_a_row_gives_the_same_bits_among_any_others() -> None:
    """What a token gets does not depend on its neighbours, as long as the configuration is the same."""
    config = DecodeConfig(16, 4, 1, 3)
    g = torch.Generator().manual_seed(5)
    a, sfa = per_token_cast_to_fp8(torch.randn(13, 900, generator=g)[:, :896])
    b = per_block_cast_to_fp8(torch.randn(72, 896, generator=g))
    whole = simulated.run(
        compile_config(config), config, dense_problem((a, sfa), b, torch.empty(13, 72, dtype=torch.bfloat16), None)
    )
    for row in (0, 12):
        alone = dense_problem((a[row:][:1], sfa[row:][:1]), b, torch.empty(1, 72, dtype=torch.bfloat16), None)
        assert torch.equal(simulated.run(compile_config(config), config, alone).d[0], whole.d[row])


def test_few_configurations_cannot_be_built() -> None:
    assert decode_config(8, 1, 8, 2) is not None
    assert decode_config(128, 2, 1, 2) is None
    assert "clusters of 1 to 8" in (DecodeConfig(8, 4, 1, 9).why_illegal() or "")
