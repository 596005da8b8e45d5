"""FP4 weights on a GPU: any number of rows, scales of all sorts, bits, graphs."""

from __future__ import annotations

import pytest
import torch

import deep_gemm
from deep_gemm.gemm import reference
from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.problem import Problem
from lab.sim.dense import random_packed
from lab.sim.rounding import TENSOR_CORES, allowed_difference, describe_mistakes

pytestmark = pytest.mark.gpu


def problem(m: int, n: int, k: int, seed: int, any_scales: bool = False, d: torch.Tensor | None = None) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    values, words = random_packed(n, k, generator, any_scales)
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(m, k, generator=generator).cuda())
    return dense_problem(a, (values.cuda(), words.cuda()), d, None)


def product(p: Problem, rows: slice = slice(None)) -> torch.Tensor:
    """Call the public function for some rows."""
    d = deep_gemm.fp8_fp4_gemm_nt((p.a[rows], p.sfa[rows]), (p.b, p.sfb), recipe_a=(1, 128), recipe_b=(1, 32))
    assert isinstance(d, torch.Tensor)
    return d


def assert_right(p: Problem, c: torch.Tensor | None = None) -> None:
    right = torch.empty_like(p.d)
    reference.compute(p._replace(d=right, c=c))
    assert describe_mistakes(p.d, right, allowed_difference(p, right, TENSOR_CORES)) is None


@pytest.mark.parametrize("any_scales", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (576, 288), (24576, 1536), (5120, 2304), (2880, 2880)])
def test_any_number_of_rows_through_the_public_function(n: int, k: int, any_scales: bool) -> None:
    """Plans are derived for other rows, and serve other weights of the same shape."""
    for seed, m in enumerate((1, 7, 16, 33, 64, 100, 257, 7, 64)):
        p = problem(m, n, k, seed, any_scales)
        assert_right(p._replace(d=product(p)))


def test_a_graph_takes_what_the_weight_has_become() -> None:
    """Scales that folded, and then do not: nothing about a weight is decided before the kernel runs."""
    p, other = problem(9, 200, 1312, 1), problem(9, 200, 1312, 2, any_scales=True)
    call = (p.a, p.sfa), (p.b, p.sfb), p.d
    for _ in range(3):
        deep_gemm.fp8_fp4_gemm_nt(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_fp4_gemm_nt(*call)
    assert_right(p)
    p.b.data.copy_(other.b)
    p.sfb.data.copy_(other.sfb)
    graph.replay()
    assert_right(p)
    p.d.zero_()
    deep_gemm.fp8_fp4_gemm_nt(*call)
    assert_right(p)


def test_bits_are_those_of_the_row_alone_where_that_is_asked() -> None:
    deep_gemm.set_batch_invariant(True)
    try:
        p = problem(200, 4096, 2048, 3)
        whole = product(p)
        for rows in (slice(0, 1), slice(5, 20), slice(40, 104)):
            assert torch.equal(product(p, rows), whole[rows])
    finally:
        deep_gemm.set_batch_invariant(False)


def test_one_call_gives_the_same_bits_each_time() -> None:
    p = problem(16, 4096, 7168, 4)
    found = [product(p) for _ in range(20)]
    assert all(torch.equal(each, found[0]) for each in found)
