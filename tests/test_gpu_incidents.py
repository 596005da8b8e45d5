"""Situations that users of such kernels met and that no other test makes: see docs/incidents.md."""

from __future__ import annotations

import pytest
import torch

import deep_gemm
from deep_gemm import calc_diff
from deep_gemm.benchmark import tune
from deep_gemm.benchmark.cases import Case
from deep_gemm.benchmark.timing import L2Flush
from deep_gemm.choose.output import Output
from deep_gemm.gpus import gpu_of

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
"""By `calc_diff`, beside the product of the numbers that were cast: mostly the casts' own error."""


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(512, 1024, 147456), (1538, 256, 2048)])
def test_weight_gradients_of_great_depth_and_of_an_odd_number_of_rows(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, y, d = random(m, k), random(n, k), torch.full((m, n), 32.0, device="cuda")
    a, b = (deep_gemm.per_token_cast_to_fp8(each, mn_major=True) for each in (x, y))
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, d)
    assert calc_diff(d - 32, x.float() @ y.float().t()) < TOLERANCE


@pytest.mark.parametrize("m", [1, 16, 32])
def test_few_rows_with_scales_by_row_on_both_sides(m: int) -> None:
    x, y = random(m, 4096), random(2048, 4096)
    a, b = (deep_gemm.per_token_cast_to_fp8(each, mn_major=True) for each in (x, y))
    for dtype in (torch.bfloat16, torch.float32):
        d = torch.full((m, 2048), torch.nan, dtype=dtype, device="cuda")
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))
        assert calc_diff(d, x.float() @ y.float().t()) < TOLERANCE


@pytest.mark.parametrize("shape", [(32, 8192, 8192), (64, 16, 8192)])
def test_no_absurd_configuration(shape: tuple[int, int, int]) -> None:
    contest = tune.Contest.of(Case("dense", shape), Output(), gpu_of(torch.cuda.current_device()))
    judgement = tune.judge(contest, L2Flush())
    assert judgement.ratio < 1.5, f"{judgement.chosen.config} beside {judgement.best.config}: {judgement.ratio:.2f}"


def test_the_same_layer_again_and_again() -> None:
    """Casts, rows of experts and sums: nothing is added in an order that depends on time."""
    x, ids = random(700, 512), torch.randint(-1, 16, (700, 6), generator=torch.Generator().manual_seed(0)).cuda()
    weights = torch.rand(700, 6, generator=torch.Generator().manual_seed(1)).cuda()
    w1, w2 = (deep_gemm.per_block_cast_to_fp8(random(16, *shape)) for shape in ((1024, 512), (512, 512)))
    first, again = torch.empty_like(x), torch.empty_like(x)
    deep_gemm.experts(x, ids, weights, w1, w2, first)
    for _ in range(50):
        deep_gemm.experts(x, ids, weights, w1, w2, again.fill_(torch.nan))
        assert torch.equal(again, first)
