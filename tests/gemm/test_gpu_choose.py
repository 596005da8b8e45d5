"""Compare the heuristics with measurements on a GPU: their configuration is about as fast as the best candidate."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from deep_gemm.core.gpu import gpu_of
from deep_gemm.gemm.choose.tiles import OUTPUTS_BY_NAME
from deep_gemm.gemm.kinds.output import Output
from lab.bench import tune
from lab.bench.cases import Case
from lab.bench.timing import L2Flush

pytestmark = pytest.mark.gpu

SHAPES = 20
MOST = 1.15
MOST_OPERATIONS = 1e12
"""Limit of a random product's operations, so that its slowest candidate takes only milliseconds."""


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    """Draw dense sizes, evenly on a logarithmic scale; n and k are typical of weights."""
    rng = random.Random(0)
    found: list[tuple[int, int, int]] = []

    def size(least: int, most: int, multiple: int) -> int:
        return max(round(math.exp(rng.uniform(math.log(least), math.log(most))) / multiple), 1) * multiple

    while len(found) < count:
        m, n, k = size(1, 8192, 1), size(512, 16384, 64), size(512, 16384, 128)
        if 2 * m * n * k <= MOST_OPERATIONS:
            found.append((m, n, k))
    return found


def test_the_chosen_configuration_is_within_15_percent_of_the_best_and_takes_what_the_cost_says() -> None:
    torch.manual_seed(0)
    gpu, flush, told, too_slow, errors = gpu_of(torch.cuda.current_device()), L2Flush(), [], [], []
    contests = [tune.Contest.of(Case("dense", shape), Output(), gpu) for shape in random_shapes(SHAPES)]
    tune.compile_all(tune.configurations(contests), lambda _: None)
    for contest in contests:
        judgement = tune.judge(contest, flush)
        chosen, best = judgement.chosen, judgement.best
        errors.append(abs(math.log(chosen.spread.us / contest.entrants[0].cost_us)))
        told.append(
            f"{contest.case.name}: {chosen.config} {chosen.spread.us:.1f} us, "
            f"{best.config} {best.spread.us:.1f} us, {judgement.ratio:.3f}"
        )
        if judgement.ratio > MOST:
            too_slow.append(told[-1])
    print(*told, sep="\n")
    assert not too_slow, "\n" + "\n".join(too_slow)
    assert statistics.mean(errors) < 0.15, "the times that explain predicts are wrong"


@pytest.mark.parametrize("output", OUTPUTS_BY_NAME.values(), ids=list(OUTPUTS_BY_NAME))
def test_products_of_every_output_are_tuned(output: Output) -> None:
    shape, gpu = (1000, 1024, 4096), gpu_of(torch.cuda.current_device())
    contest = tune.Contest.of(Case("dense", shape), output, gpu)
    assert tune.random_problem(shape, output).output == output
    judgement = tune.judge(contest, L2Flush())
    assert len(judgement.rivals) == min(tune.FINALISTS, len(contest.entrants) - 1) > 0
    costs = {entrant.config.name: entrant.cost_us for entrant in contest.entrants}
    for time in (judgement.chosen, *judgement.rivals):
        assert 0.6 < time.spread.us / costs[time.config] < 1.6, f"{time.config}: {time.spread.us} us"
