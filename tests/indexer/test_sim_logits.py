"""The sources of the indexer's kernels in the simulator: all forms, heads, depths, ranges, pages and contexts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thorough import up_to

from deep_gemm.indexer.check import HEADS, Logits
from deep_gemm.indexer.kernel import config_of, kernel_of
from deep_gemm.indexer.plan_paged_contexts import CONFIG, KERNEL
from lab.sim import logits as sim
from lab.sim.library import compiled
from lab.sim.logits import Ranges, anywhere, causal, compare, packed, paged_problem, problem

pytestmark = pytest.mark.host_compiler

FORMS = {"clean": {"clean": True}, "not clean": {}, "compressed": {"columns": 90}}


def run(p: Logits, num_sms: int = 2, seed: int = 0, **how: Any) -> torch.Tensor:
    config = config_of(p)
    return sim.run(compiled(kernel_of(p), config), config, p, num_sms=num_sms, seed=seed, **how)


def check(p: Logits, seed: int = 0, num_sms: int = 2, hidden_blocks: int = 0) -> None:
    compare(p, run(p, num_sms, seed, hidden_blocks=hidden_blocks))


def bits(p: Logits, num_sms: int) -> torch.Tensor:
    return run(p, num_sms, truncate=True).nan_to_num(7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [32, 64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_all_forms(heads: int, depth: int, dtype: torch.dtype, form: str) -> None:
    check(problem((21, 300, heads, depth), anywhere(21, 300, heads), dtype=dtype, **FORMS[form]), seed=depth)  # type: ignore[arg-type]


@pytest.mark.combinations
@pytest.mark.parametrize("heads", HEADS)
def test_any_number_of_heads(heads: int) -> None:
    check(problem((2 * 128 // heads + 3, 200, heads, 32), causal(2 * 128 // heads + 3, 200), clean=True), seed=heads)


@pytest.mark.parametrize(
    "shape",
    [(5, 200, 32, 128), (13, 333, 64, 128)],  # DeepGEMM 2.6.1 computes mostly wrong values for these
    ids=str,
)
@pytest.mark.parametrize("clean", [False, True])
def test_few_tokens_and_few_keys(shape: tuple[int, int, int, int], clean: bool) -> None:
    for seed in range(up_to(8, 1)):
        check(problem(shape, causal(*shape[:2]), clean=clean), seed=seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "ranges",
    [
        ([7, 0, 150, 9, 150], [7, 0, 150, 9, 150]),  # empty
        ([90, 120, 3, 150, 0], [10, 119, 2, 0, -5]),  # crossed
        ([-7, 140, -9, 200, 0], [999, 2**31 - 1, 1, 300, 150]),  # beyond the keys
        ([5, -(2**31), 31, 32, 33], [6, 4, 33, 64, 34]),
    ],
    ids=["empty", "crossed", "beyond", "small"],
)
def test_ranges_of_every_kind(ranges: Ranges, form: str) -> None:
    check(problem((5, 150, 64, 32), ranges, **FORMS[form]))  # type: ignore[arg-type]


def test_all_ranges_empty() -> None:
    for form in FORMS.values():
        check(problem((9, 700, 64, 32), ([3] * 9, [3] * 9), **form))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("keys", [1, 31, 128, 129, 700])
def test_any_size(tokens: int, keys: int) -> None:
    for form in FORMS.values():
        check(problem((tokens, keys, 64, 32), anywhere(tokens, keys, tokens), **form), seed=keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_sms", [1, 3, 7])
def test_bits_do_not_depend_on_the_number_of_ctas(num_sms: int) -> None:
    """Each logit has the same bits, whichever CTA computes it."""
    p = problem((37, 900, 64, 32), packed(37, 900), clean=True)
    assert torch.equal(bits(p, 2), bits(p, num_sms))


def test_tiles_and_slots_go_round() -> None:
    """Each CTA computes many tiles and blocks of keys, so the rings wrap."""
    for seed in range(up_to(12, 1)):
        check(problem((60, 1500, 64, 128), causal(60, 1500)), seed=seed)


def test_more_tiles_than_threads() -> None:
    tokens = 385 * 2
    check(problem((tokens, 40, 128, 32), anywhere(tokens, 40), clean=True))


def test_weights_may_lie_apart_and_rows_have_room() -> None:
    p = problem((9, 100, 32, 32), causal(9, 100), clean=True)
    room = torch.full((9, 45), torch.nan)
    room[:, 3:35] = p.weights
    check(p._replace(weights=room[:, 3:35]))


def test_a_nan_reaches_its_logits_and_no_others() -> None:
    p = problem((6, 100, 32, 32), causal(6, 100))
    clean, q = run(p), p.q.clone()
    q[2, 5, 7] = torch.nan
    got = run(p._replace(q=q))
    assert got[2, :97].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(got[rest].nan_to_num(7), clean[rest].nan_to_num(7))


@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "depth"), [(16, 32), (32, 64), (64, 128)])
def test_all_forms_in_pages(heads: int, depth: int, next_n: int, page: int) -> None:
    """Test also next_n = 3, which DeepGEMM refuses."""
    contexts = [[300 - 7 * t for t in range(next_n)], [0] * next_n, [65 + t for t in range(next_n)]]
    dtype = torch.bfloat16 if (next_n + page // 32) % 2 else torch.float32
    check(paged_problem(contexts, next_n, heads, depth, page=page, dtype=dtype), seed=next_n)


@pytest.mark.parametrize(("next_n", "heads"), [(1, 128), (2, 128), (3, 80), (4, 40), (3, 72), (1, 8)])
def test_other_numbers_of_heads_in_pages(next_n: int, heads: int) -> None:
    check(paged_problem([[200] * next_n, [130] * next_n], next_n, heads, 32))


@pytest.mark.parametrize("page", [32, 64])
def test_block_strides_that_are_no_multiple_of_the_page(page: int) -> None:
    check(paged_problem([[333, 332], [64, 63]], 2, 32, 64, page=page, room=48))


def test_context_0() -> None:
    check(paged_problem([[0], [0], [0]], 1, 64, 32, columns=70))
    check(paged_problem([[0, 0], [5, 0], [0, 0], [0, 300]], 2, 64, 32))


def test_pages_beyond_the_context_are_never_read() -> None:
    """Behind the context, the table names a block that is not in memory, and the rows of logits continue."""
    for page, next_n in ((32, 1), (64, 2)):
        contexts = [[1100] * next_n, [0] * next_n]
        p = paged_problem(contexts, next_n, 16, 32, page=page, columns=1160, names_last_block=True)
        check(p, hidden_blocks=1)


def test_many_sequences_some_without_keys() -> None:
    """Test more sequences than a warp examines at a time, and shares that end in the middle of a sequence."""
    contexts = [[(i * 97) % 400 if i % 3 else 0] for i in range(75)]
    for shares in (1, 3):
        check(paged_problem(contexts, 1, 16, 32, shares=shares), seed=shares)


@pytest.mark.parametrize("sequences", [31, 32, 33])
def test_shares_that_the_kernel_cuts_and_those_of_a_schedule(sequences: int) -> None:
    contexts = [[max(length - 1, 0), length] for length in ((i * 61) % 500 for i in range(sequences))]
    for shares in (2, 5):
        check(paged_problem(contexts, 2, 16, 32, shares=shares), seed=shares, num_sms=shares)


def test_ring_and_tables_go_round() -> None:
    check(paged_problem([[5000], [3000]], 1, 64, 128, page=32, shares=1))
    check(paged_problem([[5000], [3000]], 1, 16, 128, shares=2))


def test_two_ctas_for_a_share() -> None:
    """The schedule was made for half the number of SMs, so two CTAs work on each share."""
    check(paged_problem([[900, 901, 902, 903], [10, 0, 300, 128]], 4, 64, 64, shares=2), num_sms=4)
    check(paged_problem([[4900, 901, 902, 903]], 4, 16, 32, page=32, shares=1), num_sms=2)


def test_bits_do_not_depend_on_shares() -> None:
    p, one = (paged_problem([[700, 699]], 2, 64, 64, shares=shares) for shares in (3, 1))
    assert torch.equal(bits(p, 2), bits(one, 2))


def test_contexts_of_sequences_alone() -> None:
    check(paged_problem([300, 0, 77], 2, 32, 32))


def test_contexts_beyond_the_rows_and_negative_ones() -> None:
    """Nothing may be written behind a row if the context is longer than the row's table and logits."""
    p = paged_problem([[300], [-5]], 1, 64, 32, columns=100)
    check(p)
    assert (p.logits.shape, p.logits.stride(0)) == ((2, 100), 256)


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("sequences", [0, 1, 31, 700, 1100])
@pytest.mark.parametrize("shares", [1, 7, 132, 600])
def test_schedules(shares: int, sequences: int, next_n: int) -> None:
    g = torch.Generator().manual_seed(sequences + shares)
    lengths = torch.randint(-300, 2000, (sequences, next_n), generator=g, dtype=torch.int32)
    sim.check_schedule(compiled(KERNEL, CONFIG), lengths, shares)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("sequences", [9, 32, 64, 96, 128])
def test_schedules_without_keys(sequences: int, next_n: int) -> None:
    lengths = torch.zeros(sequences, next_n, dtype=torch.int32)
    for shares in (132, 66):
        assert not sim.check_schedule(compiled(KERNEL, CONFIG), lengths, shares).any()


@pytest.mark.parametrize("next_n", [1, 4])
@pytest.mark.parametrize("sequences", [32, 64, 96, 128])
def test_whole_batches_without_keys_and_with_one_each(sequences: int, next_n: int) -> None:
    """A sequence without a key reads no page, and writes no logit."""
    for length in (0, 1):
        check(paged_problem([[length] * next_n] * sequences, next_n, 16, 32, columns=70, shares=3), num_sms=3)
