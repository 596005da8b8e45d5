"""The kernels of paged logits are compiled for every configuration, and are what was planned."""

from __future__ import annotations

import pytest
from thorough import configurations

from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.indexer import paged_kernel as fp8_paged_mqa_logits
from deep_gemm.indexer import plan_paged_contexts
from deep_gemm.indexer.paged_config import PagedConfig, paged_config
from lab.gates import violations


def problems(config: PagedConfig, headers: dict[str, str]) -> list[str]:
    kernel = compile_cubin(fp8_paged_mqa_logits.KERNEL.source, headers, name=fp8_paged_mqa_logits.KERNEL.kernel_name)
    return violations(report(kernel.cubin, kernel.log), fp8_paged_mqa_logits.code_plan(config))


@pytest.mark.parametrize(
    "config", configurations(fp8_paged_mqa_logits.reachable_paged()), ids=lambda config: config.name
)
def test_a_reachable_kernel_is_what_was_planned(config: PagedConfig) -> None:
    assert config.why_illegal() is None
    assert problems(config, fp8_paged_mqa_logits.KERNEL.headers(config)) == []


def test_every_reachable_configuration_is_legal() -> None:
    for config in fp8_paged_mqa_logits.reachable_paged():
        assert config.why_illegal() is None, config


def test_the_kernel_that_plans_is_what_was_planned() -> None:
    config = plan_paged_contexts.CONFIG
    kernel = compile_cubin(
        plan_paged_contexts.KERNEL.source,
        plan_paged_contexts.KERNEL.headers(config),
        name=plan_paged_contexts.KERNEL.kernel_name,
    )
    assert violations(report(kernel.cubin, kernel.log), plan_paged_contexts.KERNEL.code_plan(config)) == []


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
    headers = fp8_paged_mqa_logits.KERNEL.headers(config)
    assert headers["fp8_paged_mqa_logits.cuh"].count(old) == 1
    headers["fp8_paged_mqa_logits.cuh"] = headers["fp8_paged_mqa_logits.cuh"].replace(old, new)
    assert any(expected in problem for problem in problems(config, headers))
