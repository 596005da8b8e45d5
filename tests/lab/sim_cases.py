"""Unit kernels for the simulator's tests: many bodies in one source, so that they compile once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from deep_gemm.core.sources import cuda_sources
from lab.sim import Buffer, HostKernel, Map, Pointer, Result, compile_kernel, simulate
from lab.sim.arguments import Argument

SHARED_BYTES = 2 * 16384 + 4096 + 1024
IN_MAP = TensorMap(ElementType.FLOAT32, (32, 64), (128,), (32, 8), 128)
OUT_MAP = TensorMap(ElementType.FLOAT32, (32, 64), (128,), (32, 8), 128)

_KERNELS = Path(__file__).parent / "sim_kernels"
_KERNEL = """
KERNEL(256, 1) cases(GRID_CONSTANT ptx::TensorMap map_in, GRID_CONSTANT ptx::TensorMap map_out, const float* in,
                     float* out, uint32_t* flags, uint32_t which, uint32_t x) {
  Case c{map_in, map_out, in, out, flags, x};
  Shared& shared = ptx::dynamic_shared<Shared>();
  const uint32_t thread = ptx::thread_index();
  switch (which) {
"""


def cases_file(name: str) -> str:
    """A file of sim_kernels/ that holds cases."""
    return (_KERNELS / name).read_text()


def case_names(cases: str) -> list[str]:
    return [name for _, name in _found(cases)]


def _found(cases: str) -> list[tuple[str, str]]:
    """Whether each case has a barrier, and its name."""
    return re.findall(r"^(BARRIER_)?CASE\((\w+)\)", cases, re.MULTILINE)


@cache
def _compiled(cases: str) -> HostKernel:
    calls = [
        f"    case {index}: {'init_barrier(shared.bar, thread);' * bool(has_barrier)}\n"
        f"      return {name}(c, shared, shared.bar, thread, thread / 32, thread % 32);\n"
        for index, (has_barrier, name) in enumerate(_found(cases))
    ]
    headers = {**cuda_sources(), "cases.cuh": cases_file("cases.cuh")}
    return compile_kernel("".join([cases, _KERNEL, *calls, "  }\n}\n"]), headers, name="cases")


def run_case(
    cases: str,
    name: str,
    *,
    in_map: TensorMap = IN_MAP,
    out_map: TensorMap = OUT_MAP,
    data: torch.Tensor | None = None,
    x: int = 0,
    threads: int = 128,
    num_sms: int = 1,
    dependent: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, Result]:
    """Run one case; `in` holds 64 x 32 floats (or `data`), `out` 64 x 32 times NaN, `flags` 16 zeros."""
    buffers = {
        "in": Buffer(torch.arange(2048.0) if data is None else data, is_dependent=dependent),
        "out": Buffer(torch.full((64, 32), float("nan")), is_writable=True),
        "flags": Buffer(torch.zeros(16, dtype=torch.int32), is_writable=True),
    }
    arguments: list[Argument] = [
        Map("in", in_map),
        Map("out", out_map),
        Pointer("in"),
        Pointer("out"),
        Pointer("flags"),
        case_names(cases).index(name),
        x,
    ]
    options = {"shared_bytes": SHARED_BYTES, **options}
    result = simulate(_compiled(cases), arguments, buffers, threads=threads, num_sms=num_sms, **options)
    out, flags = result.buffers["out"], result.buffers["flags"]
    assert isinstance(out, torch.Tensor)
    assert isinstance(flags, torch.Tensor)
    return out, flags, result
