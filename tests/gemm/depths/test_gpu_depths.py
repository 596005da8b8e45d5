"""Groups along k on a GPU: chosen kernels, users' problems, graphs, depths that only the GPU knows.

D is NaN before each product unless D is also C. All of D is compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import assert_right_on_gpu, captured, checked_on_gpu, host_never_waits
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.layout import align, ceil_div
from deep_gemm.gemm import depths
from deep_gemm.gemm.ask.depths import k_grouped_problem
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import MAX_INLINE_KS
from deep_gemm.gemm.problem import Problem
from lab.configs import reachable_k_grouped
from lab.sim import product as simulated

pytestmark = pytest.mark.gpu

RAGGED = [16, 0, 144, 128, 656, 0, 32, 2064]
ADDITIONS = ["fresh", "c", "in place", "bf16"]


def numbers(ks: Sequence[int]) -> Tensor:
    return torch.tensor(ks, dtype=torch.int32, device="cuda")


def operands(rows: int, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Make the values and the m-major scales of one operand on the GPU."""
    blocks = sum(ceil_div(k, 128) for k in ks)
    values = torch.randn(rows * sum(ks), device="cuda").to(torch.float8_e4m3fn)
    pitch = ceil_div(rows, 4) * 4
    return values, torch.rand(blocks, pitch, device="cuda").add_(0.5)[:, :rows].t()


def problem_of(ks: Sequence[int], m: int, n: int, addition: str, *, on_gpu_alone: bool) -> Problem:
    n = align(n, 8) if addition == "bf16" else n
    a, b = operands(m, ks), operands(n, ks)
    dtype = torch.bfloat16 if addition == "bf16" else torch.float32
    d = torch.full((len(ks), m, n), float("nan"), dtype=dtype, device="cuda")
    c = torch.randn(d.shape, device="cuda") if addition == "c" else d.normal_() if addition == "in place" else None
    return k_grouped_problem(a, b, d, None if on_gpu_alone else list(ks), numbers(ks) if on_gpu_alone else None, c)


def check(p: Problem, config: GemmConfig | None = None) -> Tensor:
    return checked_on_gpu(depths.run_on_gpu, p, config)


def addition_of(config: GemmConfig) -> str:
    if not config.is_fp32:
        return "bf16"
    return "in place" if config.adds_to_d else "c" if config.with_c else "fresh"


@pytest.mark.parametrize("seed", range(12))
def test_random_depths_and_the_chosen_kernel(seed: int) -> None:
    rng = random.Random(seed)
    groups, m, n = rng.choice([1, 3, 33, 70]), rng.choice([1, 130, 520]), rng.choice([4, 576, 1028])
    ks = [16 * rng.choice([0, 1, 7, 8, 9, rng.randint(0, 100)]) for _ in range(groups)]
    check(problem_of([*ks, 16], m, n, ADDITIONS[seed % 4], on_gpu_alone=bool(seed % 2)))


def test_a_configuration_that_is_not_for_these_is_refused() -> None:
    p = problem_of([128], 64, 64, "c", on_gpu_alone=False)
    with pytest.raises(ValueError, match="is for another output: "):
        depths.run_on_gpu(p, reachable_k_grouped()[0])


# ---- problems that users met


@pytest.mark.parametrize("addition", ADDITIONS)
def test_groups_of_128_and_256_that_no_cluster_may_straddle(addition: str) -> None:
    p = problem_of([128, 256], 192, 3072, addition, on_gpu_alone=True)
    right = check(p)
    for config in reachable_k_grouped():
        if addition_of(config) == addition:
            assert torch.equal(check(p, config), right), config.name


@pytest.mark.parametrize("addition", ADDITIONS)
def test_short_groups_give_the_same_bits_a_hundred_times(addition: str) -> None:
    ks = [128, 256, 144, 128, 240, 256, 128, 192]
    p = problem_of(ks, 768, 2048, addition, on_gpu_alone=True)
    before, first = p.d.clone(), check(p)
    for _ in range(100):
        p.d.copy_(before)
        depths.run_on_gpu(p)
        assert torch.equal(p.d, first)


@pytest.mark.parametrize(("m", "n"), [(2048, 768), (768, 1536)])
def test_many_groups_and_empty_ones(m: int, n: int) -> None:
    """The 128 groups have a depth of 4096 in all, and every fourth group is empty."""
    ks = [0 if group % 4 == 3 else 32 if group % 3 else 64 for group in range(128)]
    ks[0] += 4096 - sum(ks)
    for addition in ADDITIONS:
        check(problem_of(ks, m, n, addition, on_gpu_alone=addition == "c"))


def test_128_groups_of_4096() -> None:
    p = problem_of([4096] * 128, 2048, 768, "fresh", on_gpu_alone=True)
    depths.run_on_gpu(p)
    for group in (0, 1, 63, 127):
        part = slice(group * 4096, (group + 1) * 4096)
        blocks = slice(group * 32, (group + 1) * 32)
        a, b = p.a[p.m * part.start : p.m * part.stop], p.b[p.n * part.start : p.n * part.stop]
        d, ks = p.d[group, None], numbers([4096])
        one = p._replace(a=a, b=b, sfa=p.sfa[:, blocks], sfb=p.sfb[:, blocks], ks_tensor=ks, d=d)
        assert_right_on_gpu(one, d)


def test_more_groups_than_parameters_hold() -> None:
    ks = [16 * (group % 3) for group in range(MAX_INLINE_KS + 1)]
    for on_gpu_alone in (False, True):
        check(problem_of(ks, 20, 64, "fresh", on_gpu_alone=on_gpu_alone))


# ---- through the public functions


@pytest.mark.parametrize("addition", ADDITIONS)
def test_a_graph_replays_with_changed_depths(addition: str) -> None:
    all_ks = [[128, 0, 400, 256, 16], [0, 784, 0, 16, 0], [144, 160, 160, 160, 176], [16, 16, 16, 16, 16]]
    m, n, groups = 520, 576, 5
    total, blocks = 800, 12
    a = torch.randn(m * total, device="cuda").to(torch.float8_e4m3fn), torch.rand(blocks, m, device="cuda").t()
    b = torch.randn(n * total, device="cuda").to(torch.float8_e4m3fn), torch.rand(blocks, n, device="cuda").t()
    dtype = torch.bfloat16 if addition == "bf16" else torch.float32
    ks, start = numbers(all_ks[0]), torch.randn(groups, m, n, device="cuda", dtype=dtype)
    d = start.clone()
    c = {"c": start, "in place": d}.get(addition)

    def call(out: Tensor, added: Tensor | None) -> None:
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, None, ks, added)

    call(d, c)
    graph, _ = captured(call, d, c)
    for changed in all_ks:
        ks.copy_(numbers(changed))
        d.copy_(start)
        graph.replay()
        again = start.clone()
        call(again, {"c": start, "in place": again}.get(addition))
        assert torch.equal(d, again)
        used = sum(ceil_div(k, 128) for k in changed)
        of_a, of_b = ((x[: rows * sum(changed)], sf[:, :used]) for (x, sf), rows in ((a, m), (b, n)))
        c = start if addition in ("c", "in place") else None
        assert_right_on_gpu(k_grouped_problem(of_a, of_b, torch.empty_like(d), changed, None, c), d, str(changed))


def test_a_graph_keeps_the_depths_of_a_list() -> None:
    """Depths of a list are passed by value: later changes of the list, or other calls, must not change the graph."""
    ks = [128, 0, 400]
    p = problem_of(ks, 130, 576, "fresh", on_gpu_alone=False)
    right = check(p)
    graph, _ = captured(deep_gemm.k_grouped_fp8_gemm_nt_contiguous, (p.a, p.sfa), (p.b, p.sfb), p.d, ks)
    ks[:] = [0, 512, 16]
    check(problem_of(ks, 130, 576, "fresh", on_gpu_alone=False))
    p.d.fill_(float("nan"))
    graph.replay()
    assert torch.equal(p.d, right)


def test_two_streams_do_not_share_maps() -> None:
    problems = [
        problem_of(ks, 768, 1024, "fresh", on_gpu_alone=True)
        for ks in ([128, 256, 4096], [2048, 0, 2432], [4464, 0, 16], [1040, 1520, 1920])
    ]
    rights = [check(p) for p in problems]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(20):
        for index, p in enumerate(problems):
            with torch.cuda.stream(streams[index % 2]):
                p.d.fill_(float("nan"))
                depths.run_on_gpu(p)
    torch.cuda.synchronize()
    for p, right in zip(problems, rights, strict=True):
        assert torch.equal(p.d, right)


@pytest.mark.parametrize("on_gpu_alone", [False, True])
def test_the_host_never_waits(on_gpu_alone: bool) -> None:
    p = problem_of(RAGGED, 520, 576, "c", on_gpu_alone=on_gpu_alone)
    depths.run_on_gpu(p)  # the first call loads a kernel, which may wait
    with host_never_waits():
        for _ in range(2):
            a, b = (p.a, p.sfa.contiguous()), (p.b, p.sfb)
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, p.d, p.ks, p.ks_tensor, p.c)


def test_the_form_of_2025_accumulates() -> None:
    ks = [256, 0, 144]
    p = problem_of(ks, 132, 576, "in place", on_gpu_alone=False)
    right = check(p)
    deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((p.a, p.sfa.t()), (p.b, p.sfb.t()), p.d, ks)
    assert torch.equal(p.d, right)


def test_the_same_bits_on_any_number_of_sms_with_any_tile() -> None:
    p = problem_of(RAGGED, 776, 1044, "fresh", on_gpu_alone=True)
    right = check(p)
    for config in reachable_k_grouped():
        if addition_of(config) == "fresh":
            assert torch.equal(check(p, config), right), config.name
    for num_sms in (1, 7, 100):
        deep_gemm.set_num_sms(num_sms)
        assert torch.equal(check(p), right)


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize(("ks", "m", "n"), [([], 8, 8), ([128], 0, 8), ([128], 8, 0), ([0, 0], 8, 8)])
def test_sizes_of_zero(ks: list[int], m: int, n: int, addition: str) -> None:
    p = problem_of(ks, m, n, addition, on_gpu_alone=False)
    right, _ = simulated.right_and_allowed(p, {"device": "cuda"})
    depths.run_on_gpu(p)
    assert torch.equal(p.d, right)


def test_records_that_serve_other_depths_and_addresses_are_right() -> None:
    for seed in (0, 1):
        for ks in ([128, 256], [144, 16], [400, 0], [640, 640], [256, 128]):
            for on_gpu_alone in (False, True):
                p: Any = problem_of(ks, 520, 576, "c", on_gpu_alone=on_gpu_alone)
                right = check(p)
                d = torch.full_like(p.d, float("nan"))
                a, b = (p.a.clone(), p.sfa), (p.b, p.sfb)
                deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, None if on_gpu_alone else ks, p.ks_tensor, p.c)
                assert torch.equal(d, right), (seed, ks)


def test_pdl_changes_nothing() -> None:
    p: Any = problem_of(RAGGED, 520, 576, "in place", on_gpu_alone=True)
    before, right = p.d.clone(), check(p)
    deep_gemm.set_pdl(True)
    for _ in range(20):
        ks = p.ks_tensor.clone()  # the kernel ahead writes the depths
        p.d.copy_(before)
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous((p.a, p.sfa), (p.b, p.sfb), p.d, None, ks, p.d)
        assert torch.equal(p.d, right)
