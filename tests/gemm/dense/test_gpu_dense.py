"""The fp8_gemm kernel on a GPU: bits of every reachable configuration, sizes at limits, streams, graphs, threads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import captured, in_threads, random_fp8, random_scales, small_integers, some, sum_of_parts
from torch import Tensor

import deep_gemm
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.call import RECORDS
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.check.recipes import E2M1
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm import launch as dense
from deep_gemm.gemm import reference
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.decode import decode_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds.output import FINE_OPERANDS
from deep_gemm.gemm.problem import Problem
from lab import configs
from lab.bench.tune import compile_all
from lab.configs import reachable_decode
from lab.sim.dense import random_packed
from lab.sim.fp8_gemm_decode import random_problem
from lab.sim.rounding import TENSOR_CORES, allowed_difference, describe_mistakes

pytestmark = pytest.mark.gpu

Operand = tuple[Tensor, Tensor]
# Bounds of the error of all of D: rounding D to BF16 causes 1.7e-3, the tensor cores' own sums 1.3e-4.
RELATIVE = {torch.bfloat16: 3e-3, torch.float32: 1e-3}


def operands(m: int, n: int, k: int, seed: int = 0, *, by_row: bool = False) -> tuple[Operand, Operand]:
    g = torch.Generator("cuda").manual_seed(seed)
    a = random_fp8((m, k), g), random_scales((m, ceil_div(k, 128)), g)
    rows = n if by_row else ceil_div(n, 128)
    b = random_fp8((n, k), g), random_scales((rows, ceil_div(k, 128)), g)
    return a, b


def problem_for(config: GemmConfig, a: Operand, b: Operand, d: Tensor) -> Problem:
    """Make a problem with the C that the configuration needs."""
    c = None
    if config.adds_to_d:
        c = d.normal_()
    elif config.with_c:
        c = torch.randn(d.shape, device="cuda").to(d.dtype)
        c = torch.randn(d.shape[1], device="cuda") if config.c_is_fp32 else c
    return dense_problem(a, b, d, c, recipes=(None, config.sfa, config.sfb))


def right_d(p: Problem, c: Tensor | None) -> Tensor:
    """Compute D by the reference on the GPU; `c` holds the values of C from before the product."""
    d = torch.empty_like(p.d)
    reference.compute(p._replace(d=d, c=c))
    return d


def assert_right(p: Problem, got: Tensor, right: Tensor, config: GemmConfig | None = None) -> None:
    """Check each element by the tensor cores' bound, and D as a whole. The error names the worst element and tile."""
    allowed = allowed_difference(p, right, TENSOR_CORES)
    mistakes = describe_mistakes(got, right, allowed, (config.block_m, config.block_n) if config else None)
    assert mistakes is None, f"{config.name if config else 'chosen'}: {mistakes}"
    relative = float((got.double() - right.double()).norm() / right.double().norm())
    assert relative < RELATIVE[got.dtype], f"{relative:.1e} for the whole result"


FINE = [config for config in configs.reachable_dense() if config.operands in FINE_OPERANDS]
CONFIGS = [config for config in configs.reachable_dense() if config.b != E2M1 and config not in FINE] + FINE[::12]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile all kernels that the tests need, on all processors at once."""
    compile_all([*CONFIGS, *reachable_decode()], lambda _: None)


@pytest.mark.parametrize("index", range(len(CONFIGS)))
def test_sums_that_are_exact_in_the_tensor_cores_give_the_references_bits(index: int) -> None:
    """The operands are small integers: no sum of a k-block needs more bits than the tensor cores keep."""
    config = CONFIGS[index]
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    m, n, k = config.block_m * 2 + 8, config.block_n * 2 + 8, 4240 if config.has_tail else 128 * 36 - 16
    g = torch.Generator("cuda").manual_seed(index)
    a, b = (torch.randint(-2, 3, (rows, k), generator=g, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    sfa, sfb = (
        random_scales((ceil_div(rows, of.rows), ceil_div(k, of.columns or k)), g)
        for rows, of in ((m, some(config.sfa)), (n, some(config.sfb)))
    )
    p = problem_for(config, (a, sfa), (b, sfb), torch.full((m, n), float("nan"), dtype=dtype, device="cuda"))
    right = (
        sum_of_parts(p, config.cluster_k, config.run_k_blocks)
        if config.cluster_k > 1
        else right_d(p, p.c.clone() if p.c is not None else None)
    )
    dense.run(p, config)
    assert torch.equal(p.d, right)


def test_the_same_bits_whatever_m_is_where_that_is_asked_for() -> None:
    deep_gemm.set_batch_invariant(True)
    for n, k in ((576, 7168), (2112, 1536), (2112, 7168), (4096, 512)):
        a, b = operands(512, n, k)
        whole = some(deep_gemm.fp8_gemm_nt(a, b))
        for m in (1, 2, 7, 8, 16, 31, 32, 33, 64, 100, 128, 200, 256, 384, 511):
            part = some(deep_gemm.fp8_gemm_nt((a[0][:m], a[1][:m]), b))
            assert torch.equal(part, whole[:m]), f"{m} of 512 rows, n = {n}, k = {k}"


@pytest.mark.parametrize("m", [1, 16, 128, 1000])
def test_products_that_start_beside_the_end_of_the_kernel_ahead_are_right(m: int) -> None:
    """Each product reads a copy that the kernel ahead writes. A product that does not wait would read the old zeros."""
    a, b = operands(m, 2112, 7168)
    right = some(deep_gemm.fp8_gemm_nt(a, b))
    deep_gemm.set_pdl(True)
    x, d = a[0].clone(), torch.empty_like(right)
    for _ in range(20):
        x.view(torch.int8).zero_()
        x.copy_(a[0])
        deep_gemm.fp8_gemm_nt((x, a[1]), b, d)
        assert torch.equal(d, right)


@pytest.mark.parametrize("of", [(1, 576, 7168), (32, 8192, 8192), (64, 16, 8192), (300, 1032, 336), (2048, 2112, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chosen_configurations(of: tuple[int, int, int], dtype: torch.dtype) -> None:
    a, b = operands(*of)
    d = torch.full(of[:2], float("nan"), dtype=dtype, device="cuda")
    deep_gemm.fp8_gemm_nt(a, b, d)
    p = dense_problem(a, b, d, None)
    assert_right(p, d, right_d(p, None))


@pytest.mark.parametrize(("m", "n", "k"), [(70000, 32768, 128), (64, 131072, 16896)])
def test_sizes_past_two_to_the_31(m: int, n: int, k: int) -> None:
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for first in range(0, n, 8192):
        b[first : first + 8192] = torch.randn(8192, k, device="cuda").to(torch.float8_e4m3fn)
    sfa, sfb = torch.rand(m, ceil_div(k, 128), device="cuda"), torch.rand(ceil_div(n, 128), ceil_div(k, 128)).cuda()
    d = some(deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb)))
    for rows in (slice(0, 3), slice(m // 2, m // 2 + 3), slice(m - 3, m)):
        right = reference.block_scaled_product(a[rows], sfa[rows], b, sfb)
        assert float((d[rows].double() - right.double()).norm() / right.double().norm()) < RELATIVE[torch.bfloat16]


@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 64, 128), (64, 0, 128), (64, 64, 0), (0, 0, 0)])
def test_sizes_of_zero(m: int, n: int, k: int, with_c: bool) -> None:
    a, b = operands(m, n, k)
    c = torch.randn(m, n, device="cuda", dtype=torch.bfloat16) if with_c else None
    d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, b, d, c)
    assert torch.equal(d, c if c is not None else torch.zeros_like(d))


@pytest.mark.parametrize(("m", "n", "k"), [(520, 1032, 2064), (16, 4096, 7168)])
def test_the_same_call_gives_the_same_bits(m: int, n: int, k: int) -> None:
    a, b = operands(m, n, k)
    first = some(deep_gemm.fp8_gemm_nt(a, b))
    for _ in range(100):
        again = torch.full_like(first, float("nan"))
        deep_gemm.fp8_gemm_nt(a, b, again)
        assert torch.equal(again, first)


def test_a_thread_that_has_not_used_the_gpu_yet_multiplies() -> None:
    """A new thread has no CUDA context. It must get a context, both to load a kernel and to launch a loaded kernel."""
    torch.manual_seed(0)
    RECORDS.clear()
    kernels: tuple[Any, ...] = (FP8_GEMM, FP8_GEMM_DECODE)
    for kernel in kernels:
        kernel.loaded.cache_clear()
        kernel.launcher.cache_clear()
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(40, 400, device="cuda"))
    b = deep_gemm.per_block_cast_to_fp8(torch.randn(200, 400, device="cuda"))
    found = [torch.full((40, 200), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    for d in found[:2]:  # the first thread loads the kernel
        in_threads(partial(deep_gemm.fp8_gemm_nt, a, b), [d])
    deep_gemm.fp8_gemm_nt(a, b, found[2])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_threads_that_share_a_record() -> None:
    problems = [operands(128, 256, 512, seed) for seed in range(8)]
    right = [deep_gemm.fp8_gemm_nt(a, b) for a, b in problems]
    wrong: list[int] = []

    def work(index: int) -> None:
        a, b = problems[index]
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for _ in range(200):
                d = deep_gemm.fp8_gemm_nt(a, b)
                torch.cuda.current_stream().synchronize()
                if d is None or not torch.equal(d, right[index]):  # type: ignore[arg-type]
                    wrong.append(index)

    in_threads(work, range(len(problems)))
    assert wrong == []


def test_fewer_sms_give_the_same_bits_without_compiling() -> None:
    a, b = operands(1000, 2112, 512)
    right = deep_gemm.fp8_gemm_nt(a, b)
    loaded: Any = FP8_GEMM.loaded
    compiled = loaded.cache_info().currsize
    for num_sms in (1, 7, 100):
        deep_gemm.set_num_sms(num_sms)
        assert torch.equal(deep_gemm.fp8_gemm_nt(a, b), right)  # type: ignore[arg-type]
    assert loaded.cache_info().currsize == compiled


def test_a_seen_call_with_bad_addresses_is_refused_still() -> None:
    a, b = operands(64, 256, 512)
    d = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, b, d)
    inside_b = b[0].view(torch.uint8).flatten()[: 64 * 256 * 2].view(torch.bfloat16).view(64, 256)
    with pytest.raises(ValueError, match="d: expected memory that does not overlap b"):
        deep_gemm.fp8_gemm_nt(a, b, inside_b)
    room = torch.empty(64 * 512 + 16, device="cuda", dtype=torch.uint8)
    misaligned = room[8 : 8 + 64 * 512].view(torch.float8_e4m3fn).view(64, 512)
    with pytest.raises(ValueError, match="a: expected an address that is a multiple of 16 bytes"):
        deep_gemm.fp8_gemm_nt((misaligned, a[1]), b, d)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_in_turn() -> None:
    for _ in range(2):
        for device in ("cuda:0", "cuda:1"):
            a, b = ((x.to(device), s.to(device)) for x, s in operands(200, 512, 1024))
            d = some(deep_gemm.fp8_gemm_nt(a, b))
            p = dense_problem(a, b, d, None)
            assert_right(p, d, right_d(p, None))


# FP4 weights on a GPU: any number of rows, all kinds of scales, bits, graphs.


def problem(m: int, n: int, k: int, seed: int, any_scales: bool = False, d: torch.Tensor | None = None) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    values, words = random_packed(n, k, generator, any_scales)
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(m, k, generator=generator).cuda())
    return dense_problem(a, (values.cuda(), words.cuda()), d, None)


def product(p: Problem, rows: slice = slice(None)) -> torch.Tensor:
    """Call the public function for some rows of the problem."""
    d = deep_gemm.fp8_fp4_gemm_nt((p.a[rows], p.sfa[rows]), (p.b, p.sfb), recipe_a=(1, 128), recipe_b=(1, 32))
    assert isinstance(d, torch.Tensor)
    return d


def assert_fp4_right(p: Problem, c: torch.Tensor | None = None) -> None:
    right = torch.empty_like(p.d)
    reference.compute(p._replace(d=right, c=c))
    assert describe_mistakes(p.d, right, allowed_difference(p, right, TENSOR_CORES)) is None


@pytest.mark.parametrize("any_scales", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (576, 288), (24576, 1536), (5120, 2304), (2880, 2880)])
def test_any_number_of_rows_through_the_public_function(n: int, k: int, any_scales: bool) -> None:
    """A record must serve other numbers of rows, and other weights of the same shape."""
    for seed, m in enumerate((1, 7, 16, 33, 64, 100, 257, 7, 64)):
        p = problem(m, n, k, seed, any_scales)
        assert_fp4_right(p._replace(d=product(p)))


def test_a_graph_takes_what_the_weight_has_become() -> None:
    """The scales fold at first and do not fold later: no decision about a weight is made before the kernel runs."""
    p, other = problem(9, 200, 1312, 1), problem(9, 200, 1312, 2, any_scales=True)
    call = (p.a, p.sfa), (p.b, p.sfb), p.d
    for _ in range(3):
        deep_gemm.fp8_fp4_gemm_nt(*call)
    graph, _ = captured(deep_gemm.fp8_fp4_gemm_nt, *call)
    assert_fp4_right(p)
    p.b.data.copy_(other.b)
    p.sfb.data.copy_(other.sfb)
    graph.replay()
    assert_fp4_right(p)
    p.d.zero_()
    deep_gemm.fp8_fp4_gemm_nt(*call)
    assert_fp4_right(p)


def test_bits_are_those_of_the_row_alone_where_that_is_asked() -> None:
    deep_gemm.set_batch_invariant(True)
    p = problem(200, 4096, 2048, 3)
    whole = product(p)
    for rows in (slice(0, 1), slice(5, 20), slice(40, 104)):
        assert torch.equal(product(p, rows), whole[rows])


def test_one_call_gives_the_same_bits_each_time() -> None:
    p = problem(16, 4096, 7168, 4)
    found = [product(p) for _ in range(20)]
    assert all(torch.equal(each, found[0]) for each in found)


# The fp8_gemm_decode kernel on a GPU: bits of every reachable configuration, splits, streams, graphs.


@pytest.mark.parametrize("index", range(len(reachable_decode())))
def test_a_cta_that_is_alone_gives_the_references_bits(index: int) -> None:
    """A CTA alone adds all k-blocks in one chain, in order. A split is compared with the sum of reference parts."""
    config = reachable_decode()[index]
    p = small_integers(config, config.block_tokens - 1, config.block_n + 8, 4240, index, "cuda")
    if config.cluster_k == 1:
        dense.run(p, config)
        assert torch.equal(p.d, right_d(p, p.c))
        return
    whole = replace(config, is_fp32=True, with_c=False, c_is_fp32=False)
    p = p._replace(d=torch.empty(p.m, p.n, device="cuda"), c=None)
    dense.run(p, whole)
    assert torch.equal(p.d, sum_of_parts(p, config.cluster_k, 1))


@pytest.mark.parametrize("cluster_k", range(1, 9))
@pytest.mark.parametrize("num_k_blocks", [1, 2, 3, 7, 8, 9, 31, 33, 65])
def test_every_split_of_every_depth(cluster_k: int, num_k_blocks: int) -> None:
    config = some(decode_config(16, 1, cluster_k, 1, is_fp32=True))
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


@pytest.mark.parametrize(("m", "n", "k"), [(16, 2112, 7168), (384, 768, 1024), (200, 512, 1024)])
def test_a_record_serves_other_operands_and_streams_and_graphs(m: int, n: int, k: int) -> None:
    problems, rights = [], []
    for seed in range(4):
        problems.append((*operands(m, n, k, seed), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)))
    for a, b, d in problems:
        d.fill_(float("nan"))
        deep_gemm.fp8_gemm_nt(a, b, d)
        assert_right(dense_problem(a, b, d, None), d, right_d(dense_problem(a, b, d, None), None))
        rights.append(d.clone())
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, (a, b, d) in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                d.fill_(float("nan"))
                deep_gemm.fp8_gemm_nt(a, b, d)
    torch.cuda.synchronize()
    assert all(torch.equal(d, right) for (_, _, d), right in zip(problems, rights, strict=True))

    a, b, d = problems[0]
    graph, _ = captured(deep_gemm.fp8_gemm_nt, a, b, d)
    for (new_a, new_b, _), right in zip(problems[1:], rights[1:], strict=True):
        for old, new in zip((*a, *b), (*new_a, *new_b), strict=True):
            old.copy_(new)
        d.fill_(float("nan"))
        graph.replay()
        assert torch.equal(d, right)


@pytest.mark.parametrize("words", Words.__members__.values(), ids=str)
@pytest.mark.parametrize("operands", FINE_OPERANDS, ids=str)
def test_fine_scales_give_the_references_bits(operands: Any, words: Words) -> None:
    """With any scales the kernel adds partial sums in one chain, in order. Small integers make partial sums exact."""
    _, sfa, sfb = operands
    for tokens, warpgroups in ((8, 1), (16, 2), (64, 1)):
        config = some(decode_config(tokens, warpgroups, 1, 1, is_fp32=True, sfa=sfa, sfb=sfb))
        p = random_problem(config, tokens + 3, 200, 1200, tokens, any_scales=True, words=words)
        g = torch.Generator("cuda").manual_seed(tokens)
        a, b = (torch.randint(-2, 3, x.shape, generator=g, device="cuda").to(x.dtype) for x in (p.a, p.b))
        p = p._replace(a=a, sfa=p.sfa.cuda(), b=b, sfb=p.sfb.cuda(), d=p.d.cuda())
        dense.start(p, config, 132)
        assert torch.equal(p.d.nan_to_num(7.25), right_d(p, None).nan_to_num(7.25))
