"""The one header that is generated: WGMMA instructions name all their accumulator registers, N / 2 of them."""

from __future__ import annotations

from collections.abc import Iterable

from ..choose.config import WGMMA_K

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

template <>
DEVICE void wgmma_m64k128_e4m3<{n}>(float (&d)[{count}], uint32_t a_low, uint32_t b_low) {{
  asm volatile(
      "{{\\n"
      ".reg .pred first, other;\\n"
      ".reg .b32 a_low, b_low;\\n"
      ".reg .b64 a, b;\\n"
      "setp.ne.b32 first, 0, 0;\\n"
      "setp.ne.b32 other, 1, 0;\\n"
{products}
      "}}"
      : {outputs}
      : "r"(a_low), "r"(b_low), "n"(static_cast<uint64_t>(kDescriptorHigh) << 32));
}}
"""

_PRODUCT_OF_FOUR = """\
      "add.u32 a_low, %{a}, {step};\\n"
      "cvt.u64.u32 a, a_low;\\n"
      "or.b64 a, a, %{high};\\n"
      "add.u32 b_low, %{b}, {step};\\n"
      "cvt.u64.u32 b, b_low;\\n"
      "or.b64 b, b, %{high};\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, a, b, {accumulate}, 1, 1;\\n\""""


def wgmma_header(ns: Iterable[int]) -> str:
    """Text of `wgmma_shapes.cuh`: `ptx::wgmma_m64k32_e4m3<n>` for each n (PTX ISA: 8 to 256, a multiple of 8)."""
    shapes = sorted(set(ns))
    for n in shapes:
        if not (8 <= n <= 256 and n % 8 == 0):
            raise ValueError(f"ns: WGMMA needs an n from 8 to 256 that is a multiple of 8, got {n}")
    return "\n".join(["#pragma once", "namespace ptx {", "", *map(_specialization, shapes), "}  // namespace ptx", ""])


def _specialization(n: int) -> str:
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    products = [
        _PRODUCT_OF_FOUR.format(
            n=n,
            registers=registers,
            a=count,
            b=count + 1,
            high=count + 2,
            step=i * WGMMA_K // 16,
            accumulate="other" if i else "first",
        )
        for i in range(4)
    ]
    return _SPECIALIZATION.format(
        n=n,
        count=count,
        registers=registers,
        products="\n".join(products),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
        a=count,
        b=count + 1,
        accumulate=count + 2,
    )
