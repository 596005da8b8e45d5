"""Without g++, tests that need it are skipped with a message, CI fails, and the simulator names the compiler."""

from __future__ import annotations

import re

import conftest
import pytest

from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds.output import Output
from lab.sim import HostCompileError, library
from lab.sim import product as simulated


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    library._compiler.cache_clear()
    library._compiler_version.cache_clear()


@pytest.fixture
def marked(request: pytest.FixtureRequest) -> pytest.Item:
    request.node.add_marker("host_compiler")
    return request.node  # type: ignore[no-any-return]


def test_a_test_that_needs_it_skips_and_says_why(marked: pytest.Item, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "THOROUGH", False)
    with pytest.raises(pytest.skip.Exception, match=re.escape("needs g++, which is not in PATH")):
        conftest.pytest_runtest_setup(marked)


def test_in_ci_it_fails(marked: pytest.Item, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "THOROUGH", True)
    with pytest.raises(pytest.fail.Exception, match=re.escape("g++ is not in PATH")):
        conftest.pytest_runtest_setup(marked)


def test_other_tests_run(request: pytest.FixtureRequest) -> None:
    conftest.pytest_runtest_setup(request.node)


def test_the_simulator_says_what_it_lacks() -> None:
    with pytest.raises(HostCompileError, match=re.escape("needs g++ (C++20); none was found in PATH")):
        simulated.compile_config(tile_config(128, 64, Output()), {})
