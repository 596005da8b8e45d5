"""A reader of cubins: their kernels, the resources and machine code of each, and a report.

A cubin is an ELF64 file. Each kernel has a section `.text.<kernel>` of 128-bit instructions. The section contains the
kernel, the functions that it calls without inlining, and padding at the end. `.nv.info` has records of registers and
stack. NVIDIA does not document this layout. It was found by compiling small kernels with NVRTC 12.8 and 13.0.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from . import ptxas_log

# Mnemonics of nvdisasm 12.8, by an instruction's low 9 bits. The 3 bits above tell where operands are: FFMA is 0x223 on
# registers, and 0x823 with an immediate.
_MNEMONICS = {
    0x002: "MOV",
    0x020: "FMUL",
    0x021: "FADD",
    0x023: "FFMA",
    0x024: "IMAD",
    0x02E: "ACQBULK",
    0x03C: "HMMA",
    0x044: "STSM",
    0x0CA: "R2UR",
    0x108: "MUFU",
    0x118: "NOP",
    0x11D: "BAR",
    0x147: "BRA",
    0x14D: "EXIT",
    0x181: "LDG",
    0x183: "LDL",
    0x184: "LDS",
    0x186: "STG",
    0x187: "STL",
    0x188: "STS",
    0x189: "SHFL",
    0x192: "MEMBAR",
    0x1A7: "SYNCS",
    0x1AE: "LDGSTS",
    0x1B4: "UTMALDG",
    0x1B5: "UTMASTG",
    0x1B6: "UTMAREDG",
    0x1B7: "UTMACMDFLUSH",
    0x1BA: "UBLKCP",
    0x1C5: "WARPGROUP",
    0x1C8: "USETMAXREG",
    0x1F0: "HGMMA",
    0x1F3: "QGMMA",
}

_EM_CUDA = 190
_SHT_NOBITS = 8
_STT_FUNC = 2
_STO_CUDA_ENTRY = 0x10
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_OS_ABI_AT = 7
_FLAGS_AT = 0x30
# The byte of the ELF header's flags that has the GPU's number, by the header's OS ABI: 0x33 before CUDA 13, then 0x41.
_ARCHITECTURE_IN_FLAGS = {0x33: 0, 0x41: 1}
# sm_90 reserves the first 1024 bytes of shared memory for the system. A kernel's section includes these bytes.
_RESERVED_SHARED_BYTES = 1024


class Control(NamedTuple):
    """The scheduling fields of an instruction."""

    stall: int
    """Cycles until the next instruction may issue."""
    yield_: int
    """The bit as stored. 0 lets another warp issue next. (NVIDIA does not document it; compilers use it this way.)"""
    write_barrier: int
    """The scoreboard (0 to 5; 7 for none) that is released when the result is written."""
    read_barrier: int
    """The scoreboard that is released when the operands have been read."""
    wait_mask: int
    """Scoreboards to wait for before issue."""
    reuse: int
    """Bit i keeps source operand i in the operand cache."""


class Instruction(NamedTuple):
    """An instruction: 128 bits of machine code."""

    offset: int
    """Position of the instruction's first byte in the cubin."""
    low: int
    high: int

    @property
    def mnemonic(self) -> str:
        """The operation's name, or a number such as "0x119" if the table lacks it."""
        return _MNEMONICS.get(self.low & 0x1FF) or f"0x{self.low & 0x1FF:03x}"

    @property
    def control(self) -> Control:
        """The scheduling fields, which are bits 105 to 125."""
        bits = self.high >> 41
        return Control(
            stall=bits & 0xF,
            yield_=bits >> 4 & 1,
            write_barrier=bits >> 5 & 7,
            read_barrier=bits >> 8 & 7,
            wait_mask=bits >> 11 & 0x3F,
            reuse=bits >> 17 & 0xF,
        )

    @property
    def destination(self) -> int:
        """Bits 16 to 23: the first register that the instruction writes."""
        return self.low >> 16 & 0xFF

    @property
    def first_source(self) -> int:
        """Bits 24 to 31: the register of the first operand."""
        return self.low >> 24 & 0xFF

    @property
    def accumulators(self) -> range:
        """The registers of a thread that hold the 64 x n sums of a QGMMA. Bits 53 to 57 are n / 8 - 1."""
        return range(self.destination, self.destination + 4 * ((self.low >> 53 & 0x1F) + 1))

    @property
    def immediate(self) -> int:
        """Bits 32 to 63: the immediate operand. In a USETMAXREG it is the register count."""
        return self.low >> 32

    @property
    def is_multicast(self) -> bool:
        """Bit 75 of a UTMALDG: tell whether the instruction has a mask of CTAs as an operand."""
        return bool(self.high >> 11 & 1)


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a cubin."""

    name: str
    registers: int
    """Registers of a thread at launch."""
    stack_frame_bytes: int
    """Local memory of a thread, including the memory of functions that the kernel calls."""
    static_shared_bytes: int
    """Bytes as in the driver's count: with the alignment of a dynamic array, without the system's 1024 bytes."""
    code_bytes: int
    instructions: tuple[Instruction, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of instructions by mnemonic, including the padding."""
        return Counter(instruction.mnemonic for instruction in self.instructions)


@dataclass(frozen=True)
class KernelReport(KernelCode):
    """A kernel of a cubin, with counts of its instructions and the compiler's notes."""

    multicast_loads: int
    """TMA loads that write to every CTA of a cluster."""
    setmaxnreg: frozenset[int]
    """The register counts in the kernel's setmaxnreg instructions."""
    notes: tuple[str, ...]
    """ptxas's notes about WGMMA and setmaxnreg."""


def read_kernels(cubin: bytes) -> tuple[KernelCode, ...]:
    """Return all kernels of a cubin, in the order of its symbols. Raise a ValueError if the cubin is malformed."""
    try:
        return _read_kernels(cubin)
    except (struct.error, KeyError) as error:
        raise ValueError(f"cubin: malformed ({type(error).__name__}: {error})") from error


def report(cubin: bytes, log: str, *, kernel: str | None = None) -> KernelReport:
    """Report on one kernel. `kernel` is its name; it may be None if the cubin has only one kernel."""
    kernels = read_kernels(cubin)
    chosen = [code for code in kernels if kernel in (None, code.name)]
    if len(chosen) != 1:
        raise ValueError(f"kernel: expected one of {[code.name for code in kernels]}, got {kernel!r}")
    code = chosen[0]
    return KernelReport(
        **vars(code),
        multicast_loads=sum(i.mnemonic == "UTMALDG" and i.is_multicast for i in code.instructions),
        setmaxnreg=frozenset(i.immediate for i in code.instructions if i.mnemonic == "USETMAXREG"),
        notes=tuple(ptxas_log.notes(log)),
    )


def architecture(cubin: bytes) -> int:
    """Return the architecture of a cubin, such as 90. Raise a ValueError if the cubin is malformed."""
    try:
        _sections(cubin)
        return cubin[_FLAGS_AT + _ARCHITECTURE_IN_FLAGS[cubin[_OS_ABI_AT]]]
    except (struct.error, KeyError) as error:
        raise ValueError(f"cubin: malformed ({type(error).__name__}: {error})") from error


NO_DISASSEMBLER = (
    "there is no nvdisasm or cuobjdump on PATH, in CUDA_HOME/bin or in Triton. The CUDA toolkit has them "
    "(or: pip install triton). Nothing else in the package needs them."
)


def disassemble(cubin: bytes) -> str | None:
    """Return the output of nvdisasm or cuobjdump; None if both are missing. It is for people: no code depends on it."""
    command = _disassembler()
    if command is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([*command, file.name], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise ValueError(f"cubin: {Path(command[0]).name} refuses it: {run.stderr.strip()}")
    return run.stdout


def _disassembler() -> list[str] | None:
    """Find a disassembler on PATH, in the CUDA toolkit or in Triton."""
    folders = [os.environ.get("PATH", os.defpath)]
    folders += [str(Path(home) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    for name, *options in (["nvdisasm"], ["cuobjdump", "-sass"]):
        if tool := shutil.which(name, path=os.pathsep.join(folders)):
            return [tool, *options]
    return None


@dataclass(frozen=True)
class _Section:
    index: int
    kind: int
    offset: int
    size: int
    link: int

    def bytes_of(self, cubin: bytes) -> bytes:
        if self.kind == _SHT_NOBITS:
            return b""
        if self.offset + self.size > len(cubin):
            raise ValueError(f"cubin: section {self.index} ends past the file's {len(cubin)} bytes")
        return cubin[self.offset : self.offset + self.size]


def _read_kernels(cubin: bytes) -> tuple[KernelCode, ...]:
    sections = _sections(cubin)
    symbols = sections[".symtab"]
    names = next((s for s in sections.values() if s.index == symbols.link), None)
    if names is None:
        raise ValueError("cubin: its symbol table names no string table")
    name_bytes = names.bytes_of(cubin)
    records = _resource_records(sections[".nv.info"].bytes_of(cubin))
    kernels = []
    table = symbols.bytes_of(cubin)
    for index, (name_at, info, other, _, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", table)):
        if info & 0xF != _STT_FUNC or not other & _STO_CUDA_ENTRY:
            continue
        name = _string(name_bytes, name_at)
        text = sections[f".text.{name}"]
        code = text.bytes_of(cubin)
        if not code:
            raise ValueError(f"cubin: kernel {name} has no code")
        shared = sections.get(f".nv.shared.{name}")
        halves = enumerate(struct.iter_unpack("<QQ", code))
        kernels.append(
            KernelCode(
                name=name,
                registers=records[_EIATTR_REGCOUNT, index],
                stack_frame_bytes=records[_EIATTR_FRAME_SIZE, index],
                static_shared_bytes=max(0, shared.size - _RESERVED_SHARED_BYTES) if shared else 0,
                code_bytes=len(code),
                instructions=tuple(Instruction(text.offset + 16 * i, low, high) for i, (low, high) in halves),
            )
        )
    if not kernels:
        raise ValueError("cubin: it holds no kernel")
    return tuple(kernels)


def _sections(cubin: bytes) -> dict[str, _Section]:
    magic, elf_class, byte_order = struct.unpack_from("<4sBB", cubin)
    (machine,) = struct.unpack_from("<H", cubin, 0x12)
    if (magic, elf_class, byte_order, machine) != (b"\x7fELF", 2, 1, _EM_CUDA):
        raise ValueError("cubin: expected a little-endian ELF64 file of machine type CUDA (190)")
    (table_at,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    if entry_bytes != 64 or names_index >= count or table_at + 64 * count > len(cubin):
        raise ValueError("cubin: its section table is damaged")
    headers = list(struct.iter_unpack("<IIQQQQIIQQ", cubin[table_at : table_at + 64 * count]))
    found = [
        _Section(index, kind, offset, size, link)
        for index, (_, kind, _, _, offset, size, link, _, _, _) in enumerate(headers)
    ]
    names = found[names_index].bytes_of(cubin)
    return {_string(names, header[0]): section for header, section in zip(headers, found, strict=True)}


def _string(table: bytes, start: int) -> str:
    end = table.find(b"\0", start)
    if end < 0:
        raise ValueError(f"cubin: no string at offset {start} of a string table")
    return table[start:end].decode()


def _resource_records(info: bytes) -> dict[tuple[int, int], int]:
    """Read the records of `.nv.info` with one symbol and one value, as (attribute, symbol index) -> value."""
    records = {}
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # here `value` is the size of the bytes behind it; in other forms it is the value
            if value == 8:
                symbol, amount = struct.unpack_from("<II", info, at)
                records[attribute, symbol] = amount
            at += value
    return records
