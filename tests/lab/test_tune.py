"""`python -m lab tune`, all that needs no GPU: who is timed, how often, what is judged, kept and printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, install, on_gpu
from typer.testing import CliRunner

from deep_gemm.core import settings as settings_module
from deep_gemm.core.gpu import H200
from deep_gemm.core.jit import CompilerMissing
from deep_gemm.gemm.dense import launch as dense
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.dense.choose import cheapest_tile, reachable, reachable_decode, tuned_tiles
from deep_gemm.gemm.explain import candidates
from deep_gemm.gemm.kernel import KERNEL as FP8_GEMM
from deep_gemm.gemm.kernel_decode import KERNEL as FP8_GEMM_DECODE
from deep_gemm.gemm.output import Output
from deep_gemm.gemm.table import read_table
from deep_gemm.gemm.tiles import OUTPUTS_BY_NAME
from lab.__main__ import app
from lab.bench import command, products, tune, tune_command
from lab.bench.cases import Case, cases_of
from lab.bench.contenders import OURS
from lab.bench.report import Report
from lab.bench.timing import Spread

SHAPE = (200, 576, 1024)
Times = dict[str, tuple[Spread, tuple[str, ...]]]


class Clock:
    """Times that nobody measured: every call is made once, and takes 10 us if nothing else is said of its tile."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.rounds: list[tuple[int, list[str]]] = []

    def cold(self, calls: Mapping[str, Callable[[], Any]], flush: object, repeats: int) -> Times:
        self.rounds.append((repeats, list(calls)))
        for call in calls.values():
            call()
        return {name: (Spread(us := self.us.get(name, 10.0), us - 1, us + 1), ("kernel",)) for name in calls}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(settings_module, "in_force", settings_module.InForce())
    fake = install(monkeypatch)

    problem = tune.random_problem

    def random_problem(shape: tuple[int, ...], output: Output) -> DenseProblem:
        p = problem(shape, output, "cpu")
        return p._replace(d=on_gpu(p.d))

    monkeypatch.setattr(tune, "random_problem", random_problem)
    monkeypatch.setattr(tune, "L2Flush", lambda: None)
    monkeypatch.setattr(tune, "build", lambda config: None)
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_command, "gpu_of", lambda device: fake.gpu)
    return fake


@pytest.fixture
def clock(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tune, "cold", clock.cold)
    return clock


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit of two small products, instead of all."""
    cases = [Case("dense", SHAPE), Case("dense_1d1d", (256, 384, 512))]
    contests = [tune.Contest.of(case, products.DENSE_OUTPUTS[case.kind], H200) for case in cases]
    monkeypatch.setattr(tune, "audit_contests", lambda gpu, is_judged: contests)


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of its own, and with no table of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DG_TUNED_TABLE", raising=False)
    settings_module.settings.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    settings_module.settings.cache_clear()
    tuned_tiles.cache_clear()


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def contest(shape: tuple[int, ...] = SHAPE, output: Output | None = None) -> tune.Contest:
    return tune.Contest.of(Case("dense", shape), output or Output(), H200)


# Contests


@pytest.mark.parametrize("shape", [SHAPE, (1, 7168, 2048), (64, 2112, 7168), (4096, 7168, 2048), (77, 2128, 7184)])
def test_the_chosen_tile_and_all_that_may_be_faster_are_entered(shape: tuple[int, int, int]) -> None:
    entrants = tune.Contest.of(Case("dense", shape), Output(), H200, by_cost=True).entrants
    assert entrants[0].tile == cheapest_tile(*shape, Output(), H200)
    able = [one for one in candidates(*shape, Output(), H200) if one.why_not is None]
    assert set(entrants[1:]) == {
        one for one in able if one.cost_us <= tune.HOPEFUL * able[0].cost_us and one != entrants[0]
    }
    assert len(entrants) == len({one.config.name for one in entrants})


def test_an_audit_is_of_all_dense_cases_and_some_at_random_and_needs_few_kernels() -> None:
    contests = tune.audit_contests(H200)
    assert [one.case for one in contests[: -tune.RANDOM_SHAPES]] == cases_of("dense")
    assert len({one.case.shape for one in contests}) >= len(contests) - 4
    assert [one.output.name for one in contests].count("1d1d fp32+d") == 4
    configs = tune.configurations(contests)
    assert len(configs) == len(set(configs)) < 120
    assert set(configs) <= {*reachable(), *reachable_decode()}


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
    assert dense.output_of(p) == output
    for entrant in contest(output=output).entrants:
        dense.run(p, entrant.config)
    assert len(gpu.launches) == len(contest(output=output).entrants)


# Judging


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


# Audits


@pytest.mark.usefixtures("two_cases", "in_a_folder")
def test_an_audit_keeps_all_times_and_ends_well(clock: Clock, results: Path) -> None:
    code, output = invoke("--audit", "--commit", "abc", "--verbose")
    assert code == 0, output
    assert "200x576x1024: " in output
    assert (
        "2 shapes: the chosen tile takes 0.0% longer than the best on average, 0.0% at worst (200x576x1024); "
        "0 above 5%" in output
    )
    assert "to tune" not in output
    (path,) = results.iterdir()
    assert path.name.startswith("audit-")
    assert path.name.endswith("-abc.json")
    report = Report.load(path)
    assert report.kind == "audit"
    assert report.header["method"] == tune.METHOD
    chosen = [row for row in report.rows if row.contender == OURS]
    assert [(row.kind, row.shape) for row in chosen] == [("dense", SHAPE), ("dense_1d1d", (256, 384, 512))]
    assert all(row.us == 10 and row.us_min == 9 and row.us_max == 11 and row.config for row in report.rows)
    assert sum(row.contender == tune.RIVAL for row in report.rows if row.shape == SHAPE) == tune.FINALISTS


@pytest.mark.usefixtures("two_cases")
@pytest.mark.parametrize(("us", "code"), [(10.4, 0), (10.6, 1)])
def test_an_audit_fails_where_a_choice_is_more_than_5_percent_behind(
    clock: Clock, in_a_folder: Path, us: float, code: int
) -> None:
    clock.us[contest().entrants[0].config.name] = us
    got, output = invoke("--audit", "--out", "f.json")
    assert got == code
    (line,) = [line for line in output.splitlines() if line.startswith("200x576x1024 ")]
    assert line.split()[-1] == f"{us / 10 - 1:.1%}"
    assert f"{code} above 5%" in output
    assert "to tune: python -m lab tune --output 'bf16' --shapes '200,576,1024'" in output
    assert (in_a_folder / "f.json").exists()


@pytest.mark.usefixtures("two_cases")
def test_a_shape_that_fails_is_told_and_kept(clock: Clock, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = tune.judge

    def broken(one: tune.Contest, flush: Any) -> tune.Judgement:
        if one.case.kind == "dense":
            raise RuntimeError("out of memory\nand more")
        return judge(one, flush)

    monkeypatch.setattr(tune, "judge", broken)
    code, output = invoke("--audit", "--out", "f.json")
    assert code == 1
    assert "no times of 200x576x1024: RuntimeError: out of memory" in output
    report = Report.load(in_a_folder / "f.json")
    assert [row.failed for row in report.failures()] == ["RuntimeError: out of memory"]
    assert {row.kind for row in report.rows} == {"dense", "dense_1d1d"}


@pytest.mark.usefixtures("two_cases")
def test_a_lost_gpu_leaves_what_was_measured(clock: Clock, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = tune.judge

    def lost(one: tune.Contest, flush: Any) -> tune.Judgement:
        if one.case.kind != "dense":
            raise products.GpuLostError("illegal memory access")
        return judge(one, flush)

    monkeypatch.setattr(tune, "judge", lost)
    monkeypatch.setattr(tune, "raise_if_lost", _raise)
    code, output = invoke("--audit", "--out", "f.json")
    assert code == 1
    assert "stopped: illegal memory access" in output
    report = Report.load(in_a_folder / "f.json")
    assert report.header["stopped"] == "illegal memory access"
    assert {row.kind for row in report.rows} == {"dense"}


def _raise(error: Exception) -> None:
    raise error


# Tables


def test_shapes_with_a_faster_tile_get_an_entry_and_lose_it_again(clock: Clock, in_a_folder: Path) -> None:
    chosen, other = contest().entrants[0], contest().entrants[3]
    clock.us[other.config.name] = 9.6
    code, output = invoke("--shapes", "200,576,1024;300,576,1024;200,576,1024", "--out", "t.json")
    assert code == 0, output
    assert "of 2 shapes have an entry in t.json" in output
    entries = {entry.m: entry for entry in read_table(in_a_folder / "t.json")}
    found = entries[200]
    assert (found.n, found.k, found.output, found.gpu, found.num_sms) == (576, 1024, Output(), "H200", 132)
    assert (found.tile, found.us, found.replaces, found.replaced_us) == (other.tile.name, 9.6, chosen.tile.name, 10)
    made_by = json.loads((in_a_folder / "t.json").read_text())["made_by"]
    assert made_by.startswith("python -m lab tune, deep_gemm ")

    clock.us[other.config.name] = 9.8  # 2% are not worth it
    code, output = invoke("--shapes", "200,576,1024", "--out", "t.json")
    assert code == 0, output
    assert "0 of 1 shapes have an entry in t.json" in output
    assert {entry.m: entry for entry in read_table(in_a_folder / "t.json")} == {
        m: entry for m, entry in entries.items() if m != 200
    }


def test_entries_of_other_outputs_and_gpus_stay(gpu: FakeGpu, clock: Clock, in_a_folder: Path) -> None:
    clock.us[contest().entrants[1].config.name] = 5
    assert invoke("--shapes", "200,576,1024")[0] == 0
    wgrad = OUTPUTS_BY_NAME["1d1d fp32+d"]
    clock.us[contest((1000, 1024, 4096), wgrad).entrants[1].config.name] = 5
    assert invoke("--shapes", "1000,1024,4096", "--output", "1d1d fp32+d")[0] == 0
    found = read_table(in_a_folder / "tuned.json")
    assert [(entry.output.name, entry.m) for entry in found] == [("1d1d fp32+d", 1000), ("bf16", 200)]


def test_a_tuned_product_is_measured_beside_the_tile_of_the_lowest_cost(
    clock: Clock, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.us[contest().entrants[1].config.name] = 5
    monkeypatch.setenv("DG_TUNED_TABLE", str(in_a_folder / "mine.json"))
    settings_module.settings.cache_clear()
    tables = []
    for _ in range(2):
        assert invoke("--shapes", "200,576,1024")[0] == 0
        tables.append((in_a_folder / "mine.json").read_text())
        tuned_tiles.cache_clear()
    assert tables[0] == tables[1]
    assert (
        contest().entrants[0].config.name
        == tune.Contest.of(Case("dense", SHAPE), Output(), H200, by_cost=True).entrants[1].config.name
    ), "with the table in force its tile is the chosen one"


def test_a_table_with_a_mistake_is_not_written_over(clock: Clock, in_a_folder: Path) -> None:
    (in_a_folder / "t.json").write_text("mine")
    code, output = invoke("--shapes", "200,576,1024", "--out", "t.json")
    assert code == 2
    assert "t.json: expected JSON, got" in output
    assert (in_a_folder / "t.json").read_text() == "mine"
    assert clock.rounds == []


# Usage


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "got none"),
        (("--audit", "--shapes", "1,8,16"), "got --audit and --shapes"),
        (("--audit", "--output", "bf16"), "--output is for --shapes"),
        (("--shapes", "1,8,16", "--commit", "abc"), "--commit is for --audit and --collect"),
        (("--shapes", "1,8"), "shapes: expected three or four positive integers"),
        (
            ("--shapes", "1,2,8,16"),
            "shapes: expected (m, n, k) for tune, n a multiple of 8 and k of 16, got (1, 2, 8, 16)",
        ),
        (("--shapes", "1,8,15"), "shapes: expected (m, n, k) for tune, n a multiple of 8 and k of 16, got (1, 8, 15)"),
        (("--shapes", "1,8,16", "--output", "fp16"), "output: expected one of bf16, bf16+c, "),
    ],
)
def test_command_line_refuses_in_words(arguments: tuple[str, ...], complaint: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert complaint in output


@pytest.mark.parametrize("arguments", [("--audit",), ("--shapes", "1,8,16")])
def test_without_a_gpu_the_command_says_so(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    code, output = invoke(*arguments)
    assert code == 2
    assert (
        "tune measures a GPU and found no CUDA GPU; these run anywhere: `bench compile`, `bench numerics --quick`"
        in output
    )


def test_another_gpu_than_a_hopper_is_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> None:
        raise NotImplementedError("deep_gemm's kernels need a Hopper GPU")

    monkeypatch.setattr(tune_command, "gpu_of", refuse)
    code, output = invoke("--audit")
    assert code == 2
    assert "need a Hopper GPU" in output


def test_a_table_in_force_that_is_none_is_named(
    gpu: FakeGpu, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_TUNED_TABLE", str(in_a_folder / "none.json"))
    settings_module.settings.cache_clear()
    tuned_tiles.cache_clear()
    code, output = invoke("--audit")
    assert code == 2
    assert "none.json: expected a table of tuned products, got" in output


def test_without_a_compiler_the_command_says_what_to_install(
    clock: Clock, in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(config: object) -> None:
        raise CompilerMissing('run: pip install "hopper-gemm[cu13]"')

    monkeypatch.setattr(tune, "build", missing)
    code, output = invoke("--shapes", "200,576,1024", "--out", "t.json")
    assert code == 2
    assert 'pip install "hopper-gemm[cu13]"' in output
    assert not (in_a_folder / "t.json").exists()
