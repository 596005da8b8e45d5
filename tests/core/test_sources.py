"""What must hold of the CUDA sources as texts."""

from __future__ import annotations

import re

import pytest

from deep_gemm.core.sources import cuda_sources
from deep_gemm.gemm.choose.bf16 import reachable_bf16, reachable_bf16_depths, reachable_bf16_rows
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.k_group_maps import KERNEL as K_GROUP_MAPS
from deep_gemm.gemm.kernel import FP8_GEMM_DECODE
from deep_gemm.gemm.kinds.output import OPERANDS_BY_ROW
from deep_gemm.kernels import KERNELS, ORDINARY
from lab.configs import reachable_dense as reachable
from lab.configs import reachable_grouped, reachable_heads, reachable_k_grouped, reachable_silu

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
    of_configurations = {"fp8_gemm", "bf16_gemm"}
    assert found == {"KERNEL_NAME", *(kernel.kernel_name for kernel in KERNELS if kernel.name not in of_configurations)}


def test_profilers_find_one_kernel_of_a_product_and_know_its_kind() -> None:
    of_heads = (config for config in reachable_heads() if isinstance(config, GemmConfig))
    every = (*reachable(), *reachable_grouped(), *reachable_silu(), *reachable_k_grouped(), *of_heads)
    names = {config.kernel_name: config for config in every}
    assert set(names) == {
        "fp8_gemm_dense",
        "fp8_gemm_m_grouped_contiguous",
        "fp8_gemm_m_grouped_contiguous_silu",
        "fp8_gemm_m_grouped_contiguous_fetched_silu",
        "fp8_gemm_m_grouped_contiguous_by_64",
        "fp8_gemm_dense_by_64",
        "fp8_gemm_m_grouped_masked_by_64",
        "fp8_gemm_dense_fine",
        "fp8_gemm_m_grouped_contiguous_fine",
        "fp8_gemm_m_grouped_masked_fine",
        "fp8_gemm_m_grouped_masked",
        "fp8_gemm_heads",
        "fp8_wgrad_gemm_dense",
        "fp8_wgrad_gemm_m_grouped_contiguous",
        "fp8_wgrad_gemm_m_grouped_masked",
        "fp8_wgrad_gemm_heads",
        "fp8_wgrad_gemm_k_grouped",
    }
    of_bf16 = (*reachable_bf16(), *reachable_bf16_rows(), *reachable_bf16_depths())
    assert {config.kernel_name for config in of_bf16} == {
        "bf16_gemm_dense",
        "bf16_gemm_m_grouped_contiguous",
        "bf16_gemm_m_grouped_masked",
        "bf16_gemm_k_grouped",
    }
    for name, config in names.items():
        assert f"#define KERNEL_NAME {name}\n" in config.header()
        assert name.startswith("fp8_wgrad_gemm_") == (config.operands == OPERANDS_BY_ROW)
    assert FP8_GEMM_DECODE.name.startswith("fp8_gemm_")
    searched = ("fp8_gemm", "fp8_wgrad_gemm", "gemm_", "bf16_gemm", "mqa_logits", "tf32_hc_prenorm_gemm")
    helpers = {K_GROUP_MAPS.name, *(kernel.name for kernel in ORDINARY)}
    assert [name for name in helpers if any(text in name for text in searched)] == []


@pytest.mark.parametrize("name", SOURCES)
def test_assembly_is_in_the_wrappers_alone(name: str) -> None:
    assert name.startswith("ptx/") or not re.search(r"\basm\b", SOURCES[name])


@pytest.mark.parametrize("name", SOURCES)
def test_no_header_of_cuda_or_the_c_library_is_included(name: str) -> None:
    assert re.findall(r"#include *<.*", SOURCES[name]) == []
