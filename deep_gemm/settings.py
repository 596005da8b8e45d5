"""Environment variables, typed and read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. Every variable that the package reads is a field here."""

    jit_cache_dir: Path
    """Where compiled kernels are kept: `DG_JIT_CACHE_DIR`, or the older `DG_CACHE_DIR`."""
    jit_debug: bool
    """`DG_JIT_DEBUG`: print what is compiled, with which options, and what the compiler said."""
    jit_strict: bool
    """`DG_JIT_STRICT`: a kernel that spills, needs a stack frame or draws a WGMMA note from ptxas is an error."""
    print_configs: bool
    """`DG_PRINT_CONFIGS`: print the configuration chosen for each new problem."""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings from a mapping of environment variables; a pure function, for tests and for `settings`."""
    cache_dir = environment.get("DG_JIT_CACHE_DIR") or environment.get("DG_CACHE_DIR")
    return Settings(
        jit_cache_dir=Path(cache_dir) if cache_dir else _default_cache_dir(),
        jit_debug=_flag(environment, "DG_JIT_DEBUG"),
        jit_strict=_flag(environment, "DG_JIT_STRICT"),
        print_configs=_flag(environment, "DG_PRINT_CONFIGS"),
    )


@cache
def settings() -> Settings:
    """The settings of this process."""
    return read_settings(os.environ)


def _default_cache_dir() -> Path:
    try:
        return Path.home() / ".cache" / "deep_gemm"
    except RuntimeError:  # a container may run under a user id that has neither HOME nor a passwd entry
        # No directory: kernels stay in memory. A fixed name in /tmp would let other users supply machine code.
        return Path(os.devnull) / "deep_gemm"


def _flag(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
