"""Contests of tiles, which the heuristics' tests run on a GPU: tiles that are timed, rounds, and judged tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fake_gpu import FakeGpu, on_gpu

from deep_gemm.core.gpu import H200
from deep_gemm.gemm import launch
from deep_gemm.gemm.choose.fp8 import chosen_tile
from deep_gemm.gemm.choose.tiles import OUTPUTS_BY_NAME
from deep_gemm.gemm.explain import Question
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.problem import Problem
from lab.bench import tune
from lab.bench.cases import Case
from lab.bench.timing import Spread
from lab.configs import reachable_decode
from lab.configs import reachable_dense as reachable

SHAPE = (200, 576, 1024)
Times = dict[str, tuple[Spread, tuple[str, ...]]]


class Clock:
    """Makes up times: every call is made once, and takes 10 us unless `us` holds another time for its tile."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.rounds: list[tuple[int, list[str]]] = []

    def cold(self, calls: Mapping[str, Callable[[], Any]], flush: object, repeats: int) -> Times:
        self.rounds.append((repeats, list(calls)))
        for call in calls.values():
            call()
        return {name: (Spread(us := self.us.get(name, 10.0), us - 1, us + 1), ("kernel",)) for name in calls}


@pytest.fixture
def gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    problem = tune.random_problem

    def random_problem(shape: tuple[int, ...], output: Output) -> Problem:
        p = problem(shape, output, "cpu")
        return p._replace(d=on_gpu(p.d))

    monkeypatch.setattr(tune, "random_problem", random_problem)
    return gpu


@pytest.fixture
def clock(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tune, "cold", clock.cold)
    return clock


def contest(shape: tuple[int, ...] = SHAPE, output: Output | None = None) -> tune.Contest:
    return tune.Contest.of(Case("dense", shape), output or Output(), H200)


@pytest.mark.parametrize("shape", [SHAPE, (1, 7168, 2048), (64, 2112, 7168), (4096, 7168, 2048), (77, 2128, 7184)])
def test_the_chosen_tile_and_all_that_may_be_faster_are_entered(shape: tuple[int, int, int]) -> None:
    entrants = tune.Contest.of(Case("dense", shape), Output(), H200).entrants
    assert entrants[0].tile == chosen_tile(Sizes(*shape), Output(), H200)
    able = [one for one in Question(*shape, Output(), 1, H200).candidates() if one.why_not is None]
    assert set(entrants[1:]) == {
        one for one in able if one.cost_us <= tune.HOPEFUL * able[0].cost_us and one != entrants[0]
    }
    assert len(entrants) == len({one.config.name for one in entrants})


def test_all_configurations_are_compiled_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    told: list[str] = []
    monkeypatch.setattr(tune, "build", built.append)
    configs = tune.configurations([contest()])
    tune.compile_all(configs, told.append)
    assert set(built) == set(configs)
    assert len(told) == len(configs) == len(built)


def test_both_kernels_are_compiled_by_their_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(FP8_GEMM, "build", lambda config: built.append(("fp8_gemm", config)))
    monkeypatch.setattr(FP8_GEMM_DECODE, "build", lambda config: built.append(("decode", config)))
    for config in (reachable()[0], reachable_decode()[0]):
        tune.build(config)
    assert built == [("fp8_gemm", reachable()[0]), ("decode", reachable_decode()[0])]


@pytest.mark.parametrize("name", OUTPUTS_BY_NAME)
def test_products_are_made_for_every_output(gpu: FakeGpu, name: str) -> None:
    output = OUTPUTS_BY_NAME[name]
    p = tune.random_problem(SHAPE, output)
    assert p.output == output
    for entrant in contest(output=output).entrants:
        launch.run(p, entrant.config)
    assert len(gpu.launches) == len(contest(output=output).entrants)


def test_two_rounds_the_second_of_the_best_four_and_the_chosen(gpu: FakeGpu, clock: Clock) -> None:
    one = contest((300, 4096, 1024))
    names = [entrant.config.name for entrant in one.entrants]
    assert len(names) > tune.FINALISTS + 2
    clock.us = dict(zip(names, [30.0, *(20.0 - i for i in range(len(names) - 1))], strict=True))
    judgement = tune.judge(one, flush=None)  # type: ignore[arg-type]
    assert clock.rounds == [(tune.FIRST_REPEATS, names), (tune.REPEATS, [names[0], *names[:-5:-1]])]
    assert judgement.chosen.config == names[0]
    assert judgement.best.config == names[-1]
    assert judgement.ratio == pytest.approx(30 / clock.us[names[-1]])
    assert len(gpu.launches) == len(names) + 1 + tune.FINALISTS


def test_few_entrants_need_one_round(clock: Clock) -> None:
    one = contest()
    few = tune.Contest(one.case, one.output, one.entrants[:3])
    judgement = tune.judge(few, flush=None)  # type: ignore[arg-type]
    assert [repeats for repeats, _ in clock.rounds] == [tune.REPEATS]
    assert judgement.ratio == 1
