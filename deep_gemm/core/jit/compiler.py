"""Compiles CUDA C++ in memory to a cubin in memory, with NVRTC. This needs no GPU, driver, nvcc or CUDA_HOME.

The result depends only on the arguments and the compiler's version. Only this module uses NVRTC. The first compilation
loads NVRTC, because importing `deep_gemm` must stay cheap.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from . import ptxas_log

ARCH = "sm_90a"
DEFAULT_OPTIONS = ("--std=c++20", "--device-as-default-execution-space")  # makes unmarked lambdas device code


class CompilerMissing(RuntimeError):  # noqa: N818  "CompilerMissingError" would say less
    """NVRTC or its Python bindings are missing, or their CUDA version differs from torch's."""


class CompileError(RuntimeError):
    """The compiler refused a source. With `strict`: or the compiled kernel would be slow."""

    def __init__(self, name: str, reason: str, *, log: str, options: tuple[str, ...], source: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason
        self.log = log
        self.options = options
        self.source = source
        self.source_path: Path | None = None
        """The file that the cache wrote the source to."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle stores an exception's class and `args`, but not its keyword arguments. If a worker's error cannot be
        # unpickled, the pool that waits for the worker hangs.
        made = partial(type(self), log=self.log, options=self.options, source=self.source)
        return made, self.args, {"source_path": self.source_path}

    def __str__(self) -> str:
        where = f"\nsource: {self.source_path}" if self.source_path else ""
        return f"{self.name}: {self.reason}\noptions: {' '.join(self.options)}{where}\n{self.log}"


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code, and the compiler's messages about it."""

    name: str
    cubin: bytes
    log: str
    compiler: str
    config: str = field(default="", compare=False)
    """The name of the kernel's configuration, for people."""


def full_options(options: Iterable[str], arch: str = ARCH) -> tuple[str, ...]:
    """Return all options for NVRTC: the caller's options, and the options that every compilation needs."""
    return (
        f"--gpu-architecture={arch}",
        "--ptxas-options=-v",  # registers, spills and performance notes in the log
        "--no-source-include",  # else NVRTC reads a missing header from the current directory
        *options,
    )


def compile_cubin(
    source: str,
    headers: Mapping[str, str],
    *,
    name: str,
    arch: str = ARCH,
    options: Iterable[str] = DEFAULT_OPTIONS,
    strict: bool = False,
) -> CompiledKernel:
    """Compile `source`, whose includes (`"ptx/mbarrier.cuh"`) are keys of `headers`.

    NVRTC releases the GIL, so threads compile at the same time. With `strict`, raise a CompileError if the kernel
    spills or needs a stack frame, or if ptxas notes a slow WGMMA or an ignored setmaxnreg.
    """
    all_options = full_options(options, arch)
    status, cubin, log = _run(f"{name}.cu", source, headers, all_options, artifact="CUBIN")
    if cubin is None:
        raise CompileError(name, f"NVRTC: {status}", log=log, options=all_options, source=source)
    kernel = CompiledKernel(name, cubin, log, compiler_version())
    if strict:
        check_strictly(kernel, all_options, source)
    return kernel


def compile_ptx(source: str, headers: Mapping[str, str], *, name: str) -> bytes:
    """Compile `source` as `compile_cubin` does, but stop at the PTX."""
    all_options = full_options(DEFAULT_OPTIONS, ARCH.replace("sm", "compute"))
    status, ptx, log = _run(f"{name}.cu", source, headers, all_options, artifact="PTX")
    if ptx is None:
        raise CompileError(name, f"NVRTC: {status}", log=log, options=all_options, source=source)
    return ptx.rstrip(b"\0")


def check_strictly(kernel: CompiledKernel, options: tuple[str, ...], source: str) -> None:
    """Raise a CompileError if the compiler's log contains a complaint."""
    if complaints := ptxas_log.complaints(kernel.log):
        reason = "compiled, but not as planned:\n  " + "\n  ".join(complaints)
        raise CompileError(kernel.name, reason, log=kernel.log, options=options, source=source)


@cache
def compiler_version() -> str:
    """Return the exact build of NVRTC, such as "13.0.88 CL-36424714".

    `nvrtcVersion` returns only 13.0, but two builds of one release may make different machine code. The first lines of
    any PTX name the build, so this function compiles an empty program.
    """
    options = ("--gpu-architecture=compute_90a",)
    status, ptx, log = _run("version.cu", "", {}, options, artifact="PTX")
    match = re.search(rb"Compiler Build ID: (\S+).*?, V([\d.]+)", ptx or b"", re.DOTALL)
    if match is None:
        raise CompilerMissing(f"NVRTC does not report its version: {status}\n{log}")
    return f"{match[2].decode()} {match[1].decode()}"


def _run(
    file_name: str, source: str, headers: Mapping[str, str], options: tuple[str, ...], *, artifact: str
) -> tuple[str, bytes | None, str]:
    """Run NVRTC. Return its status, its artifact ("CUBIN" or "PTX"; None if it failed) and its log."""
    nvrtc = _nvrtc()
    (program,) = _checked(
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            file_name.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = ptxas_log.clean(_read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program))
        if int(status) != 0:
            return status.name, None, log
        size, get = getattr(nvrtc, f"nvrtcGet{artifact}Size"), getattr(nvrtc, f"nvrtcGet{artifact}")
        return status.name, _read(size, get, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(get_size: Any, get: Any, program: Any) -> bytes:
    # NVRTC writes into the buffer, so the buffer is a bytearray. It must not be `b" " * size`, as in the examples of
    # the bindings: with size 1, that is an object that the whole interpreter shares.
    (size,) = _checked(get_size(program))
    buffer = bytearray(size)
    _checked(get(program, buffer))
    return bytes(buffer)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"NVRTC failed: {status.name}")
    return tuple(values)


@cache
def _nvrtc() -> Any:
    """Import the bindings of NVRTC. Check that the bindings and the NVRTC library have torch's CUDA major version."""
    wanted = _torch_cuda_major()
    try:
        bindings = importlib.import_module("cuda.bindings")
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise _missing(wanted, f"cuda.bindings cannot be imported ({error})") from error
    found = f"cuda-bindings {bindings.__version__}"
    bindings_major = int(bindings.__version__.split(".")[0])
    try:
        major, minor = _checked(nvrtc.nvrtcVersion())
    except (RuntimeError, OSError) as error:
        why = " ".join(str(error).split())  # joined, because the bindings' text has several lines
        raise _missing(wanted, f"{found}, but no NVRTC library for it ({why})", bindings_major) from error
    # Both are compared: bindings 12.9 load an NVRTC 13 if they find one.
    if wanted is not None and (wanted, wanted) != (bindings_major, major):
        raise _missing(wanted, f"{found} with NVRTC {major}.{minor}")
    return nvrtc


def _missing(wanted: int | None, found: str, extra: int = 13) -> CompilerMissing:
    """Make an error that names the packages to install: for torch's CUDA, or, without it, for the bindings' CUDA."""
    of_which = f"of CUDA {wanted}, as torch has" if wanted else "of one CUDA version"
    choice = ". This torch has no CUDA: for another machine take the extra of its torch.version.cuda, cu12 or cu13"
    return CompilerMissing(
        f"deep_gemm compiles its kernels at run time and needs NVRTC and cuda-bindings {of_which}; found: {found}. "
        f'Run: pip install "hopper-gemm[cu{wanted or extra}]"{"" if wanted else choice}'
    )


def _torch_cuda_major() -> int | None:
    """Return torch's CUDA major version. None if torch is absent or has no CUDA: then any NVRTC fits.

    The version is read from a file of torch, because importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).parent / "version.py")).get("cuda")
    return int(version.split(".")[0]) if version else None
