"""Gates that compare a kernel's machine code with the plan of its configuration.

A kernel with spilled registers, or with products that wait for each other, is slow, but its results are right. Tests
of results cannot notice such a fault. Machine code shows the fault, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deep_gemm.core.check.layout import align
from deep_gemm.core.gpu import REGISTERS_PER_SM, SHARED_BYTES_LIMIT
from deep_gemm.core.jit.cubin import KernelReport
from deep_gemm.core.kernel import CodePlan

REGISTERS_STEP = 8
"""A thread's registers are allocated in multiples of this number."""


@dataclass(frozen=True)
class Gate:
    """One rule that every kernel must keep."""

    name: str
    protects_from: str
    """The fault in a kernel that fails the gate."""
    problems: Callable[[KernelReport, CodePlan], list[str]]
    """Returns sentences about problems, for a reader without knowledge of the kernel; empty if the gate is passed."""


@dataclass(frozen=True)
class Verdict:
    """The result of one gate for one kernel."""

    gate: Gate
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Tell whether the kernel keeps the rule."""
        return not self.problems


def verdicts(report: KernelReport, plan: CodePlan) -> list[Verdict]:
    """Return the result of each gate."""
    return [Verdict(gate, tuple(gate.problems(report, plan))) for gate in GATES]


def violations(report: KernelReport, plan: CodePlan) -> list[str]:
    """Return a sentence for each difference between a kernel and its plan; empty for a good kernel."""
    return [problem for verdict in verdicts(report, plan) for problem in verdict.problems]


def _stack(report: KernelReport, plan: CodePlan) -> list[str]:
    if not report.stack_frame_bytes:
        return []
    return [
        f"each thread keeps {report.stack_frame_bytes} bytes on a stack, which is in slow local memory: an array is "
        f"indexed by what is unknown at compile time (a loop that is not unrolled), or there are too few registers"
    ]


def _local_memory(report: KernelReport, plan: CodePlan) -> list[str]:
    loads, stores = report.counts["LDL"], report.counts["STL"]
    if not loads and not stores:
        return []
    return [
        f"local memory is read by {loads} instructions (LDL) and written by {stores} (STL): values that should be in "
        f"registers are kept in memory instead"
    ]


def _tensor_core(report: KernelReport, plan: CodePlan) -> list[str]:
    return [
        f"{report.counts[mnemonic]} tensor core instructions ({mnemonic}) where {planned} were planned, those of one "
        f"k-block: the k loop is unrolled or copied, or products were left out"
        for mnemonic, planned in (("QGMMA", plan.qgmma), ("HGMMA", plan.hgmma))
        if report.counts[mnemonic] != planned
    ]


def _setmaxnreg(report: KernelReport, plan: CodePlan) -> list[str]:
    planned = {registers for _, registers in plan.roles if registers is not None}
    if report.setmaxnreg == planned:
        return []
    return [
        f"registers are moved between warps (setmaxnreg) to {sorted(report.setmaxnreg) or 'nothing'} a thread where "
        f"{sorted(planned) or 'nothing'} was planned: math warps keep too few, or wait for registers that no "
        f"warp releases"
    ]


def _register_pool(report: KernelReport, plan: CodePlan) -> list[str]:
    given = align(report.registers, REGISTERS_STEP) * plan.threads
    asked = sum(threads * (registers or 0) for threads, registers in plan.roles)
    problems = []
    if given * plan.ctas_per_sm > REGISTERS_PER_SM:
        problems.append(
            f"{report.registers} registers a thread for {plan.threads} threads are {given} registers, more than the "
            f"{REGISTERS_PER_SM} of an SM: the launch would fail (the launch bounds state too few threads)"
            if plan.ctas_per_sm == 1
            else f"{report.registers} registers a thread for {plan.threads} threads are {given} registers, "
            f"{plan.ctas_per_sm} times which an SM does not have"
        )
    if asked > given:
        shares = " + ".join(f"{threads} x {registers}" for threads, registers in plan.roles)
        problems.append(
            f"setmaxnreg asks for {shares} = {asked} registers where the launch gave {given}: "
            f"the last warps to ask would wait for ever"
        )
    return problems


def _shared_memory(report: KernelReport, plan: CodePlan) -> list[str]:
    problems = []
    if report.static_shared_bytes:
        problems.append(
            f"{report.static_shared_bytes} bytes of shared memory are static (a __shared__ variable): the plan counts "
            f"only the dynamic part, SharedStorage, where everything belongs"
        )
    needed = plan.shared_bytes + report.static_shared_bytes
    if needed > SHARED_BYTES_LIMIT:
        problems.append(
            f"{needed} bytes of shared memory, more than the {SHARED_BYTES_LIMIT} that a block may have: "
            f"the launch would fail (fewer stages or store buffers are needed)"
        )
    return problems


def _tma_loads(report: KernelReport, plan: CodePlan) -> list[str]:
    problems = []
    if report.counts["UTMALDG"] != plan.tma_loads:
        problems.append(
            f"{report.counts['UTMALDG']} TMA loads (UTMALDG) where {plan.tma_loads} were planned, one for each operand "
            f"and the scales: a load is missing, repeated, or not made by TMA"
        )
    if report.multicast_loads != plan.multicast_loads:
        problems.append(
            f"{report.multicast_loads} TMA loads to all CTAs of a cluster (multicast) where {plan.multicast_loads} "
            f"were planned: a shared operand is loaded twice, or a CTA without a cluster writes to another"
        )
    return problems


def _tma_stores(report: KernelReport, plan: CodePlan) -> list[str]:
    planned = {"UTMASTG": plan.tma_stores, "UTMAREDG": plan.tma_reduces, "UBLKCP": plan.bulk_copies}
    if all(report.counts[mnemonic] == count for mnemonic, count in planned.items()):
        return []
    return [
        f"{report.counts['UTMASTG']} TMA stores (UTMASTG), {report.counts['UTMAREDG']} that add (UTMAREDG) and "
        f"{report.counts['UBLKCP']} of rows (UBLKCP) where {plan.tma_stores}, {plan.tma_reduces} and "
        f"{plan.bulk_copies} were planned, one for each panel or unit: part of D would not be written, or D would be "
        f"overwritten where it is to be added to"
    ]


GATES = (
    Gate("no stack", "arrays in local memory, which is slow", _stack),
    Gate("no local memory", "registers spilled in the k loop", _local_memory),
    Gate("no C75xx note", "products (WGMMA) that wait for each other", lambda report, plan: list(report.notes)),
    Gate("QGMMA as planned", "a k loop copied, products left out", _tensor_core),
    Gate("setmaxnreg as planned", "math warps with too few registers", _setmaxnreg),
    Gate("registers suffice", "launches that fail, or wait for ever", _register_pool),
    Gate("shared memory fits", "launches that fail", _shared_memory),
    Gate("TMA loads as planned", "loads repeated, multicast without a cluster", _tma_loads),
    Gate("TMA stores as planned", "parts of D not written, or overwritten", _tma_stores),
)
