"""Compilers and bindings other than the installed ones: the oldest supported and the newest released.

The newest compiler is installed with the cuda-bindings of its time, in an environment that lab/releases.py makes. If it
is newer than the last compiler that was tried, failures are warnings in the summary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import oldest_release
import other_nvrtc
import pytest
from compiler_matrix import MINORS, Kept, cases, outcomes, same_code
from helpers import Job, compile_many, some
from thorough import ALL, sample

from deep_gemm.core.jit.compiler import CompiledKernel
from deep_gemm.core.jit.cubin import report
from lab import releases
from lab.gates import violations

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]
PARTS = 4
"""The number of parts that the configurations are compiled in, so that workers share them."""


@contextmanager
def news_if_newer() -> Iterator[None]:
    """Turn a failure into a warning if the release is newer than any release that was tried."""
    found = releases.versions()
    if found is None:
        pytest.skip("the newest NVRTC and cuda-bindings are not installed; `make test` installs them")
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if not releases.newer_than_tried(found):
            raise
        lines = str(error).splitlines()
        told = "\n".join([line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-20:])
        warnings.warn(f"{found}, newer than any that was tried, fails:\n{told}", stacklevel=3)


@pytest.mark.parametrize(
    "names",
    [
        ("driver", "jit", "cubin", "ptx"),
        ("interleave", "gates"),
        pytest.param(("sim",), marks=pytest.mark.host_compiler),
    ],
    ids=" ".join,
)
def test_tests_of_the_compiler_the_driver_and_the_simulator_pass_with_the_newest_release(
    names: tuple[str, ...],
) -> None:
    with news_if_newer():
        run_tests(str(releases.PYTHON), names, {})


@pytest.mark.parametrize(
    "names", [("driver", "jit"), pytest.param(("sim",), marks=pytest.mark.host_compiler)], ids=" ".join
)
def test_tests_of_the_driver_compiling_and_the_simulator_pass_with_the_oldest_bindings_and_numpy(
    names: tuple[str, ...],
) -> None:
    found = oldest_release.versions()
    if found is None:
        pytest.skip("the oldest versions are not installed; `make test` installs them")
    path = {"PYTHONPATH": f"{oldest_release.FOLDER}{os.pathsep}{ROOT}"}
    told = subprocess.run(
        [sys.executable, "-c", "import cuda.bindings, numpy; print(cuda.bindings.__version__, numpy.__version__)"],
        env={**os.environ, **path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.split() == [found["cuda-bindings"], found.get("numpy", told.stdout.split()[1])]
    run_tests(sys.executable, names, path)


def run_tests(python: str, names: Sequence[str], path: Mapping[str, str]) -> None:
    """Run a part of these files of tests in another environment; raise an AssertionError that names the failures."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if not ALL:
        environment.pop("CI", None)
    files = [str(next(ROOT.glob(f"tests/*/test_{name}.py"))) for name in names]
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=ROOT, env={**environment, **path}, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise AssertionError(run.stdout[-8000:] + run.stderr[-1000:])


def assert_as_planned(library: Path | None, part: int) -> None:
    chosen = cases(sample)[part::PARTS]
    kernels = other_nvrtc.compile_all(some(library), [case.job for case in chosen], threads=1)
    problems = {
        kernel.name: told
        for kernel, case in zip(kernels, chosen, strict=True)
        if (told := violations(report(kernel.cubin, kernel.log), case.plan))
    }
    if problems:
        raise AssertionError("\n".join(f"{name}: {told}" for name, told in problems.items()))


@pytest.mark.parametrize("part", range(0, PARTS, 1 if ALL else PARTS))
def test_kernels_of_the_oldest_compiler_are_what_was_planned(part: int) -> None:
    library = other_nvrtc.oldest_library()
    if library is None:
        pytest.skip(other_nvrtc.HOW_TO_GET_THE_OLDEST)
    assert_as_planned(library, part)


@pytest.mark.parametrize("part", range(0 if ALL else 1, PARTS, 1 if ALL else PARTS))
def test_kernels_of_the_newest_compiler_are_what_was_planned(part: int) -> None:
    with news_if_newer():
        assert_as_planned(other_nvrtc.library(releases.packages()), part)


def test_the_matrix_counts_the_kernels_that_two_versions_compile_to_the_same_code() -> None:
    digests = {"12.8": {"a": "1", "b": "2"}, "12.9": {"a": "1", "b": "3"}, "13.0": {"a": "1", "b": "3"}}
    assert same_code(digests) == {"12.9": {"12.8": 1}, "13.0": {"12.8": 1, "12.9": 2}}


def test_the_matrix_compiles_what_is_new_and_keeps_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, other, *_ = (case for case in cases(sample) if case.job.name.startswith("fp8_gemm "))
    changed = case._replace(job=case.job._replace(source=case.job.source + "// another"))
    planned = case._replace(plan=replace(case.plan, qgmma=case.plan.qgmma + 1))
    assert len({each.key for each in (case, other, changed, planned)}) == 4
    for header, is_included in (("slot.cuh", True), ("cast_rows.cuh", False)):
        headers = {**case.job.headers, header: case.job.headers[header] + "// another"}
        assert (case._replace(job=case.job._replace(headers=headers)).key != case.key) == is_included, header
    (kernel,) = compile_many([case.job])
    compiled: list[str] = []

    def compile_all(library: Path, jobs: Sequence[Job], threads: int) -> list[CompiledKernel]:
        compiled.extend(job.name for job in jobs)
        return [kernel] * len(jobs)

    monkeypatch.setattr(other_nvrtc, "compile_all", compile_all)
    file = tmp_path / "outcomes.json"
    found = outcomes(tmp_path, [case, planned], Kept(file), 1)
    assert [bool(outcome.wrong) for outcome in found] == [False, True]
    assert outcomes(tmp_path, [planned, case], Kept(file), 1) == found[::-1]
    assert compiled == [case.job.name] * 2
    outcomes(tmp_path, [case, changed], Kept(file), 1)
    assert len(compiled) == 3


def test_the_record_says_that_every_minor_version_compiles_every_configuration() -> None:
    """The record must contain the newest version that was tried; a new minor version must be added in both places.

    The summary warns of kernels that have changed since the record. Other tests compile some of these by the pinned,
    the oldest and the newest compiler. A release compiles all of them.
    """
    newest = max((ROOT / "benchmarks" / "results").glob("compilers-20*.json"))
    record = json.loads(newest.read_text())
    keys = {case.key for case in (cases() if ALL else cases(sample))}
    if new := keys - set(record["keys"].split()):
        warnings.warn(
            f"{len(new)} of {len(keys)} configurations are new, or have changed since all versions of NVRTC compiled "
            f"them ({newest.name}): run tests/lab/compiler_matrix.py --record",
            stacklevel=1,
        )
    assert not record["is_sample"]
    assert record["only"] == ""
    assert record["configurations"] > 900
    assert record["not_as_planned"] == {version: {} for version in MINORS}
    assert (MINORS[0], MINORS[-1]) == (other_nvrtc.OLDEST, releases.TRIED["nvidia-cuda-nvrtc"])
