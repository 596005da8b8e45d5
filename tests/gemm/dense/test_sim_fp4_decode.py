"""FP4 weights in the decode kernel, in the simulator: every tile, ragged edges, scales that fold and others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_gemm.core.check.recipes import E2M1, MX
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.gemm import reference
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.decode import DecodeConfig
from lab.sim import product as simulated
from lab.sim.dense import random_problem
from lab.sim.fp8_gemm_decode import DecodeTrial
from lab.sim.product import compile_config

pytestmark = [pytest.mark.host_compiler, pytest.mark.combinations]


def config(
    block_tokens: int, num_stages: int = 3, warpgroups: int = 1, cluster_k: int = 1, **more: Any
) -> DecodeConfig:
    return DecodeConfig(block_tokens, num_stages, warpgroups, cluster_k, b=E2M1, sfb=MX, **more)


@pytest.mark.parametrize("any_scales", [False, True])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("block_tokens", [8, 16, 24, 32, 48, 64])
def test_every_tile_on_ragged_problems(block_tokens: int, warpgroups: int, any_scales: bool) -> None:
    for cluster_k in (1, 3):
        of = config(block_tokens, 3, warpgroups, cluster_k)
        if of.why_illegal() is None:
            for m, n, k in ((block_tokens - 3, 64 * warpgroups + 24, 1312), (block_tokens + 5, 72, 288)):
                DecodeTrial(of, m, n, k, cluster_k, any_scales=any_scales).run()


@pytest.mark.parametrize("k", [32, 64, 96, 128, 160, 2048, 2080, 4160])
def test_any_depth(k: int) -> None:
    """Below one k-block; odd numbers of them; past each 16 whose scales are in shared memory; CTAs without any."""
    DecodeTrial(config(16), 5, 72, k, k).run()
    DecodeTrial(config(8, 2, 2, 4), 5, 136, k, k, any_scales=True).run()


@pytest.mark.parametrize("schedule", ["slow_warps", "slow_producer", "slow_math", "late_loads", "slow_lanes"])
def test_biased_schedules(schedule: str) -> None:
    for seed in (1, 2):
        DecodeTrial(config(16, 2, 2), 13, 200, 1312, seed, schedule, any_scales=seed == 2).run()


@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("is_fp32", [False, True])
def test_every_kind_of_output(is_fp32: bool, with_c: bool) -> None:
    of = config(16, 3, 1, 2, is_fp32=is_fp32, with_c=with_c)
    DecodeTrial(of, 19, 72, 544, 1, is_dependent=True, in_place=with_c, weight_is_ready=True).run()


SCALES = {
    "zero": lambda s: s.fill_(0),
    "the largest": lambda s: s.fill_(254),
    "2^30 apart": lambda s: s.copy_(torch.tensor([100, 130]).repeat(s.numel() // 2).view(s.shape)),
    "2^11 apart": lambda s: s.copy_(torch.tensor([120, 131]).repeat(s.numel() // 2).view(s.shape)),
    "2^12 apart": lambda s: s.copy_(torch.tensor([120, 132]).repeat(s.numel() // 2).view(s.shape)),
    "one row of zeros": lambda s: s[3].fill_(0),
    "low": lambda s: s.copy_(torch.arange(s.numel()).view(s.shape) % 9),
}


@pytest.mark.parametrize("name", SCALES)
def test_any_scales_give_what_the_reference_gives(name: str) -> None:
    """To the bit: in a k-block each token has one number that is not zero, so that no sum is rounded."""
    of = config(16, 3, 2, is_fp32=True)
    generator = torch.Generator().manual_seed(1)
    a = torch.zeros(13, 4, 128)
    a.scatter_(2, torch.randint(0, 128, (13, 4, 1), generator=generator), 1.5)
    values = torch.randint(0, 256, (136, 256), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (136, 16), generator=generator, dtype=torch.uint8)
    SCALES[name](scales)
    sfa = torch.full((13, 4), 2.0**-60)
    p = dense_problem(
        (a.view(13, 512).to(torch.float8_e4m3fn), sfa), (values, scales), torch.full((13, 136), torch.nan), None
    )
    d, right = simulated.run(compile_config(of), of, p).d, torch.empty_like(p.d)
    reference.compute(p._replace(d=right))
    assert torch.equal(d.nan_to_num(7.25), right.nan_to_num(7.25))
    assert bool(d.isfinite().all()) == (name != "the largest")


def test_a_scale_that_is_no_number_makes_its_row_none() -> None:
    of = config(16, 3)
    for others in (125, 60):  # its row's others fold, or do not
        p = random_problem(of, 13, 72, 544, 3)
        scales = torch.full((72, 17), others, dtype=torch.uint8)
        scales[:, 3::4] = 125
        scales[5, 6] = 255
        p = p._replace(sfb=words_of(scales))
        right = torch.empty_like(p.d)
        reference.compute(p._replace(d=right))
        d = simulated.run(compile_config(of), of, p).d
        assert d[:, 5].isnan().all()
        assert right[:, 5].isnan().all()
        assert int(d.isnan().sum()) == 13


def test_scales_may_have_any_strides() -> None:
    of = config(16, 4, 1, 2)
    p = random_problem(of, 11, 264, 736, 3)
    wide = torch.full((264, 9), -1, dtype=torch.int32)
    wide[:, :6] = p.sfb
    for sfb in (p.sfb.t().contiguous().t(), wide[:, :6]):
        simulated.run(compile_config(of), of, p._replace(sfb=sfb, sfa=p.sfa.t().contiguous().t())).checked()


def test_bits_do_not_depend_on_the_tile() -> None:
    p = random_problem(config(8), 8, 136, 1312, 5)
    found = [
        simulated.run(compile_config(of), of, p._replace(d=torch.empty_like(p.d)), truncate=True).d
        for of in (config(8), config(8, 2, 2), config(16, 2), replace(config(64, 2), ctas_per_sm=1))
    ]
    assert all(torch.equal(d, found[0]) for d in found)
