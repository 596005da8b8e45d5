"""Facts about the machine and the measured code. Clocks and power are read, never set."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[2] / "deep_gemm"
_SMI_FIELDS = "clocks.sm,power.draw,driver_version,power.limit,clocks.max.sm"


@dataclass(frozen=True)
class GpuState:
    """Clock and power of the GPU at one moment; None if unknown."""

    sm_mhz: float | None = None
    power_w: float | None = None


def header(kind: str, method: str, commit: str | None = None) -> dict[str, Any]:
    """Make the header of a result file: the kind, the machine, the date and the method."""
    found_commit, dirty = git_state()
    return {
        "kind": kind,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "system": platform.platform(), **_gpu_facts()},
        "versions": _versions(),
        "commit": commit or found_commit,
        "dirty": dirty if commit is None else None,
        "source_sha256": source_digest(),
        "method": method,
    }


def gpu_state() -> GpuState:
    """Read the clock and power of the current GPU."""
    try:
        return _nvml_state()
    except Exception:  # the measurement must go on if NVML's bindings are missing, are too old, or fail
        figures = (*_smi(), None, None)[:2]
        return GpuState(*(_number(figure) for figure in figures))


def git_state() -> tuple[str, bool | None]:
    """Return the commit, and whether the package differs from the commit; ("unknown", None) outside a checkout."""
    git = ("git", "-C", str(PACKAGE))
    if not _output(*git, "ls-files", "__init__.py"):  # an installed package may be inside some other checkout
        return "unknown", None
    return _output(*git, "rev-parse", "--short=12", "HEAD"), bool(_output(*git, "status", "--porcelain", "--", "."))


def source_digest() -> str:
    """Return a digest of the package's sources, which identifies the code if git cannot."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cuh", ".c", ".json")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _versions() -> dict[str, str | None]:
    from deep_gemm import __version__
    from deep_gemm.core.jit.compiler import CompilerMissing, compiler_version
    from deep_gemm.core.replay import which

    try:
        nvrtc: str | None = compiler_version()
    except CompilerMissing:
        nvrtc = None
    return {
        "deep_gemm": __version__,
        "replay": which(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": nvrtc,
        "cublas": _installed("nvidia-cublas") or _installed("nvidia-cublas-cu12"),
        **{name: _installed(name) for name in ("cuda-bindings", "triton", "vllm")},
    }


def _gpu_facts() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    _, _, driver, power_limit, max_clock = (*_smi(), *[None] * 5)[:5]
    return {
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / (1 << 30), 1),
        "driver": driver,
        "power_limit_w": _number(power_limit),
        "max_sm_mhz": _number(max_clock),
    }


def _nvml_state() -> GpuState:
    nvml, handle = _nvml()
    return GpuState(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM), nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)


@cache
def _nvml() -> tuple[Any, Any]:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml, nvml.nvmlDeviceGetHandleByUUID(_uuid())


def _smi() -> list[str | None]:
    """Read the figures of `_SMI_FIELDS` from nvidia-smi; return an empty list if it fails."""
    if not torch.cuda.is_available():
        return []
    query = (f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits")
    line = _output("nvidia-smi", f"--id={_uuid()}", *query)
    return [figure.strip() for figure in line.split(",")] if line.count(",") == _SMI_FIELDS.count(",") else []


def _uuid() -> str:
    """Return the GPU's UUID, because NVML's device numbers ignore CUDA_VISIBLE_DEVICES."""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:  # "[N/A]"
        return None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
