"""Gates find out a kernel of the indexer's logits that is broken."""

from __future__ import annotations

import pytest

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.indexer.kernel import KERNEL, MqaConfig, mqa_config
from lab.gates import violations


def problems(config: MqaConfig, headers: dict[str, str]) -> list[str]:
    kernel = compile_cubin(KERNEL.source, headers, name=KERNEL.name)
    return violations(report(kernel.cubin, kernel.log), KERNEL.code_plan(config))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # the first unit is read while its product runs
        (
            "ptx::wgmma_wait_group<kInFlight < kLag ? kInFlight : kLag>();",
            "if (kUnit) ptx::wgmma_wait_group<0>();",
            "C7517",
        ),
        ("ptx::setmaxnreg_inc<kMathRegisters>();", "", "setmaxnreg"),
        ("kBlock * kBlockKeys,\n", "kBlock * 64,\n", None),
    ],
    ids=["no wait", "no setmaxnreg", "a change that gates allow"],
)
def test_a_broken_kernel_does_not_pass(old: str, new: str, expected: str | None) -> None:
    config = mqa_config(64, 128, 4, False, False)
    headers = KERNEL.headers(config)
    assert headers["fp8_mqa_logits.cuh"].count(old) == 1
    headers["fp8_mqa_logits.cuh"] = headers["fp8_mqa_logits.cuh"].replace(old, new)
    found = problems(config, headers)
    assert found == [] if expected is None else any(expected in problem for problem in found)
