"""Every kernel of rows of experts is compiled, and its machine code is what was planned."""

from __future__ import annotations

from types import ModuleType

import pytest

from deep_gemm.jit.compiler import compile_cubin
from deep_gemm.jit.report import report
from deep_gemm.kernels import gather_rows, gather_weighted, meet_ranks, pack_rows, plan_sends, route_rows, send_rows
from deep_gemm.kernels.gather_weighted import GatherConfig, reachable_gather
from deep_gemm.kernels.pack_rows import PackConfig, reachable_pack
from deep_gemm.kernels.plan_sends import PlanSendsConfig, reachable_plan_sends
from deep_gemm.kernels.route_rows import RouteConfig, reachable_route
from deep_gemm.kernels.send_rows import SendConfig, reachable_send
from deep_gemm.tools.gates import violations


@pytest.mark.parametrize("config", reachable_route(), ids=lambda config: config.name)
def test_routing_is_what_was_planned(config: RouteConfig) -> None:
    kernel = compile_cubin(route_rows.SOURCE, route_rows.headers(config), name=route_rows.NAME)
    assert violations(report(kernel.cubin, kernel.log), route_rows.code_plan(config)) == []


@pytest.mark.parametrize("config", reachable_gather(), ids=lambda config: config.name)
def test_gathering_is_what_was_planned_and_fuses_no_addition(config: GatherConfig) -> None:
    kernel = compile_cubin(gather_weighted.SOURCE, gather_weighted.headers(config), name=gather_weighted.NAME)
    found = report(kernel.cubin, kernel.log)
    assert violations(found, gather_weighted.code_plan(config)) == []
    assert found.counts["FFMA"] == 0


@pytest.mark.parametrize("config", reachable_plan_sends(), ids=lambda config: config.name)
def test_planning_is_what_was_planned(config: PlanSendsConfig) -> None:
    kernel = compile_cubin(plan_sends.SOURCE, plan_sends.headers(config), name=plan_sends.NAME)
    assert violations(report(kernel.cubin, kernel.log), plan_sends.code_plan(config)) == []


@pytest.mark.parametrize("config", reachable_pack(), ids=lambda config: config.name)
def test_packing_is_what_was_planned(config: PackConfig) -> None:
    kernel = compile_cubin(pack_rows.SOURCE, pack_rows.headers(config), name=pack_rows.NAME)
    assert violations(report(kernel.cubin, kernel.log), pack_rows.code_plan(config)) == []


@pytest.mark.parametrize("config", reachable_send(), ids=lambda config: config.name)
def test_sending_is_what_was_planned(config: SendConfig) -> None:
    kernel = compile_cubin(send_rows.SOURCE, send_rows.headers(config), name=send_rows.NAME)
    assert violations(report(kernel.cubin, kernel.log), send_rows.code_plan(config)) == []


@pytest.mark.parametrize("module", [gather_rows, meet_ranks], ids=lambda module: module.NAME)
def test_gathering_and_meeting_are_what_was_planned(module: ModuleType) -> None:
    kernel = compile_cubin(module.SOURCE, module.headers(module.CONFIG), name=module.NAME)
    assert violations(report(kernel.cubin, kernel.log), module.code_plan(module.CONFIG)) == []
