"""A kernel on one page: it compiles to the kernel's machine code, or to as many of its main instructions."""

from __future__ import annotations

from typing import Any

import pytest
from machine_code import digest
from test_docs import script
from thorough import one_in

from deep_gemm.casts.cast_rows import KERNEL as CAST_ROWS
from deep_gemm.core.jit.compiler import CompiledKernel, compile_cubin
from deep_gemm.core.jit.cubin import report
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.kernel import FP8_GEMM
from lab.fold import page
from lab.inspect import OPCODES
from lab.kernels import all_kernels

SHOWN = script("write_kernels").SHOWN
MOST_LINES = {"dense": 700, "decode": 450, "grouped": 1000}
PAGES = [(name, SHOWN[name].kernel, SHOWN[name].config, most) for name, most in MOST_LINES.items()]
OTHERS = [
    (name, kernel, kernel.configs()[0], 1000)
    for name, kernel in all_kernels().items()
    if kernel is not CAST_ROWS  # its page has the same instructions in another order
]
ANY = [(CAST_ROWS, CAST_ROWS.configs()[0]), *((FP8_GEMM, config) for config in FP8_GEMM.configs()[80::170])]


def compiled(kernel: Kernel[Any], config: Any) -> tuple[str, CompiledKernel, CompiledKernel]:
    """Give a page, its machine code and the kernel's."""
    headers = kernel.headers(config)
    text = page(kernel.source, headers)
    library = {each: headers[each] for each in headers if each.startswith(("ptx/", "types", "wgmma_shapes"))}
    found, right = (compile_cubin(*each, name=kernel.name) for each in ((text, library), (kernel.source, headers)))
    return text, found, right


@pytest.mark.parametrize(
    ("name", "kernel", "config", "most"),
    [*PAGES, *one_in(12, OTHERS)],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_page_compiles_to_the_machine_code_of_the_kernel(
    name: str, kernel: Kernel[Any], config: Any, most: int
) -> None:
    text, found, right = compiled(kernel, config)
    assert text.count("\n") <= most
    assert digest(found.cubin) == digest(right.cubin)


@pytest.mark.parametrize(("kernel", "config"), one_in(7, ANY), ids=lambda each: each.name)
def test_a_page_of_any_configuration_has_as_many_main_instructions(kernel: Kernel[Any], config: Any) -> None:
    _, found, right = compiled(kernel, config)
    a, b = (report(each.cubin, each.log).counts for each in (found, right))
    assert {opcode: a[opcode] for opcode in OPCODES} == {opcode: b[opcode] for opcode in OPCODES}


def test_constants_choose_branches_arguments_and_functions() -> None:
    source = """
// Adds.
constexpr bool kAdds = true;
constexpr uint32_t kParts = 1;
// Gone.
DEVICE uint32_t unused() { return 3; }
// Goes over `parts`. Goes with `unused`.
template <uint32_t kCount>
DEVICE uint32_t part_of(uint32_t i) {
  if constexpr (kCount > 1) {
    const uint32_t half = i / 2;
    return half;
  } else {
    const uint32_t whole = i * kParts;
    return kAdds && i > 0 ? whole + 1 : unused();
  }
}
KERNEL(32, 1) k(uint32_t* p) {
  if (!kAdds || p == nullptr) return;
  *p = part_of<kParts>(*p);
}
"""
    assert (
        page(source, {"types.cuh": ""})
        == """#include "types.cuh"

DEVICE uint32_t part_of(uint32_t i) {
  const uint32_t whole = i;
  return i > 0 ? whole + 1 : 3;
}
KERNEL(32, 1) k(uint32_t* p) {
  if (p == nullptr) return;
  *p = part_of(*p);
}
"""
    )
