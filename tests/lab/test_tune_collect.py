"""`python -m lab tune --collect`, all that needs no GPU: what is timed, what is kept, what is skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, install, on_gpu
from typer.testing import CliRunner

from deep_gemm.core import settings as settings_module
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.core.gpu import H200
from deep_gemm.core.jit import CompilerMissing
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.dense.choose import reachable, reachable_decode
from deep_gemm.gemm.depths import launch as depths
from deep_gemm.gemm.depths.check import KGroupedProblem
from deep_gemm.gemm.depths.choose import reachable_k_grouped
from deep_gemm.gemm.output import FINE_OPERANDS, OF_BF16_ALONE, USUAL_OPERANDS, Groups, Output
from deep_gemm.gemm.rows import launch as rows
from deep_gemm.gemm.rows.check import ContiguousProblem, MaskedProblem
from deep_gemm.gemm.rows.choose import reachable_grouped, reachable_grouped_decode
from lab.__main__ import app
from lab.bench import command, products, tune, tune_collect, tune_command, tune_samples
from lab.bench.timing import PairingError, Spread
from lab.bench.tune_samples import Sample

DENSE = Sample(Output(), 200, 576, 1024)
IDS = Sample(Output(groups=Groups.IDS), 60, 128, 256, 3, is_fitted=False)
COUNTS = Sample(Output(sfb=PER_ROW, groups=Groups.COUNTS), 20, 128, 256, 2)
DEPTHS = Sample(Output(is_fp32=True, adds_to_d=True, sfb=PER_ROW, groups=Groups.DEPTHS), 64, 128, 256, 2)
SAMPLES = [DENSE, IDS, COUNTS, DEPTHS]

Calls = dict[str, Callable[[], Any]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """A GPU on which every call takes 10 us; what was called: kinds of products, and names of configurations."""
    found: list[tuple[str, str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings_module, "in_force", settings_module.InForce())
    fake: FakeGpu = install(monkeypatch)
    problem, caller = tune.random_problem, tune_collect.caller

    def random_problem(shape: tuple[int, ...], output: Output, device: str) -> DenseProblem:
        p = problem(shape, output, device)
        return p._replace(d=on_gpu(p.d))

    def cold(calls: Calls, flush: object, repeats: int) -> dict[str, tuple[Spread, tuple[str, ...]]]:
        assert repeats == tune_collect.REPEATS
        for call in calls.values():
            call()
        return {name: (Spread(10.0, 9.0, 11.0), ("kernel",)) for name in calls}

    def grouped(p: ContiguousProblem | MaskedProblem | KGroupedProblem, config: GemmConfig) -> None:
        found.append((type(p).__name__, config.name))

    monkeypatch.setattr(tune, "random_problem", random_problem)
    monkeypatch.setattr(tune, "build", lambda config: None)
    monkeypatch.setattr(tune_collect, "caller", lambda sample: caller(sample, "cpu"))
    monkeypatch.setattr(tune_collect, "L2Flush", lambda: None)
    monkeypatch.setattr(tune_collect, "cold", cold)
    monkeypatch.setattr(tune_collect, "clusters_at_once", lambda device: {"1": {"2": 66}, "2": {"2": 132}})
    monkeypatch.setattr(rows, "run", grouped)
    monkeypatch.setattr(depths, "run_on_gpu", grouped)
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_command, "gpu_of", lambda device: fake.gpu)
    monkeypatch.setattr(tune_samples, "samples", lambda num_sms: SAMPLES)
    return found


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tune", "--collect", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def read(path: str = "f.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


# Samples


def test_samples_cover_both_halves_and_every_kind_from_the_beginning() -> None:
    found = tune_samples.choice_samples()
    assert len(found) > 500
    quarter = found[: len(found) // 4]
    for part in (found, quarter):
        by_half = [[one for one in part if one.is_fitted is half] for half in (True, False)]
        assert abs(len(by_half[0]) - len(by_half[1])) <= len(part) / 20
        for half in by_half:
            assert {one.output.groups for one in half} == set(Groups) - {Groups.ENDS, Groups.HEADS, *OF_BF16_ALONE}
            names = {one.output.name for one in half}
            assert {"bf16", "fp32", "1d1d fp32+d", "1d1d bf16", *tune_samples.FINE_OUTPUTS} <= names
            assert min(one.m for one in half if not one.num_groups) <= 8
            assert max(one.m for one in half if not one.num_groups) > 4000


def test_no_weight_is_both_fitted_and_held_back() -> None:
    weights: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for one in tune_samples.choice_samples():
        if not one.num_groups:
            weights[one.is_fitted].add((one.n, one.k))
    assert not weights[True] & weights[False]


def test_samples_are_the_same_each_time_and_products_that_there_are() -> None:
    found = tune_samples.samples(132)
    assert found == tune_samples.samples(132)
    for one in found:
        assert one.n % 8 == 0
        assert one.k % 16 == 0
        assert 2 * one.m * one.n * one.k <= tune_samples.MOST_OPERATIONS or one.m == 1 or one.purpose != "choice"
        if one.output.groups in (Groups.IDS, Groups.ENDS):
            assert sum(one.sizes()) == one.m
        if one.num_groups:
            assert len(one.sizes()) == one.num_groups
            assert min(one.sizes()) >= 0


@pytest.mark.parametrize("num_sms", [132, 78, 114])
def test_the_product_that_shows_the_rate_has_a_tile_for_each_sm(num_sms: int) -> None:
    rates = [one for one in tune_samples.fact_samples(num_sms) if one.purpose == "rate"]
    assert len(rates) == len(tune_samples.RATE_DEPTHS)
    assert all(one.m // 128 * (one.n // 256) == num_sms for one in rates)


def test_only_kernels_that_can_be_chosen_are_timed() -> None:
    entries = [tune_collect.entry_of(one, H200) for one in tune_samples.samples(132)]
    configs = set(tune_collect.configurations(entries))
    few_rows = (config for operands in (USUAL_OPERANDS, *FINE_OPERANDS) for config in reachable_decode(operands))
    of_groups = *reachable_grouped(), *reachable_grouped_decode(), *reachable_k_grouped()
    assert configs <= {*reachable(), *few_rows, *of_groups}
    assert all(len(entry.configs) >= 2 for entry in entries)


# Runs


def test_every_tile_of_every_product_is_timed_and_kept(ran: list[tuple[str, str]]) -> None:
    code, output = invoke("--out", "f.json", "--commit", "abc", "--verbose")
    assert code == 0, output
    found = read()
    assert found["header"]["kind"] == "tune"
    assert found["header"]["commit"] == "abc"
    assert found["header"]["method"] == tune_collect.METHOD
    assert found["header"]["stopped"] is None
    assert found["clusters_at_once"] == {"1": {"2": 66}, "2": {"2": 132}}
    for row, sample in zip(found["rows"], SAMPLES, strict=True):
        assert (row["output"], row["m"], row["n"], row["k"]) == (sample.output.name, sample.m, sample.n, sample.k)
        assert row["groups"] == sample.num_groups
        assert row["sizes"] == (sample.sizes() if sample.num_groups else [])
        assert row["fitted"] == sample.is_fitted
        assert list(row["us"]) == list(tune_collect.entry_of(sample, H200).configs)
        assert set(map(tuple, row["us"].values())) == {(10.0, 9.0, 11.0)}
        assert row["failed"] == {}
    assert {kind for kind, _ in ran} == {"ContiguousProblem", "MaskedProblem", "KGroupedProblem"}
    assert "200x576x1024 bf16: " in output
    assert "times of 4 products written to f.json" in " ".join(output.split())


def test_the_file_has_a_name_of_its_own(ran: list[tuple[str, str]], results: Path) -> None:
    assert invoke("--commit", "abc")[0] == 0
    (path,) = results.iterdir()
    assert path.name.startswith("tune-")
    assert path.name.endswith("-abc.json")


def test_a_kernel_that_does_not_compile_is_left_out(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(config: object) -> None:
        if isinstance(config, GemmConfig) and config.name == "128x128 bf16":
            raise RuntimeError("too many registers")

    monkeypatch.setattr(tune, "build", build)
    code, output = invoke("--out", "f.json")
    assert code == 0
    assert "no time of 128x128 bf16: RuntimeError: too many registers" in output
    dense, by_ids, *_ = read()["rows"]
    assert "128x128" not in dense["us"]
    assert "64x64" in dense["us"]
    assert "128x128" in by_ids["us"], "another kernel"


def test_a_kernel_that_does_not_run_is_told_and_the_others_are_timed(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(p: KGroupedProblem, config: GemmConfig) -> None:
        if config.block_m == 64:
            raise RuntimeError("no such box\nand more")

    monkeypatch.setattr(depths, "run_on_gpu", run)
    code, output = invoke("--out", "f.json")
    assert code == 0
    assert "64x64: RuntimeError: no such box" in " ".join(output.split())
    row = read()["rows"][3]
    assert row["failed"] == {"64x64": "RuntimeError: no such box"}
    assert "64x64" not in row["us"]
    assert "128x128" in row["us"]


def test_a_product_without_memory_is_told_and_the_others_are_timed(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tune_collect.caller

    def caller(sample: Sample) -> Any:
        if sample == IDS:
            raise torch.OutOfMemoryError("out of memory")
        return make(sample)

    monkeypatch.setattr(tune_collect, "caller", caller)
    assert invoke("--out", "f.json")[0] == 0
    found = read()["rows"]
    assert [bool(row["us"]) for row in found] == [True, False, True, True]
    assert found[1]["failed"] == {"all": "OutOfMemoryError: out of memory"}


def test_when_the_time_is_up_the_run_ends_and_says_so(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 0.0, 20.0, 31.0))
    monkeypatch.setattr(tune_collect, "monotonic", lambda: next(clock))
    code, output = invoke("--out", "f.json", "--minutes", "0.5")
    assert code == 0
    found = read()
    assert len(found["rows"]) == 2
    assert found["header"]["stopped"] == "2 of 4 products left after 0.5 minutes"
    assert found["header"]["stopped"] in " ".join(output.split())


def test_a_lost_gpu_leaves_what_was_measured(ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(error: Exception) -> None:
        raise products.GpuLostError("illegal memory access")

    def run(p: object, config: object) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(tune_collect, "raise_if_lost", lost)
    monkeypatch.setattr(depths, "run_on_gpu", run)
    assert invoke("--out", "f.json")[0] == 0
    found = read()
    assert len(found["rows"]) == 3
    assert found["header"]["stopped"] == "illegal memory access"


def test_a_profiler_that_loses_calls_time_and_again_ends_the_run(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cold(*_: object) -> None:
        raise PairingError("the profiler saw 3 fills for 9 calls")

    monkeypatch.setattr(tune_collect, "cold", cold)
    monkeypatch.setattr(tune_collect, "PAIRING_ERRORS_TO_STOP", 3)
    code, output = invoke("--out", "f.json")
    assert code == 1, "no time at all"
    assert "stopped: the profiler saw 3 fills" in output
    assert len(read()["rows"]) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--audit",), "got --audit and --collect"),
        (("--output", "bf16"), "--output is for --shapes; --collect has products of its own"),
        (("--minutes", "0"), "--minutes is for --collect, and above 0, got 0.0"),
    ],
)
def test_command_line_refuses_in_words(arguments: tuple[str, ...], complaint: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert complaint in " ".join(output.split())


def test_without_a_compiler_the_command_says_what_to_install(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(config: object) -> None:
        raise CompilerMissing('run: pip install "hopper-gemm[cu13]"')

    monkeypatch.setattr(tune, "build", missing)
    code, output = invoke("--out", "f.json")
    assert code == 2
    assert 'pip install "hopper-gemm[cu13]"' in output
