"""Gates find out kernels of other families than `fp8_gemm`'s that are broken (test_gates.py), and allow what is not."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.cubin import report
from deep_gemm.gemm.kernel import BF16_GEMM
from deep_gemm.hyper.kernel import KERNEL as HC_PRENORM
from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.indexer.config import InPages, InRows, logits_config
from deep_gemm.indexer.kernel import IN_PAGES, IN_ROWS
from lab.gates import violations


class Break(NamedTuple):
    """An edit of a kernel's source, and a part of what is said of it; None where gates allow it."""

    kernel: Any
    config: Any
    file: str
    old: str
    new: str
    expected: str | None


ADDS_C = next(config for config in BF16_GEMM.configs() if config.with_c and config.cluster_k == config.slices == 1)
HC = HC_PRENORM, HcConfig(128, 24, 2), "hc_prenorm.cuh"
MQA = IN_ROWS, logits_config(64, 128, 4, InRows())
PAGED = IN_PAGES, logits_config(64, 128, 4, InPages(2, 64))
TILES, ROWS_KERNEL, PAGES_KERNEL = "logits/tiles.cuh", "fp8_mqa_logits.cuh", "fp8_paged_mqa_logits.cuh"
WAIT, NO_REGISTERS = (
    "ptx::wgmma_wait_group<kInFlight < kLag ? kInFlight : kLag>();",
    "ptx::setmaxnreg_inc<kMathRegisters>();",
)
LOAD_OF_A, LOAD_OF_B = "      ptx::tma_load_2d(&p.map_a", "shared.b[at.stage], {}, unit.row_n);"
BREAKS = {
    "bf16_gemm: sums that C was added to are not let go": Break(
        BF16_GEMM, ADDS_C, "mainloop_of_slice.cuh", "kWithC || kMayBeEmpty", "kMayBeEmpty", "C7515"
    ),
    "hc_prenorm: no wait": Break(*HC, "    ptx::wgmma_wait_group<0>();\n", "", "C75"),
    "hc_prenorm: A is not loaded": Break(*HC, LOAD_OF_A, LOAD_OF_A.replace("ptx", "if (false) ptx"), "TMA loads"),
    "hc_prenorm: the first block of B": Break(*HC, LOAD_OF_B.format("k_block * kBlockK"), LOAD_OF_B.format(0), None),
    # the first unit is read while its product runs
    "fp8_mqa_logits: no wait": Break(*MQA, TILES, WAIT, "if (kUnit) ptx::wgmma_wait_group<0>();", "C7517"),
    "fp8_mqa_logits: no setmaxnreg": Break(*MQA, ROWS_KERNEL, NO_REGISTERS, "", "setmaxnreg"),
    "fp8_mqa_logits: other keys": Break(*MQA, TILES, "kBlock * work.step,\n", "kBlock * 64,\n", None),
    "fp8_paged_mqa_logits: no wait": Break(*PAGED, TILES, WAIT, "ptx::wgmma_wait_group<1>();", "C75"),
    "fp8_paged_mqa_logits: no setmaxnreg": Break(*PAGED, PAGES_KERNEL, NO_REGISTERS, "", "setmaxnreg"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_does_not_pass(name: str) -> None:
    kernel, config, file, old, new, expected = BREAKS[name]
    headers = kernel.headers(config)
    assert old in headers[file]
    headers[file] = headers[file].replace(old, new)
    compiled = compile_cubin(kernel.source, headers, name=name)
    found = violations(report(compiled.cubin, compiled.log), kernel.code_plan(config))
    assert found == [] if expected is None else any(expected in problem for problem in found)
