"""The cast_rows kernel's own source in the simulator, bit for bit as the reference casts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from casts import assert_same_bits, hard_quotients, wild
from torch import Tensor

from deep_gemm.choose.config_cast import CastConfig, cast_config, reachable_cast
from deep_gemm.problem.layout import align, ceil_div
from deep_gemm.quantize import per_token_cast_to_fp8
from deep_gemm.sim import HostKernel
from deep_gemm.sim import cast_rows as sim

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]
CONFIGS = reachable_cast()


@cache
def compiled(config: CastConfig) -> HostKernel:
    return sim.compile_config(config)


def strides(m: int, k: int, *, m_major: bool) -> tuple[int, int]:
    return (1, align(m, 4)) if m_major else (ceil_div(k, 128), 1)


def check(
    config: CastConfig,
    x: Tensor,
    seed: int = 0,
    *,
    m_major: bool = True,
    min_amax: float = 0.0,
    rounds_up: bool = False,
) -> None:
    found = sim.run(
        compiled(config),
        config,
        x,
        strides(*x.shape, m_major=m_major),
        min_amax=min_amax,
        rounds_up=rounds_up,
        seed=seed,
    )
    assert_same_bits(found, per_token_cast_to_fp8(x, rounds_up, min_amax=min_amax))


@pytest.mark.parametrize("rounds_up", [False, True])
@pytest.mark.parametrize("m_major", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=[config.name for config in CONFIGS])
def test_every_configuration_on_ragged_matrices(config: CastConfig, m_major: bool, rounds_up: bool) -> None:
    step = config.vector
    for seed, (m, k) in enumerate([(config.rows + 3, 5 * 128 + 3 * step), (1, step), (2, 128), (5, 129 * step)]):
        check(config, wild(m, k, config.dtype, seed), seed, m_major=m_major, rounds_up=rounds_up)


@pytest.mark.parametrize("config", CONFIGS, ids=[config.name for config in CONFIGS])
def test_rows_of_a_wider_matrix(config: CastConfig) -> None:
    wide = wild(9, 640, config.dtype, 1)
    offset = 0 if config.vector > 1 else 3
    check(config, wide[:, offset : offset + 256])


@pytest.mark.parametrize("min_amax", [0.0, 1e-4, 1.0, 1e30])
def test_the_largest_magnitude_has_a_floor(min_amax: float) -> None:
    config = cast_config(torch.bfloat16, is_aligned=True, is_few=True)
    check(config, wild(7, 512, torch.bfloat16, 2), min_amax=min_amax)
    check(config, torch.zeros(3, 256, dtype=torch.bfloat16), min_amax=min_amax)


@pytest.mark.parametrize("seed", range(4))
def test_many_schedules(seed: int) -> None:
    config = cast_config(torch.float32, is_aligned=True, is_few=False)
    check(config, wild(70, 700, torch.float32, seed), seed)


def test_quotients_beside_where_fp8_rounds_the_other_way() -> None:
    check(cast_config(torch.float32, is_aligned=True, is_few=False), hard_quotients())
