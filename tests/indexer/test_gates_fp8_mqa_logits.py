"""The kernel of the indexer's logits is compiled for every configuration, and is what was planned."""

from __future__ import annotations

import pytest
from thorough import configurations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.indexer.kernel import KERNEL, MqaConfig, mqa_config
from lab.gates import violations


def problems(config: MqaConfig, headers: dict[str, str]) -> list[str]:
    kernel = compile_cubin(KERNEL.source, headers, name=KERNEL.name)
    return violations(report(kernel.cubin, kernel.log), KERNEL.code_plan(config))


HEADS_OF_MODELS = (16, 32, 64)
CONFIGS = [
    config
    for config in KERNEL.configs()
    if config.heads in HEADS_OF_MODELS or config == mqa_config(config.heads, 128, 4, False, False)
]
"""All with numbers of heads that models have; in CI one with each other."""


@pytest.mark.parametrize("config", configurations(CONFIGS), ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: MqaConfig) -> None:
    assert config.why_illegal() is None
    assert problems(config, KERNEL.headers(config)) == []


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
