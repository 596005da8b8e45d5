"""The fp8_gemm_decode kernel on a GPU: bits of every reachable configuration, splits, streams, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import random_scales
from test_gpu_dense import assert_right, operands, right_d
from torch import Tensor

from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm import launch as dense
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.decode import DecodeConfig, decode_config
from deep_gemm.gemm.kernel import FP8_GEMM_DECODE
from deep_gemm.gemm.kinds.output import FINE_OPERANDS
from deep_gemm.gemm.plan import Plan, addresses_of
from deep_gemm.gemm.problem import Problem
from lab.bench.tune import compile_all
from lab.configs import reachable_decode
from lab.sim.fine_decode import random_problem

pytestmark = pytest.mark.gpu


def dtype_of(config: DecodeConfig) -> torch.dtype:
    return torch.float32 if config.is_fp32 else torch.bfloat16


def small_integers(config: DecodeConfig, m: int, n: int, k: int, seed: int) -> Problem:
    """No sum of a block needs more bits than the tensor cores keep."""
    g = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randint(-2, 3, (rows, k), generator=g, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    sfa, sfb = random_scales((m, ceil_div(k, 128)), g), random_scales((ceil_div(n, 128), ceil_div(k, 128)), g)
    d = torch.full((m, n), float("nan"), dtype=dtype_of(config), device="cuda")
    c = torch.randn(m, n, device="cuda").to(d.dtype) if config.with_c else None
    return dense_problem((a, sfa), (b, sfb), d, c)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All that are needed, compiled on all processors at once."""
    compile_all(reachable_decode(), lambda _: None)


@pytest.mark.parametrize("index", range(len(reachable_decode())))
def test_a_cta_that_is_alone_gives_the_references_bits(index: int) -> None:
    """A chain over all k-blocks in order. A split is checked against the same split of k, part by part."""
    config = reachable_decode()[index]
    p = small_integers(config, config.block_tokens - 1, config.block_n + 8, 4240, index)
    if config.cluster_k == 1:
        dense.run(p, config)
        assert torch.equal(p.d, right_d(p, p.c))
        return
    whole = replace(config, is_fp32=True, with_c=False)
    d = torch.empty(p.m, p.n, device="cuda")
    dense.run(p._replace(d=d, c=None), whole)
    total, num_k_blocks = torch.zeros_like(d), ceil_div(p.k, 128)
    for rank in range(config.cluster_k):
        first, end = (num_k_blocks * r // config.cluster_k for r in (rank, rank + 1))
        part = p._replace(
            a=p.a[:, first * 128 : end * 128].contiguous(),
            b=p.b[:, first * 128 : end * 128].contiguous(),
            sfa=p.sfa[:, first:end],
            sfb=p.sfb[:, first:end],
            d=torch.empty_like(d),
            c=None,
        )
        total += right_d(part, None)
    assert torch.equal(d, total)


@pytest.mark.parametrize("cluster_k", range(1, 9))
@pytest.mark.parametrize("num_k_blocks", [1, 2, 3, 7, 8, 9, 31, 33, 65])
def test_every_split_of_every_depth(cluster_k: int, num_k_blocks: int) -> None:
    config = decode_config(16, 1, cluster_k, 1, fp32=True)
    assert config is not None
    a, b = operands(13, 136, num_k_blocks * 128 - 32, seed=cluster_k)
    p = dense_problem(a, b, torch.full((13, 136), float("nan"), device="cuda"), None)
    dense.run(p, config)
    assert_right(p, p.d, right_d(p, None))


def test_scales_are_read_as_they_lie() -> None:
    a, b = operands(11, 264, 2832)
    right = torch.empty(11, 264, device="cuda", dtype=torch.bfloat16)
    dense.run(dense_problem(a, b, right, None))
    for sfa in (get_mn_major_tma_aligned_tensor(a[1]), a[1].repeat(1, 2)[:, : a[1].shape[1]]):
        for sfb in (b[1], b[1].t().contiguous().t()):
            d = torch.empty_like(right)
            p = dense_problem((a[0], sfa), (b[0], sfb), d, None)
            dense.run(p._replace(sfa=sfa, sfb=sfb))
            assert torch.equal(d, right)


def launch(plan: Plan, a: Operand, b: Operand, d: Tensor) -> None:
    at = (*(x.data_ptr() for x in (*a, *b, d)), 0)
    assert plan.fits(at)
    plan.launch(at)


def test_a_plan_serves_other_operands_and_streams_and_graphs() -> None:
    problems = []
    for seed in range(4):
        a, b = operands(16, 2112, 7168, seed)
        d = torch.empty(16, 2112, device="cuda", dtype=torch.bfloat16)
        problems.append((a, b, d))
    a, b, d = problems[0]
    plan = dense.run(dense_problem(a, b, d, None))
    assert plan is not None
    rights = []
    for a, b, d in problems:
        d.fill_(float("nan"))
        launch(plan, a, b, d)
        assert_right(dense_problem(a, b, d, None), d, right_d(dense_problem(a, b, d, None), None))
        rights.append(d.clone())
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, (a, b, d) in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                d.fill_(float("nan"))
                launch(plan, a, b, d)
    torch.cuda.synchronize()
    assert all(torch.equal(d, right) for (_, _, d), right in zip(problems, rights, strict=True))

    a, b, d = problems[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(plan, a, b, d)
    for old, new in zip((*a, *b), (*problems[1][0], *problems[1][1]), strict=True):
        old.copy_(new)
    d.fill_(float("nan"))
    graph.replay()
    assert torch.equal(d, rights[1])


@pytest.mark.parametrize("words", Words.__members__.values(), ids=str)
@pytest.mark.parametrize("operands", FINE_OPERANDS, ids=str)
def test_fine_scales_give_the_references_bits(operands: Any, words: Words) -> None:
    """A chain over all parts of k-blocks in order, with any scales; no sum of a part needs more bits than there are."""
    _, sfa, sfb = operands
    for tokens, warpgroups in ((8, 1), (16, 2), (64, 1)):
        config = decode_config(tokens, warpgroups, 1, 1, fp32=True, sfa=sfa, sfb=sfb)
        assert config is not None
        p = random_problem(config, tokens + 3, 200, 1200, tokens, any_scales=True, words=words)
        g = torch.Generator("cuda").manual_seed(tokens)
        a, b = (torch.randint(-2, 3, x.shape, generator=g, device="cuda").to(x.dtype) for x in (p.a, p.b))
        p = p._replace(a=a, sfa=p.sfa.cuda(), b=b, sfb=p.sfb.cuda(), d=p.d.cuda())
        dense.plan_of(p, config, 132, FP8_GEMM_DECODE.launcher(config, 0, False)).launch(addresses_of(p))
        assert torch.equal(p.d.nan_to_num(7.25), right_d(p, None).nan_to_num(7.25))


def test_the_same_call_gives_the_same_bits() -> None:
    a, b = operands(16, 4096, 7168)
    first = torch.empty(16, 4096, device="cuda", dtype=torch.bfloat16)
    dense.run(dense_problem(a, b, first, None))
    for _ in range(100):
        again = torch.full_like(first, float("nan"))
        dense.run(dense_problem(a, b, again, None))
        assert torch.equal(again, first)
