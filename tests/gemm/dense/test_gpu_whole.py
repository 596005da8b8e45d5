"""One scale for all of k, and biases, on a GPU: the reference's bits, promotion of sums, graphs, mixed scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_right_on_gpu, captured, checked_on_gpu, host_never_waits, some
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.gemm import launch
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.ask.rows import contiguous_problem, masked_problem
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE, kernel_of
from deep_gemm.gemm.kinds.epilogues import TO_D
from lab.bench.tune import compile_all
from lab.casts import cast_by_torch
from lab.sim.trials import trial_of
from lab.sim.whole import PromotedFewTrial, PromotedTrial

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
BY_ROWS: Any = {"recipe_a": (1, 0), "recipe_b": (1, 0)}
RECIPES = None, (1, 0), (1, 0)
CONFIGS = [config for kernel in (FP8_GEMM, FP8_GEMM_DECODE) for config in kernel.configs() if config.sfa == WHOLE]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile all kernels that the tests need, on all processors at once."""
    compile_all(CONFIGS, lambda _: None)


def by_rows(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    return cast_by_torch(torch.randn(shape, generator=g, device="cuda"), 1, shape[-1])


def integers(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw integers so small that tensor cores keep all bits of a run's sum, and a scale of any sign for each row."""
    g = torch.Generator("cuda").manual_seed(seed)
    values = torch.randint(-2, 3, shape, generator=g, device="cuda").to(torch.float8_e4m3fn)
    return values, torch.rand(*shape[:-1], 1, generator=g, device="cuda") - 0.3


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_configuration(config: Any) -> None:
    for seed in range(2):
        trial_of(kernel_of(config), config).drawn(config, seed).on("cuda").run()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("c", [None, "c", "bias", "bias in bf16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2112, 7168), (24, 576, 1552), (200, 1032, 4096), (4096, 2112, 1536)])
def test_chosen_kernels_give_the_references_bits(m: int, n: int, k: int, c: str | None, dtype: torch.dtype) -> None:
    deep_gemm.set_batch_invariant(True)  # otherwise k may be split, and each CTA rounds its sum
    a, b = integers(m, k), integers(n, k, seed=1)
    g = torch.Generator("cuda").manual_seed(2)
    added = {
        None: None,
        "c": torch.randn(m, n, generator=g, device="cuda").to(dtype),
        "bias": torch.randn(n, generator=g, device="cuda"),
        "bias in bf16": torch.randn(n, generator=g, device="cuda").bfloat16(),
    }[c]
    d = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
    deep_gemm.fp8_gemm_nt(a, b, d, added, **BY_ROWS)
    sums = (a[0].double() @ b[0].double().T).float() * (a[1] * b[1].T)
    right = sums if added is None else sums + added.float()
    assert torch.equal(d, right.to(dtype))


def test_sums_are_promoted_every_128_columns() -> None:
    for config in CONFIGS:
        if config.is_fp32 and not config.with_c and not config.work.groups_rows and config.cluster_k == 1:
            if getattr(config, "adds_to_d", False) or config.epilogue != TO_D:
                continue
            kind: Any = PromotedFewTrial if kernel_of(config) is FP8_GEMM_DECODE else PromotedTrial
            is_any_depth = not isinstance(config, GemmConfig) or config.has_tail or config.run_k_blocks == 1
            kind(config, 45, 72, 1296 if is_any_depth else 1024).on("cuda").run()


def test_the_same_bits_whatever_m_is_where_that_is_asked_for() -> None:
    deep_gemm.set_batch_invariant(True)
    for n, k in ((576, 7168), (2112, 1536), (4096, 512)):
        a, b = by_rows(512, k), by_rows(n, k, seed=1)
        whole = some(deep_gemm.fp8_gemm_nt(a, b, **BY_ROWS))
        for m in (1, 2, 7, 8, 16, 31, 32, 33, 64, 100, 128, 200, 256, 384, 511):
            part = some(deep_gemm.fp8_gemm_nt((a[0][:m], a[1][:m]), b, **BY_ROWS))
            assert torch.equal(part, whole[:m]), f"{m} of 512 rows, n = {n}, k = {k}"


@pytest.mark.parametrize("m", [3, 16, 200, 1500])
def test_the_same_call_gives_the_same_bits(m: int) -> None:
    a, b = by_rows(m, 7168), by_rows(2112, 7168, seed=1)
    first = some(deep_gemm.fp8_gemm_nt(a, b, **BY_ROWS))
    for _ in range(50):
        again = torch.full_like(first, torch.nan)
        deep_gemm.fp8_gemm_nt(a, b, again, **BY_ROWS)
        assert torch.equal(again, first)


SIDES = [((1, 0), (128, 128)), ((0, 0), (128, 128)), ((1, 128), (1, 0)), ((1, 128), (0, 0)), ((1, 32), (1, 0))]
SIDES += [((1, 0), (64, 64)), ((1, 0), (0, 0)), ((0, 0), (1, 0)), ((0, 0), (0, 0))]


@pytest.mark.parametrize("m", [5, 300])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_mixtures(sides: Any, m: int) -> None:
    g = torch.Generator("cuda").manual_seed(m)
    operands: list[Any] = []
    for rows, (of_rows, columns) in ((m, sides[0]), (1032, sides[1])):
        x = torch.randn(rows, 2064, generator=g, device="cuda")
        if of_rows:
            operands.append(cast_by_torch(x, of_rows, columns or 2064))
        else:
            scale = x.abs().amax() / 448
            operands.append(((x / scale).to(torch.float8_e4m3fn), scale))
    a, b = operands
    d = torch.full((m, 1032), torch.nan, dtype=BF16, device="cuda")
    for _ in range(3):  # the first call makes a record
        deep_gemm.fp8_gemm_nt(a, b, d.fill_(torch.nan), recipe_a=sides[0], recipe_b=sides[1])
        assert_right_on_gpu(dense_problem(a, b, d, None, recipes=(None, *sides)), d)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("of_bias", [None, BF16, FP32])
@pytest.mark.parametrize("rows", [2, 90])
def test_rows_of_groups(rows: int, of_bias: torch.dtype | None, dtype: torch.dtype) -> None:
    groups, n, k = 9, 1032, 1552
    b = by_rows(groups, n, k, seed=1)
    bias = None if of_bias is None else torch.randn(groups, n, device="cuda").to(of_bias)
    ids = torch.arange(groups, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    ids[rows : 2 * rows] = -1
    a, d = by_rows(groups * rows, k), torch.full((groups * rows, n), 42.0, dtype=dtype, device="cuda")
    p = contiguous_problem(a, b, d, ids, recipes=RECIPES, bias=bias)
    checked_on_gpu(launch.run, p)
    counts = torch.full((groups,), rows, dtype=torch.int32, device="cuda")
    counts[3] = 0
    a, d = by_rows(groups, rows, k), torch.full((groups, rows, n), 42.0, dtype=dtype, device="cuda")
    checked_on_gpu(launch.run, masked_problem(a, b, d, counts, rows, recipes=RECIPES, bias=bias))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("of_bias", [BF16, FP32])
def test_biases_of_bf16_and_of_fp4(of_bias: torch.dtype, dtype: torch.dtype) -> None:
    for m in (5, 40, 700):
        g = torch.Generator("cuda").manual_seed(m)
        x, w = (torch.randn(rows, 1552, generator=g, device="cuda").bfloat16() for rows in (m, 1032))
        bias = torch.randn(1032, generator=g, device="cuda").to(of_bias) * 100
        d = torch.full((m, 1032), torch.nan, dtype=dtype, device="cuda")
        deep_gemm.bf16_gemm_nt(x, w, d, bias)
        torch.testing.assert_close(d.double(), x.double() @ w.double().T + bias.double(), rtol=1e-2, atol=1e-1)
        a, v = deep_gemm.per_token_cast_to_fp8(x[:, :1536]), deep_gemm.quantize_mxfp4(w[:, :1536])
        deep_gemm.fp8_fp4_gemm_nt(a, v, d.fill_(torch.nan), bias)
        assert_right_on_gpu(dense_problem(a, v, d, bias), d)


def test_a_graph_takes_new_scales_and_a_new_bias_and_the_host_never_waits() -> None:
    a, b, bias = by_rows(300, 2048), by_rows(1032, 2048, seed=1), torch.randn(1032, device="cuda")
    d = torch.empty(300, 1032, dtype=BF16, device="cuda")
    for _ in range(3):
        deep_gemm.fp8_gemm_nt(a, b, d, bias, **BY_ROWS)
    graph, _ = captured(deep_gemm.fp8_gemm_nt, a, b, d, bias, **BY_ROWS)
    a[1].mul_(3)
    b[1].mul_(-0.5)
    bias.add_(7)
    with host_never_waits():
        graph.replay()
        replayed = d.clone()
        deep_gemm.fp8_gemm_nt(a, b, d.fill_(torch.nan), bias, **BY_ROWS)
    assert torch.equal(replayed, d)
    assert_right_on_gpu(dense_problem(a, b, d, bias, recipes=RECIPES), d)


@pytest.mark.parametrize("m", [2, 40, 900])
def test_a_record_serves_other_operands_of_the_same_shapes(m: int) -> None:
    for seed in range(4):
        a, b = by_rows(m, 2048, seed=seed), by_rows(1032, 2048, seed=seed + 9)
        bias = torch.randn(1032, device="cuda")
        d = some(deep_gemm.fp8_gemm_nt(a, b, c=bias, **BY_ROWS))
        assert_right_on_gpu(dense_problem(a, b, d, bias, recipes=RECIPES), d)


def test_products_that_start_beside_the_end_of_the_kernel_ahead_are_right() -> None:
    deep_gemm.set_pdl(True)
    for m in (1, 16, 1000):
        a, b = by_rows(m, 7168), by_rows(2112, 7168, seed=1)
        right = some(deep_gemm.fp8_gemm_nt(a, b, **BY_ROWS))
        x, sf, d = a[0].clone(), a[1].clone(), torch.empty_like(right)
        for _ in range(20):
            x.view(torch.int8).zero_()
            sf.zero_()
            x.copy_(a[0])
            sf.copy_(a[1])
            deep_gemm.fp8_gemm_nt((x, sf), b, d, **BY_ROWS)
            assert torch.equal(d, right)
