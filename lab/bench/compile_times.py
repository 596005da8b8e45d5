"""Times of compiling kernels without a cache. Needs no GPU."""

from __future__ import annotations

import time

from deep_gemm.core.jit.compiler import compile_cubin, compiler_version
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.dense.choose import reachable
from deep_gemm.gemm.kernel import KERNEL as FP8_GEMM

from .products import reason
from .report import Add, Announce, Row

METHOD = "compile: wall time of NVRTC from source to machine code, one configuration after the other, no cache involved"
QUICK_COUNT = 12


def configurations(quick: bool) -> list[GemmConfig]:
    """Every configuration that the heuristics can choose, or an even sample of them."""
    configs = reachable()
    return configs[:: len(configs) // QUICK_COUNT][:QUICK_COUNT] if quick else configs


def measure(configs: list[GemmConfig], *, add: Add, announce: Announce) -> None:
    """Compile each configuration once."""
    compiler_version()  # loads NVRTC; otherwise the first kernel's time would include that
    for config in configs:
        announce(config.name)
        add([_row(config)])


def _row(config: GemmConfig) -> Row:
    shape, name = (config.block_m, config.block_n), config.name
    try:
        headers = FP8_GEMM.headers(config)
        begin = time.perf_counter()
        compile_cubin(FP8_GEMM.source, headers, name=config.kernel_name)
        us = (time.perf_counter() - begin) * 1e6
    except Exception as error:
        return Row("compile", shape, "deep_gemm", "compile", config=name, failed=reason(error))
    return Row("compile", shape, "deep_gemm", "compile", us, us, us, config=name)
