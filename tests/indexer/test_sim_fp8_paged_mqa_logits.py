"""The kernels of paged logits in the simulator: their own sources, for all forms, heads, depths, pages and contexts."""

from __future__ import annotations

import pytest
import torch

from deep_gemm.indexer.paged_check import PagedLogits
from deep_gemm.indexer.paged_kernel import KERNEL, config_of
from deep_gemm.indexer.plan_paged_contexts import CONFIG
from deep_gemm.indexer.plan_paged_contexts import KERNEL as PLANNER
from deep_gemm.indexer.reference import paged_mqa_logits
from lab.sim import fp8_paged_mqa_logits as sim
from lab.sim import plan_paged_contexts
from lab.sim.fp8_paged_mqa_logits import compare, problem
from lab.sim.library import compiled

pytestmark = pytest.mark.host_compiler


def check(p: PagedLogits, seed: int = 0, num_sms: int = 2) -> None:
    config = config_of(p)
    compare(p, sim.run(compiled(KERNEL, config), config, p, seed=seed, num_sms=num_sms))


@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "depth"), [(16, 32), (32, 64), (64, 128)])
def test_all_forms(heads: int, depth: int, next_n: int, page: int) -> None:
    """Among them next_n of 3, which DeepGEMM refuses."""
    contexts = [[300 - 7 * t for t in range(next_n)], [0] * next_n, [65 + t for t in range(next_n)]]
    dtype = torch.bfloat16 if (next_n + page // 32) % 2 else torch.float32
    check(problem(contexts, next_n, heads, depth, page=page, dtype=dtype), seed=next_n)


@pytest.mark.parametrize(("next_n", "heads"), [(1, 128), (2, 128), (3, 80), (4, 40), (3, 72), (1, 8)])
def test_other_numbers_of_heads(next_n: int, heads: int) -> None:
    check(problem([[200] * next_n, [130] * next_n], next_n, heads, 32))


@pytest.mark.parametrize("page", [32, 64])
def test_block_strides_that_are_no_multiple_of_the_page(page: int) -> None:
    check(problem([[333, 332], [64, 63]], 2, 32, 64, page=page, room=48))


def test_context_0() -> None:
    check(problem([[0], [0], [0]], 1, 64, 32, columns=70))
    check(problem([[0, 0], [5, 0], [0, 0], [0, 300]], 2, 64, 32))


def test_pages_beyond_the_context_are_never_read() -> None:
    """The table names a block there that is not in memory, and rows of logits go on."""
    for page, next_n in ((32, 1), (64, 2)):
        p = problem([[1100] * next_n, [0] * next_n], next_n, 16, 32, page=page, columns=1160, names_last_block=True)
        config = config_of(p)
        compare(p, sim.run(compiled(KERNEL, config), config, p, num_sms=2, hidden_blocks=1))


def test_many_sequences_some_without_keys() -> None:
    """More than a warp looks at together, in shares that end in the middle of a sequence."""
    contexts = [[(i * 97) % 400 if i % 3 else 0] for i in range(75)]
    for shares in (1, 3):
        check(problem(contexts, 1, 16, 32, shares=shares), seed=shares)


@pytest.mark.parametrize("sequences", [31, 32, 33])
def test_shares_that_the_kernel_cuts_and_those_of_a_schedule(sequences: int) -> None:
    contexts = [[max(length - 1, 0), length] for length in ((i * 61) % 500 for i in range(sequences))]
    for shares in (2, 5):
        check(problem(contexts, 2, 16, 32, shares=shares), seed=shares, num_sms=shares)


def test_ring_and_tables_go_round() -> None:
    check(problem([[5000], [3000]], 1, 64, 128, page=32, shares=1))
    check(problem([[5000], [3000]], 1, 16, 128, shares=2))


def test_two_ctas_for_a_share() -> None:
    """A schedule for half as many SMs."""
    check(problem([[900, 901, 902, 903], [10, 0, 300, 128]], 4, 64, 64, shares=2), num_sms=4)
    check(problem([[4900, 901, 902, 903]], 4, 16, 32, page=32, shares=1), num_sms=2)


def test_bits_depend_neither_on_shares_nor_on_next_n() -> None:
    p, one = (problem([[700, 699]], 2, 64, 64, shares=shares) for shares in (3, 1))
    config = config_of(p)
    first, second = (sim.run(compiled(KERNEL, config), config, each, truncate=True) for each in (p, one))
    assert torch.equal(first.nan_to_num(7), second.nan_to_num(7))


def test_contexts_of_sequences_alone() -> None:
    check(problem([300, 0, 77], 2, 32, 32))


def test_contexts_beyond_the_rows_and_negative_ones() -> None:
    """Nothing is written behind a row, whose table and logits end before its context."""
    p = problem([[300], [-5]], 1, 64, 32, columns=100)
    check(p)
    assert (p.logits.shape, p.logits.stride(0)) == ((2, 100), 256)


def test_the_reference_is_right() -> None:
    for contexts in ([[300, 0], [70, 71]], [90, 0]):
        p = problem(contexts, 2, 16, 32, page=32, room=16)
        p.logits.fill_(torch.nan)
        paged_mqa_logits(p)
        compare(p, p.logits)


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("sequences", [0, 1, 31, 700, 1100])
@pytest.mark.parametrize("shares", [1, 7, 132, 600])
def test_schedules(shares: int, sequences: int, next_n: int) -> None:
    g = torch.Generator().manual_seed(sequences + shares)
    lengths = torch.randint(-300, 2000, (sequences, next_n), generator=g, dtype=torch.int32)
    plan_paged_contexts.check(compiled(PLANNER, CONFIG), lengths, shares)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("sequences", [9, 32, 64, 96, 128])
def test_schedules_without_keys(sequences: int, next_n: int) -> None:
    lengths = torch.zeros(sequences, next_n, dtype=torch.int32)
    for shares in (132, 66):
        assert not plan_paged_contexts.check(compiled(PLANNER, CONFIG), lengths, shares).any()


@pytest.mark.parametrize("next_n", [1, 4])
@pytest.mark.parametrize("sequences", [32, 64, 96, 128])
def test_whole_batches_without_keys_and_with_one_each(sequences: int, next_n: int) -> None:
    """No page is read where there is no key, and no logit is written."""
    for length in (0, 1):
        check(problem([[length] * next_n] * sequences, next_n, 16, 32, columns=70, shares=3), num_sms=3)
