"""Shows in ten lines what this machine can run, and what is missing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch

from .. import __version__
from ..compat import installed
from ..core.gpu import HOPPER
from ..core.jit import CompilerMissing
from ..core.jit.cache import can_be_written, files_in, shipped, why_not_taken
from ..core.jit.compiler import compiler_version
from ..core.jit.driver import driver_version
from ..core.jit.entry import Unsound, read_entry
from ..core.replay import which
from ..core.settings import VARIABLES, SettingError, read_settings

OLDEST_CUDA = (12, 0)
"""The oldest CUDA whose drivers support Hopper's tensor maps and load cubins for sm_90a."""
CACHE_VARIABLES = ("DG_JIT_CACHE_DIR", "DG_CACHE_DIR")


@dataclass(frozen=True)
class Finding:
    """A line of the report: the examined thing, the finding, and whether anything is wrong."""

    what: str
    found: str
    is_wrong: bool = False

    def __str__(self) -> str:
        return f"{self.what:10} {self.found}"


def examine(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Examine everything that a product needs, on this machine and its GPU."""
    compiler, gpu, package = _compiler(), _gpu(), Path(__file__).resolve().parents[1]
    driver = _driver(compiler)
    variables = [f"{name}={environment[name]}{_note(name)}" for name in sorted(environment) if name.startswith("DG_")]
    return [
        Finding("deep_gemm", f"{__version__}, Python {platform.python_version()}, {package}"),
        Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none: a build for the CPU'}"),
        compiler,
        driver,
        gpu,
        _cache(environment, compiler),
        _replay(),
        Finding("settings", ", ".join(variables) or "no DG_ variable is set"),
        *_verdict(compiler, driver, gpu),
        *(Finding("mend", each, is_wrong=True) for each in (*_wrong_settings(environment), *installed.to_mend())),
    ]


def _compiler() -> Finding:
    try:
        return Finding("NVRTC", compiler_version())
    except CompilerMissing as error:
        return Finding("NVRTC", str(error), is_wrong=True)


def _driver(compiler: Finding) -> Finding:
    version = driver_version()
    if version is None:
        return Finding("driver", "none found (libcuda.so.1)", is_wrong=True)
    text = f"CUDA {version[0]}.{version[1]}"
    if version < OLDEST_CUDA:
        return Finding("driver", f"{text}: too old, kernels need a driver of CUDA 12.0 or newer", is_wrong=True)
    if not compiler.is_wrong and version[0] < int(compiler.found.split(".")[0]):
        why = f"{text}: older than NVRTC {compiler.found.split()[0]}, whose kernels it cannot load; take a newer driver"
        return Finding("driver", f"{why}, or torch and NVRTC of CUDA {version[0]}", is_wrong=True)
    return Finding("driver", text)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none that torch can use", is_wrong=True)
    found = [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]
    names = ", ".join(f"{each.name} ({each.major}.{each.minor}, {each.multi_processor_count} SMs)" for each in found)
    return Finding("GPU", names, is_wrong=all(each.major != HOPPER for each in found))


def _note(name: str) -> str:
    """Return a note if a variable has no effect, with the name of a similar variable that may be meant."""
    if name in VARIABLES or name.startswith("DG_TEST_"):
        return ""
    if name == "DG_TUNED_TABLE":
        return " (ignored)"
    near = "".join(get_close_matches(name, VARIABLES, 1, cutoff=0.8))
    return f" (no such variable: is {near} meant?)" if near else " (no such variable)"


def _wrong_settings(environment: Mapping[str, str]) -> list[str]:
    """Return an error text for each variable of the package that has a wrong value."""
    wrong = []
    for name, value in sorted(environment.items()):
        try:
            read_settings({name: value})
        except SettingError as error:
            wrong.append(str(error))
    return wrong


def _cache(environment: Mapping[str, str], compiler: Finding) -> Finding:
    texts = []
    try:
        directories = read_settings({name: environment.get(name, "") for name in CACHE_VARIABLES}).jit_cache_dirs
    except SettingError:
        return Finding("cache", "not examined", is_wrong=True)
    for directory in (*directories, *shipped()):
        kernels = files_in(directory)
        size = sum(path.stat().st_size for path in kernels) / 1e6
        reason = why_not_taken(directory, directory.stat()) if directory.exists() else None
        if reason is None and directory in shipped() and not compiler.is_wrong:
            reason = _of_another_compiler(kernels, compiler.found)
        unused = f"; not used: {reason}" if reason else ""
        texts.append(f"{directory}: {len(kernels)} kernels, {size:.1f} MB{unused}")
    if any(map(can_be_written, directories)):
        return Finding("cache", "; ".join(texts))
    told = "; ".join([*texts, "it is not writable: set DG_JIT_CACHE_DIR to a writable directory"])
    return Finding("cache", told, is_wrong=True)


def _replay() -> Finding:
    try:
        return Finding("replay", which())
    except SettingError:
        return Finding("replay", "not examined", is_wrong=True)


def _of_another_compiler(kernels: Sequence[Path], compiler: str) -> str | None:
    """Return why a wheel's kernels are not used: another NVRTC made them. None if the NVRTC here made them."""
    try:
        found = read_entry(kernels[0]).compiler if kernels else compiler
    except (OSError, Unsound) as error:
        return str(error)
    return None if found == compiler else f"NVRTC {found} made them, but {compiler} is installed"


def _verdict(compiler: Finding, driver: Finding, gpu: Finding) -> list[Finding]:
    """Conclude from the findings which products can run, and how the user can get more."""
    if not gpu.is_wrong and not driver.is_wrong and not compiler.is_wrong:
        return [Finding("so", "kernels run on this GPU, and the reference on the CPU")]
    if gpu.is_wrong:
        can_compile = "kernels can be compiled (compile)"
        if compiler.is_wrong:
            can_compile = "without NVRTC no kernel is compiled: `compile` fails, and `demo` leaves kernels out"
        why = "there is no Hopper GPU" if not torch.cuda.is_available() else "the GPU is not a Hopper"
        if torch.version.cuda is None and not driver.is_wrong:
            why = "torch is a build for the CPU: install one for CUDA"
        is_old = driver.is_wrong and driver.found.startswith("CUDA")  # then torch may find no GPU even if there is one
        return [
            Finding("so", f"products run by the reference on the CPU; {can_compile}"),
            Finding("for more", driver.found if is_old else f"{why}: kernels need an H100, H200 or H20", is_old),
        ]
    if not driver.is_wrong and any(map(files_in, shipped())):
        return [
            Finding("so", "the kernels of a wheel run on this GPU, and the reference on the CPU"),
            Finding("for more", f"other kernels need a compiler: {compiler.found}"),
        ]
    without = "; on the GPU only cached kernels run: other kernels need NVRTC" if not driver.is_wrong else ""
    return [
        Finding("so", f"products run by the reference on the CPU alone{without}"),
        Finding("for more", driver.found if driver.is_wrong else compiler.found, is_wrong=True),
    ]
