"""Logits of keys in pages on a GPU: right in all forms, nothing written beside them, the same bits each time."""

from __future__ import annotations

import pytest
import torch

import deep_gemm
from deep_gemm.indexer.paged import compute
from deep_gemm.indexer.paged_check import PagedLogits
from deep_gemm.indexer.reference import schedule
from lab.sim.fp8_mqa_logits import BITS_OF_PRODUCTS
from lab.sim.fp8_paged_mqa_logits import compare, problem

pytestmark = pytest.mark.gpu

MARK = -1.5 * 2.0**53
"""What no logit is, in FP32 and BF16."""
REPEATS = 20


def sms() -> int:
    return deep_gemm.get_num_sms()


def guarded(p: PagedLogits) -> tuple[PagedLogits, torch.Tensor]:
    """The problem with its logits inside of a larger tensor of marks."""
    rows, pitch = p.logits.shape[0], p.logits.stride(0)
    memory = torch.full((rows + 2, pitch), MARK, dtype=p.logits.dtype, device="cuda")
    return p._replace(logits=memory[1:-1, : p.logits.shape[1]]), memory


def check(p: PagedLogits) -> None:
    p, memory = guarded(p)
    compute(p)
    first = memory.clone()
    compare(p, p.logits, MARK, BITS_OF_PRODUCTS)
    assert (memory[0] == MARK).all()
    assert (memory[-1] == MARK).all()
    assert (memory[1:-1, p.logits.shape[1] :] == MARK).all()
    for _ in range(REPEATS):
        memory.fill_(MARK)
        compute(p)
        assert torch.equal(memory, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("depth", [32, 64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_all_forms(next_n: int, heads: int, depth: int, page: int, dtype: torch.dtype) -> None:
    contexts = [[(b * 911 + t * 37) % 3000 if b % 5 else 0 for t in range(next_n)] for b in range(40)]
    check(problem(contexts, next_n, heads, depth, page=page, room=16, shares=sms(), dtype=dtype, device="cuda"))


def test_next_n_of_4_with_a_schedule_for_half_of_the_sms() -> None:
    contexts = [[4000 + b, 4001 + b, 4002 + b, 4003 + b] for b in range(40)]
    check(problem(contexts, 4, 64, shares=sms() // 2, device="cuda"))


def test_one_long_context() -> None:
    check(problem([[131072]], 1, shares=sms(), device="cuda"))


def test_context_0_and_no_sequences() -> None:
    check(problem([[0], [0]], 1, columns=300, shares=sms(), device="cuda"))
    given = problem([[70]], 1, shares=sms(), device="cuda")
    empty = deep_gemm.fp8_paged_mqa_logits(
        given.q[:0], given.cache, given.weights[:0], given.contexts[:0], given.table[:0], given.schedule, 70
    )
    assert empty.shape == (0, 70)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("sequences", [32, 64, 96, 128])
def test_whole_batches_without_keys_and_with_one_each(sequences: int, next_n: int) -> None:
    shares = sms() // 2 if next_n == 4 else sms()
    for length in (0, 1):
        lengths = torch.full((sequences, next_n), length, dtype=torch.int32)
        expected = torch.empty(shares + 1, 2, dtype=torch.int32)
        schedule(lengths, expected)
        assert torch.equal(deep_gemm.get_paged_mqa_logits_metadata(lengths.cuda(), 64, shares).cpu(), expected)
        check(problem(lengths.tolist(), next_n, columns=300, shares=shares, device="cuda"))


@pytest.mark.parametrize("sequences", [0, 1, 256, 4096])
@pytest.mark.parametrize("next_n", [1, 3])
def test_schedules(sequences: int, next_n: int) -> None:
    lengths = torch.randint(0, 9000, (sequences, next_n), dtype=torch.int32)
    expected = torch.empty(sms() + 1, 2, dtype=torch.int32)
    schedule(lengths, expected)
    assert torch.equal(deep_gemm.get_paged_mqa_logits_metadata(lengths.cuda(), 64, sms()).cpu(), expected)


def test_a_graph_is_replayed_with_other_inputs() -> None:
    """The schedule is made outside of the graph and copied into it."""
    p, memory = guarded(problem([[900, 800]] * 9, 2, shares=sms(), device="cuda"))
    compute(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute(p)
    for longest in (900, 0, 1, 640):
        p.contexts.copy_(torch.tensor([[longest, longest // 2]] * 9, dtype=torch.int32))
        p.schedule.copy_(deep_gemm.get_paged_mqa_logits_metadata(p.contexts, 64, sms()))
        memory.fill_(MARK)
        graph.replay()
        compare(p, p.logits, MARK, BITS_OF_PRODUCTS)
