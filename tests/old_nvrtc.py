"""NVRTC 12.8, the last that does not interleave FFMAs, beside the one in use; `pip install "deep_gemm[old-nvrtc]"`.

It runs in a process of its own, because two NVRTCs in one process may take each other's symbols.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "nvidia-cuda-nvrtc-cu12", "12.8."
HOW_TO_GET = 'pip install "deep_gemm[old-nvrtc]" (88 MB)'


def library() -> Path | None:
    """The library's file; None where that package is not installed, or is of another version."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    if not package.version.startswith(VERSION):
        return None
    found = [file for file in package.files or [] if file.name == "libnvrtc.so.12"]
    return Path(str(package.locate_file(found[0]))) if found else None


def compile_all(nvrtc: Path, jobs: list[tuple[str, dict[str, str], tuple[str, ...]]]) -> list[bytes]:
    """The cubin of each (source, headers, options)."""
    run = subprocess.run(
        [sys.executable, __file__, str(nvrtc)], input=json.dumps(jobs), capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    return [bytes.fromhex(cubin) for cubin in json.loads(run.stdout)]


class _Nvrtc:
    def __init__(self, file: str) -> None:
        self._library = ctypes.CDLL(file)

    def compile(self, source: str, headers: dict[str, str], options: list[str]) -> bytes:
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        texts, names = _strings(headers.values()), _strings(headers)
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"k.cu", len(headers), texts, names)
        if self._library.nvrtcCompileProgram(program, len(options), _strings(options)):
            self._call("GetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            self._call("GetProgramLog", program, log)
            raise RuntimeError(log.value.decode())
        self._call("GetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        self._call("GetCUBIN", program, cubin)
        return cubin.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, f"nvrtc{function}")(*arguments):
            raise RuntimeError(f"nvrtc{function}: status {status}")


def _strings(texts: Any) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


if __name__ == "__main__":
    nvrtc = _Nvrtc(sys.argv[1])
    json.dump([nvrtc.compile(*job).hex() for job in json.load(sys.stdin)], sys.stdout)
