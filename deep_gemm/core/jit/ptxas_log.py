"""Reads ptxas's part of the compiler's log: registers, stack, spills, and notes about lost performance.

NVRTC 12.8 to 13.5 prints all these lines as "info", even the serious ones:

    ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine ...
    ptxas info    : Function properties for fp8_gemm_dense
    ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 168 registers, used 1 barriers
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MEMORY = re.compile(
    r"Function properties for (?P<function>\S+)\n"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_NOTE = re.compile(r"\((?P<code>C75\d\d)\) (?P<text>.+)")

# Notes are recognized by their words, because the numbers of messages change between versions of ptxas. Since 13.1
# ptxas writes wgmma.wait_group instead of warpgroup.wait, and adds a missing fence without a note.
_WAIT_INJECTED = "the compiler added a wait, because registers of a running WGMMA are used before wgmma.wait_group"
_MEANING = {
    "'setmaxnreg' ignored": "registers are not moved between the warps of a block, so all warps keep the same number",
    "are serialized": "the tensor core's products (WGMMA) wait for each other instead of overlapping",
    "warpgroup.wait is injected": _WAIT_INJECTED,
    "wgmma.wait_group is injected": _WAIT_INJECTED,
    "warpgroup.arrive is injected": "the compiler added a fence, because registers of a WGMMA are written without a "
    "wgmma.fence before it",
}


@dataclass(frozen=True)
class LocalMemory:
    """Bytes of a thread's local memory (which is in DRAM) that ptxas reports for one function."""

    function: str
    stack_frame_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def clean(raw: bytes) -> str:
    """Return the log as text, without NVRTC's NULs and ptxas's times, so that equal compilations have equal logs."""
    text = raw.decode(errors="replace").replace("\0", "")
    lines = [line.rstrip() for line in text.splitlines() if not re.match(r"ptxas info\s*: Compile time = ", line)]
    return "\n".join(lines).strip()


def local_memory(log: str) -> tuple[LocalMemory, ...]:
    """Return the stack and spills of every function that the log describes."""
    return tuple(
        LocalMemory(match["function"], int(match["stack"]), int(match["stores"]), int(match["loads"]))
        for match in _MEMORY.finditer(log)
    )


def notes(log: str) -> list[str]:
    """List the notes C7500 to C7599, each with its meaning: they report slow WGMMA and ignored setmaxnreg."""
    found = []
    for match in _NOTE.finditer(log):
        meanings = [meaning for words, meaning in _MEANING.items() if words in match["text"]]
        found.append(f"{match['code']}: {' '.join([*meanings, '- ptxas:']) if meanings else 'ptxas:'} {match['text']}")
    return found


def complaints(log: str) -> list[str]:
    """List the faults in the log that a finished kernel must not have, each as a sentence."""
    functions = local_memory(log)
    if not functions:
        # A log without a report must not pass: another ptxas may word it differently.
        return ["the compiler's log does not report registers and spills, so they cannot be checked"]
    found = notes(log)
    for function in functions:
        if function.spill_store_bytes or function.spill_load_bytes:
            found.append(
                f"{function.function} has too few registers: it spills {function.spill_store_bytes} bytes of stores "
                f"and {function.spill_load_bytes} bytes of loads to local memory"
            )
        if function.stack_frame_bytes:
            found.append(
                f"{function.function} needs a stack frame of {function.stack_frame_bytes} bytes: an array that should "
                f"be in registers is in local memory (spills, or an index unknown at compile time)"
            )
    return found
