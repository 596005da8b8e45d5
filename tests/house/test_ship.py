"""Files that a release ships beside the package: a wheel of compiled kernels, and a folder for the kernel hub."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from email import message_from_bytes
from itertools import islice
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import deep_gemm
from deep_gemm.__main__ import app
from deep_gemm.cli import doctor, precompile
from deep_gemm.cli.models import FORMS
from deep_gemm.core import jit
from deep_gemm.core.gpu import H200
from deep_gemm.core.jit import CompilerMissing, compiler
from deep_gemm.core.jit import cache as cache_module
from deep_gemm.core.jit.cache import SHIPPED, shipped, why_untrusted
from deep_gemm.core.jit.compiler import compiler_version
from deep_gemm.core.settings import settings
from deep_gemm.gemm.choose.fp8 import select
from deep_gemm.gemm.kernel import kernel_of
from deep_gemm.gemm.kinds.output import Output, Sizes
from lab import ship
from lab.__main__ import app as lab_app

ROOT = Path(__file__).resolve().parents[2]
SMALL, OTHER = (select(Sizes(64, n, 7168), Output(), H200) for n in (2112, 512))


def forget() -> None:
    """Clear all caches, as in a new process."""
    settings.cache_clear()
    jit._cache_of.cache_clear()
    shipped.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build a wheel with one kernel."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DG_JIT_CACHE_DIR", str(folder / "cache"))
        forget()
        kernel_of(SMALL).build(SMALL)
        yield ship.wheel_of(list((folder / "cache").glob("*.kernel")), "a test", folder)
    forget()


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(folder), str(wheel)], check=True)
    return folder


@pytest.fixture
def installed(cache: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the kernels in an environment that has the wheel; the cache is empty."""
    shutil.copytree(site, tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delenv("DG_JIT_STRICT", raising=False)
    forget()
    monkeypatch.setattr(jit, "compile_cubin", no_compiler)
    return tmp_path / "site" / SHIPPED


def no_compiler(*_: object, **__: object) -> Any:
    raise CompilerMissing("no NVRTC here")


def test_the_wheel_names_its_version_its_compiler_and_holds_kernels_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith("/METADATA"))
        stated = message_from_bytes(archive.read(about))
    assert stated["Name"] == "hopper-gemm-cache"
    assert stated["Version"] == deep_gemm.__version__
    assert stated.get_all("Requires-Dist") == [f"hopper-gemm=={deep_gemm.__version__}"]
    text = stated.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert f"1 kernels of hopper-gemm {deep_gemm.__version__}" in text.decode()
    assert f"NVRTC {compiler_version()}" in text.decode()
    kernels = [name for name in names if name.endswith(".kernel")]
    assert [name.split("-")[0] for name in kernels] == [f"{SHIPPED}/{kernel_of(SMALL).name_of(SMALL)}"]
    assert {name for name in names if ".dist-info/" not in name} == {*kernels, f"{SHIPPED}/__init__.py"}


def test_a_kernel_of_the_wheel_needs_no_compiler_and_nothing_is_written(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_version.cache_clear()
    monkeypatch.setattr(compiler, "_nvrtc", no_compiler)
    before = {path: path.stat().st_mtime_ns for path in installed.iterdir()}
    assert kernel_of(SMALL).build(SMALL).cubin
    with pytest.raises(CompilerMissing, match=f"is not among the compiled kernels in .*{installed}. no NVRTC here"):
        kernel_of(OTHER).build(OTHER)
    assert {path: path.stat().st_mtime_ns for path in installed.iterdir()} == before
    assert SHIPPED not in sys.modules
    assert not list((tmp_path / "cache").glob("*.kernel"))


def test_where_there_is_no_compiler_the_wheels_is_taken_and_not_one_of_older_kernels(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = jit.CompiledKernel("older", b"machine code", "a log", "12.8.93 CL-1")
    cache_module.KernelCache(tmp_path / "cache").store("0" * 64, older, options=[], passes=[])
    compiler_version.cache_clear()
    monkeypatch.setattr(compiler, "_nvrtc", no_compiler)
    assert kernel_of(SMALL).build(SMALL).cubin


@pytest.mark.parametrize("what", ["damaged", "others may write", "another NVRTC", "another source"])
def test_what_is_not_sound_or_not_ours_is_not_hit(installed: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    (kernel,) = installed.glob("*.kernel")
    told: Any = nullcontext()
    if what == "damaged":
        kernel.write_bytes(kernel.read_bytes()[:-1])
    elif what == "others may write":
        installed.chmod(0o777)
        told = pytest.warns(RuntimeWarning, match="others may write to it")
    elif what == "another NVRTC":
        monkeypatch.setattr(jit, "compiler_version", lambda: "13.9.1 CL-1")
    else:
        monkeypatch.setattr(kernel_of(SMALL), "headers", lambda config: {"config.cuh": "// of another release"})
    with told, pytest.raises(CompilerMissing):
        kernel_of(SMALL).build(SMALL)


def test_a_wheel_may_be_as_open_as_the_package_and_no_more(
    installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = tmp_path / "cache.py"
    code.write_text("")
    monkeypatch.setattr(cache_module, "__file__", str(code))
    (kernel,) = installed.glob("*.kernel")
    for path, mode in ((code, 0o664), (installed, 0o775), (kernel, 0o664)):  # as pip sets them under umask 002
        path.chmod(mode)
    assert kernel_of(SMALL).build(SMALL).cubin
    assert "not used" not in str(doctor.examine()[5])
    code.chmod(0o644)
    assert "not used: others may write to it" in str(doctor.examine()[5])


def test_a_wheel_may_be_its_packages_owners_and_no_other_users() -> None:
    ours, theirs = (os.stat_result((0o644, 0, 0, 1, user, 0, 0, 0, 0, 0)) for user in (4711, 4712))
    assert why_untrusted(ours, ours) is None
    assert "it belongs to user 4711" in str(why_untrusted(ours))
    assert "it belongs to user 4712" in str(why_untrusted(theirs, ours))


def test_a_kernel_that_the_wheel_lacks_is_compiled_into_the_users_cache(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "compile_cubin", compiler.compile_cubin)
    before = set(installed.iterdir())
    kernel_of(OTHER).build(OTHER)
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 1
    assert set(installed.iterdir()) == before


def test_commands_know_the_wheel(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {name: CliRunner().invoke(app, ["cache", *name.split()]) for name in ("list", "verify")}
    assert f"1 kernels, 0.0 MB, in {installed}" in shown["list"].output
    assert f"1 of 1 kernels in {installed} are sound" in shown["verify"].output
    archive = tmp_path / "kernels.tar"
    assert CliRunner().invoke(app, ["cache", "export", str(archive)]).output.startswith("1 kernels, ")
    job = precompile.Job("fp8_gemm_dense", SMALL, lambda: kernel_of(SMALL).build(SMALL))
    assert precompile.run([job], Console(quiet=True)), "ready, although nothing new was stored"
    assert f"{installed}: 1 kernels, 0.0 MB" in str(doctor.examine()[5])
    assert "not used" not in str(doctor.examine()[5])
    monkeypatch.setattr(doctor, "compiler_version", lambda: "13.9.1 CL-1")
    told = f"not used: NVRTC {compiler_version()} made them, but 13.9.1 CL-1 is installed"
    assert told in str(doctor.examine()[5])


def test_the_doctor_says_that_a_hopper_runs_the_wheel_without_a_compiler(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "compiler_version", no_compiler)
    monkeypatch.setattr(doctor, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(doctor, "_gpu", lambda: doctor.Finding("GPU", "NVIDIA H200"))
    so, more = doctor.examine()[8:10]
    assert so.found == "the kernels of a wheel run on this GPU, and the reference on the CPU"
    assert more.found == "other kernels need a compiler: no NVRTC here"
    assert not more.is_wrong


def test_the_wheel_is_not_looked_for_until_a_kernel_is_needed() -> None:
    code = (
        "import torch, deep_gemm; from deep_gemm.core.jit.cache import shipped; x = torch.randn(4, 128);"
        "deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(x.repeat(2, 1)));"
        "print(shipped.cache_info().misses)"
    )
    assert forked.run("-c", code).stdout == "0\n"


# ---- making them ------------------------------------------------------------------------------------------------


def test_kernels_are_listed_once_and_ranks_that_cannot_be_are_left_out_in_words() -> None:
    console = Console(file=io.StringIO(), record=True, width=200)
    found = ship.jobs_for(["qwen3-235b"], [4], ["H200"], 8, console)
    how: dict[str, Any] = {"tp": 4, "max_tokens": 8, "gpu": "H200"}
    listed = [precompile.jobs_of_model("qwen3-235b", ep=ep, form=form, **how) for ep in (1, 4) for form in FORMS]
    assert set(found) == {job for jobs in listed for _, job in jobs}
    assert len(set(found)) == len(found)
    assert console.export_text(clear=False) == ""
    assert set(ship.jobs_for(["qwen3-235b"], [4, 3], ["H200"], 8, console)) == set(found)
    told = "qwen3-235b, tp 3, ep 1: left out: tp, ep: expected a divisor of 64 attention heads, got 3"
    assert told in console.export_text()


def made(*arguments: str) -> Any:
    return CliRunner().invoke(lab_app, ["ship", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Reduce the models to two kernels, and make a checkout to build in."""

    def jobs(model: str, **_: object) -> Sequence[tuple[str, precompile.Job]]:
        return [("casts", job) for job in islice(precompile.ordinary_jobs(), 2)]

    monkeypatch.setattr(precompile, "jobs_of_model", jobs)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    monkeypatch.setattr(ship, "ROOT", tmp_path)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "")  # the command sets it
    forget()
    yield tmp_path
    forget()


def test_one_command_compiles_the_kernels_of_models_and_makes_the_wheel(few: Path) -> None:
    result = made("kernels", str(few / "dist"), "--model", "deepseek-v3", "--model", "glm-5")
    assert result.exit_code == 0, result.output
    (wheel,) = (few / "dist").iterdir()
    assert result.output.splitlines()[-1] == str(wheel)
    assert wheel.name == f"hopper_gemm_cache-{deep_gemm.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert len([name for name in archive.namelist() if name.endswith(".kernel")]) == 2
        (about,) = (archive.read(name) for name in archive.namelist() if name.endswith("/METADATA"))
    assert b"\ndeepseek-v3, glm-5.\n" in about
    (few / "build" / "kernels" / f"older-{'0' * 64}.kernel").write_bytes(b"")
    result = made("kernels", str(few / "dist"))
    assert result.exit_code == 2
    assert "expected the 2 kernels of these models, got 3: remove it" in result.output


def test_what_cannot_be_made_is_refused_in_words(few: Path, installed: Path) -> None:
    result = made("kernels", str(few / "dist"), "--model", "gpt-5")
    assert result.exit_code == 2
    assert f"expected none of these kernels in this environment, got {installed}: uninstall it first" in result.output
    sys.path.remove(str(installed.parent))
    shipped.cache_clear()
    result = made("kernels", str(few / "dist"), "--model", "gpt-5")
    assert result.exit_code == 2
    assert "model: expected one of deepseek-v3, " in result.output


def test_a_wheel_has_the_kernels_of_one_compiler(tmp_path: Path) -> None:
    cache = cache_module.KernelCache(tmp_path)
    for digit, version in enumerate(("12.8.93 CL-1", "13.0.88 CL-1")):
        kernel = jit.CompiledKernel("one", b"machine code", "a log", version)
        cache.store(str(digit) * 64, kernel, options=[], passes=[])
    with pytest.raises(ValueError, match=r"files: expected kernels of one compiler, got those of \['12"):
        ship.wheel_of(list(tmp_path.glob("*.kernel")), "a test", tmp_path)


# ---- the kernel hub ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    result = made("hub", str(out))
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_the_hubs_folder_has_the_package_and_what_its_loader_reads(folder: Path, backend: str) -> None:
    variant = folder / "build" / f"torch-{backend}"
    files = {str(path.relative_to(variant)): path.read_bytes() for path in variant.rglob("*") if path.is_file()}
    stated = json.loads(files.pop("metadata.json"))
    package = ROOT / "deep_gemm"
    assert files == {
        str(path.relative_to(package)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    assert stated["backend"]["type"] == backend
    assert stated["id"].isidentifier()
    assert (folder / "README.md").read_text().startswith("---\nlicense: mit\n")


LOAD = """
import sys
from pathlib import Path
import torch
import kernels
loaded = kernels.get_local_kernel(Path(sys.argv[1]))
a, b = torch.randn(64, 512), torch.randn(256, 512)
operands = loaded.per_token_cast_to_fp8(a), loaded.per_block_cast_to_fp8(b)
assert loaded.calc_diff(loaded.fp8_gemm_nt(*operands), a @ b.t()) < 1e-3
assert loaded.nn.Linear(128, 128)(torch.randn(8, 128)).shape == (8, 128)
assert torch.equal(torch.ops.deep_gemm.fp8_gemm_nt(*operands[0], *operands[1]), loaded.fp8_gemm_nt(*operands))
assert "deep_gemm" not in sys.modules
print(loaded.__file__, kernels.get_loaded_kernels()[0].metadata.name)
"""


def test_the_hubs_loader_takes_the_folder(folder: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("the hub's loader is not installed: pip install kernels")
    run = forked.run("-c", LOAD, str(folder), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    backend = "cpu" if torch.version.cuda is None else "cuda"
    assert run.stdout == f"{folder / 'build' / f'torch-{backend}' / '__init__.py'} hopper-gemm\n"


# ---- workflows --------------------------------------------------------------------------------------------------


def steps_of(workflow: str, job: str) -> list[dict[str, Any]]:
    """Return the steps of a workflow's job."""
    yaml = pytest.importorskip("yaml", reason="workflows are YAML: pip install PyYAML")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
    steps: list[dict[str, Any]] = jobs[job]["steps"]
    return steps


@pytest.mark.parametrize(
    ("workflow", "job", "commands"),
    [
        ("ci", "test", [".ci/run"]),
        ("release", "dist", [".ci/run", "make dist", "pipx run twine check --strict dist/*"]),
        ("release", "arm", ["make wheels", ".venv/bin/python -m pytest tests/core/test_replay.py"]),
    ],
)
def test_workflows_name_the_commands_that_people_run_and_list_no_others(
    workflow: str, job: str, commands: list[str]
) -> None:
    steps = steps_of(workflow, job)
    assert [step["run"] for step in steps if "run" in step] == commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (python,) = (step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", ""))
    assert f"on Python {python};" in (ROOT / "constraints.txt").read_text()
    page = (ROOT / "docs" / "release.md").read_text()
    assert [command for command in commands if command not in page] == []


def test_make_dist_makes_what_the_workflow_keeps() -> None:
    rule = (ROOT / "Makefile").read_text().partition("\ndist:")[2].partition("\n\n")[0]
    steps = steps_of("release", "dist")
    kept = {step["with"]["path"].rstrip("/") for step in steps if "upload" in step.get("uses", "")}
    assert kept == set(re.findall(r"-m .* (\S+)$", rule, re.MULTILINE)) != set()
