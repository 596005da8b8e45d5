"""The package as a whole: the time of its import, its wheel's files, and examples in docstrings that must run."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import warnings
import zipfile
from importlib import metadata
from pathlib import Path

import oldest_release
import pytest
import torch
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_replay import COMPILER
from thorough import ALL, THOROUGH

import deep_gemm
from deep_gemm.cli import demo
from lab import releases
from lab.bench.timing import KernelEvent

ROOT = Path(__file__).resolve().parents[2]
SITE = [sysconfig.get_path("purelib")]
EXAMPLES = {
    **{"torch": torch, "KernelEvent": KernelEvent},
    **{name: getattr(module, name) for module in (deep_gemm, deep_gemm.nn) for name in module.__all__},
}
HAVE_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("deep_gemm", "lab")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", HAVE_EXAMPLES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, attempted = doctest.testmod(module, extraglobs={**EXAMPLES, **vars(module)})
    assert attempted > 0
    assert failed == 0


def test_every_public_product_cast_and_layer_has_an_example() -> None:
    named = [getattr(deep_gemm, name) for name in vars(deep_gemm)["__all__"] if not name.startswith("cublaslt")]
    rooms = tuple(f"deep_gemm.{room}." for room in ("casts", "gemm", "hyper", "linear", "moe"))
    of_rooms = [each for each in named if callable(each) and str(each.__module__).startswith(rooms)]
    assert len(of_rooms) > 40
    lacking = [each.__qualname__ for each in of_rooms if ">>>" not in (each.__doc__ or "")]
    assert lacking == ["ExpertRows"], "the type that expert_rows returns"


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="not a part of the environment of `make test`")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch depends on CUDA's packages")
def test_all_that_make_installs_has_its_version_in_a_file() -> None:
    texts = [(ROOT / f"constraints{of}.txt").read_text() for of in ("", "-cu12", "-cu13")]
    pinned = {name for text in texts for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}
    found = {each.metadata["Name"] for each in metadata.distributions(path=SITE)}
    missing = {canonicalize_name(name) for name in found} - {canonicalize_name(name) for name in pinned}
    assert missing <= {"hopper-gemm", "torch", "pip", "setuptools"}


def test_importing_loads_no_cuda_library_and_little_besides_torch() -> None:
    code = (
        "import time, torch, sys; before = set(sys.modules); t = time.process_time(); import deep_gemm;"
        "print(time.process_time() - t);"  # leaves out other processes of the machine
        "print([m for m in set(sys.modules) - before if m.split('.')[0] in ('cuda', 'rich', 'typer', 'matplotlib')]);"
        "print(torch.cuda.is_initialized())"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}

    def seconds() -> float:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        took, *said = run.stdout.split()
        assert said == ["[]", "False"]
        return float(took)

    assert any(seconds() < 0.5 for _ in range(3))


def test_modules_of_the_package_import_each_other_relatively() -> None:
    absolute = re.compile(r"^\s*(from|import) deep_gemm\b", re.MULTILINE)
    sources = (ROOT / "deep_gemm").rglob("*.py")
    assert [str(path.relative_to(ROOT)) for path in sources if absolute.search(path.read_text())] == []


def test_demo_finds_every_product_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run()
    out = capsys.readouterr().out
    assert out.count("right") == 7
    assert "wrong" not in out


@pytest.mark.release
def test_demo_says_so_where_a_product_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(a: object, b: object, **_: object) -> torch.Tensor:
        return torch.zeros(demo.ROWS, demo.N, dtype=torch.bfloat16)

    monkeypatch.setattr(demo, "fp8_gemm_nt", broken)
    assert not demo.run()
    assert "wrong" in capsys.readouterr().out


NATIVE = "deep_gemm/core/_replay.abi3.so"


def wheel_of(source: Path, folder: Path, **environment: str) -> Path:
    """Make a wheel of the checkout or of a source distribution."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the same sources without a C compiler."""
    return wheel_of(ROOT, tmp_path_factory.mktemp("pure"), CC="false")


def test_wheels_carry_every_file_of_the_package_and_the_replay_where_a_compiler_is(wheel: Path, pure: Path) -> None:
    source = ROOT / "deep_gemm"
    wanted = {
        str(path.relative_to(ROOT))
        for path in source.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    for made, native, tag in ((pure, set(), "py3-none-any"), (wheel, {NATIVE}, "cp310-abi3-linux_")):
        if native and COMPILER is None:
            pytest.skip("needs a C compiler")
        assert made.name.startswith(f"hopper_gemm-{deep_gemm.__version__}-{tag}")
        assert {name for name in zipfile.ZipFile(made).namelist() if ".dist-info/" not in name} == wanted | native


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_the_replay_needs_the_libc_that_the_tag_of_a_release_names_and_no_other_library(wheel: Path) -> None:
    built = zipfile.ZipFile(wheel).read(NATIVE)
    (tag,) = re.findall(r"--plat-name=manylinux_(\d+)_(\d+)_", (ROOT / "Makefile").read_text())
    of_libc = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", built)]
    assert of_libc and max(of_libc) <= (int(tag[0]), int(tag[1]))
    assert set(re.findall(rb"lib[\w.]+\.so[.\d]*", built)) <= {b"libc.so.6"}


def test_wheel_states_its_licence_and_links_to_nothing_in_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        stated = Metadata.from_email(archive.read(name), validate=True)  # a package index validates the metadata too
        assert f"{name.removesuffix('METADATA')}licenses/LICENSE" in archive.namelist()
    assert (stated.name, str(stated.version)) == ("hopper-gemm", deep_gemm.__version__)
    assert stated.license_expression == "MIT"
    assert stated.author is not None and stated.author in (ROOT / "LICENSE").read_text()
    assert stated.description_content_type == "text/markdown"
    assert stated.description is not None
    assert [link for link in re.findall(r"\]\(([^)]*)\)", stated.description) if "://" not in link] == []
    pythons = {str(name).rpartition(" ")[2] for name in stated.classifiers or () if "Python :: 3." in name}
    assert pythons and stated.requires_python is not None
    assert all(python in stated.requires_python for python in pythons)
    cudas = {str(name).rpartition(" ")[2] for name in stated.classifiers or () if "CUDA :: " in name}
    assert {f"cu{cuda}" for cuda in cudas} == {extra for extra in stated.provides_extra or () if extra.startswith("cu")}


def test_the_changes_begin_with_this_release() -> None:
    first = re.search(r"^## (\S+), (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == deep_gemm.__version__
    assert re.fullmatch(r"not uploaded yet|\d{4}-\d\d-\d\d", first[2])


@pytest.mark.release
def test_the_source_distribution_is_the_checkout_and_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    if not list(metadata.distributions(name="build")):
        if THOROUGH:
            pytest.fail("CI must build the source distribution, but build is not installed", pytrace=False)
        pytest.skip("the source distribution needs build: pip install build")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], check=True)
    of_tree, of_archive = (zipfile.ZipFile(path) for path in (wheel, tmp_path / wheel.name))
    assert of_archive.namelist() == of_tree.namelist()
    assert [name for name in of_tree.namelist() if of_archive.read(name) != of_tree.read(name)] == []
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        carried = {member.name.partition("/")[2] for member in source if member.isfile()}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert carried == {name for name in listed if (ROOT / name).exists()} | {"PKG-INFO", "setup.cfg"}
    without_compiler = zipfile.ZipFile(wheel_of(archive, tmp_path / "pure", CC="false"))
    assert {*without_compiler.namelist()} == {name for name in of_tree.namelist() if name != NATIVE}


class Environment:
    """A virtual environment without the tests' packages."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
        self.elsewhere.mkdir()
        venv.create(self.folder, symlinks=True)
        (self.packages,) = self.folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: str) -> None:
        """Install or uninstall packages, from files alone."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin" / "python"), "--quiet"]
        subprocess.run([*pip, *arguments], check=True)

    def install(self, source: str | Path) -> None:
        """Install a wheel without its dependencies."""
        self.pip("install", "--no-index", "--no-deps", str(source))

    def link_what_ours_needs(self) -> None:
        """Link the dependencies that the tests run with, torch among them, so that none is downloaded again."""
        (own,) = metadata.distributions(name="hopper-gemm", path=[str(self.packages)])
        for source in declared_by(own):
            if not (self.packages / source.name).exists():
                (self.packages / source.name).symlink_to(source)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        clean["PYTHONWARNINGS"] = "error:Failed to initialize NumPy"  # torch's warning if numpy is missing
        program = [str(self.folder / "bin" / command[0]), *command[1:]]
        return subprocess.run(program, cwd=self.elsewhere, env=clean, capture_output=True, text=True, check=False)


@pytest.mark.release
@pytest.mark.parametrize("made", ["wheel", "pure"])
def test_wheel_runs_the_demo_in_an_environment_of_its_declared_dependencies_alone(
    made: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    environment = Environment(tmp_path)
    environment.install(request.getfixturevalue(made))
    environment.link_what_ours_needs()
    shown = environment.run("deep_gemm", "demo")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("right") == 7
    (told,) = (line for line in environment.run("deep_gemm", "doctor").stdout.splitlines() if "replay" in line)
    has_replay = any(environment.packages.glob(NATIVE))
    assert has_replay is (made == "wheel" and COMPILER is not None)
    assert ("was not built" in told) is not has_replay


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Build a foreign wheel with a module of the same name and the files of an older DeepGEMM."""
    wheel, info = tmp_path / "deep_gemm-2.1.1-py3-none-any.whl", "deep_gemm-2.1.1.dist-info"
    files = {
        "deep_gemm/__init__.py": "from .utils import theirs\nfp8_gemm_nt = theirs\n",
        "deep_gemm/utils/__init__.py": "theirs = 'theirs'\n",
        "deep_gemm/_C.abi3.so": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: deep-gemm\nVersion: 2.1.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


@pytest.mark.release
@pytest.mark.parametrize("is_first", [True, False] if ALL else [False])
def test_another_distribution_of_the_module_is_told_and_the_commands_mend_it(
    wheel: Path, foreign: Path, tmp_path: Path, is_first: bool
) -> None:
    environment = Environment(tmp_path)
    for source in (wheel, foreign) if is_first else (foreign, wheel):
        environment.install(source)
    environment.link_what_ours_needs()
    commands = f"Run: pip uninstall -y deep-gemm hopper-gemm; then: pip install {wheel.as_uri()}"
    imported = environment.run("python", "-c", "import deep_gemm; print(deep_gemm.fp8_gemm_nt)")
    assert imported.returncode == 0, imported.stderr
    if is_first:  # then the foreign package runs, and ours prints nothing
        assert (imported.stdout, imported.stderr) == ("theirs\n", "")
    else:
        assert imported.stdout.startswith("<function fp8_gemm_nt ")
        assert imported.stderr.count("UserWarning: deep_gemm and hopper-gemm have their files in one folder") == 1
        assert commands.replace("deep-gemm", "deep_gemm") in imported.stderr
    shown = environment.run("python", "-m", "deep_gemm", "doctor")
    assert shown.returncode == 1, shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout.splitlines()[-1].endswith(commands)

    environment.pip("uninstall", "-y", "deep-gemm")  # the usual remedy, which also removes some of our files
    for command in (["python", "-m", "deep_gemm", "doctor"], ["deep_gemm", "doctor"]):
        shown = environment.run(*command)
        assert shown.returncode == 1, shown.stderr
        assert shown.stdout == (
            "deep_gemm: 2 of hopper-gemm's files are gone or changed: deep_gemm/__init__.py, "
            f"deep_gemm/utils/__init__.py. Run: pip uninstall -y hopper-gemm; then: pip install {wheel.as_uri()}\n"
        )

    environment.install(foreign)
    environment.pip("uninstall", "-y", "deep-gemm", "hopper-gemm")
    assert not list(environment.packages.glob("deep_gemm/**/*.py"))
    environment.install(wheel.as_uri())
    imported = environment.run("python", "-W", "error::UserWarning", "-c", "import deep_gemm")
    assert imported.returncode == 0, imported.stderr
    shown = environment.run("deep_gemm", "doctor")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "\nmend " not in shown.stdout


COMMANDS = """
import sys
import typer
from importlib import metadata
from typer.testing import CliRunner
from deep_gemm.__main__ import app
from lab.__main__ import app as lab
for line in ("--help", "compile --help", "cache export --help", "cache list", "explain 64 2112 7168", "lab --help",
             "lab configs", "compile --model glm-5 --max-tokens 2 --list"):
    program, words = (lab, line.split()[1:]) if line.startswith("lab ") else (app, line.split())
    result = CliRunner().invoke(program, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code != 0:
        sys.exit(f"{line}: {result.exit_code}\\n{result.output}")
print(metadata.version("typer"), metadata.version("rich"))
"""


@pytest.mark.release
def test_commands_run_with_the_oldest_versions_that_are_allowed() -> None:
    found = oldest_release.versions()
    if found is None:
        pytest.skip("the oldest versions are not installed; `make test` installs them")
    environment = {**os.environ, "PYTHONPATH": f"{oldest_release.FOLDER}{os.pathsep}{ROOT}"}
    run = subprocess.run(
        [sys.executable, "-c", COMMANDS], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [found["typer"], found["rich"]]


@pytest.mark.release
def test_commands_run_with_the_newest_versions() -> None:
    found = releases.versions()
    if found is None:
        pytest.skip("the newest versions are not installed; `make test` installs them")
    command = [str(releases.PYTHON), "-c", COMMANDS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode != 0 and releases.newer_than_tried(found):
        warnings.warn(f"{found}, newer than any that was tried, fails:\n{run.stderr[-2000:]}", stacklevel=1)
        return
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [found["typer"], found["rich"]]


def declared_by(distribution: metadata.Distribution) -> set[Path]:
    """Return the files and folders directly below site-packages of all packages that a distribution needs."""
    found: set[Path] = set()
    seen: set[str] = set()
    waiting = [(line, {""}) for line in distribution.requires or ()]
    while waiting:
        line, extras = waiting.pop()
        wanted = Requirement(line)
        is_wanted = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras)
        if wanted.name in seen or not is_wanted:
            continue
        seen.add(wanted.name)
        needed = metadata.distribution(wanted.name)
        tops = {Path(file).parts[0] for file in needed.files or ()} - {"..", "__pycache__"}
        found |= {Path(str(needed.locate_file(top))) for top in tops}
        waiting += [(line, {"", *wanted.extras}) for line in needed.requires or ()]
    return found


def test_the_version_is_stated_once() -> None:
    sources = (ROOT / "pyproject.toml", *(ROOT / "deep_gemm").rglob("*.py"))
    stating = [path for path in sources if f'"{deep_gemm.__version__}"' in path.read_text()]
    assert stating == [ROOT / "deep_gemm" / "__init__.py"]


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, on_an_index = (
        (ROOT / page).read_text().split("```python\n")[1].split("```")[0] for page in ("README.md", "docs/package.md")
    )
    assert on_an_index == code
    exec(compile(code, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.removeprefix("tensor(").split(",")[0]) < 1e-3
