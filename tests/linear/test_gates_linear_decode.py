"""Every kernel that casts what it multiplies is compiled for each tile that can be chosen, and is what was planned."""

from __future__ import annotations

import pytest
from thorough import configurations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.linear.kernel import KERNEL, LinearDecodeConfig
from lab.gates import violations


@pytest.mark.parametrize("config", configurations(KERNEL.configs()), ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: LinearDecodeConfig) -> None:
    kernel = compile_cubin(KERNEL.source, KERNEL.headers(config), name=KERNEL.name)
    assert violations(report(kernel.cubin, kernel.log), KERNEL.code_plan(config)) == []
