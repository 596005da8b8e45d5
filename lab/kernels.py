"""Every kernel of the package, for tools that loop over all of them.

A kernel has the name of its file. If its family's module does not list it, no tool finds it, and a test fails.
"""

from __future__ import annotations

from typing import Any

from deep_gemm.core.jit import applied
from deep_gemm.core.jit.compiler import CompiledKernel, compile_cubin
from deep_gemm.core.kernel import Kernel
from deep_gemm.kernels import KERNELS


def all_kernels() -> dict[str, Kernel[Any]]:
    """Return all kernels, by name."""
    return {kernel.name: kernel for kernel in KERNELS}


def kernel_named(name: str) -> Kernel[Any]:
    """Find a kernel by its name."""
    kernels = all_kernels()
    if name not in kernels:
        raise ValueError(f"kernel: expected one of {', '.join(kernels)}, got {name}")
    return kernels[name]


def config_named(kernel: Kernel[Any], name: str | None) -> Any:
    """Find a kernel's configuration by its name; None means the first."""
    names = {each.name: each for each in kernel.configs()}
    if name is not None and name not in names:
        raise ValueError(f"config: expected one of {list(names)}, got {name!r}")
    return next(iter(names.values())) if name is None else names[name]


def compiled(kernel: Kernel[Any], config: Any) -> CompiledKernel:
    """Compile a configuration for sm_90a, without the cache."""
    found = compile_cubin(kernel.source, kernel.headers(config), name=f"{kernel.name} {config.name}")
    return applied(kernel.passes(config), found)
