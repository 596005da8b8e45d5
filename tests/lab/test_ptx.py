"""The wrappers of PTX instructions: every one assembles for sm_90a, and the simulator has every one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from deep_gemm.core.jit import ptxas_log
from deep_gemm.core.jit.compiler import CompileError, compile_cubin
from deep_gemm.core.jit.cubin import read_kernels
from deep_gemm.core.sources import PACKAGE, cuda_sources
from deep_gemm.core.wgmma_header import wgmma_bf16_header, wgmma_header

ALL_WRAPPERS = (Path(__file__).parent / "sim_kernels" / "all_wrappers.cuh").read_text()


def compile_all(n: int, *, shapes: Iterable[int] | None = None) -> tuple[bytes, str]:
    fp8, bf16 = (
        wgmma_header([n] if shapes is None else shapes, of_registers=True),
        wgmma_bf16_header([24], b_is_mn_major=True),
    )
    headers = {
        **cuda_sources(),
        "config.cuh": f"#pragma once\nconstexpr unsigned kUnitN = {n};\n",
        "wgmma_shapes.cuh": fp8 + bf16,
    }
    kernel = compile_cubin('#include "config.cuh"\n' + ALL_WRAPPERS, headers, name="all_wrappers")
    return kernel.cubin, kernel.log


def wrapper_names() -> list[str]:
    """Every function in `ptx/`."""
    text = "\n".join(path.read_text() for path in sorted((PACKAGE / "core" / "ptx").glob("*.cuh")))
    made = re.findall(r'^PTX_\w+\((?:.*?"\w", )?(\w+), ', text, re.MULTILINE)
    return sorted({*made, *re.findall(r"^DEVICE \S+&? (\w+)\(", text, re.MULTILINE)})


def test_the_kernel_of_this_test_calls_every_wrapper() -> None:
    assert len(wrapper_names()) > 60
    missing = [name for name in wrapper_names() if not re.search(rf"\bptx::{name}\b", ALL_WRAPPERS)]
    assert missing == []


@pytest.mark.parametrize("n", [8, 112, 256])
def test_every_wrapper_assembles(n: int) -> None:
    cubin, log = compile_all(n)
    assert "error" not in log
    (kernel,) = read_kernels(cubin)
    counts = kernel.counts
    assert counts["QGMMA"] == 4 + 1 + 2 + 4 + 2, "the wrong number of FP8 tensor core instructions"
    assert counts["HGMMA"] == 4 + 1, "the wrong number of BF16 tensor core instructions"
    assert counts["USETMAXREG"] == 2


def test_no_wrapper_costs_local_memory() -> None:
    _, log = compile_all(128)
    (memory,) = ptxas_log.local_memory(log)
    assert (memory.stack_frame_bytes, memory.spill_store_bytes, memory.spill_load_bytes) == (0, 0, 0)


def test_asm_lies_in_ptx_alone() -> None:
    sources = cuda_sources()
    assert [name for name, text in sources.items() if re.search(r"\basm\b", text) and not name.startswith("ptx/")] == []


def test_a_wgmma_shape_that_was_not_generated_is_named_by_the_compiler() -> None:
    with pytest.raises(CompileError, match=r"wgmma_header\(\) was not asked for this N"):
        compile_all(128, shapes=[64])


@pytest.mark.parametrize("n", [0, 4, 12, 264])
def test_impossible_wgmma_shapes_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 8, got {n}"):
        wgmma_header([n])


def test_wgmma_header_names_every_register_once() -> None:
    text = wgmma_header([16, 8, 16])
    assert text.count("template <>") == 2 * 2
    assert "{%0, %1, %2, %3}, %4, %5, p, 1, 1" in text
    assert "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1" in text
