"""Facts of a compiled kernel: what it needs, and which instructions its machine code has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from . import ptxas_log
from .cubin import read_kernels


@dataclass(frozen=True)
class KernelReport:
    """Facts of one kernel."""

    name: str
    registers: int
    stack_frame_bytes: int
    static_shared_bytes: int
    code_bytes: int
    counts: Counter[str]
    """Instructions by mnemonic, including the padding's."""
    multicast_loads: int
    """TMA loads that write to every CTA of a cluster."""
    setmaxnreg: frozenset[int]
    """The register counts that its setmaxnreg instructions ask for."""
    notes: tuple[str, ...]
    """ptxas's notes about WGMMA and setmaxnreg."""


def report(cubin: bytes, log: str, *, kernel: str | None = None) -> KernelReport:
    """The report on one kernel. `kernel`, its name, may be left out if the cubin holds only one."""
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
        multicast_loads=sum(i.mnemonic == "UTMALDG" and i.is_multicast for i in code.instructions),
        setmaxnreg=frozenset(i.immediate for i in code.instructions if i.mnemonic == "USETMAXREG"),
        notes=tuple(ptxas_log.notes(log)),
    )
