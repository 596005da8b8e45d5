"""Is a compiled kernel as it was planned? The facts of its machine code, and gates on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from deep_gemm.jit import ptxas_log
from deep_gemm.jit.cubin import read_kernels


@dataclass(frozen=True)
class KernelReport:
    """What one kernel needs and consists of."""

    name: str
    registers: int
    stack_frame_bytes: int
    static_shared_bytes: int
    code_bytes: int
    counts: Counter[str]
    """Instructions by mnemonic, those of the padding included."""
    setmaxnreg: frozenset[int]
    """The register counts that its setmaxnreg instructions ask for."""
    notes: tuple[str, ...]
    """What ptxas says about WGMMA and setmaxnreg."""


def report(cubin: bytes, log: str, *, kernel: str | None = None) -> KernelReport:
    """The report on the kernel of that name, which may be left out where the cubin holds only one."""
    kernels = read_kernels(cubin)
    chosen = [code for code in kernels if kernel in (None, code.name)]
    if len(chosen) != 1:
        raise ValueError(f"kernel: expected one of {[code.name for code in kernels]}, got {kernel!r}")
    code = chosen[0]
    return KernelReport(
        name=code.name,
        registers=code.registers,
        stack_frame_bytes=code.stack_frame_bytes,
        static_shared_bytes=code.static_shared_bytes,
        code_bytes=code.code_bytes,
        counts=code.counts(),
        setmaxnreg=frozenset(i.immediate for i in code.instructions if i.mnemonic == "USETMAXREG"),
        notes=tuple(ptxas_log.notes(log)),
    )


def violations(
    report: KernelReport,
    *,
    expected_qgmma: int | None = None,
    expected_setmaxnreg: Collection[int] = (),
    max_registers: int = 255,
) -> list[str]:
    """Every way in which a kernel is not as planned, a sentence each; empty for a sound kernel.

    `expected_setmaxnreg` holds the register counts that its roles ask for.
    """
    r = report
    found = list(r.notes)
    if r.stack_frame_bytes:
        found.append(
            f"{r.name} keeps {r.stack_frame_bytes} bytes a thread on a stack, which is in slow local memory: an array "
            f"is indexed by what is unknown at compile time, or there are too few registers"
        )
    if r.counts["LDL"] or r.counts["STL"]:
        found.append(
            f"{r.name} reads local memory with {r.counts['LDL']} instructions and writes it with {r.counts['STL']}: "
            f"values that should be in registers were put there"
        )
    if r.registers > max_registers:
        found.append(f"{r.name} uses {r.registers} registers a thread, more than the {max_registers} planned")
    if expected_qgmma is not None and r.counts["QGMMA"] != expected_qgmma:
        found.append(
            f"{r.name} holds {r.counts['QGMMA']} tensor core instructions (QGMMA) where {expected_qgmma} were planned: "
            f"a loop is unrolled more or less than meant, or products were left out"
        )
    if r.setmaxnreg != frozenset(expected_setmaxnreg):
        found.append(
            f"{r.name} sets its register count (setmaxnreg) to {sorted(r.setmaxnreg) or 'nothing'} where "
            f"{sorted(expected_setmaxnreg) or 'nothing'} was planned"
        )
    return found
