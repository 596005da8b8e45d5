"""The cache of compiled kernels, in situations that users of such caches met."""

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
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import raising, some

from deep_gemm.core import jit
from deep_gemm.core.jit import cache as cache_module
from deep_gemm.core.jit.cache import KernelCache, kernel_key, why_untrusted
from deep_gemm.core.jit.compiler import CompiledKernel, CompileError
from deep_gemm.core.jit.entry import pack
from deep_gemm.core.settings import read_settings

PACKAGE = Path(__file__).parents[2] / "deep_gemm"
SCALE = 'extern "C" __global__ void scale(float* p) { p[threadIdx.x] *= 2; }'
KERNEL = CompiledKernel("scale", b"\x7fELF\n\0machine code\n" * 50, "ptxas info: a log\nof two lines", "13.0.88 CL-1")
KEY = "f" * 64

# The process imports the package without torch, then forks, so that 64 processes can start in a moment.
LIGHT = f"""
import os, signal, sys, types
package = types.ModuleType("deep_gemm")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["deep_gemm"] = package
from deep_gemm.core import jit
SOURCE = {SCALE!r}
"""


def store(cache: KernelCache) -> Path:
    """Store a kernel; return its file."""
    cache.store(KEY, KERNEL, options=["--std=c++20"], passes=["yield 1"])
    return cache.path("scale", KEY)


def load(*directories: Path, name: str = "scale", key: str = KEY) -> CompiledKernel | None:
    """Load a kernel as another process would."""
    return KernelCache(*directories).load(name, key)


@contextmanager
def umask(mode: int) -> Iterator[None]:
    old = os.umask(mode)
    try:
        yield
    finally:
        os.umask(old)


def run_light(code: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DG_JIT_CACHE_DIR": str(directory), **variables}
    command = [sys.executable, "-c", LIGHT + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


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


def test_a_stored_kernel_is_loaded_by_another_process_and_its_one_file_tells_a_person_what_it_is(
    tmp_path: Path,
) -> None:
    file = store(KernelCache(tmp_path))
    assert load(tmp_path) == KERNEL
    assert list(tmp_path.iterdir()) == [file]
    facts = json.loads(file.read_bytes().split(b"\n")[1])
    assert (facts["options"], facts["passes"]) == (["--std=c++20"], ["yield 1"])
    assert facts["compiler"] == KERNEL.compiler


def test_a_file_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    with umask(0o022):
        file = store(KernelCache(tmp_path))
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_cut_at_any_place_or_with_any_byte_flipped_is_a_miss(tmp_path: Path) -> None:
    file = store(KernelCache(tmp_path))
    whole = file.read_bytes()
    for at, byte in enumerate(whole):
        file.write_bytes(whole[:at])
        assert load(tmp_path) is None, f"cut to {at} bytes"
        file.write_bytes(whole[:at] + bytes([byte ^ 0x20]) + whole[at + 1 :])
        assert load(tmp_path) is None, f"byte {at} flipped"


def test_a_sound_file_under_another_kernels_name_is_a_miss(tmp_path: Path) -> None:
    store(KernelCache(tmp_path)).rename(KernelCache(tmp_path).path("scale", "other"))
    assert load(tmp_path, key="other") is None


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
    assert cache.load("scale", KEY) is None  # reading a pipe would wait for a writer
    assert time.perf_counter() - begin < 5


def test_a_pipe_in_the_cache_gives_way_to_the_kernel(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    os.mkfifo(cache.path("scale", KEY))
    store(cache)
    assert load(tmp_path) == KERNEL


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[:-9] + b"\0" + b[-8:]])
def test_build_compiles_again_over_a_damaged_file(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    kernel = jit.build(SCALE, {}, name="scale")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    jit._cache_of.cache_clear()
    assert jit.build(SCALE, {}, name="scale") == kernel
    assert file.read_bytes() == whole


# ---- bad files, old files ---------------------------------------------------------------------------------------


def test_a_bad_file_is_set_aside_with_the_reason_and_not_too_many_are_kept(tmp_path: Path) -> None:
    path = store(KernelCache(tmp_path))
    sound = path.read_bytes()
    for damage in range(cache_module.MOST_IN_QUARANTINE + 3):
        path.write_bytes(sound[:-1] + bytes([damage]))
        store(KernelCache(tmp_path))
        assert path.read_bytes() == sound
    bad = list((tmp_path / "quarantine").glob("*.bad"))
    assert len(bad) == cache_module.MOST_IN_QUARANTINE
    assert sound[:-1] + bytes([0]) not in [file.read_bytes() for file in bad], "the oldest went"
    for file in bad:
        told = file.with_suffix(".txt").read_text()
        assert told == f"{path.name} was set aside: its content does not have the digest that it states\n"
    assert len(list((tmp_path / "quarantine").iterdir())) == 2 * len(bad)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    with cache.path("scale", KEY).open("wb") as file:
        file.truncate(1 << 40)  # a sparse file, which uses no room on the disk
    assert cache.load("scale", KEY) is None


def test_the_kernels_used_least_recently_make_room(tmp_path: Path) -> None:
    size = len(pack("a" * 64, KERNEL, options=[], passes=[]))
    cache = KernelCache(tmp_path, limit_bytes=3 * size + 100)
    paths = {letter: cache.path("scale", letter * 64) for letter in "abcde"}

    def keep(letter: str) -> None:
        cache.store(letter * 64, KERNEL, options=[], passes=[])

    for age, letter in enumerate("abc"):
        keep(letter)
        written = time.time() - 10**6 + age
        os.utime(paths[letter], (written, written))
    (tmp_path / f"{paths['b'].stem}.ptx").write_text("x")
    (tmp_path / "notes.txt").write_text("x" * 10**6)
    assert load(tmp_path, key="a" * 64) == KERNEL, "a was used last"
    assert paths["a"].stat().st_mtime < time.time() - 10**5, "the time of its writing must not change"
    keep("d")
    assert {path.name for path in tmp_path.iterdir()} == {paths[letter].name for letter in "acd"} | {"notes.txt"}
    keep("e")
    assert {path.name for path in tmp_path.iterdir()} == {paths[letter].name for letter in "ade"} | {"notes.txt"}


def test_a_kernel_larger_than_the_limit_is_kept(tmp_path: Path) -> None:
    assert store(KernelCache(tmp_path, limit_bytes=1)).exists()


# ---- several directories, other users ----------------------------------------------------------------------------


def test_all_directories_are_read_and_the_first_that_can_be_written_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unwritable, shipped, own = tmp_path / "file" / "cache", tmp_path / "shipped", tmp_path / "own"
    store(KernelCache(shipped))
    assert load(unwritable, own, shipped) == KERNEL
    assert not own.exists(), "a kernel that is found is not copied"
    cache = KernelCache(unwritable, own, shipped)
    cache.store("o" * 64, KERNEL, options=[], passes=[])
    assert [path.name for path in own.iterdir()] == [f"scale-{'o' * 64}.kernel"]
    assert len(list(shipped.iterdir())) == 1


def test_the_directory_is_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    with umask(0o000):
        file = store(KernelCache(tmp_path / "made" / "cache"))
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o022 == 0
    assert load(file.parent) == KERNEL


@pytest.mark.parametrize("writable", ["directory", "file"])
def test_nothing_is_loaded_that_others_may_write_and_one_warning_says_so(tmp_path: Path, writable: str) -> None:
    file = store(KernelCache(tmp_path / "cache"))
    open_to_all = file if writable == "file" else file.parent
    open_to_all.chmod(0o777)
    cache = KernelCache(tmp_path / "cache")
    told = rf"not loaded from .*{open_to_all.name}: others may write to it .mode 777.: "
    with pytest.warns(RuntimeWarning, match=told) as caught:
        assert [cache.load("scale", KEY) for _ in range(3)] == [None] * 3
    assert len(caught) == 1
    if writable == "file":  # the untrusted file is replaced by one that can be trusted
        store(KernelCache(tmp_path / "cache"))
        assert load(tmp_path / "cache") == KERNEL


def test_nothing_is_loaded_from_another_user_than_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(KernelCache(tmp_path))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me != 0:
        with pytest.warns(RuntimeWarning, match=f"it belongs to user {me}, not to user {me + 1} or root"):
            assert load(tmp_path) is None
    else:  # a file of root is trusted like the user's own
        assert load(tmp_path) == KERNEL
    real = os.fstat(0)
    for uid, trusted in ((me + 1, True), (0, True), (me + 2, False)):
        state = os.stat_result([0o100644, *real[1:4], uid, *real[5:]])
        assert (why_untrusted(state) is None) is trusted


# ---- many processes, killed processes ---------------------------------------------------------------------------


COUNTED = """
import time
from deep_gemm.core.jit import cache, one_builder
from deep_gemm.core.jit.compiler import CompiledKernel
jit.compiler_version = lambda: "13.0.88 CL-1"
def compile_cubin(source, headers, *, name, strict):
    with open(os.environ["COUNT"], "a") as file:
        file.write(name + "\\n")
    time.sleep(0.1)
    return CompiledKernel(name, source.encode(), "a log", "13.0.88 CL-1")
jit.compile_cubin = compile_cubin
def forked(number, work):
    children = []
    for index in range(number):
        child = os.fork()
        if child == 0:
            work(index)
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]
"""
"""Replaces NVRTC by a slow compiler that counts its calls."""


def counted(code: str, tmp_path: Path) -> list[str]:
    """Run code in a light process; return the kernels that it compiles, in order."""
    (tmp_path / "count").touch()
    run = run_light(COUNTED + code, tmp_path / "cache", COUNT=str(tmp_path / "count"), DG_JIT_STRICT="0")
    assert run.returncode == 0, run.stderr
    return (tmp_path / "count").read_text().split()


def test_64_processes_on_an_empty_cache_compile_each_kernel_once(tmp_path: Path) -> None:
    code = """
def work(index):
    for at in range(4):
        name = f"kernel{(at + index) % 4}"
        assert jit.build(name, {}, name=name).cubin == name.encode()
assert set(forked(64, work)) == {0}
"""
    assert sorted(counted(code, tmp_path)) == ["kernel0", "kernel1", "kernel2", "kernel3"]
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".kernel"}, "no lock is left"


def test_threads_of_a_process_compile_a_kernel_once(tmp_path: Path) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    made = list(pool.map(lambda _: jit.build("a", {}, name="a"), range(64)))
assert all(kernel == made[0] for kernel in made)
"""
    assert counted(code, tmp_path) == ["a"]


def test_the_next_builder_does_not_wait_for_one_that_was_killed(tmp_path: Path) -> None:
    code = """
real = jit.compile_cubin
def work(index):
    def killed(source, headers, **how):
        real(source, headers, **how)
        os.kill(os.getpid(), signal.SIGKILL)
    jit.compile_cubin = killed
    jit.build("a", {}, name="a")
assert forked(1, work) == [signal.SIGKILL]
begin = time.monotonic()
jit.build("a", {}, name="a")
assert time.monotonic() - begin < 5, "the lock outlived its holder"
"""
    assert counted(code, tmp_path) == ["a", "a"]
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".kernel"}, "its lock file is gone too"


def test_a_child_that_is_forked_while_a_thread_builds_neither_keeps_the_lock_nor_waits_for_the_thread(
    tmp_path: Path,
) -> None:
    code = """
import threading
real = jit.compile_cubin
started = threading.Event()
def slow(source, headers, **how):
    started.set()
    time.sleep(0.3)
    return real(source, headers, **how)
jit.compile_cubin = slow
thread = threading.Thread(target=jit.build, args=("a", {}), kwargs={"name": "a"})
thread.start()
started.wait()
lives_on = os.fork()
if lives_on == 0:
    time.sleep(30)
def work(index):
    jit.build("a", {}, name="a")
begin = time.monotonic()
assert forked(1, work) == [0]
thread.join()
jit.build("b", {}, name="b")
assert time.monotonic() - begin < 5
os.kill(lives_on, signal.SIGKILL)
os.waitpid(lives_on, 0)
"""
    assert counted(code, tmp_path) == ["a", "b"], "the child waited for the file, not for a thread of its parent"


@pytest.mark.parametrize(
    "trouble",
    [
        "def refuse(*a): raise OSError(37, 'No locks available')\nimport fcntl; fcntl.lockf = refuse",
        "one_builder.PATIENCE_S = 0.05\nimport fcntl\ndef held(*a): raise BlockingIOError\nfcntl.lockf = held",
    ],
    ids=["no locks on this file system", "a holder that is stopped"],
)
def test_where_no_lock_can_be_had_several_compile_and_all_are_right(trouble: str, tmp_path: Path) -> None:
    code = f"""
{trouble}
def work(index):
    assert jit.build("a", {{}}, name="a").cubin == b"a"
assert set(forked(4, work)) == {{0}}
"""
    assert set(counted(code, tmp_path)) == {"a"}
    (file,) = (tmp_path / "cache").glob("*.kernel")
    assert file.read_bytes().endswith(b"\na")


@pytest.mark.parametrize(
    "moment",
    [
        "jit.compile_cubin = die",
        "os.replace = die",
        "cache._create = lambda path, create=cache._create: Half(create(path))",
    ],
    ids=["compiles", "is about to rename", "writes"],
)
def test_a_process_killed_while_it(moment: str, tmp_path: Path) -> None:
    code = f"""
from deep_gemm.core.jit import cache
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
class Half:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
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


@pytest.mark.parametrize(("module", "name", "code"), [(cache_module, "_create", "EROFS"), (os, "replace", "EXDEV")])
def test_a_file_system_that_refuses_files_or_the_rename_leaves_kernels_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: str
) -> None:
    monkeypatch.setattr(module, name, raising(OSError(getattr(errno, code), "refused")))
    check_works_from_memory_and_warns_once(KernelCache(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_leaves_kernels_in_memory_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_full(path: Path) -> Any:
        path.touch()
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(cache_module, "_create", open_full)
    check_works_from_memory_and_warns_once(KernelCache(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_writable_directory_draws_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store(KernelCache(tmp_path / "made" / "when" / "needed"))


def test_without_a_home_kernels_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", raising(RuntimeError("Could not determine home directory.")))
    check_works_from_memory_and_warns_once(KernelCache(*read_settings({}).jit_cache_dirs))


def test_a_failed_source_is_kept_elsewhere_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = CompileError("broken", "NVRTC", log="", options=(), source="int x = ;")
    KernelCache(tmp_path / "file").keep_failed_source(error, {}, KEY)
    assert some(error.source_path).read_text() == "int x = ;"
