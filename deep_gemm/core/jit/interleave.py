"""A pass over machine code: every other FFMA of promotion lets another warp issue the next instruction.

Promotion is a sequence of 64 to 128 FFMAs for each thread and k-block. In code of NVRTC before 12.9, a warp keeps the
issue slot for the whole sequence (yield 1). The scale, which all its FFMAs read, stays in the operand cache (reuse 2:
the second operand). In code of NVRTC 12.9 and later, a warp yields the slot at every other FFMA (yield 0), and this
FFMA does not cache its operand (reuse 0). Other warps of the scheduler can then issue their products in between. The
pass makes the same change in code of older compilers.

The pass changes very little, so that no result can change:

- It changes only the yield and reuse bits of promotion FFMAs: FFMAs on registers, without predicate or modifier, whose
  first operand is an accumulator of one of the kernel's QGMMAs. Every other instruction keeps all its bits.
- It changes yield from 1 to 0, never back. Yield is a hint: a warp may lose the slot after any instruction (a miss of
  the instruction cache is enough), and code must be right even then. It skips FFMAs whose stall count is not 1.
- It clears reuse bits and never sets one. An operand that is not in the operand cache is read from the register file.
- It skips a kernel if more than a third of its promotion FFMAs yield: then the kernel is already interleaved.
- It raises a ValueError for a file that is not a cubin for sm_90.

The rule for where to yield was found by comparing cubins of old and new compilers. The turn to yield alternates from
instruction to instruction. It restarts after an instruction outside the math pipes (load, barrier, product, branch).
Only a turn on a promotion FFMA changes bits. No compiler interleaves kernels with 256 or fewer threads on an SM, which
have at most one math warp on each scheduler: see `helps`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from .cubin import Instruction, KernelCode, architecture, read_kernels

VERSION = 1
"""Part of the cache's key: raise it whenever the result of `interleave` changes."""
COMPILERS_THAT_INTERLEAVE = (12, 9)
"""This version of NVRTC and later ones interleave by themselves."""
THREADS_WITHOUT_OTHERS = 256
"""With up to this number of threads on an SM, a scheduler has at most two warps, and one of them is the producer's."""

_FFMA_ON_REGISTERS = 0x223
_ALWAYS = 7 << 12  # the predicate that is always true, in bits 12 to 15
_YIELD = 1 << 45  # in the upper 64 bits
_REUSE = 0xF << 58
_CONTROL_AND_THIRD_SOURCE = ~((1 << 41) - 1) | 0xFF
_FIRST_BEYOND_MATH = 0x119
"""Operations whose low nine bits are at least this are for memory, barriers, tensor cores or branches."""


def interleave(cubin: bytes) -> bytes:
    """Interleave the promotion FFMAs of a cubin. Return it unchanged if there is nothing to do."""
    code = bytearray(cubin)
    for kernel in _kernels(cubin):
        promotions = frozenset(_promotions(kernel))
        yielding = sum(not ffma.control.yield_ for ffma in promotions)
        if yielding * 3 > len(promotions):
            continue
        for ffma in _where_to_yield(kernel.instructions, promotions):
            high = ffma.high & ~(_YIELD | _REUSE)
            code[ffma.offset + 8 : ffma.offset + 16] = high.to_bytes(8, "little")
    return bytes(code)


def pairs(cubin: bytes) -> Counter[tuple[int, int]]:
    """Count the promotion FFMAs by (yield, reuse)."""
    controls = (ffma.control for kernel in _kernels(cubin) for ffma in _promotions(kernel))
    return Counter((control.yield_, control.reuse) for control in controls)


def helps(compiler: str, threads_per_sm: int) -> bool:
    """Tell whether the pass helps code of this compiler ("13.0.88 CL-...") with `threads_per_sm` threads on an SM."""
    major, minor = compiler.split(".")[:2]
    return (int(major), int(minor)) < COMPILERS_THAT_INTERLEAVE and threads_per_sm > THREADS_WITHOUT_OTHERS


def _kernels(cubin: bytes) -> tuple[KernelCode, ...]:
    if (found := architecture(cubin)) != 90:
        raise ValueError(f"cubin: expected a cubin for sm_90, got sm_{found}")
    return read_kernels(cubin)


def _promotions(kernel: KernelCode) -> Iterator[Instruction]:
    partials = {register for i in kernel.instructions if i.mnemonic == "QGMMA" for register in i.accumulators}
    for i in kernel.instructions:
        is_plain = i.low & 0xFFFF == _FFMA_ON_REGISTERS | _ALWAYS and not i.low >> 40
        if is_plain and not i.high & ~_CONTROL_AND_THIRD_SOURCE and i.first_source in partials:
            yield i


def _where_to_yield(instructions: Iterable[Instruction], promotions: frozenset[Instruction]) -> Iterator[Instruction]:
    is_turn = False
    for i in instructions:
        if i.low & 0x1FF >= _FIRST_BEYOND_MATH:
            is_turn = False
        elif not i.control.yield_:
            is_turn = True
        else:
            is_turn = not is_turn
            if is_turn and i in promotions and i.control.stall == 1:
                yield i
