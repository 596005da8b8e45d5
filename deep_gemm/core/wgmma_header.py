"""Generates the wrappers of WGMMA instructions: each instruction names all its N / 2 accumulator registers."""

from __future__ import annotations

from collections.abc import Iterable

from .check.recipes import BFLOAT16, E4M3, VALUES, Values
from .gpu import WGMMA_K

_PRODUCTS = """\
DEVICE void fence_registers(float (&d)[{count}]) {{
  asm volatile("" : {outputs}::"memory");
}}

template <>
DEVICE void wgmma_m64k{depth}_{type}<{n}, {options}>(float (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
  asm volatile(
      "{{\\n"
      ".reg .pred p;\\n"
      "setp.ne.b32 p, %{accumulate}, 0;\\n"
      "{instruction} {{{registers}}}, %{a}, %{b}, p, 1, 1{majors};\\n"
      "}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)));
}}

template <>
DEVICE void wgmma_m64k{four_depth}_{type}<{n}, {options}>(float (&d)[{count}], uint32_t a_low, uint32_t b_low{sums}) {{
  asm volatile(
      "{{\\n"
      ".reg .pred first, other;\\n"
      ".reg .b32 a_low, b_low;\\n"
      ".reg .b64 a, b;\\n"
      "setp.ne.b32 first, {adds}, 0;\\n"
      "setp.ne.b32 other, 1, 0;\\n"
{four}
      "}}"
      : {outputs}
      : "r"(a_low), "r"(b_low), "n"(static_cast<uint64_t>(kDescriptorHigh) << 32){more});
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

_PRODUCT_OF_FOUR = """\
      "add.u32 a_low, %{a}, {step_a};\\n"
      "cvt.u64.u32 a, a_low;\\n"
      "or.b64 a, a, %{high};\\n"
      "add.u32 b_low, %{b}, {step_b};\\n"
      "cvt.u64.u32 b, b_low;\\n"
      "or.b64 b, b, %{high};\\n"
      "{instruction} {{{registers}}}, a, b, {predicate}, 1, 1{majors};\\n\""""


# Steps from one WGMMA to the next, in a descriptor's low word, whose unit is 16 bytes. A WGMMA is 32 bytes deep. If k
# is contiguous, the step is these 32 bytes. If m or n is contiguous, the step is 16 rows of 128 bytes.
_K_MAJOR_STEP, _MN_MAJOR_STEP = WGMMA_K // 16, 16 * 128 // 16


def wgmma_header(ns: Iterable[int], *, b: Values = E4M3, of_registers: bool = False) -> str:
    """Write `wgmma_shapes.cuh`: `ptx::wgmma_m64k32_e4m3<n>` for each n (PTX ISA: 8 to 256, a multiple of 8).

    A is E4M3; `b` is the type of B. `of_registers` adds the wrappers that read A from registers.
    """
    shapes = _shapes(ns)
    registers = (_of_registers(n, depth) for n in shapes * of_registers for depth in (32, 128))
    return _header([*(_products(n, b) for n in shapes), *registers])


def wgmma_bf16_header(ns: Iterable[int], a_is_mn_major: bool = False, b_is_mn_major: bool = False) -> str:
    """Write the header for BF16 operands of these majors: `ptx::wgmma_m64k16_bf16<n, a_is_mn_major, b_is_mn_major>`."""
    return _header(_products(n, BFLOAT16, (a_is_mn_major, b_is_mn_major)) for n in _shapes(ns))


def _shapes(ns: Iterable[int]) -> list[int]:
    shapes = sorted(set(ns))
    for n in shapes:
        if not (8 <= n <= 256 and n % 8 == 0):
            raise ValueError(f"ns: WGMMA needs an n from 8 to 256 that is a multiple of 8, got {n}")
    return shapes


def _header(specializations: Iterable[str]) -> str:
    return "\n".join(["#pragma once", "namespace ptx {", "", *specializations, "}  // namespace ptx", ""])


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


def _products(n: int, b: Values, are_mn_major: tuple[bool, bool] | None = None) -> str:
    """Define wrappers of one and of four WGMMAs with n rows of B. For BF16, pass `are_mn_major`; four may add to d."""
    b = VALUES[VALUES.index(b)]  # the name becomes code, so only a known type may pass
    a, depth = (E4M3, WGMMA_K) if are_mn_major is None else (BFLOAT16, WGMMA_K // 2)
    words = _operands(n) | {
        "type": a.name,
        "depth": depth,
        "four_depth": 4 * depth,
        "instruction": f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{a.name}.{b.name}",
        "high": n // 2 + 2,
    }
    if are_mn_major is None:
        words |= {"options": b.exponent_bits, "majors": "", "sums": "", "adds": 0, "more": ""}
    else:
        words |= {
            "options": ", ".join(map(str, are_mn_major)).lower(),
            "majors": "".join(f", {is_mn:d}" for is_mn in are_mn_major),
            "sums": ", bool accumulate",
            "adds": f"%{n // 2 + 3}",
            "more": ',\n        "r"(static_cast<uint32_t>(accumulate))',
        }
    step_a, step_b = (_MN_MAJOR_STEP if is_mn else _K_MAJOR_STEP for is_mn in are_mn_major or (False, False))
    four = (
        _PRODUCT_OF_FOUR.format(**words, step_a=i * step_a, step_b=i * step_b, predicate="other" if i else "first")
        for i in range(4)
    )
    return _PRODUCTS.format(**words, four="\n".join(four))


def _operands(n: int) -> dict[str, object]:
    """Return the fields that the templates above share. The accumulators are the first n / 2 operands of the asm."""
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
