"""The one header that is generated: WGMMA instructions name all their accumulator registers, N / 2 of them."""

from __future__ import annotations

from collections.abc import Iterable

from .gpu import WGMMA_K

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

_OF_REGISTERS = """\
template <>
DEVICE void wgmma_registers_m64k{depth}_e4m3<{n}>(float (&d)[{count}], const uint32_t (&a)[{words}], uint32_t b_low) {{
  asm volatile(
      "{{\\n"
      ".reg .pred first, other;\\n"
      ".reg .b32 b_low;\\n"
      ".reg .b64 b;\\n"
      "setp.ne.b32 first, 0, 0;\\n"
      "setp.ne.b32 other, 1, 0;\\n"
{products}
      "}}"
      : {outputs}
      : {fragments}, "r"(b_low), "n"(static_cast<uint64_t>(kDescriptorHigh) << 32));
}}
"""

_PRODUCT_OF_REGISTERS = """\
      "add.u32 b_low, %{b}, {step};\\n"
      "cvt.u64.u32 b, b_low;\\n"
      "or.b64 b, b, %{high};\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
      "{{{registers}}}, {{{fragment}}}, b, {accumulate}, 1, 1;\\n\""""

_BF16 = """\
DEVICE void fence_registers(float (&d)[{count}]) {{
  asm volatile("" : {outputs}::"memory");
}}

template <>
DEVICE void wgmma_m64k16_bf16<{n}, {majors}>(float (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
  asm volatile(
      "{{\\n"
      ".reg .pred p;\\n"
      "setp.ne.b32 p, %{accumulate}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{registers}}}, %{a}, %{b}, p, 1, 1, {transposed};\\n"
      "}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)));
}}

template <>
DEVICE void wgmma_m64k64_bf16<{n}, {majors}>(float (&d)[{count}], uint32_t a_low, uint32_t b_low, bool accumulate) {{
  asm volatile(
      "{{\\n"
      ".reg .pred first, other;\\n"
      ".reg .b32 a_low, b_low;\\n"
      ".reg .b64 a, b;\\n"
      "setp.ne.b32 first, %{accumulate_four}, 0;\\n"
      "setp.ne.b32 other, 1, 0;\\n"
{products}
      "}}"
      : {outputs}
      : "r"(a_low), "r"(b_low), "n"(static_cast<uint64_t>(kDescriptorHigh) << 32),
        "r"(static_cast<uint32_t>(accumulate)));
}}
"""

_PRODUCT_OF_FOUR = """\
      "add.u32 a_low, %{a}, {step_a};\\n"
      "cvt.u64.u32 a, a_low;\\n"
      "or.b64 a, a, %{high};\\n"
      "add.u32 b_low, %{b}, {step_b};\\n"
      "cvt.u64.u32 b, b_low;\\n"
      "or.b64 b, b, %{high};\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}{kind} {{{registers}}}, a, b, {accumulate}, 1, 1{transposed};\\n\""""


# One product is 32 bytes deep. In low words of descriptors, which count 16 bytes, the next one lies 2 on if k is
# contiguous, and behind 16 rows of 128 bytes if m or n is.
_K_MAJOR_STEP, _MN_MAJOR_STEP = WGMMA_K // 16, 16 * 128 // 16


def wgmma_header(ns: Iterable[int], *, of_registers: bool = False) -> str:
    """Text of `wgmma_shapes.cuh`: `ptx::wgmma_m64k32_e4m3<n>` for each n (PTX ISA: 8 to 256, a multiple of 8).

    `of_registers`: also those whose A is in registers.
    """
    shapes = _shapes(ns)
    return _header(
        [*map(_e4m3, shapes), *(_of_registers(n, depth) for n in shapes * of_registers for depth in (32, 128))]
    )


def wgmma_bf16_header(ns: Iterable[int], a_is_mn_major: bool = False, b_is_mn_major: bool = False) -> str:
    """The same for BF16 operands of these majors: `ptx::wgmma_m64k16_bf16<n, a_is_mn_major, b_is_mn_major>`."""
    return _header(_bf16(n, a_is_mn_major, b_is_mn_major) for n in _shapes(ns))


def _shapes(ns: Iterable[int]) -> list[int]:
    shapes = sorted(set(ns))
    for n in shapes:
        if not (8 <= n <= 256 and n % 8 == 0):
            raise ValueError(f"ns: WGMMA needs an n from 8 to 256 that is a multiple of 8, got {n}")
    return shapes


def _header(specializations: Iterable[str]) -> str:
    return "\n".join(["#pragma once", "namespace ptx {", "", *specializations, "}  // namespace ptx", ""])


def _e4m3(n: int) -> str:
    return _SPECIALIZATION.format(
        **_operands(n), products=_four_products(n, "k32.f32.e4m3.e4m3", "", _K_MAJOR_STEP, _K_MAJOR_STEP)
    )


def _of_registers(n: int, depth: int) -> str:
    count, words = n // 2, depth // 8
    products = [
        _PRODUCT_OF_REGISTERS.format(
            n=n,
            b=count + words,
            high=count + words + 1,
            step=i * _K_MAJOR_STEP,
            registers=_operands(n)["registers"],
            fragment=", ".join(f"%{count + i * 4 + word}" for word in range(4)),
            accumulate="other" if i else "first",
        )
        for i in range(words // 4)
    ]
    fragments = ", ".join(f'"r"(a[{word}])' for word in range(words))
    return _OF_REGISTERS.format(
        **_operands(n), depth=depth, words=words, fragments=fragments, products="\n".join(products)
    )


def _bf16(n: int, a_is_mn_major: bool, b_is_mn_major: bool) -> str:
    transposed = f"{a_is_mn_major:d}, {b_is_mn_major:d}"
    step_a, step_b = (_MN_MAJOR_STEP if is_mn else _K_MAJOR_STEP for is_mn in (a_is_mn_major, b_is_mn_major))
    return _BF16.format(
        **_operands(n),
        majors=f"{a_is_mn_major}, {b_is_mn_major}".lower(),
        transposed=transposed,
        products=_four_products(n, "k16.f32.bf16.bf16", f", {transposed}", step_a, step_b),
        accumulate_four=n // 2 + 3,
    )


def _operands(n: int) -> dict[str, object]:
    """Names that the texts above have in common: the accumulators are the asm's first n / 2 operands."""
    count = n // 2
    return {
        "n": n,
        "count": count,
        "registers": ", ".join(f"%{i}" for i in range(count)),
        "outputs": ", ".join(f'"+f"(d[{i}])' for i in range(count)),
        "a": count,
        "b": count + 1,
        "accumulate": count + 2,
    }


def _four_products(n: int, kind: str, transposed: str, step_a: int, step_b: int) -> str:
    names = _operands(n) | {"kind": kind, "transposed": transposed, "high": n // 2 + 2}
    return "\n".join(
        _PRODUCT_OF_FOUR.format(
            **names | {"step_a": i * step_a, "step_b": i * step_b, "accumulate": "other" if i else "first"}
        )
        for i in range(4)
    )
