"""The fp8_mqa_logits kernel's own source in the simulator: logits of all forms, heads, depths and ranges."""

from __future__ import annotations

import pytest
import torch
from thorough import up_to

from deep_gemm.indexer.check import HEADS, MqaLogits
from deep_gemm.indexer.kernel import KERNEL, config_of
from lab.sim import fp8_mqa_logits as sim
from lab.sim.fp8_mqa_logits import Ranges, anywhere, causal, compare, packed, problem
from lab.sim.library import compiled

pytestmark = pytest.mark.host_compiler

FORMS = {"clean": {"clean": True}, "not clean": {}, "compressed": {"columns": 90}}


def check(p: MqaLogits, seed: int = 0, schedule: str | None = None, num_sms: int = 2) -> None:
    config = config_of(p)
    got = sim.run(compiled(KERNEL, config), config, p, seed=seed, schedule=schedule, num_sms=num_sms)
    compare(p, got)


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
    [(5, 200, 32, 128), (13, 333, 64, 128)],  # most values are off in DeepGEMM 2.6.1
    ids=str,
)
@pytest.mark.parametrize("clean", [False, True])
def test_few_tokens_and_few_keys(shape: tuple[int, int, int, int], clean: bool) -> None:
    for seed in range(up_to(8, 2)):
        check(problem(shape, causal(*shape[:2]), clean=clean), seed=seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "ranges",
    [
        ([7, 0, 150, 9, 150], [7, 0, 150, 9, 150]),  # empty
        ([90, 120, 3, 150, 0], [10, 119, 2, 0, -5]),  # crossed
        ([-7, 140, -9, 200, 0], [999, 2**31 - 1, 1, 300, 150]),  # beyond what there is
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
def test_shares_do_not_depend_on_the_number_of_ctas(num_sms: int) -> None:
    """Each logit has the same bits whichever CTA computes it."""
    p = problem((37, 900, 64, 32), packed(37, 900), clean=True)
    config = config_of(p)
    one, other = (
        sim.run(compiled(KERNEL, config), config, p, num_sms=number, truncate=True) for number in (2, num_sms)
    )
    assert torch.equal(one, other)


def test_tiles_and_slots_go_round() -> None:
    """Many tiles and blocks for each CTA."""
    for seed in range(up_to(12, 3)):
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
    clean = sim.run(compiled(KERNEL, config_of(p)), config_of(p), p)
    q = p.q.clone()
    q[2, 5, 7] = torch.nan
    got = sim.run(compiled(KERNEL, config_of(p)), config_of(p), p._replace(q=q))
    assert got[2, :97].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(got[rest].nan_to_num(7), clean[rest].nan_to_num(7))
