"""The kernel that lays scales out is compiled, and its machine code is what was planned."""

from __future__ import annotations

from deep_gemm.casts import lay_scales
from deep_gemm.casts.lay_scales import CONFIG
from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from lab.gates import violations


def test_laying_scales_is_what_was_planned() -> None:
    kernel = compile_cubin(lay_scales.KERNEL.source, lay_scales.KERNEL.headers(CONFIG), name=lay_scales.KERNEL.name)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, lay_scales.KERNEL.code_plan(CONFIG)) == []
    each = CONFIG.rows * CONFIG.blocks // CONFIG.num_threads
    assert [found.counts[opcode] for opcode in ("LDG", "STS", "LDS", "STG")] == [each] * 4
