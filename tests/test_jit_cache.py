"""The cache of compiled kernels, in the situations that users of such caches met."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deep_gemm import jit
from deep_gemm.jit.cache import KernelCache, kernel_key
from deep_gemm.jit.compiler import CompiledKernel, CompileError
from deep_gemm.settings import read_settings, settings

PACKAGE = Path(__file__).parents[1] / "deep_gemm"
SCALE = 'extern "C" __global__ void scale(float* p) { p[threadIdx.x] *= 2; }'
KERNEL = CompiledKernel("scale", b"\x7fELF\n\0machine code\n" * 50, "ptxas info: a log\nof two lines", "13.0.88 CL-1")
KEY = "k" * 64

# A process that has the package without the imports of its front (torch), then forks: 64 of them start in a moment.
LIGHT = f"""
import os, signal, sys, types
package = types.ModuleType("deep_gemm")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["deep_gemm"] = package
from deep_gemm import jit
SOURCE = {SCALE!r}
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def store(cache: KernelCache, kernel: CompiledKernel = KERNEL) -> None:
    cache.store(KEY, kernel, options=["--std=c++17"], passes=["yield 1"])


def run_light(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DG_JIT_CACHE_DIR": str(directory)}
    return subprocess.run(
        [sys.executable, "-c", LIGHT + code], env=environment, capture_output=True, text=True, check=False
    )


# ---- the key ----------------------------------------------------------------------------------------------------

INPUTS: dict[str, Any] = {
    "name": "scale",
    "source": "source",
    "headers": {"a.cuh": "a", "b.cuh": "b"},
    "options": ["-DX=1", "-DY=2"],
    "compiler": "13.0.88",
    "passes": [("yield", 1)],
}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"source": "source "},
        {"headers": {"a.cuh": "a", "b.cuh": "B"}},
        {"headers": {"a.cuh": "a", "c.cuh": "b"}},
        {"headers": {"a.cuh": "ab", "b.cuh": ""}},
        {"headers": {"a.cuh": "a"}},
        {"options": ["-DX=1"]},
        {"options": ["-DY=2", "-DX=1"]},
        {"options": ["-DX=1-DY=2"]},
        {"compiler": "13.0.89"},
        {"passes": []},
        {"passes": [("yield", 2)]},
        {"passes": [("yield", 1), ("reuse", 1)]},
    ],
    ids=str,
)
def test_the_key_changes_with(change: dict[str, Any]) -> None:
    assert kernel_key(**{**INPUTS, **change}) != kernel_key(**INPUTS)


def test_the_key_does_not_depend_on_the_order_of_headers() -> None:
    headers = dict(reversed(INPUTS["headers"].items()))
    assert kernel_key(**{**INPUTS, "headers": headers}) == kernel_key(**INPUTS)


# ---- files ------------------------------------------------------------------------------------------------------


def test_a_stored_kernel_is_loaded_by_another_process(tmp_path: Path) -> None:
    store(KernelCache(tmp_path))
    assert KernelCache(tmp_path).load("scale", KEY) == KERNEL


def test_storing_leaves_one_file_that_tells_a_person_what_it_is(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    store(cache)
    assert list(tmp_path.iterdir()) == [cache.path("scale", KEY)]
    facts = json.loads(cache.path("scale", KEY).read_bytes().split(b"\n")[1])
    assert facts["options"] == ["--std=c++17"]
    assert facts["passes"] == ["yield 1"]
    assert facts["compiler"] == KERNEL.compiler


def test_a_file_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        store(KernelCache(tmp_path))
    finally:
        os.umask(old)
    assert KernelCache(tmp_path).path("scale", KEY).stat().st_mode & 0o777 == 0o644


def test_a_file_cut_at_any_place_is_a_miss(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    store(cache)
    whole = cache.path("scale", KEY).read_bytes()
    for length in range(len(whole)):
        cache.path("scale", KEY).write_bytes(whole[:length])
        assert KernelCache(tmp_path).load("scale", KEY) is None, f"cut to {length} bytes"


def test_a_file_with_any_byte_flipped_is_a_miss(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    store(cache)
    whole = cache.path("scale", KEY).read_bytes()
    for at in range(len(whole)):
        cache.path("scale", KEY).write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        assert KernelCache(tmp_path).load("scale", KEY) is None, f"byte {at} flipped"


def test_a_sound_file_under_another_kernels_name_is_a_miss(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    store(cache)
    cache.path("scale", KEY).rename(cache.path("scale", "other"))
    assert KernelCache(tmp_path).load("scale", "other") is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\n",
        b"no json\ncubin",
        b"\xff\xfe\ncubin",
        b"[1]\ncubin",
        b"7\ncubin",
        b"{}\ncubin",
        b"[" * 100_000 + b"\ncubin",
        json.dumps({"key": KEY, "name": "scale", "log": ""}).encode() + b"\ncubin",
        json.dumps({"key": KEY, "name": 1, "log": "", "compiler": ""}).encode() + b"\ncubin",
    ],
)
def test_a_file_with_a_right_digest_of_something_else_is_a_miss(tmp_path: Path, body: bytes) -> None:
    cache = KernelCache(tmp_path)
    head = b"deep_gemm kernel 1 " + hashlib.sha256(body).hexdigest().encode() + b"\n"
    cache.path("scale", KEY).write_bytes(head + body)
    assert cache.load("scale", KEY) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_a_miss(tmp_path: Path, make: Callable[[Path], None]) -> None:
    cache = KernelCache(tmp_path)
    make(cache.path("scale", KEY))
    begin = time.perf_counter()
    assert cache.load("scale", KEY) is None  # to read a pipe would wait for a writer
    assert time.perf_counter() - begin < 5


def test_a_pipe_in_the_cache_gives_way_to_the_kernel(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    os.mkfifo(cache.path("scale", KEY))
    store(cache)
    assert KernelCache(tmp_path).load("scale", KEY) == KERNEL


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[:-9] + b"\0" + b[-8:]])
def test_build_compiles_again_over_a_damaged_file(directory: Path, damage: Callable[[bytes], bytes]) -> None:
    kernel = jit.build(SCALE, {}, name="scale")
    (file,) = directory.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    jit._cache_of.cache_clear()
    assert jit.build(SCALE, {}, name="scale") == kernel
    assert file.read_bytes() == whole


# ---- many processes, killed processes ---------------------------------------------------------------------------


def test_64_processes_compile_the_same_kernel_on_an_empty_cache(tmp_path: Path) -> None:
    code = """
import hashlib
go_read, go_write = os.pipe()
out_read, out_write = os.pipe()
children = []
for _ in range(64):
    child = os.fork()
    if child == 0:
        os.close(go_write)
        os.read(go_read, 1)  # returns in all of them when the parent closes its end
        kernel = jit.build(SOURCE, {}, name="scale")
        os.write(out_write, hashlib.sha256(kernel.cubin).hexdigest().encode() + b"\\n")
        os._exit(0)
    children.append(child)
os.close(go_write)
os.close(out_write)
results = b"".join(iter(lambda: os.read(out_read, 65536), b"")).decode().split()
failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
print(len(results), len(set(results)), len(failed))
"""
    run = run_light(code, tmp_path)
    assert run.stdout.split() == ["64", "1", "0"], run.stderr
    assert [path.suffix for path in tmp_path.iterdir()] == [".kernel"]  # one result, no temporary file


@pytest.mark.parametrize(
    "moment",
    [
        "jit.compile_cubin = die",
        "os.replace = die",
        "cache._pack = lambda *a, pack=cache._pack, **k: Half(pack(*a, **k))",
    ],
    ids=["compiles", "is about to rename", "writes"],
)
def test_a_process_killed_while_it(moment: str, tmp_path: Path) -> None:
    code = f"""
from deep_gemm.jit import cache
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
def Half(data):
    path = next(iter(cache.Path({str(tmp_path)!r}).glob(".*.tmp")))
    path.write_bytes(data[: len(data) // 2])
    die()
{moment}
jit.build(SOURCE, {{}}, name="scale")
"""
    assert run_light(code, tmp_path).returncode == -9
    assert list(tmp_path.glob("*.kernel")) == []
    run = run_light("print(jit.build(SOURCE, {}, name='scale').cubin.hex())", tmp_path)
    assert run.returncode == 0, run.stderr
    (file,) = tmp_path.glob("*.kernel")
    assert file.read_bytes().endswith(bytes.fromhex(run.stdout))


# ---- a cache that cannot be written -----------------------------------------------------------------------------


def check_works_from_memory_and_warns_once(cache: KernelCache) -> None:
    other = replace(KERNEL, name="other")
    with pytest.warns(RuntimeWarning, match=r"compiled kernels cannot be kept in .*DG_JIT_CACHE_DIR") as caught:
        store(cache)
        cache.store("other", other, options=[], passes=[])
    assert len(caught) == 1
    assert cache.load("scale", KEY) is KERNEL
    assert cache.load("other", "other") is other


def test_a_directory_that_cannot_be_made_leaves_kernels_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_works_from_memory_and_warns_once(KernelCache(tmp_path / "file" / "cache"))


def test_a_read_only_directory_leaves_kernels_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    check_works_from_memory_and_warns_once(KernelCache(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_leaves_kernels_in_memory_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = Path.open

    def open_full(self: Path, mode: str) -> Any:
        real_open(self, mode).close()
        return real_open(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "open", open_full)
    check_works_from_memory_and_warns_once(KernelCache(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_the_rename_leaves_kernels_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "replace", refuse)
    check_works_from_memory_and_warns_once(KernelCache(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_writable_directory_draws_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store(KernelCache(tmp_path / "made" / "when" / "needed"))


def test_without_a_home_kernels_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    check_works_from_memory_and_warns_once(KernelCache(read_settings({}).jit_cache_dir))


def test_a_failed_source_is_kept_elsewhere_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = CompileError("broken", "NVRTC", log="", options=(), source="int x = ;")
    KernelCache(tmp_path / "file").keep_failed_source(error, {}, KEY)
    assert error.source_path is not None
    assert error.source_path.read_text() == "int x = ;"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
