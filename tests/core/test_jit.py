"""Compiling: purity, errors, messages of ptxas, and `jit.build`. Needs NVRTC, no GPU; without NVRTC the tests fail."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from helpers import as_new_process, raising, some, text_sections

ROOT = Path(__file__).resolve().parents[2]
from deep_gemm.core import jit
from deep_gemm.core.jit import compiler, dumps, ptxas_log
from deep_gemm.core.jit.compiler import compile_cubin

SCALE = 'extern "C" __global__ void scale(float* p) { p[threadIdx.x] *= 2; }'

WGMMA, *_PARTS = re.split(r"^// ---- (.+)\n", (Path(__file__).parent / "kernels.cuh").read_text(), flags=re.MULTILINE)
KERNELS = {name: WGMMA + source for name, source in zip(_PARTS[::2], _PARTS[1::2], strict=True)}
SLOW_KERNELS = [name for name in KERNELS if name.startswith(("C75", "spills", "stack frame"))]
"""Kernels that each provoke one message of ptxas."""


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, compiles_anew: None) -> None:
    as_new_process(monkeypatch, DG_JIT_STRICT=1)


def run_python(code: str, environment: dict[str, str]) -> str:
    run = forked.run("-c", code, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout


# ---- compile_cubin ----------------------------------------------------------------------------------------------


def test_same_arguments_give_the_same_bytes_and_log() -> None:
    assert compile_cubin(SCALE, {}, name="scale") == compile_cubin(SCALE, {}, name="scale")


def test_headers_come_from_memory_by_their_include_names() -> None:
    headers = {"ptx/twice.cuh": '#include "factor.cuh"\n', "factor.cuh": "#define FACTOR 2\n"}
    source = '#include "ptx/twice.cuh"\n' + SCALE.replace("2", "FACTOR")
    assert compile_cubin(source, headers, name="scale").cubin == compile_cubin(SCALE, {}, name="scale").cubin


def test_a_header_on_disk_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factor.cuh").write_text("#define FACTOR 2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jit.CompileError, match=r"factor\.cuh"):
        compile_cubin('#include "factor.cuh"\n' + SCALE, {}, name="scale")


def test_a_syntax_error_carries_log_options_and_source() -> None:
    with pytest.raises(jit.CompileError) as caught:
        compile_cubin("int x = ;", {}, name="broken", options=("--std=c++20", "-DANSWER=42"))
    error = caught.value
    assert "broken.cu(1): error: expected an expression" in error.log
    assert "-DANSWER=42" in error.options
    assert "--gpu-architecture=sm_90a" in error.options
    assert error.source == "int x = ;"
    assert error.log in str(error)
    assert "-DANSWER=42" in str(error)


def test_a_compile_error_comes_whole_from_another_process() -> None:
    error = jit.CompileError("broken", "NVRTC: no", log="line 1", options=("-DX=1", "-O"), source="int x = ;")
    error.source_path = Path("/cache/broken.cu")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is jit.CompileError
        assert str(copied) == str(error)
        assert (copied.name, copied.reason, copied.log) == ("broken", "NVRTC: no", "line 1")
        assert (copied.options, copied.source) == (("-DX=1", "-O"), "int x = ;")
        assert copied.source_path == Path("/cache/broken.cu")


def test_an_unknown_option_is_a_compile_error_that_names_it() -> None:
    with pytest.raises(jit.CompileError, match="--no-such-option"):
        compile_cubin(SCALE, {}, name="scale", options=("--no-such-option",))


def test_bad_ptx_is_a_compile_error_with_the_words_of_ptxas() -> None:
    with pytest.raises(jit.CompileError, match="Not a name of any known instruction"):
        compile_cubin('extern "C" __global__ void k() { asm volatile("foo.bar;"); }', {}, name="k")


def test_the_compiler_version_names_the_build() -> None:
    major, minor = compiler._checked(compiler._nvrtc().nvrtcVersion())
    assert re.fullmatch(rf"{major}\.{minor}\.\d+ (CL-\d+|UNKNOWN)", compiler.compiler_version())  # UNKNOWN: 13.2.86


# ---- strict -----------------------------------------------------------------------------------------------------


UNTOLD = {"C7519"} if tuple(map(int, compiler.compiler_version().split(".")[:2])) >= (13, 1) else set()
"""Messages that this ptxas never prints, because it repairs the code silently."""


@pytest.mark.parametrize("message", [name for name in SLOW_KERNELS if name not in UNTOLD])
def test_strict_refuses_a_kernel_with(message: str) -> None:
    source = KERNELS[message]
    kernel = compile_cubin(source, {}, name="kernel")  # not strict: a note never stops an engine
    with pytest.raises(jit.CompileError) as caught:
        compile_cubin(source, {}, name="kernel", strict=True)
    assert message in caught.value.reason
    assert caught.value.log == kernel.log


@pytest.mark.parametrize("code", [name for name in SLOW_KERNELS if name.startswith("C75") and name not in UNTOLD])
def test_a_note_is_told_in_words_that_a_newcomer_knows(code: str) -> None:
    log = compile_cubin(KERNELS[code], {}, name="kernel").log
    told = [note for note in ptxas_log.notes(log) if note.startswith(code)]
    assert told
    assert all("- ptxas:" in note for note in told), "no entry of the table has this text of ptxas"


def test_a_missing_fence_costs_nothing_whether_it_is_told_or_not() -> None:
    missing = KERNELS["C7519"]
    fenced = missing.replace("multiply(d, a, 1)", "FENCE(); multiply(d, a, 1)")
    assert fenced != missing
    cubins = [compile_cubin(source, {}, name="kernel").cubin for source in (missing, fenced)]
    assert text_sections(cubins[0]) == text_sections(cubins[1])


def test_strict_accepts_a_clean_wgmma_kernel() -> None:
    compile_cubin(KERNELS["clean"], {}, name="kernel", strict=True)


def test_a_log_that_does_not_report_registers_is_a_complaint() -> None:
    log = compile_cubin(SCALE, {}, name="scale").log
    assert ptxas_log.complaints(log) == []
    assert len(ptxas_log.complaints("")) == 1


# ---- build ------------------------------------------------------------------------------------------------------


def test_build_compiles_once_in_a_process_and_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.build(SCALE, {}, name="scale")
    monkeypatch.setattr(jit, "compile_cubin", lambda *a, **k: pytest.fail("compiled again"))
    assert jit.build(SCALE, {}, name="scale") is first
    jit._cache_of.cache_clear()  # as a new process would see it
    assert jit.build(SCALE, {}, name="scale") == first


def test_passes_are_applied_in_order_and_are_part_of_the_key() -> None:
    plain = jit.build(SCALE, {}, name="scale")
    a, b = jit.Pass("a", 1, lambda cubin: cubin + b"a"), jit.Pass("b", 1, lambda cubin: cubin + b"b")
    assert jit.build(SCALE, {}, name="scale", passes=[a, b]).cubin == plain.cubin + b"ab"
    assert jit.build(SCALE, {}, name="scale", passes=[b, a]).cubin == plain.cubin + b"ba"
    newer = jit.Pass("a", 2, lambda cubin: cubin + b"A")
    assert jit.build(SCALE, {}, name="scale", passes=[newer, b]).cubin == plain.cubin + b"Ab"
    assert jit.build(SCALE, {}, name="scale") == plain


def test_build_leaves_a_failed_source_with_its_headers_for_reading() -> None:
    with pytest.raises(jit.CompileError) as caught:
        jit.build('#include "ptx/a.cuh"\nint x = ;', {"ptx/a.cuh": "// a\n"}, name="broken")
    path = some(caught.value.source_path)
    assert path.read_text() == '#include "ptx/a.cuh"\nint x = ;'
    assert (path.parent / "ptx/a.cuh").read_text() == "// a\n"
    assert "expected an expression" in (path.parent / "log.txt").read_text()
    assert str(path) in str(caught.value)


def test_strict_also_refuses_a_slow_kernel_that_someone_else_has_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    as_new_process(monkeypatch, DG_JIT_STRICT=0)
    jit.build(KERNELS["spills"], {}, name="kernel")
    as_new_process(monkeypatch, DG_JIT_STRICT=1)
    with pytest.raises(jit.CompileError, match="spills"):
        jit.build(KERNELS["spills"], {}, name="kernel")


def test_without_strict_one_warning_names_the_compiler_that_made_a_slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    as_new_process(monkeypatch, DG_JIT_STRICT=0)
    monkeypatch.setattr(jit, "_told_slow", set())
    told = rf"^kernel is slower than .*NVRTC {re.escape(compiler.compiler_version())} compiled it badly.*spills"
    with pytest.warns(RuntimeWarning, match=told) as caught:
        for _ in range(2):
            jit.build(KERNELS["spills"], {}, name="kernel")
            jit._cache_of.cache_clear()  # as a new process, which loads it from the cache
    assert len(caught) == 1


def test_debug_tells_what_was_compiled_and_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_new_process(monkeypatch, DG_JIT_DEBUG=1)
    jit.build(SCALE, {}, name="scale")
    told = capsys.readouterr()
    assert told.out == ""
    for fact in ("compiled scale in ", " ms", "--gpu-architecture=sm_90a", "Used ", compiler.compiler_version()):
        assert fact in told.err


# ---- dumps ------------------------------------------------------------------------------------------------------


def dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *variables: str, tool: str = "") -> dict[str, str]:
    """Build a kernel; return the files beside it, by suffix. `tool` is the script of an nvdisasm, if any."""
    as_new_process(monkeypatch, **dict.fromkeys(variables, 1))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("deep_gemm.core.jit.cubin.importlib.util.find_spec", lambda name: None)
    dumps._warn.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if tool:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvdisasm").write_text(tool)
        (tmp_path / "bin" / "nvdisasm").chmod(0o755)
    jit.build(SCALE, {}, name="scale")
    files = list((tmp_path / "cache").glob("scale-*"))
    assert len({file.stem for file in files}) == 1, "all files have the kernel's name and key"
    return {file.suffix: file.read_bytes().decode(errors="replace") for file in files}


TOOL = '#!/bin/sh\necho "code of $1"\n'


@pytest.mark.parametrize(
    ("variables", "suffixes"),
    [
        ((), {".kernel"}),
        (("DG_JIT_DUMP_PTX",), {".kernel", ".ptx"}),
        (("DG_JIT_DUMP_SASS",), {".kernel", ".cubin", ".sass"}),
        (("DG_JIT_DUMP_ASM",), {".kernel", ".cubin", ".sass", ".ptx"}),
    ],
)
def test_a_dump_lies_beside_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: tuple[str, ...], suffixes: set[str]
) -> None:
    files = dumped(monkeypatch, tmp_path, *variables, tool=TOOL)
    assert files.keys() == suffixes
    if ".ptx" in suffixes:
        assert ".target sm_90a" in files[".ptx"]
        assert ".visible .entry scale(" in files[".ptx"]
        assert "\0" not in files[".ptx"]
    if ".sass" in suffixes:
        assert files[".sass"].startswith("code of /")
        assert files[".kernel"].endswith(files[".cubin"])


def test_a_kernel_from_the_cache_is_dumped_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jit.build(SCALE, {}, name="scale")
    jit._cache_of.cache_clear()  # as a new process would see it
    monkeypatch.setattr(jit, "compile_cubin", lambda *a, **k: pytest.fail("compiled again"))
    assert dumped(monkeypatch, tmp_path, "DG_JIT_DUMP_ASM", tool=TOOL).keys() == {".kernel", ".cubin", ".sass", ".ptx"}
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.rpartition(".")[2] for line in told.err.splitlines()] == ["ptx", "cubin", "sass"]


def test_without_a_disassembler_the_machine_code_is_kept_and_one_warning_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.warns(RuntimeWarning, match="no nvdisasm or cuobjdump on PATH, .* pip install triton") as told:
        assert dumped(monkeypatch, tmp_path, "DG_JIT_DUMP_SASS").keys() == {".kernel", ".cubin"}
        jit.build(SCALE + "\n", {}, name="scale")
    assert len(told) == 1
    assert str(tmp_path / "cache") in str(told[0].message)


def test_a_disassembler_that_refuses_the_code_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = "#!/bin/sh\necho too new >&2; exit 1\n"
    with pytest.warns(RuntimeWarning, match="scale: cubin: nvdisasm refuses it: too new"):
        assert dumped(monkeypatch, tmp_path, "DG_JIT_DUMP_SASS", tool=tool).keys() == {".kernel", ".cubin"}


def test_a_dump_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_new_process(monkeypatch, DG_JIT_CACHE_DIR="/dev/null/deep_gemm", DG_JIT_DUMP_PTX=1)
    with pytest.warns(RuntimeWarning) as told:
        jit.build(SCALE, {}, name="scale")
    assert any("dumps of kernels cannot be written to /dev/null/deep_gemm" in str(one.message) for one in told)


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "x" * 101])
def test_a_name_that_cannot_be_a_file_name_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="name: expected"):
        jit.build(SCALE, {}, name=name)


# ---- surroundings -----------------------------------------------------------------------------------------------


def test_importing_asks_neither_compiler_nor_driver() -> None:
    names = "compiler._nvrtc.cache_info(), driver._driver.cache_info()"
    code = f"from deep_gemm.core.jit import compiler, driver; print({names})"
    assert run_python(code, dict(os.environ)).count("currsize=0") == 2


def test_builds_without_nvcc_cuda_home_host_compiler_or_driver(tmp_path: Path) -> None:
    code = f"""
import json
from pathlib import Path
from deep_gemm.core import jit
kernel = jit.build({SCALE!r}, {{}}, name="scale")
print(json.dumps([kernel.cubin[:4].hex(), Path("/proc/self/maps").read_text()]))
"""
    environment = {"PATH": "/nonexistent", "DG_JIT_CACHE_DIR": str(tmp_path), "DG_JIT_STRICT": "1"}
    magic, maps = json.loads(run_python(code, environment).splitlines()[-1])
    assert magic == b"\x7fELF".hex()
    if "libtorch_cuda" not in maps:  # a torch with CUDA loads the driver by itself
        assert "libcuda.so" not in maps


@pytest.fixture
def fresh_nvrtc() -> Iterator[None]:
    """Let `_nvrtc` search for the library again, in the test and after it."""
    compiler._nvrtc.cache_clear()
    yield
    compiler._nvrtc.cache_clear()


def fake_bindings(monkeypatch: pytest.MonkeyPatch, version: str, nvrtc_version: Any) -> None:
    modules = {
        "cuda.bindings": SimpleNamespace(__version__=version),
        "cuda.bindings.nvrtc": SimpleNamespace(nvrtcVersion=nvrtc_version),
    }
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)


@pytest.mark.usefixtures("fresh_nvrtc")
@pytest.mark.parametrize(("torch_major", "extra"), [(None, "cu13"), (12, "cu12"), (13, "cu13")])
def test_absent_bindings_are_named_with_the_command_that_brings_them(
    monkeypatch: pytest.MonkeyPatch, torch_major: int | None, extra: str
) -> None:
    def import_module(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(compiler, "_torch_cuda_major", lambda: torch_major)
    with pytest.raises(jit.CompilerMissing, match=rf"No module named.*pip install \"hopper-gemm\[{extra}\]\""):
        compiler._nvrtc()


@pytest.mark.usefixtures("fresh_nvrtc")
@pytest.mark.parametrize("major", [12, 13])
def test_an_absent_library_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    absent = RuntimeError("Failure finding\n  libnvrtc.so\n")  # cuda-bindings 13.5 splits its message into lines
    fake_bindings(monkeypatch, f"{major}.9.4", raising(absent))
    monkeypatch.setattr(compiler, "_torch_cuda_major", lambda: None)
    with pytest.raises(jit.CompilerMissing) as caught:
        compiler._nvrtc()
    assert str(caught.value) == (
        "deep_gemm compiles its kernels at run time and needs NVRTC and cuda-bindings of one CUDA version; "
        f"found: cuda-bindings {major}.9.4, but no NVRTC library for it (Failure finding libnvrtc.so). "
        f'Run: pip install "hopper-gemm[cu{major}]". This torch has no CUDA: for another machine take the extra '
        "of its torch.version.cuda, cu12 or cu13"
    )


@pytest.mark.usefixtures("fresh_nvrtc")
@pytest.mark.parametrize(
    ("torch_major", "bindings", "nvrtc"), [(12, "13.0.3", (13, 0)), (12, "12.9.2", (13, 0)), (13, "12.8.0", (12, 8))]
)
def test_a_compiler_of_another_cuda_than_torchs_is_refused(
    monkeypatch: pytest.MonkeyPatch, torch_major: int, bindings: str, nvrtc: tuple[int, int]
) -> None:
    fake_bindings(monkeypatch, bindings, lambda: (0, *nvrtc))
    monkeypatch.setattr(compiler, "_torch_cuda_major", lambda: torch_major)
    found = rf"cuda-bindings {bindings} with NVRTC {nvrtc[0]}\.{nvrtc[1]}"
    with pytest.raises(jit.CompilerMissing, match=rf"CUDA {torch_major}, .*{found}.*hopper-gemm\[cu{torch_major}\]"):
        compiler._nvrtc()


@pytest.mark.parametrize(("cuda", "major"), [("'13.0'", 13), ("'12.8'", 12), ("None", None)])
def test_torchs_cuda_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, major: int | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('torch was imported')")
    (tmp_path / "torch/version.py").write_text(f"cuda = {cuda}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert compiler._torch_cuda_major() == major
