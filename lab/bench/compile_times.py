"""Times of compiling kernels without a cache. They are measured without a GPU."""

from __future__ import annotations

import statistics
import time

from deep_gemm.core.jit.compiler import compile_cubin, compiler_version
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM

from ..configs import reachable_dense
from .bench import Asked, Bench, Steps
from .products import reason
from .report import Add, Announce, Report, Row

METHOD = "compile: wall time of NVRTC from source to machine code, one configuration after the other, no cache involved"
QUICK_COUNT = 12


def configurations(quick: bool) -> list[GemmConfig]:
    """List every configuration that the heuristics can choose, or an even sample of all."""
    configs = reachable_dense()
    return configs[:: len(configs) // QUICK_COUNT][:QUICK_COUNT] if quick else configs


def measure(configs: list[GemmConfig], *, add: Add, announce: Announce) -> None:
    """Compile each configuration once."""
    compiler_version()  # loads NVRTC now; otherwise the first kernel's time would include it
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


def plan(asked: Asked) -> Steps:
    """Plan the requested configurations."""
    configs = configurations(asked.quick)
    return len(configs), lambda add, announce: measure(configs, add=add, announce=announce)


def said(report: Report) -> list[str]:
    """Summarize the times in one line."""
    done = [(row.us, row.config) for row in report.rows if row.us is not None]
    if not done:
        return ["nothing compiled"]
    median = statistics.median(us for us, _ in done) / 1e3
    slowest, config = max(done, key=lambda pair: pair[0])
    return [f"{len(done)} configurations compiled, median {median:.0f} ms, slowest {slowest / 1e3:.0f} ms ({config})"]


BENCH = Bench("compile", METHOD, plan, said, takes_shapes=False, needs_gpu=lambda _: False)
