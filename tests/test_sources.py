"""What must hold of the CUDA sources as texts."""

from __future__ import annotations

import re

import pytest

from deep_gemm.kernels import fp8_gemm, fp8_gemm_decode, k_group_maps, linear_decode
from deep_gemm.kernels.ordinary import reachable_ordinary
from deep_gemm.kernels.sources import cuda_sources

SOURCES = cuda_sources()


@pytest.mark.parametrize("name", SOURCES)
def test_loops_are_unrolled_fully_or_not_at_all(name: str) -> None:
    """NVRTC 13.0 loses the remainder of some partially unrolled loops; see docs/performance_log.md."""
    partial = [
        factor for factor in re.findall(r"#pragma unroll *\(?(\w*)\)?", SOURCES[name]) if factor not in ("", "1")
    ]
    assert partial == []


def test_every_kernel_is_one_that_tools_and_gates_know() -> None:
    found = {name for text in SOURCES.values() for name in re.findall(r"^KERNEL\(.*?\) (\w+)\(", text, re.MULTILINE)}
    with_gates = {fp8_gemm.NAME, fp8_gemm_decode.NAME, k_group_maps.NAME, linear_decode.NAME}
    assert found == with_gates | {kernel.name for kernel, _ in reachable_ordinary()}


@pytest.mark.parametrize("name", SOURCES)
def test_assembly_is_in_the_wrappers_alone(name: str) -> None:
    assert name.startswith("ptx/") or not re.search(r"\basm\b", SOURCES[name])


@pytest.mark.parametrize("name", SOURCES)
def test_no_header_of_cuda_or_the_c_library_is_included(name: str) -> None:
    assert re.findall(r"#include *<.*", SOURCES[name]) == []
