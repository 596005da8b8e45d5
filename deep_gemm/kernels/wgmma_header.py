"""The one header that is generated: WGMMA instructions name all their accumulator registers, N / 2 of them."""

from __future__ import annotations

from collections.abc import Iterable

_SPECIALIZATION = """\
DEVICE void fence_registers(float (&d)[{count}]) {{
  asm volatile("" : {outputs}::"memory");
}}

template <>
DEVICE void wgmma_m64k32_e4m3<{n}>(float (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
  asm volatile(
      "{{\\n"
      ".reg .pred p;\\n"
      "setp.ne.b32 p, %{accumulate}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, %{a}, %{b}, p, 1, 1;\\n"
      "}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)));
}}
"""


def wgmma_header(ns: Iterable[int]) -> str:
    """Text of `wgmma_shapes.cuh`: `ptx::wgmma_m64k32_e4m3<n>` for each n (PTX ISA: 8 to 256, a multiple of 8)."""
    shapes = sorted(set(ns))
    for n in shapes:
        if not (8 <= n <= 256 and n % 8 == 0):
            raise ValueError(f"ns: WGMMA needs an n from 8 to 256 that is a multiple of 8, got {n}")
    return "\n".join(["#pragma once", "namespace ptx {", "", *map(_specialization, shapes), "}  // namespace ptx", ""])


def _specialization(n: int) -> str:
    count = n // 2
    return _SPECIALIZATION.format(
        n=n,
        count=count,
        registers=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
        a=count,
        b=count + 1,
        accumulate=count + 2,
    )
