"""Logits of the indexer on a GPU: all forms, no write outside the logits, the same bits each time."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
from helpers import captured

import deep_gemm
from deep_gemm.indexer.api import compute
from deep_gemm.indexer.check import ROOM, Logits, MqaLogits, PagedLogits
from deep_gemm.indexer.reference import schedule
from lab.sim.logits import BITS_OF_PRODUCTS, Ranges, anywhere, causal, compare, packed, paged_problem, problem

pytestmark = pytest.mark.gpu

P = TypeVar("P", MqaLogits, PagedLogits)
MARK = -1.5 * 2.0**53
"""A number that FP32 and BF16 hold, and that no logit equals."""
FORMS = {"clean": {"clean": True}, "not clean": {}, "compressed": {"columns": 700}}
REPEATS = 20


def sms() -> int:
    return deep_gemm.get_num_sms()


def guarded(p: P) -> tuple[P, torch.Tensor]:
    """Return the problem with its logits inside of a larger tensor of marks, and this tensor."""
    rows, pitch = p.logits.shape[0], p.logits.stride(0)
    memory = torch.full((rows + 2, pitch), MARK, dtype=p.logits.dtype, device="cuda")
    return p._replace(logits=memory[1:-1, : p.logits.shape[1]]), memory


def check(p: P) -> None:
    p, memory = guarded(p)
    compute(p)
    first = memory.clone()
    compare(p, p.logits, MARK, BITS_OF_PRODUCTS)
    assert (memory[0] == MARK).all()
    assert (memory[-1] == MARK).all()
    room = memory[1:-1, p.logits.shape[1] :]
    if isinstance(p, MqaLogits) and p.clean_logits:  # rows have space for whole blocks
        assert (room[:, ROOM:] == MARK).all()
    else:
        assert (room == MARK).all()
    for _ in range(REPEATS):
        memory.fill_(MARK)
        compute(p)
        assert torch.equal(memory, first)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [32, 64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_all_forms(heads: int, depth: int, dtype: torch.dtype, form: str) -> None:
    for ranges in (anywhere, causal, packed):
        shape = 301, 2777, heads, depth
        check(problem(shape, ranges(301, 2777), dtype=dtype, device="cuda", seed=heads, **FORMS[form]))  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [8, 24, 40, 48, 56, 72, 80, 96, 104, 128])
def test_any_number_of_heads(heads: int) -> None:
    check(problem((77, 1000, heads, 128), causal(77, 1000), clean=True, device="cuda"))


@pytest.mark.parametrize(
    "shape", [(5, 200, 32, 128), (13, 333, 64, 128), (1, 1, 64, 128), (1, 4096, 64, 128), (3, 20000, 64, 128)], ids=str
)
@pytest.mark.parametrize("clean", [False, True])
def test_few_tokens(shape: tuple[int, int, int, int], clean: bool) -> None:
    """DeepGEMM 2.6.1 computes the first two shapes wrong."""
    check(problem(shape, causal(*shape[:2]), clean=clean, device="cuda"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "ranges",
    [([90, 120, 3, 150, 0], [10, 119, 2, 0, -5]), ([-7, 140, -9, 200, 0], [999, 2**31 - 1, 1, 300, 150])],
    ids=["crossed", "beyond"],
)
def test_ranges_of_every_kind(ranges: Ranges, form: str) -> None:
    check(problem((5, 150, 64, 128), ranges, device="cuda", **FORMS[form]))  # type: ignore[arg-type]


def test_many_tokens() -> None:
    p = problem((2048, 8192, 64, 128), causal(2048, 8192), clean=True, device="cuda")
    check(p)


def test_few_sms_give_the_same_bits() -> None:
    p = problem((300, 5000, 64, 128), causal(300, 5000), clean=True, device="cuda")
    compute(p)
    whole = p.logits.clone()
    deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(7)
    compute(p)
    assert torch.equal(p.logits, whole)


def test_logits_beyond_2_31_bytes_and_elements() -> None:
    """The last rows begin more than 2^31 elements after the first row."""
    tokens, keys = 4200, 520_000
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    starts = [0] * (tokens - 4) + [keys - 300] * 4
    ends = [0] * (tokens - 4) + [keys - 3 + i for i in range(4)]
    p = problem((tokens, keys, 64, 32), (starts, ends), device="cuda", dtype=torch.float32)
    compute(p)
    last = slice(tokens - 4, tokens)
    few = p._replace(
        q=p.q[last],
        weights=p.weights[last],
        starts=p.starts[last],
        ends=p.ends[last],
        logits=torch.full((4, keys), MARK, device="cuda"),
    )
    found = torch.full_like(few.logits, MARK)
    for row in range(4):
        begin, end = starts[tokens - 4 + row], ends[tokens - 4 + row]
        found[row, begin:end] = p.logits[tokens - 4 + row, begin:end]
    compare(few, found, MARK, BITS_OF_PRODUCTS)


def recorded(p: Logits) -> torch.cuda.CUDAGraph:
    """Capture a graph of a call that ran once before."""
    compute(p)
    graph, _ = captured(compute, p)
    return graph


def test_a_graph_is_replayed_with_other_inputs() -> None:
    p, memory = guarded(problem((50, 900, 64, 128), causal(50, 900), clean=True, device="cuda"))
    graph = recorded(p)
    for seed in range(4):
        other = problem((50, 900, 64, 128), anywhere(50, 900, seed), clean=True, device="cuda", seed=seed)
        for name in ("scales", "weights", "starts", "ends"):
            getattr(p, name).copy_(getattr(other, name))
        for name in ("q", "keys"):
            getattr(p, name).view(torch.uint8).copy_(getattr(other, name).view(torch.uint8))
        memory.fill_(MARK)
        graph.replay()
        compare(p, p.logits, MARK, BITS_OF_PRODUCTS)


def test_as_a_dependent_of_the_kernel_ahead() -> None:
    """The previous kernel still writes the inputs when this kernel is launched."""
    p = problem((300, 5000, 64, 128), causal(300, 5000), clean=True, device="cuda")
    compute(p)
    right, ends = p.logits.clone(), p.ends.clone()
    filler = torch.empty(1 << 28, device="cuda")
    deep_gemm.set_pdl(True)
    for _ in range(5):
        p.ends.zero_()
        filler.fill_(1)
        p.ends.copy_(ends)
        compute(p)
        assert torch.equal(p.logits, right)


def test_public_functions() -> None:
    p = problem((9, 300, 64, 128), causal(9, 300), clean=True, device="cuda")
    given = (p.keys, p.scales), p.weights, p.starts, p.ends
    logits = deep_gemm.fp8_mqa_logits(p.q, *given)
    assert torch.equal(logits, deep_gemm.fp8_fp4_mqa_logits((p.q, None), *given))
    empty = deep_gemm.fp8_mqa_logits(p.q[:0], (p.keys, p.scales), p.weights[:0], p.starts[:0], p.ends[:0])
    assert empty.shape == (0, 300)
    nothing = deep_gemm.fp8_mqa_logits(p.q, (p.keys[:0], p.scales[:0]), *given[1:])
    assert nothing.shape == (9, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("depth", [32, 64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_all_forms_in_pages(next_n: int, heads: int, depth: int, page: int, dtype: torch.dtype) -> None:
    contexts = [[(b * 911 + t * 37) % 3000 if b % 5 else 0 for t in range(next_n)] for b in range(40)]
    check(paged_problem(contexts, next_n, heads, depth, page=page, room=16, shares=sms(), dtype=dtype, device="cuda"))


def test_next_n_of_4_with_a_schedule_for_half_of_the_sms() -> None:
    contexts = [[4000 + b, 4001 + b, 4002 + b, 4003 + b] for b in range(40)]
    check(paged_problem(contexts, 4, 64, shares=sms() // 2, device="cuda"))


def test_one_long_context() -> None:
    check(paged_problem([[131072]], 1, shares=sms(), device="cuda"))


def test_context_0_and_no_sequences() -> None:
    check(paged_problem([[0], [0]], 1, columns=300, shares=sms(), device="cuda"))
    given = paged_problem([[70]], 1, shares=sms(), device="cuda")
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
        check(paged_problem(lengths.tolist(), next_n, columns=300, shares=shares, device="cuda"))


@pytest.mark.parametrize("sequences", [0, 1, 256, 4096])
@pytest.mark.parametrize("next_n", [1, 3])
def test_schedules(sequences: int, next_n: int) -> None:
    lengths = torch.randint(0, 9000, (sequences, next_n), dtype=torch.int32)
    expected = torch.empty(sms() + 1, 2, dtype=torch.int32)
    schedule(lengths, expected)
    assert torch.equal(deep_gemm.get_paged_mqa_logits_metadata(lengths.cuda(), 64, sms()).cpu(), expected)


def test_a_graph_is_replayed_with_other_contexts() -> None:
    """The schedule is computed outside of the graph and copied into its memory."""
    p, memory = guarded(paged_problem([[900, 800]] * 9, 2, shares=sms(), device="cuda"))
    graph = recorded(p)
    for longest in (900, 0, 1, 640):
        p.contexts.copy_(torch.tensor([[longest, longest // 2]] * 9, dtype=torch.int32))
        p.schedule.copy_(deep_gemm.get_paged_mqa_logits_metadata(p.contexts, 64, sms()))
        memory.fill_(MARK)
        graph.replay()
        compare(p, p.logits, MARK, BITS_OF_PRODUCTS)
