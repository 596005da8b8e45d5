"""Rules that the texts of the CUDA sources must keep."""

from __future__ import annotations

import re

import pytest

from deep_gemm.core.jit.compiler import CompileError, compile_cubin
from deep_gemm.core.sources import cuda_sources
from deep_gemm.gemm.choose.bf16 import reachable_bf16, reachable_bf16_depths, reachable_bf16_rows
from deep_gemm.gemm.config.decode import decode_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE, K_GROUP_MAPS
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import OPERANDS_BY_ROW, Output
from deep_gemm.kernels import KERNELS, ORDINARY
from lab.configs import reachable_dense as reachable
from lab.configs import reachable_grouped, reachable_heads, reachable_k_grouped, reachable_silu
from lab.sim.library import HostCompileError, compile_kernel

SOURCES = cuda_sources()
PRODUCT = FP8_GEMM, tile_config(128, 128, Output(work=works.ENDS, epilogue=epilogues.SILU))
DECODE = FP8_GEMM_DECODE, decode_config(8, 1, 1, 2)


@pytest.mark.parametrize("name", SOURCES)
def test_loops_are_unrolled_fully_or_not_at_all(name: str) -> None:
    """NVRTC 13.0 loses the remainder of some partially unrolled loops; see docs/performance_log.md."""
    partial = [
        factor for factor in re.findall(r"#pragma unroll *\(?(\w*)\)?", SOURCES[name]) if factor not in ("", "1")
    ]
    assert partial == []


def test_every_kernel_is_one_that_tools_and_gates_know() -> None:
    found = {name for text in SOURCES.values() for name in re.findall(r"^KERNEL\(.*?\) (\w+)\(", text, re.MULTILINE)}
    of_configurations = {"fp8_gemm", "bf16_gemm", "experts_few"}
    assert found == {"KERNEL_NAME", *(kernel.kernel_name for kernel in KERNELS if kernel.name not in of_configurations)}


def test_profilers_find_one_kernel_of_a_product_and_know_its_kind() -> None:
    of_heads = (config for config in reachable_heads() if isinstance(config, GemmConfig))
    every = (*reachable(), *reachable_grouped(), *reachable_silu(), *reachable_k_grouped(), *of_heads)
    names = {config.kernel_name: config for config in every}
    kinds, fine = ("dense", "m_grouped_contiguous", "m_grouped_masked"), ("", "_by_64", "_fine")
    of_tokens = {f"fp8_gemm_{kind}{scales}" for kind in kinds for scales in fine}
    of_gradients = {f"fp8_wgrad_gemm_{kind}" for kind in (*kinds, "heads", "k_grouped")}
    others = {"fp8_gemm_m_grouped_contiguous_silu", "fp8_gemm_m_grouped_twice", "fp8_gemm_heads"}
    assert set(names) == of_tokens | of_gradients | others
    of_bf16 = (*reachable_bf16(), *reachable_bf16_rows(), *reachable_bf16_depths())
    of_bf16_kinds = *kinds, "k_grouped", "m_grouped_contiguous_silu"
    assert {config.kernel_name for config in of_bf16} == {f"bf16_gemm_{kind}" for kind in of_bf16_kinds}
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


@pytest.mark.host_compiler
@pytest.mark.parametrize(
    ("file", "lacks", "contract"),
    [
        ("work/rows.cuh", "load_all", "kinds.cuh"),
        ("convert/none.cuh", "scale_tiles", "kinds.cuh"),
        ("mainloop.cuh", "begin_scales", "kinds.cuh"),
        ("scales/blocks_of_b.cuh", "load_behind", "mainloop.cuh"),
        ("epilogue/gates_in_turn.cuh", "activate", "epilogue/silu.cuh"),
        ("decode/one.cuh", "product_of", "fp8_gemm_decode.cuh"),
        ("decode/e4m3.cuh", "multiply", "fp8_gemm_decode.cuh"),
    ],
)
def test_an_error_names_what_a_file_lacks(file: str, lacks: str, contract: str) -> None:
    kernel, config = DECODE if contract == "fp8_gemm_decode.cuh" else PRODUCT
    headers = kernel.headers(config)  # type: ignore[arg-type]  # each kernel has a configuration of its own
    without = {**headers, file: re.sub(rf"\b{lacks}\(", "renamed(", headers[file])}
    # In a contract, a line with a comment names the missing function; lines that use the function have no comment.
    checked = rf"{contract}\S*: error: [^\n]*\b{lacks}\b[^\n]*\n[^\n]*\b{lacks}\([^\n]*//"
    with pytest.raises(HostCompileError, match=checked):
        compile_kernel(kernel.source, without, name="k")
    with pytest.raises(CompileError, match=checked):
        compile_cubin(kernel.source, without, name="k")
