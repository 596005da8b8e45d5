"""Products into the parts of heads on a GPU: results, untouched middles, the plain product's bits, streams, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import CANARY
from test_gpu_dense import operands
from test_sim_skip_head_mid import SPLITS
from torch import Tensor

import deep_gemm
from deep_gemm.gemm import launch, reference
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.ask.heads import skip_problem
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import epilogues
from deep_gemm.gemm.problem import Problem
from lab.bench.tune import compile_all
from lab.configs import reachable_skipping

pytestmark = pytest.mark.gpu

Splits = tuple[int, int, int]


def random_problem(m: int, heads: int, k: int, splits: Splits, seed: int = 0) -> Problem:
    """Draw a problem whose D holds canaries alone."""
    a, b = operands(m, heads * (splits[0] + splits[2]), k, seed)
    d = torch.full((m, heads * sum(splits)), CANARY, dtype=torch.bfloat16, device="cuda")
    return skip_problem(a, b, d, splits, recipes=(None, None, None))


def product_of(p: Problem, d: Tensor) -> Tensor:
    """Return the product as a matrix, read from the parts of D. The columns between the parts must hold the canary."""
    of_heads = d.view(p.m, p.n // p.heads.columns, p.heads.columns_of_d)
    assert (of_heads[..., p.heads.left : p.heads.left + p.heads.mid] == CANARY).all()
    return torch.cat(p.heads.of(d), 2).view(p.m, p.n)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile all kernels that the tests need, on all processors at once."""
    compile_all(reachable_skipping(), lambda _: None)


@pytest.mark.parametrize("index", range(len(reachable_skipping())))
def test_every_reachable_configuration_has_the_bits_of_the_plain_product(index: int) -> None:
    config = reachable_skipping()[index]
    rows = config.block_m if isinstance(config, GemmConfig) else config.block_tokens
    tail = 128 if isinstance(config, GemmConfig) and config.has_tail else 0
    for number, splits in enumerate(SPLITS):
        m, k = (rows * 2 + 5, rows - 3, 1)[number % 3], 400 + tail
        heads = config.block_n * 3 // (splits[0] + splits[2]) + 1
        n = heads * (splits[0] + splits[2])
        p = random_problem(m, heads, k, splits, number)
        if launch.why_unfit(config, p) is not None:
            continue
        launch.run(p, config)
        d = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        plain = dense_problem((p.a, p.sfa), (p.b, p.sfb), d, None)
        launch.run(plain, replace(config, epilogue=epilogues.TO_D))
        assert torch.equal(product_of(p, p.d), plain.d)


@pytest.mark.parametrize("m", [1, 7, 64, 128, 129, 1000, 4096])
@pytest.mark.parametrize("n", [32768, 8192])
def test_shapes_of_callers(m: int, n: int) -> None:
    """Call twice with each shape, as callers do: a record serves the second call."""
    for splits in ((128, 64, 128), (64, 32, 192)):
        p = random_problem(m, n // 256, 512, splits, seed=m)
        for _ in range(2):
            p.d.fill_(CANARY)
            deep_gemm.fp8_gemm_nt_skip_head_mid((p.a, p.sfa), (p.b, p.sfb), p.d, splits)
            plain = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            deep_gemm.fp8_gemm_nt((p.a, p.sfa), (p.b, p.sfb), plain)
            assert torch.equal(product_of(p, p.d), plain)


def test_the_same_call_gives_the_same_bits() -> None:
    for m in (16, 300):
        p = random_problem(m, 32, 512, (128, 64, 128))
        deep_gemm.fp8_gemm_nt_skip_head_mid((p.a, p.sfa), (p.b, p.sfb), p.d, (128, 64, 128))
        first = p.d.clone()
        for _ in range(20):
            p.d.fill_(CANARY)
            deep_gemm.fp8_gemm_nt_skip_head_mid((p.a, p.sfa), (p.b, p.sfb), p.d, (128, 64, 128))
            assert torch.equal(p.d, first)


def test_no_depth_gives_zeros_between_which_nothing_is_written() -> None:
    d = torch.full((3, 40), CANARY, dtype=torch.bfloat16, device="cuda")
    a = torch.empty(3, 0, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(3, 0, device="cuda")
    b = torch.empty(32, 0, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(1, 0, device="cuda")
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, (16, 8, 16))
    assert d[1].tolist() == [0.0] * 16 + [CANARY] * 8 + [0.0] * 16


def test_few_sms_compute_the_same() -> None:
    p = random_problem(48, 64, 512, (128, 64, 128))
    deep_gemm.fp8_gemm_nt_skip_head_mid((p.a, p.sfa), (p.b, p.sfb), p.d, (128, 64, 128))
    deep_gemm.get_num_sms()
    q = p._replace(d=torch.full_like(p.d, CANARY))
    deep_gemm.set_num_sms(7)
    deep_gemm.fp8_gemm_nt_skip_head_mid((q.a, q.sfa), (q.b, q.sfb), q.d, (128, 64, 128))
    right = torch.full_like(p.d, CANARY)
    reference.compute(p._replace(d=right))
    for d in (p.d, q.d):
        difference = (product_of(p, d).double() - product_of(p, right).double()).norm()
        assert difference < 3e-3 * product_of(p, right).double().norm()
