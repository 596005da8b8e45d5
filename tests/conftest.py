"""Hooks and fixtures of all tests: choose which tests run, set up hypothesis, and share tests among workers."""

import gc
import importlib
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, forget_devices, install
from helpers import as_new_process
from hypothesis import settings
from thorough import ALL, THOROUGH, covering

from deep_gemm.core.jit import compiler
from deep_gemm.core.jit.cache import kernel_key
from deep_gemm.core.settings import in_force
from deep_gemm.core.settings import settings as read_from_environment
from lab.sim.library import default_cache_dir

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if THOROUGH else "default")

torch.set_num_threads(1)  # The tensors here are small, and each core has a worker already.


_TOLD: dict[int, str] = {}


def _kept(run: Any) -> Any:
    """Store NVRTC's cubins beside the simulator's libraries, so that other workers and later runs reuse the cubins."""

    @wraps(run)
    def found(file_name: str, source: str, headers: Any, options: Any, *, artifact: str) -> Any:
        compiler._nvrtc()  # Raises an error if NVRTC is missing: a stored result must not hide that.
        if artifact != "CUBIN":
            return run(file_name, source, headers, options, artifact=artifact)
        key = kernel_key(file_name, source, headers, options=options, compiler=compiler.compiler_version(), passes=())
        file = default_cache_dir() / f"{key}.nvrtc"
        if file.exists():
            return pickle.loads(file.read_bytes())
        status, cubin, log = run(file_name, source, headers, options, artifact=artifact)
        if cubin is not None:
            with NamedTemporaryFile(dir=file.parent, delete=False) as made:
                pickle.dump((status, cubin, log), made)
            Path(made.name).rename(file)
        return status, cubin, log

    return found


compiler._run = _kept(compiler._run)


@pytest.fixture
def compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have NVRTC compile every source, even if a stored result exists."""
    monkeypatch.setattr(compiler, "_run", vars(compiler._run)["__wrapped__"])


def _has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


HAS_HOPPER = _has_hopper()
collect_ignore_glob = [] if HAS_HOPPER else ["*test_gpu_*.py"]  # every test in these files would be skipped


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the settings that a test changed; clear fake devices, cached environment variables and torch's graphs."""
    before = in_force.choices
    yield
    forget_devices()
    read_from_environment.cache_clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if in_force.choices != before:
        in_force.change(**vars(before))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Make calls run as on a GPU until they reach the driver, which is a fake."""
    return install(monkeypatch)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the test's own cache of kernels and return its folder."""
    as_new_process(monkeypatch, DG_JIT_CACHE_DIR=tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a temporary folder where results without a named file are written, so that none stays in the checkout."""
    folder = tmp_path / "results"
    monkeypatch.setattr("lab.bench.report.RESULTS", folder)
    return folder


def pytest_collection_finish() -> None:
    """Keep the garbage collector from scanning thousands of tests and all imported modules again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not HAS_HOPPER:
        pytest.skip("needs an NVIDIA Hopper GPU")
    if item.get_closest_marker("host_compiler") and shutil.which("g++") is None:
        if THOROUGH:
            pytest.fail("CI must run the simulator's tests, but g++ is not in PATH", pytrace=False)
        pytest.skip("the simulator needs g++, which is not in PATH")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this run leaves out, by its settings: see thorough.py."""
    if ALL:
        return
    left_out: set[pytest.Item] = set()
    for _, group in groupby(items, key=lambda item: item.nodeid.split("[")[0]):
        cases = list(group)
        if not THOROUGH and cases[0].get_closest_marker("release"):
            left_out |= set(cases)
        elif hasattr(cases[0], "callspec") and _may_be_fewer(cases[0]):
            run_here = [item for item in cases if HAS_HOPPER or not item.get_closest_marker("gpu")]
            kept: list[pytest.Item] = covering(run_here or cases, _values)
            left_out |= set(cases) - set(kept)
    _LEFT_OUT.update(Counter(_family(item.nodeid) for item in left_out))
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _may_be_fewer(item: pytest.Item) -> bool:
    """Tell whether a run may skip a test: `combinations`, the simulator's; without CI also `few` and operators'."""
    if item.get_closest_marker("combinations") or item.path.name.startswith("test_sim_"):
        return True
    return not THOROUGH and bool(item.get_closest_marker("few") or item.path.name.startswith("test_ops_"))


def _values(item: pytest.Item) -> Iterable[Hashable]:
    """Return the features that must occur: each value of each parameter except the schedule and the seed."""
    parameters = item.callspec.params.items()  # type: ignore[attr-defined]
    return [(name, _told(value)) for name, value in parameters if name not in ("schedule", "seed")]


def _told(value: object) -> str:
    """Compute a parameter's `repr` only once, with its id as the key: cases share parameters and keep them alive."""
    if id(value) not in _TOLD:
        _TOLD[id(value)] = repr(value)
    return _TOLD[id(value)]


_LEFT_OUT: dict[str, int] = {}
"""Number of tests that this run leaves out, by family. Each worker leaves out the same tests, and reports them."""


def _family(nodeid: str) -> str:
    return nodeid.split("/")[1] if nodeid.count("/") > 1 else "tests"


def pytest_sessionfinish(session: pytest.Session) -> None:
    getattr(session.config, "workeroutput", {})["left_out"] = _LEFT_OUT


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _LEFT_OUT.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a line for each family at the end of a run of all tests."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword:
        terminalreporter.write_sep("=", "what ran, by family")
        for line in by_family(terminalreporter.stats, _LEFT_OUT, has_gpu=not collect_ignore_glob):
            terminalreporter.write_line(line)


def by_family(stats: Mapping[str, Sequence[Any]], left_out: Mapping[str, int], *, has_gpu: bool) -> Iterator[str]:
    """Count, for each folder of tests, the tests that ran; count the others by the reason why they did not run."""
    ran = Counter(_family(each.nodeid) for how in ("passed", "failed", "error") for each in stats.get(how, ()))
    tests = Path(__file__).parent
    for family in ("tests", *sorted({path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")})):
        reasons = [each.longrepr[2] for each in stats.get("skipped", ()) if _family(each.nodeid) == family]
        files = 0 if has_gpu or family == "tests" else len([*(tests / family).rglob("test_gpu_*.py")])
        parts = [f"{ran[family]:6} ran"]
        parts += [f"{count} skipped: {why.removeprefix('Skipped: ')}" for why, count in Counter(reasons).items()]
        parts += [f"{count} left out: DG_TEST_ALL=1 runs them" for count in (left_out.get(family),) if count]
        parts += [f"{files} of test_gpu_*.py not collected: no Hopper GPU"] * bool(files)
        yield f"{family:9}{'; '.join(parts)}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Run a file's tests on one worker, which compiles once, and all GPU tests on one; spread tests that compile."""
    scheduler: Any = importlib.import_module("xdist.scheduler")

    class Scheduler(scheduler.LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            if "gpu" in file or file.endswith("test_benchmark.py"):
                return "gpu"
            return nodeid if any(name in file for name in ("mutations", "gates", "compilers")) else file

    return Scheduler(config, log)
