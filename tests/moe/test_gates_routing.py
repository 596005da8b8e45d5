"""Every kernel of rows of experts is compiled, and its machine code is what was planned."""

from __future__ import annotations

from typing import Any

import pytest

from deep_gemm.across import gather_rows, meet_ranks, pack_rows, plan_sends, post_rows
from deep_gemm.across.pack_rows import reachable_pack
from deep_gemm.across.plan_sends import reachable_plan_sends
from deep_gemm.across.post_rows import reachable_post
from deep_gemm.core.jit.compiler import compile_cubin
from deep_gemm.core.jit.report import report
from deep_gemm.core.kernel import Kernel
from deep_gemm.moe import gather_weighted, route_rows
from deep_gemm.moe.gather_weighted import reachable_gather, reachable_many
from deep_gemm.moe.route_rows import RouteConfig, reachable_route
from lab.gates import violations


@pytest.mark.parametrize("config", reachable_route(), ids=lambda config: config.name)
def test_routing_is_what_was_planned(config: RouteConfig) -> None:
    kernel = compile_cubin(route_rows.SOURCE, route_rows.headers(config), name=route_rows.NAME)
    assert violations(report(kernel.cubin, kernel.log), route_rows.code_plan(config)) == []


SUMS = [(gather_weighted.KERNEL, each) for each in reachable_gather()]
SUMS_OF_MANY = [(gather_weighted.MANY, each) for each in reachable_many()]


@pytest.mark.parametrize(("kernel", "config"), [*SUMS, *SUMS_OF_MANY], ids=lambda each: each.name)
def test_gathering_is_what_was_planned_and_fuses_no_addition(kernel: Kernel[Any], config: Any) -> None:
    built = compile_cubin(kernel.source, kernel.headers(config), name=kernel.name)
    found = report(built.cubin, built.log)
    assert violations(found, kernel.code_plan(config)) == []
    assert found.counts["FFMA"] == 0


PLANNED: dict[Kernel[Any], list[Any]] = {
    route_rows.COUNTER: route_rows.reachable_count(),
    plan_sends.KERNEL: reachable_plan_sends(),
    pack_rows.KERNEL: reachable_pack(),
    post_rows.KERNEL: reachable_post(),
    gather_rows.KERNEL: [gather_rows.CONFIG],
    meet_ranks.KERNEL: [meet_ranks.CONFIG],
}
CASES = [pytest.param(k, config, id=f"{k.name} {config.name}") for k, configs in PLANNED.items() for config in configs]


@pytest.mark.parametrize(("kernel", "config"), CASES)
def test_other_kernels_of_rows_are_what_was_planned(kernel: Kernel[Any], config: Any) -> None:
    built = compile_cubin(kernel.source, kernel.headers(config), name=kernel.name)
    assert violations(report(built.cubin, built.log), kernel.code_plan(config)) == []
