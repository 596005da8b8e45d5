"""Compiles a kernel's own source with g++ and the simulator's `ptx/` into a library that Python calls."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from deep_gemm.core.kernel import Kernel

HOST_DIRECTORY = Path(__file__).resolve().parent / "host"
SCHEDULES = (
    "even",
    "slow_cta",
    "slow_warps",
    "slow_producer",
    "slow_math",
    "slow_warpgroup",
    "slow_lanes",
    "late_loads",
    "prompt_loads",
    "late_stores",
)
"""Each name tells which part is slow or early. `Schedule` in host/model/launch.h has the same order."""

_FLAGS: tuple[str, ...] = ("-std=c++20", "-march=native", "-fPIC", "-fno-strict-aliasing", "-fvisibility=hidden")
# The model takes nearly all of a run's time, and a kernel is compiled about once for each run.
_MODEL_FLAGS: tuple[str, ...] = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fno-trapping-math")
_KERNEL_FLAGS = ("-Og",)
# An unwritten register holds anything on a GPU. Here it holds -1.7e38 as FP32, so that it is never a zero by chance.
POISON_FLAG, _POISON_SINCE = "-ftrivial-auto-var-init=pattern", 12
# Without these, all loaded kernels would share their variables.
_PRIVATE = ("-fno-gnu-unique", "-Wl,-Bsymbolic")
# All default libraries except libstdc++: reading its symbols takes as long as compiling a small kernel, see `_loaded`.
_LIBRARIES: tuple[str, ...] = ("-nodefaultlibs", "-lm", "-lgcc_s", "-lgcc", "-lc")
_COMPILE_SECONDS = 300


class HostCompileError(RuntimeError):
    """g++ is missing, or rejected the kernel's source."""


class Buffer(ctypes.Structure):
    """The C struct `sim::Buffer`."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_uint32) for name in ("is_writable", "is_dependent", "rank")),
        *((name, ctypes.c_void_p) for name in ("news", "held", "released")),
    )


OtherRanks = ctypes.CFUNCTYPE(ctypes.c_uint32)
"""The C function pointer `Launch.other_ranks`."""


class Launch(ctypes.Structure):
    """The C struct `sim::Launch`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("seed", "max_steps")),
        *((name, ctypes.c_uint32) for name in ("grid", "cluster_size", "threads", "shared_bytes", "num_sms")),
        ("schedule", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("truncate", "num_buffers")),
        ("buffers", ctypes.POINTER(Buffer)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("fp8", ctypes.c_void_p),
        ("rank", ctypes.c_uint32),
        ("other_ranks", OtherRanks),
    )


class Stats(ctypes.Structure):
    """The C struct `sim::Stats`: counters of a run."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("steps", "products", "loads", "stores", "prefetches", "to_peers")
    )


@dataclass(frozen=True)
class HostKernel:
    """A kernel as a host library. The model's state is global, so `lock` lets only one run of a kernel go at a time."""

    name: str
    library: ctypes.CDLL
    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)

    def argument_bytes(self) -> list[int]:
        """Return the size of each of the kernel's parameters."""
        sizes: list[int] = []
        while size := self.library.sim_argument_bytes(len(sizes)):
            sizes.append(size)
        return sizes


def compile_kernel(
    source: str, headers: Mapping[str, str], *, name: str, flags: tuple[str, ...] = (), cache_dir: Path | None = None
) -> HostKernel:
    """Compile for the host; same arguments as `jit.compile_cubin`. The simulator's headers replace those in `ptx/`."""
    directory = cache_dir or default_cache_dir()
    library = directory / f"{_digest(source, headers, name, flags)}.so"
    if not library.exists():
        model = _compile_model(directory, flags)
        with tempfile.TemporaryDirectory(dir=directory) as build:
            unit = Path(build) / "kernel.cpp"
            for header, text in headers.items():
                if not header.startswith("ptx/") and header != "wgmma_shapes.cuh":
                    path = Path(build) / header
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
            unit.write_text(f'#include "ptx/platform.cuh"\n{source}\n#include "model/entry.h"\nSIM_EXPORT({name})\n')
            # Warnings are off, because g++ does not know the kernel's pragmas; NVRTC warns about kernels.
            chosen = (*_FLAGS, *kernel_flags(), *_PRIVATE, *flags)
            arguments = (*chosen, "-w", "-shared", f"-I{build}", f"-I{HOST_DIRECTORY}")
            _run_compiler((*arguments, str(unit), str(model), *_LIBRARIES), Path(build) / "kernel.so", library)
    return _loaded(name, library)


def copy_of(kernel: HostKernel, directory: Path) -> HostKernel:
    """Copy a kernel with a separate model, so that copies can run at the same time."""
    copy = directory / f"{len(list(directory.iterdir()))}.so"
    shutil.copyfile(kernel.path, copy)
    return _loaded(kernel.name, copy)


def _loaded(name: str, library: Path) -> HostKernel:
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library))
    loaded.sim_run.restype = ctypes.c_char_p
    loaded.sim_run.argtypes = (ctypes.POINTER(Launch), ctypes.POINTER(Stats))
    loaded.sim_argument_bytes.restype = ctypes.c_size_t
    loaded.sim_argument_bytes.argtypes = (ctypes.c_size_t,)
    return HostKernel(name, loaded, library)


def default_cache_dir() -> Path:
    """Return this user's directory for compiled models and kernels, in the system's temporary directory."""
    path = Path(tempfile.gettempdir()) / f"deep_gemm_sim_{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def _compile_model(directory: Path, flags: tuple[str, ...]) -> Path:
    model = directory / f"{_digest('', {}, 'model', flags)}.o"
    if not model.exists():
        with tempfile.TemporaryDirectory(dir=directory) as build:
            warnings = "-Wall", "-Wextra", "-Werror"
            arguments = (*_FLAGS, *_MODEL_FLAGS, "-fno-gnu-unique", *flags, *warnings, f"-I{HOST_DIRECTORY}", "-c")
            _run_compiler((*arguments, str(HOST_DIRECTORY / "model" / "model.cpp")), Path(build) / "model.o", model)
    return model


def _run_compiler(arguments: tuple[str, ...], output: Path, final: Path) -> None:
    # Write under a private name and rename, because another process may compile the same file.
    result = subprocess.run(
        [_compiler(), *arguments, "-o", str(output)],
        capture_output=True,
        text=True,
        timeout=_COMPILE_SECONDS,
        check=False,
    )
    if result.returncode:
        raise HostCompileError(f"g++ refused the source:\n{result.stderr[:4000]}")
    output.rename(final)


def _digest(source: str, headers: Mapping[str, str], name: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    chosen = (*flags, *_FLAGS, *_MODEL_FLAGS, *kernel_flags(), *_PRIVATE, *_LIBRARIES)
    parts = [source, name, *chosen, _compiler_version(), _host_digest()]
    for part in [*parts, *(text for item in sorted(headers.items()) for text in item)]:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:32]


@cache
def _host_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(HOST_DIRECTORY.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(HOST_DIRECTORY)}:{path.stat().st_size}:".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        raise HostCompileError("the simulator needs g++ (C++20); none was found in PATH")
    return found


def kernel_flags() -> tuple[str, ...]:
    """Return the options for compiling a kernel; unwritten registers are filled if this g++ supports it."""
    found = re.search(r" (\d+)\.\d", _compiler_version())
    return (*_KERNEL_FLAGS, POISON_FLAG) if found and int(found[1]) >= _POISON_SINCE else _KERNEL_FLAGS


@cache
def _compiler_version() -> str:
    return subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def compiled(kernel: Kernel[Any], config: Any, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile a configuration of a package's kernel for the host, once.

    For mutations `edits` replaces sources by name; such kernels are compiled each time.
    """
    return _compiled(kernel, config) if edits is None else _compile(kernel, config, edits)


def _compile(kernel: Kernel[Any], config: Any, edits: Mapping[str, str]) -> HostKernel:
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    return compile_kernel(kernel.source, {**kernel.headers(config), **edits}, name=kernel.name_of(config))


@cache
def _compiled(kernel: Kernel[Any], config: Any) -> HostKernel:
    return _compile(kernel, config, {})
