"""Compile with versions of NVRTC other than the installed one.

Each version compiles in a process of its own: two NVRTCs in one process may use each other's symbols.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers import Job

    from deep_gemm.core.jit.compiler import CompiledKernel

OLDEST = "12.8.93"
"""The oldest supported version, and the last that does not interleave FFMAs."""
HOW_TO_GET_THE_OLDEST = f'NVRTC {OLDEST} is not installed: pip install "hopper-gemm[old-nvrtc]" (88 MB)'


def package(version: str) -> str:
    """Return the name of the PyPI package with this version; "newest" is the newest of CUDA 13."""
    return "nvidia-cuda-nvrtc-cu12" if version.startswith("12.") else "nvidia-cuda-nvrtc"


def library(folder: Path, major: str = "*") -> Path | None:
    """Find the NVRTC library in a folder of Python packages; return None if the folder has none."""
    return next(iter(sorted(folder.glob(f"nvidia/*/lib/libnvrtc.so.{major}"))), None)


def oldest_library() -> Path | None:
    """Return the library of `OLDEST` if the extra "old-nvrtc" is installed, else None."""
    from importlib import metadata

    try:
        distribution = metadata.distribution(package(OLDEST))
    except metadata.PackageNotFoundError:
        return None
    return library(Path(str(distribution.locate_file(""))), "12") if distribution.version == OLDEST else None


def compile_all(nvrtc: Path, jobs: Sequence[Job], *, threads: int = 2) -> list[CompiledKernel]:
    """Compile all jobs with this library; return results in their order. A refused job raises an error with its log."""
    from deep_gemm.core.jit import ptxas_log
    from deep_gemm.core.jit.compiler import CompiledKernel, full_options

    asked = [(job.name, job.source, dict(job.headers), full_options(job.options)) for job in jobs]
    command = [sys.executable, __file__, str(nvrtc), str(threads)]
    run = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    answer = json.loads(run.stdout)
    return [
        CompiledKernel(job.name, bytes.fromhex(cubin), ptxas_log.clean(bytes.fromhex(log)), answer["version"])
        for job, (cubin, log) in zip(jobs, answer["kernels"], strict=True)
    ]


class _Nvrtc:
    """Binds the few functions of the library that are needed. The Python bindings support only one CUDA version."""

    def __init__(self, file: Path) -> None:
        for builtins in file.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))  # some versions search elsewhere
        self._library = ctypes.CDLL(str(file))

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, name: str, source: str, headers: dict[str, str], options: list[str]) -> tuple[bytes, bytes]:
        """Compile a source; return the cubin and the log."""
        program = ctypes.c_void_p()
        texts, names = _strings(headers.values()), _strings(headers)
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"k.cu", len(headers), texts, names)
        try:
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read("ProgramLog", program)
            if status:
                raise RuntimeError(f"{name}: status {status}\n{log.decode(errors='replace')}")
            return self._read("CUBIN", program), log
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, f"nvrtc{function}")(*arguments):
            raise RuntimeError(f"nvrtc{function}: status {status}")


def _strings(texts: Any) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _main(file: str, threads: str) -> None:
    nvrtc = _Nvrtc(Path(file))
    with ThreadPoolExecutor(int(threads)) as pool:
        kernels = list(pool.map(lambda job: [part.hex() for part in nvrtc.compile(*job)], json.load(sys.stdin)))
    json.dump({"version": nvrtc.version(), "kernels": kernels}, sys.stdout)


if __name__ == "__main__":
    _main(*sys.argv[1:])
