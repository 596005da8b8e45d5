"""The command line, as a person types it: its output, and its messages about mistakes."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
import typer
from helpers import as_new_process
from thorough import one_in, up_to
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # finds a package that is not installed

import deep_gemm
from deep_gemm.__main__ import app
from deep_gemm.cli import demo, doctor, precompile
from deep_gemm.core import jit
from deep_gemm.core.check.recipes import E2M1, MX
from deep_gemm.core.gpu import H200
from deep_gemm.core.jit import CompilerMissing, compiler
from deep_gemm.core.jit.cache import KernelCache
from deep_gemm.core.jit.compiler import CompiledKernel
from deep_gemm.core.jit.entry import pack
from deep_gemm.gemm.choose.fp8 import select, select_grouped
from deep_gemm.gemm.kernel import FP8_GEMM, kernel_of
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.kernels import ORDINARY
from deep_gemm.linear import kernel as linear_decode
from lab.__main__ import app as lab_app
from lab.configs import reachable_dense as reachable

ROOT = Path(__file__).resolve().parents[2]


APPS = {"deep_gemm": app, "lab": lab_app}


def run(*arguments: str, program: str = "deep_gemm", columns: int = 80) -> Result:
    return CliRunner().invoke(APPS[program], arguments, env={"COLUMNS": f"{columns}", "NO_COLOR": "1", "TERM": "dumb"})


def words(result: Result) -> str:
    """Return the printed words without frames and line breaks, which depend on the terminal's width."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def printed(*arguments: str, code: int = 0, program: str = "deep_gemm") -> str:
    """Run a command, check its exit code, and return the text that it prints."""
    result = run(*arguments, program=program)
    assert result.exit_code == code, result.output
    return words(result)


@pytest.mark.parametrize("program", APPS)
def test_every_command_is_listed_with_what_it_does(program: str) -> None:
    shown = printed("--help", program=program)
    for command in APPS[program].registered_commands:
        assert command.callback is not None
        if command.hidden:
            assert f" {command.name} " not in shown
            continue
        what = (command.callback.__doc__ or "").split(".")[0]
        assert f" {command.name or command.callback.__name__} {what}" in shown


def commands_of(program: str) -> dict[tuple[str, str], Any]:
    root: Any = typer.main.get_command(APPS[program])
    cache: Any = root.commands.get("cache")
    found = {"": root, **root.commands}
    if cache is not None:
        found.update({f"cache {name}": command for name, command in cache.commands.items()})
    return {(program, name): command for name, command in found.items() if not command.hidden}


COMMANDS = {**commands_of("deep_gemm"), **commands_of("lab")}


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_every_argument_and_option_says_what_it_is(program: str, name: str) -> None:
    silent = [each.name for each in COMMANDS[program, name].params if not getattr(each, "help", None)]
    assert silent == []


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_help_ends_with_examples_that_can_be_typed(program: str, name: str) -> None:
    lines = [line.strip() for line in COMMANDS[program, name].epilog.split("\n\n")]
    assert lines[0] == "Examples:"
    begin = f"python -m {program} "
    typed = [line.removeprefix(begin) for line in lines if line.startswith(begin)]
    assert typed
    shown = run(*name.split(), "--help", program=program)
    assert shown.exit_code == 0
    for example in typed:
        assert example in words(shown)
        arguments = shlex.split(example)
        first = 2 if arguments[0] == "cache" else 1
        command = COMMANDS[program, " ".join(arguments[:first])]
        command.make_context(name, arguments[first:])  # raises an error for an option that does not exist
        assert name in ("", "cache") or arguments[: len(name.split())] == name.split()


@pytest.mark.parametrize(
    "line", ["bench dense --quick", "sim", "inspect --help", "configs", "soak", "tune --fit", "plot"]
)
def test_a_command_that_is_the_laboratorys_says_where_it_is(line: str) -> None:
    shown = printed(*line.split(), code=2)
    name = line.split(maxsplit=1)[0]
    told = f"deep_gemm: {name} is now a command of the laboratory, beside the package. In a checkout: python -m lab"
    assert shown == f"{told} {name}"


@pytest.mark.parametrize("program", APPS)
def test_exit_codes_are_told(program: str) -> None:
    told = words(run("--help", program=program))
    assert "Exit codes: 0 all right; 1 something failed or was found wrong; 2 the request" in told
    assert run("no-such-command").exit_code == 2


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"deep_gemm {deep_gemm.__version__}\n")


def test_make_help_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    told = text.split("\nhelp:\n")[1].split("\n\n")[0]
    assert [target for target in targets.split() if target != "help" and f"make {target} " not in told] == []


@pytest.mark.parametrize("has_package", [True, False])
def test_make_demo_runs_where_the_package_is_or_says_that_it_makes_a_place(tmp_path: Path, has_package: bool) -> None:
    python = tmp_path / "active" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ntest "$1" = -m && echo "ran $@"\ntest "$1" = -m || exit {int(not has_package)}\n')
    python.chmod(0o755)
    environment = {**os.environ, "VIRTUAL_ENV": str(python.parents[1])}
    command = ["make", "--no-print-directory", "-n", "demo", f"VENV={tmp_path / 'made'}"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("In the active environment, " in done.stdout.split("fi\n")[1]) is has_package
    assert ("ran -m deep_gemm demo" in done.stdout) is has_package
    assert (f"python3 -m venv --clear --system-site-packages {tmp_path / 'made'}" in done.stdout) is not has_package
    assert ("pip install --quiet" in done.stdout) is False


# ---- doctor -----------------------------------------------------------------------------------------------------

HOPPER = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
AMPERE = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108)


def machine(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Any], driver: tuple[int, int] | None, compiler: str | None = "13.0.88"
) -> list[str]:
    """Return the doctor's lines about a machine with these GPUs, driver and compiler."""

    def version() -> str:
        return compiler or no_compiler()

    monkeypatch.setattr(doctor, "compiler_version", version)
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    result = run("doctor")
    lines = result.output.splitlines()
    assert 9 <= len(lines) <= 10
    return [*lines, str(result.exit_code)]


def test_doctor_on_a_hopper_says_that_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = machine(monkeypatch, [HOPPER], (13, 0))
    assert "NVRTC      13.0.88" in lines
    assert "driver     CUDA 13.0" in lines
    assert "GPU        NVIDIA H200 (9.0, 132 SMs)" in lines
    assert lines[-2:] == ["so         kernels run on this GPU, and the reference on the CPU", "0"]


CACHED = " alone; on the GPU only cached kernels run: other kernels need NVRTC"
COMPILES = "; kernels can be compiled (compile)"
NEITHER = "; without NVRTC no kernel is compiled: `compile` fails, and `demo` leaves kernels out"
OLDER = "older than NVRTC {}, whose kernels it cannot load; take a newer driver, or torch and NVRTC of CUDA 12"
INSTALL = 'deep_gemm compiles its kernels at run time. Run: pip install "hopper-gemm[cu13]"'
NEEDED = "kernels need an H100, H200 or H20"


@pytest.mark.parametrize(
    ("gpus", "driver", "compiler", "so", "more", "code"),
    [
        ([HOPPER], (13, 0), None, CACHED, INSTALL, 1),
        ([HOPPER], (11, 8), "13.0.88", " alone", "CUDA 11.8: too old, kernels need a driver of CUDA 12.0 or newer", 1),
        ([HOPPER], (12, 9), "13.5.37 CL-1", " alone", f"CUDA 12.9: {OLDER.format('13.5.37')}", 1),
        ([], (12, 4), "13.0.88", COMPILES, f"CUDA 12.4: {OLDER.format('13.0.88')}", 1),
        ([], None, "13.0.88", COMPILES, f"there is no Hopper GPU: {NEEDED}", 0),
        ([], None, None, NEITHER, f"there is no Hopper GPU: {NEEDED}", 0),
        ([AMPERE], (13, 0), "13.0.88", COMPILES, f"the GPU is not a Hopper: {NEEDED}", 0),
    ],
)
def test_doctor_says_what_a_machine_lacks_and_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Any], driver: Any, compiler: str | None, so: str, more: str, code: int
) -> None:
    lines = machine(monkeypatch, gpus, driver, compiler)
    assert lines[-3] == f"so         products run by the reference on the CPU{so}"
    assert lines[-2] == f"for more   {more}"
    assert lines[-1] == f"{code}"


def test_doctor_takes_a_driver_of_the_compilers_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = machine(monkeypatch, [HOPPER], (13, 0), "13.5.37 CL-1")
    assert "driver     CUDA 13.0" in lines
    assert lines[-1] == "0"


def test_doctor_names_settings_and_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    as_new_process(monkeypatch, DG_JIT_DEBUG=1, DG_JIT_CACHE_DIR=tmp_path / "file" / "cache")
    shown = words(run("doctor"))
    assert "DG_JIT_DEBUG=1" in shown
    assert "DG_TUNED_TABLE=/table (ignored)" in str([*map(str, doctor.examine({"DG_TUNED_TABLE": "/table"}))])
    assert "0 kernels, 0.0 MB; it is not writable: set DG_JIT_CACHE_DIR to a writable directory" in shown


def test_doctor_says_of_a_variable_that_does_not_exist_which_one_may_be_meant() -> None:
    asked = {"DG_JIT_CACHE_DIRS": "/a", "DG_JIT_USE_NVRTC": "1", "DG_JIT_DEBUG": "0", "DG_TEST_ALL": "1"}
    (told,) = [each.found for each in doctor.examine(asked) if each.what == "settings"]
    assert told.split(", ") == [
        "DG_JIT_CACHE_DIRS=/a (no such variable: is DG_JIT_CACHE_DIR meant?)",
        "DG_JIT_DEBUG=0",
        "DG_JIT_USE_NVRTC=1 (no such variable)",
        "DG_TEST_ALL=1",
    ]


@pytest.mark.parametrize(
    ("value", "told"), [("1", "Python: DG_DISABLE_NATIVE_REPLAY is set"), ("maybe", "not examined")]
)
def test_doctor_and_result_files_say_which_replay_runs(cache: Path, value: str, told: str) -> None:
    code = "from lab.bench.machine import header; print(header('dense', '')['versions']['replay'])"
    environment = {**os.environ, "DG_DISABLE_NATIVE_REPLAY": value}
    assert f"replay     {told}" in forked.run("-m", "deep_gemm", "doctor", env=environment).stdout.splitlines()
    if value == "1":
        assert forked.run("-c", code, env=environment).stdout == f"{told}\n"


# ---- compile and cache ------------------------------------------------------------------------------------------


def test_compile_makes_what_a_product_of_this_shape_then_finds(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("compile", "64,2112,7168", "2000x512x7168", "--gpu", "H200")
    assert result.exit_code == 0
    assert words(result).startswith(f"2 kernels: about 1 s on {os.cpu_count()} processors, less for cached kernels")
    assert "2 of 2 kernels are ready, 2 of them new" in words(result)
    assert " 2/2 " in result.output, "without a terminal, each kernel has a line"
    jit._cache_of.cache_clear()
    monkeypatch.setattr(jit, "compile_cubin", None)  # compiling now fails
    for shape in ((64, 2112, 7168), (2000, 512, 7168)):
        config = select(Sizes(*shape), Output(), H200)
        assert kernel_of(config).build(config).cubin
    again = run("compile", "64,2112,7168", "--gpu", "H200")
    assert "1 of 1 kernels are ready, 0 of them new" in words(again)
    assert again.exit_code == 0


def test_compile_of_a_weight_makes_all_that_any_m_can_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def keep(jobs: Iterable[Any], console: object) -> bool:
        built.extend(jobs)
        return True

    monkeypatch.setattr(precompile, "run", keep)
    assert run("compile", "2112,7168", "--gpu", "H200").exit_code == 0
    made = {job.config for job in built}
    assert {select(Sizes(m, 2112, 7168), Output(), H200) for m in range(1, 20_000, 7)} <= made
    assert len(made) < 20
    built.clear()
    arguments = ("--groups", "ids", "--num-groups", "8", "--gpu", "H200")
    assert run("compile", "4096,7168", *arguments).exit_code == 0
    ids = Output(work=works.IDS)
    made = {job.config for job in built}
    assert {select_grouped(Sizes(m / 8, 4096, 7168, 8), ids, H200) for m in range(1, 20_000, 7)} <= made
    built.clear()
    assert run("compile", "256,4096,7168", "--groups", "depths", "--num-groups", "8").exit_code == 0
    assert run("compile", "4,1024,4096", "--groups", "heads", "--num-groups", "8").exit_code == 0
    assert "k_group_maps" in [job.name for job in built]
    built.clear()
    assert run("compile", "2112,7168", "--layers", "--gpu", "H200").exit_code == 0
    names = {job.name for job in built}
    assert {f"{kernel.name_of(config)} {config.name}" for kernel in ORDINARY for config in kernel.configs()} <= names
    assert any(job.kernel == linear_decode.KERNEL.kernel_name for job in built)
    built.clear()
    assert run("compile", "2112,7168", "--layers", "--fp4", "--gpu", "H200").exit_code == 0
    made = {job.config for job in built}
    assert {select(Sizes(m, 2112, 7168), Output(b=E2M1, sfb=MX), H200) for m in range(1, 20_000, 7)} <= made
    assert not any(job.kernel == linear_decode.KERNEL.kernel_name for job in built), "`linear` casts by itself"


def test_compile_says_which_kernel_failed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = FP8_GEMM.headers
    monkeypatch.setattr(FP8_GEMM, "headers", lambda config: {**headers(config), "ring.cuh": "int x = ;"})
    shown = printed("compile", "4096,512,7168", "--gpu", "H200", code=1)
    assert "fp8_gemm_dense: NVRTC: NVRTC_ERROR_COMPILATION" in shown
    assert "0 of 1 kernels are ready, 0 of them new" in shown


def test_compile_fails_where_nothing_can_be_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file, not a directory")
    with pytest.warns(RuntimeWarning, match="compiled kernels cannot be kept"):
        assert run("compile", "4096,512,7168", "--gpu", "H200").exit_code == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compile", "shapes: expected shapes, --model or --layers, got none"),
        ("compile 64", "shapes: expected m,n,k or n,k, such as 64,2112,7168, got '64'"),
        ("compile 64,a,128", "shapes: expected m,n,k or n,k, such as 64,2112,7168, got '64,a,128'"),
        ("compile 0,8,128", "m: expected an integer in 1..2147483647, got 0"),
        ("compile 12,128", "n: expected a multiple of 8 for torch.bfloat16 output, got 12"),
        ("compile 8,100", "k: expected a multiple of 16, got 100"),
        ("compile 8,128 --gpu B200", "gpu: expected H200, H100, H20 or None, got 'B200'"),
        ("compile 8,128 --tp 8", "tp: expected --model too, as shapes are of one rank, got only 8"),
        ("compile --layers --ep 2", "ep: expected --model too, as shapes are of one rank, got only 2"),
        ("compile 8,128 --form rows", "form: expected --model too, as shapes are of one rank, got only rows"),
        ("compile 8,128 --max-tokens 64", "max-tokens: expected --model too, as shapes are of one rank, got only 64"),
        ("compile 8,128 --num-groups 2", "num_groups: expected 1 without groups, got 2"),
        ("compile --model deepseek", "kimi-k2"),
        ("explain 0 8 128", "deep_gemm: m: expected"),
        ("explain 64 12 128", "deep_gemm: n: expected a multiple of 8 for torch.bfloat16 output, got 12"),
        ("explain 64 8 100", "deep_gemm: k: expected a multiple of 16, got 100"),
        ("explain 64 8 128 --groups ids --with-c", "deep_gemm: groups: expected no C for groups of rows (ids)"),
        ("explain 64 8 128 --row-scales --groups heads", "deep_gemm: recipe_a: expected (1, 128), got (1, 0)"),
        ("compile 8,128 --row-scales --groups depths", "deep_gemm: recipe_a: expected (1, 128) for a"),
        ("explain 64 8 128 --gpu B200", "deep_gemm: gpu: expected H200, H100, H20 or None, got 'B200'"),
    ],
)
def test_mistakes_are_refused_in_words(line: str, message: str) -> None:
    assert message in printed(*line.split(), code=2)


def test_compile_says_what_to_install_where_the_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "compiler_version", no_compiler)
    assert 'Run: pip install "hopper-gemm[cu13]"' in printed("compile", "8,128", code=2)


def kept(cache: Path, *names: str) -> list[Path]:
    """Store kernels with these names in a cache; return their files."""
    for name in names:
        key = hashlib.sha256(name.encode()).hexdigest()
        kernel = CompiledKernel(name, b"machine code", "a log", "13.0.88 CL-1")
        KernelCache(cache).store(key, kernel, options=[], passes=[])
    return sorted(cache.glob("*.kernel"))


def test_cache_list_shows_kernels_and_which_are_not_sound(cache: Path) -> None:
    assert words(run("cache", "list")) == f"0 kernels, 0.0 MB, in {cache}"
    first, second = kept(cache, "one", "two")
    second.write_bytes(b"")
    shown = printed("cache", "list")
    assert re.search(rf"one {first.stem[-64:][:8]} 13.0.88 \d+ \d\d-\d\d", shown)
    assert re.search(r"two \w{8} not sound 0 ", shown)
    assert shown.endswith(f"2 kernels, 0.0 MB, in {cache}")


def test_cache_list_says_what_each_kernel_was_compiled_for(cache: Path) -> None:
    assert run("compile", "64,2112,7168", "2000,512,7168", "--gpu", "H200").exit_code == 0
    listed = run("cache", "list")
    for shape in ((64, 2112, 7168), (2000, 512, 7168)):
        assert f" {select(Sizes(*shape), Output(), H200).name} " in words(listed)
    assert max(map(len, listed.output.splitlines()[:-1])) <= 80
    (one, *_) = cache.glob("*.kernel")
    head, facts, cubin = one.read_bytes().split(b"\n", 2)
    body = re.sub(rb'"config": "[^"]*", ', b"", facts) + b"\n" + cubin
    one.write_bytes(head[:-64] + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert "not sound" not in words(run("cache", "list")), "older files do not store it"


def test_cache_verify_fails_for_what_is_not_sound_and_removes_it_if_told(cache: Path) -> None:
    first, second, third = kept(cache, "one", "three", "two")
    assert printed("cache", "verify") == f"3 of 3 kernels in {cache} are sound"
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(first.read_bytes())  # the file is sound, but has another kernel's name
    shown = printed("cache", "verify", code=1)
    assert f"{second}: not sound; it is compiled again when needed" in shown
    assert str(third) in shown
    assert shown.endswith(f"1 of 3 kernels in {cache} are sound")
    assert run("cache", "verify", "--remove").exit_code == 0
    assert list(cache.iterdir()) == [first]


def test_cache_clear_removes_what_the_cache_wrote_and_nothing_else(cache: Path) -> None:
    first, *_ = kept(cache, "one", "two")
    error = jit.CompileError("broken", "NVRTC", log="", options=(), source="int x = ;")
    KernelCache(cache).keep_failed_source(error, {"ptx/a.cuh": ""}, "k" * 64)
    for name in (f"{first.stem}.ptx", f"{first.stem}.sass", ".0123456789abcdef.tmp"):
        (cache / name).write_text("")
    strangers = {cache / name for name in ("notes.txt", "my.kernel", "other.ptx", "x-123.kernel", ".hidden.tmp")}
    for path in strangers:
        path.write_text("")
    refused = CliRunner().invoke(app, ["cache", "clear"], input="n\n")
    assert refused.exit_code == 1
    assert first.exists()
    assert f"2 kernels removed from {cache}" in printed("cache", "clear", "--yes")
    assert {path for path in cache.rglob("*") if path.is_file()} == strangers
    assert words(run("cache", "clear", "--yes")) == f"0 kernels removed from {cache}"


def test_cache_of_a_directory_that_is_not_there_is_empty(cache: Path) -> None:
    for arguments in (("list",), ("verify",), ("clear", "--yes")):
        assert "0 " in printed("cache", *arguments)


def test_a_shipped_cache_serves_where_there_isno_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "kernels.tar"
    assert run("compile", "64,2112,7168", "64,512,7168", "--gpu", "H200").exit_code == 0
    made = {path.name: path.read_bytes() for path in cache.glob("*.kernel")}
    assert f"{len(made)} kernels, " in run("cache", "export", str(archive)).output
    first = archive.read_bytes()
    run("cache", "export", str(archive))
    assert archive.read_bytes() == first, "the same kernels give the same bytes, so an image's layer stays the same"

    # On another machine: kernels are in a directory that is only read, and NVRTC is missing.
    as_new_process(monkeypatch, DG_JIT_CACHE_DIR=tmp_path / "there")
    told = f"{len(made)} kernels, made by NVRTC {compiler.compiler_version()}, are in"
    assert told in printed("cache", "import", str(archive))
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == made
    as_new_process(monkeypatch, DG_JIT_CACHE_DIR=f"{tmp_path / 'file' / 'cache'}{os.pathsep}{tmp_path / 'there'}")
    (tmp_path / "file").write_text("")
    compiler.compiler_version.cache_clear()
    monkeypatch.setattr(compiler, "_nvrtc", no_compiler)
    for n in (2112, 512):
        config = select(Sizes(64, n, 7168), Output(), H200)
        assert kernel_of(config).build(config).cubin
    with pytest.raises(CompilerMissing, match=r"fp8_gemm_dense is not among the compiled kernels in .*pip install"):
        FP8_GEMM.build(next(config for config in reachable() if config.block_m == 256))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (f"../one-{'a' * 64}.kernel", None, "its name is not a kernel's"),
        (f"/tmp/one-{'a' * 64}.kernel", None, "its name is not a kernel's"),
        (f"failed/one-{'a' * 64}.kernel", None, "its name is not a kernel's"),
        (f"one-{'a' * 64}.kernel\n", None, "its name is not a kernel's"),
        ("notes.txt", b"", "its name is not a kernel's"),
        (f"one-{'b' * 64}.kernel", None, "it holds another kernel: one-"),
        (f"two-{'a' * 64}.kernel", None, "it holds another kernel: one-"),
        (f"one-{'a' * 64}.kernel", b"", "it is empty"),
        (f"one-{'a' * 64}.kernel", b"\x80\x04.", "it is not a kernel's file, or it has another format"),
        (f"one-{'a' * 64}.kernel", tarfile.SYMTYPE, "it is not a regular file"),
        (f"one-{'a' * 64}.kernel", tarfile.LNKTYPE, "it is not a regular file"),
        (f"one-{'a' * 64}.kernel", tarfile.FIFOTYPE, "it is not a regular file"),
        (f"one-{'a' * 64}.kernel", tarfile.DIRTYPE, "it is not a regular file"),
    ],
)
def test_import_refuses_what_is_not_a_kernel_and_writes_nothing_elsewhere(
    cache: Path, tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    archive = tmp_path / "kernels.tar"
    sound = pack("a" * 64, CompiledKernel("one", b"machine code", "a log", "13.0.88 CL-1"), options=[], passes=[])
    with tarfile.open(archive, "w") as tar:
        member, data = tarfile.TarInfo(name), b""
        if content in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member.type, member.linkname = content or b"", "/etc/passwd"
        else:
            data = sound if content is None else content
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    shown = printed("cache", "import", str(archive), code=1)
    assert f"refused: {reason}" in shown
    assert "0 kernels are in" in shown
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


def test_import_and_export_say_what_they_cannot_do(cache: Path, tmp_path: Path) -> None:
    archive, nowhere = tmp_path / "kernels.tar", tmp_path / "no" / "folder"
    told = printed("cache", "import", str(archive), code=2)
    assert told == f"deep_gemm: {archive}: No such file or directory"
    archive.write_text("no archive")
    told = printed("cache", "import", str(archive), code=2)
    assert told.startswith(f"deep_gemm: file: expected a tar from `cache export`, got {archive}: ")
    told = printed("cache", "export", str(nowhere), code=2)
    assert told == f"deep_gemm: {nowhere}: No such file or directory"
    assert run("cache", "export", str(archive)).exit_code == 1, "there is nothing to export"
    (first,) = kept(cache, "one")
    first.write_bytes(b"")
    assert f"{first}: left out (it is empty)" in words(run("cache", "export", str(archive)))
    cache.chmod(0o777)
    told = printed("cache", "import", str(archive), code=2)
    assert "others may write to it (mode 777): chmod go-w" in told


# ---- explain ----------------------------------------------------------------------------------------------------


def test_explain_shows_the_choice_and_what_lost() -> None:
    result = run("explain", "4096", "7168", "2048", "--gpu", "H200")
    assert result.exit_code == 0
    assert words(result).startswith("4096 x 7168 x 2048, BF16 On an H200 with 132 SMs ")
    assert len([line for line in result.output.splitlines() if line.endswith(" chosen")]) == 1


@pytest.mark.parametrize(
    ("options", "title"),
    [
        (("--fp32", "--with-c"), "4096 x 7168 x 2048, FP32, C added"),
        (("--by-row", "--accumulate"), "4096 x 7168 x 2048, FP32, a scale for each row of B, added to D"),
        (("--by-row", "--output", "bf16"), "4096 x 7168 x 2048, BF16, a scale for each row of B"),
        (("--groups", "ids", "--num-groups", "8"), "4096 rows in 8 groups, by 7168 x 2048, BF16"),
        (("--groups", "counts", "--num-groups", "8"), "8 groups of about 4096 rows, by 7168 x 2048, BF16"),
        (("--groups", "heads", "--num-groups", "8"), "8 heads of 4096 x 7168 x 2048, BF16"),
        (
            ("--groups", "depths", "--num-groups", "8", "--accumulate"),
            "8 groups of 4096 x 7168, 2048 deep on average, FP32, a scale for each row of B, added to D",
        ),
    ],
)
def test_explain_is_for_every_product(options: tuple[str, ...], title: str) -> None:
    shown = printed("explain", "4096", "7168", "2048", "--gpu", "H200", *options)
    assert shown.startswith(f"{title} On an H200 ")


# ---- demo -------------------------------------------------------------------------------------------------------


def speeds(monkeypatch: pytest.MonkeyPatch, error: float = 1.7e-3) -> Result:
    """Run a demo on a GPU on which each product takes 100 us, and cuBLASLt's product 80 us."""
    monkeypatch.setattr(demo, "_has_hopper", lambda: True)
    monkeypatch.setattr(demo, "measured", lambda m, n, k: (error, 100.0, 80.0))
    return run("demo")


@pytest.mark.usefixtures("no_products")
def test_demo_on_a_gpu_shows_tflops_and_error_beside_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    result = speeds(monkeypatch)
    assert result.exit_code == 0
    assert "4096 x 7168 x 2048 100.0 1203 1.7e-03 80.0 1503 1.25" in words(result)
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.usefixtures("no_products")
@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_demo_fails_where_a_product_on_the_gpu_does(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    result = speeds(monkeypatch, error)
    assert result.exit_code == 1
    assert f"4096 x 7168 x 2048: wrong, relative error {error:.1e}" in words(result)


@pytest.mark.gpu
def test_demo_measures_both_and_how_far_off_ours_is() -> None:
    error, ours, theirs = demo.measured(64, 2112, 7168)
    assert error < 4e-3
    assert 1 < ours < 1000
    assert 1 < theirs < 1000


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the demo runs the kernels instead")


def no_compiler() -> str:
    raise CompilerMissing('deep_gemm compiles its kernels at run time. Run: pip install "hopper-gemm[cu13]"')


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the products of the demo, which test_package.py runs."""
    monkeypatch.setattr(demo, "_show_products", lambda console: True)


@without_gpu
@pytest.mark.usefixtures("no_products", "compiles_anew")
def test_demo_without_a_gpu_compiles_a_kernel_of_each_kind() -> None:
    result = run("demo")
    assert result.exit_code == 0
    rows = [" ".join(line.split()) for line in result.output.splitlines()]
    for kind, config in demo.KERNELS.items():
        (row,) = [row for row in rows if row.startswith(f"{kind} {config.name} ")]
        registers, milliseconds = map(int, row.split()[-2:])
        assert 32 <= registers <= 255
        assert milliseconds > 0
    assert max(map(len, result.output.splitlines())) <= 80


@without_gpu
def test_demo_on_a_cpu_shows_no_times_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_show_kernels", lambda console: True)
    examples = demo._examples
    monkeypatch.setattr(demo, "_examples", lambda device: islice(examples(device), 1))
    (heading,) = [line for line in run("demo").output.splitlines() if line.startswith("product ")]
    assert heading.split() == ["product", "m", "x", "n", "x", "k", "D", "backend", "error"]


@without_gpu
@pytest.mark.usefixtures("no_products")
def test_demo_without_a_compiler_says_what_to_install_and_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "compiler_version", no_compiler)
    assert 'Run: pip install "hopper-gemm[cu13]"' in printed("demo")


@without_gpu
def test_demo_on_another_gpu_than_a_hopper_is_that_of_a_machine_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(demo, "_show_kernels", lambda console: True)
    examples = demo._examples  # test_package runs the other examples
    monkeypatch.setattr(demo, "_examples", lambda device: islice(examples(device), up_to(7, 1)))
    assert "no Hopper GPU found" in printed("demo")


# ---- packages that are missing, and errors in the environment -------------------------------------------------------

HIDE = """
import os, sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command line in a process of its own, which may lack some packages."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE)
    (tmp_path / "site" / "deep_gemm_is_imported.py").write_text("import deep_gemm")
    script = tmp_path / "deep_gemm"  # the script that pip writes
    script.write_text("import sys\nfrom deep_gemm.__main__ import main\nsys.exit(main())\n")

    def run(line: str, hidden: str = "", by: str = "-m deep_gemm", **variables: str) -> Any:
        paths = os.pathsep.join(map(str, (tmp_path / "site", ROOT)))
        added = {"HIDDEN": hidden, "PYTHONPATH": paths, "DG_JIT_CACHE_DIR": str(tmp_path / "cache"), **variables}
        arguments = [*(by if by != "script" else str(script)).split(), *line.split()]
        environment = {**os.environ, **added}
        if "torch" in hidden:
            command = [sys.executable, *arguments]
            return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        if by == "script":
            return forked.run(*arguments, env=environment, cwd=tmp_path)
        program = f"{HIDE}import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
        return forked.run("-c", program, *arguments[1:], env=environment, cwd=tmp_path)

    return run


@pytest.mark.parametrize("by", ["-m deep_gemm", "script"])
@pytest.mark.parametrize("line", ["doctor", "explain 64 128 128", "demo"])
def test_every_command_without_torch_ends_in_a_sentence(process: Any, line: str, by: str) -> None:
    done = process(line, hidden="torch", by=by)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "deep_gemm: expected torch, found none. Run: pip install torch\n"


@pytest.mark.parametrize("by", one_in(2, ["-m deep_gemm", "script"]))
@pytest.mark.parametrize("line", ["--help", "--version", "cache list", "explain --help", "bench"])
def test_what_needs_no_torch_imports_none(process: Any, line: str, by: str) -> None:
    done = process(line, hidden="torch numpy", by=by)
    assert done.returncode == (2 if line == "bench" else 0), done.stderr
    assert "torch, found none" not in done.stderr


@pytest.mark.parametrize("by", ["-m", "script"])
def test_a_program_is_no_command_whatever_it_is_called(process: Any, tmp_path: Path, by: str) -> None:
    program = tmp_path / ("deep_gemm" if by == "script" else "site/deep_gemm_is_used.py")
    program.write_text("import deep_gemm\nprint(deep_gemm.ceil_div(7, 2))\n")
    done = process("--help deep_gemm" if by == "script" else "deep_gemm_is_used deep_gemm", by=by)
    assert (done.stdout, done.stderr) == ("4\n", "")


def test_a_program_without_torch_gets_an_error_that_says_so(process: Any) -> None:
    done = process("deep_gemm_is_imported", hidden="torch", by="-m")
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: deep_gemm: expected torch, found none. Run: pip install torch\n")


OF_CACHES = [f"cache {each}" for each in ("list", "verify", "clear --yes", "export x.tar", "import x.tar")]


@pytest.mark.parametrize("line", one_in(6, [*OF_CACHES, "compile 64,8,128"]))
def test_a_variable_that_is_wrong_ends_a_command_in_a_sentence(process: Any, line: str) -> None:
    done = process(line, DG_JIT_CACHE_LIMIT_MB="much")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "deep_gemm: DG_JIT_CACHE_LIMIT_MB: expected a positive integer, got 'much'\n"


def test_doctor_names_each_variable_that_is_wrong_and_shows_the_rest(process: Any, tmp_path: Path) -> None:
    done = process("doctor", DG_JIT_DEBUG="maybe", DG_JIT_CACHE_LIMIT_MB="much")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert f"cache      {tmp_path / 'cache'}: 0 kernels, 0.0 MB" in lines
    assert any(line.startswith("NVRTC ") for line in lines)
    assert any(line.startswith("settings ") and "DG_JIT_DEBUG=maybe" in line for line in lines)
    assert lines[-2:] == [
        "mend       DG_JIT_CACHE_LIMIT_MB: expected a positive integer, got 'much'",
        "mend       DG_JIT_DEBUG: expected 0 or 1 (no or yes, off or on, false or true), got 'maybe'",
    ]


def test_doctor_shows_the_rest_where_the_directory_of_the_cache_is_wrong(process: Any) -> None:
    done = process("doctor", DG_JIT_CACHE_DIR="~nobody-of-this-name/kernels")
    assert (done.returncode, done.stderr) == (1, "")
    assert "cache      not examined\n" in done.stdout
    assert "mend       DG_JIT_CACHE_DIR: expected a path, got '~nobody-of-this-name/kernels', whose home" in done.stdout


@pytest.mark.parametrize(
    "line", ["-m lab bench compile --quick --out x.json", "-m deep_gemm compile 64,8,128", "-m lab inspect"]
)
def test_a_command_that_compiles_says_what_to_install_where_nvrtc_is_missing(process: Any, line: str) -> None:
    _, program, rest = line.split(maxsplit=2) if line.count(" ") > 1 else (*line.split(), "")
    done = process(rest, hidden="cuda", by=f"-m {program}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("deep_gemm: deep_gemm compiles its kernels at run time and needs NVRTC and cuda-")
    assert 'Run: pip install "hopper-gemm[cu1' in done.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
