"""The cast_rows kernel's own source in the simulator, bit for bit as the reference casts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
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
    values, scales = sim.run(
        compiled(config),
        config,
        x,
        strides(*x.shape, m_major=m_major),
        min_amax=min_amax,
        rounds_up=rounds_up,
        seed=seed,
    )
    right_values, right_scales = per_token_cast_to_fp8(x, rounds_up, min_amax=min_amax)
    assert torch.equal(scales, right_scales)
    assert torch.equal(values.view(torch.uint8), right_values.view(torch.uint8))


def wild(m: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Magnitudes from the smallest to the largest, and everything that is no ordinary number."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-150, 128, (m, ceil_div(k, 128)), generator=generator).repeat_interleave(128, dim=1)[
        :, :k
    ]
    x = torch.randn(m, k, generator=generator, dtype=torch.float64) * 2.0 ** exponents.double()
    x = x.to(dtype)
    strange = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 448.0, 1e-45])
    where = torch.randint(0, m * k, (max(m * k // 50, 1),), generator=generator)
    x.view(-1)[where] = strange[torch.randint(0, len(strange), where.shape, generator=generator)].to(dtype)
    x[:: max(m // 3, 1), : min(k, 128)] = 0
    return x


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
