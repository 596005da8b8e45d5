"""The kernels of paged logits are compiled for every configuration, and are what was planned."""

from __future__ import annotations

import pytest
from thorough import configurations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.indexer import plan_paged_contexts
from deep_gemm.indexer.paged_kernel import KERNEL, PagedConfig, paged_config
from lab.gates import violations


def problems(config: PagedConfig, headers: dict[str, str]) -> list[str]:
    kernel = compile_cubin(KERNEL.source, headers, name=KERNEL.name)
    return violations(report(kernel.cubin, kernel.log), KERNEL.code_plan(config))


@pytest.mark.parametrize("config", configurations(KERNEL.configs()), ids=lambda config: config.name)
def test_a_reachable_kernel_is_what_was_planned(config: PagedConfig) -> None:
    assert config.why_illegal() is None
    assert problems(config, KERNEL.headers(config)) == []


def test_every_reachable_configuration_is_legal() -> None:
    for config in KERNEL.configs():
        assert config.why_illegal() is None, config


def test_the_kernel_that_plans_is_what_was_planned() -> None:
    planner, config = plan_paged_contexts.KERNEL, plan_paged_contexts.CONFIG
    kernel = compile_cubin(planner.source, planner.headers(config), name=planner.name)
    assert violations(report(kernel.cubin, kernel.log), planner.code_plan(config)) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("ptx::wgmma_wait_group<kInFlight < kLag ? kInFlight : kLag>();", "ptx::wgmma_wait_group<1>();", "C75"),
        ("ptx::setmaxnreg_inc<kMathRegisters>();", "", "setmaxnreg"),
    ],
    ids=["no wait", "no setmaxnreg"],
)
def test_a_broken_kernel_does_not_pass(old: str, new: str, expected: str) -> None:
    config = paged_config(2, 64, 128, 64, 4)
    headers = KERNEL.headers(config)
    assert headers["fp8_paged_mqa_logits.cuh"].count(old) == 1
    headers["fp8_paged_mqa_logits.cuh"] = headers["fp8_paged_mqa_logits.cuh"].replace(old, new)
    assert any(expected in problem for problem in problems(config, headers))
