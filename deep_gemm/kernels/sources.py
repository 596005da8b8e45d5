"""The CUDA C++ sources of the package, as the in-memory headers of a compilation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CUDA_DIRECTORY = Path(__file__).resolve().parents[1] / "cuda"


@cache
def cuda_sources() -> dict[str, str]:
    """Every source under `cuda/`, by the name by which others include it."""
    return {
        path.relative_to(CUDA_DIRECTORY).as_posix(): path.read_text() for path in sorted(CUDA_DIRECTORY.rglob("*.cuh"))
    }


def wgmma_shape_header(n: int) -> str:
    """`wgmma_shape.cuh`: the one WGMMA that a configuration uses, 64 x n x 32, E4M3 into FP32."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""#pragma once
namespace ptx {{
// d = a x b, plus d where `accumulate`; d must not be touched before wgmma_wait_group.
template <int n>
DEVICE void wgmma_m64k32_e4m3(float (&d)[n / 2], uint64_t a, uint64_t b, bool accumulate) {{
  static_assert(n == {n}, "generated for n = {n}");
  asm volatile(
      "{{\\n.reg .pred accumulate;\\n"
      "setp.ne.b32 accumulate, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, %{count}, %{count + 1}, "
      "accumulate, 1, 1;\\n}}"
      : {operands}
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}}
}}  // namespace ptx
"""
