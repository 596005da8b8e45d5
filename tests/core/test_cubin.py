"""Reading machine code: facts about known kernels, and errors for malformed files."""

from __future__ import annotations

import functools
import importlib.util
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_jit import KERNELS

from deep_gemm.core.jit.compiler import CompiledKernel, compile_cubin
from deep_gemm.core.jit.cubin import Control, Instruction, architecture, disassemble, read_kernels, report

PLANNED, STACK, TWO = (KERNELS[name] for name in ("planned", "stack frame", "two"))
TMA, BOX = "cp.async.bulk.tensor.2d", "[%1, {%2, %2}]"


@functools.cache
def compiled(source: str) -> CompiledKernel:
    return compile_cubin(source, {}, name="test")


def asm(instruction: str) -> str:
    """Return the statement of a PTX instruction whose operands are an address, a tensor map and a number."""
    return f'asm volatile("{instruction};" ::"r"(s), "l"(map), "r"(n) : "memory");'


def counts_of(body: str) -> dict[str, int]:
    arguments = "float* p, unsigned* q, unsigned long long map, unsigned s, int n"
    source = f'extern "C" __global__ void __launch_bounds__(128, 1) k({arguments}) {{ {body} }}'
    (kernel,) = read_kernels(compiled(source).cubin)
    return dict(kernel.counts)


# ---- facts ------------------------------------------------------------------------------------------------------


def test_every_kernel_is_read_with_its_own_resources() -> None:
    kernels = {kernel.name: kernel for kernel in read_kernels(compiled(TWO).cubin)}
    assert set(kernels) == {"plain", "shared"}
    assert kernels["plain"].static_shared_bytes == 0
    assert kernels["shared"].static_shared_bytes == 128
    assert [kernels[name].counts["BAR"] for name in ("plain", "shared")] == [0, 1]


def test_registers_and_stack_agree_with_what_ptxas_says() -> None:
    for source in (PLANNED, STACK):
        (kernel,) = read_kernels(compiled(source).cubin)
        log = compiled(source).log
        assert f"{kernel.stack_frame_bytes} bytes stack frame" in log
        assert f"Used {kernel.registers} registers" in log
    assert kernel.stack_frame_bytes == 160


def test_the_stack_of_a_called_function_counts_for_its_kernel() -> None:
    (kernel,) = read_kernels(compiled(KERNELS["stack of a callee"]).cubin)
    assert kernel.stack_frame_bytes == 160


def test_instructions_know_their_place_in_the_file() -> None:
    cubin = compiled(PLANNED).cubin
    (kernel,) = read_kernels(cubin)
    assert kernel.code_bytes == 16 * len(kernel.instructions) > 0
    for instruction in kernel.instructions:
        assert struct.unpack_from("<QQ", cubin, instruction.offset) == (instruction.low, instruction.high)


@pytest.mark.parametrize(
    ("mnemonic", "times", "body"),
    [
        ("FFMA", 1, "p[threadIdx.x] = __fmaf_rn(p[1], p[2], p[3]);"),
        ("FFMA", 1, "p[threadIdx.x] = __fmaf_rn(p[1], 2.5f, p[3]);"),
        ("FFMA", 1, "p[threadIdx.x] = __fmaf_rn(p[1], p[2], 2.5f);"),
        ("FMUL", 1, "p[threadIdx.x] = __fmul_rn(p[1], p[2]);"),
        ("FADD", 1, "p[threadIdx.x] = __fadd_rn(p[1], p[2]);"),
        ("LDG", 3, "p[threadIdx.x] = p[1] * p[2] + p[3];"),
        ("STG", 2, "p[threadIdx.x] = 1; p[threadIdx.x + 128] = 2;"),
        ("SHFL", 1, "q[threadIdx.x] = __shfl_sync(-1, q[threadIdx.x], n);"),
        ("SHFL", 1, "q[threadIdx.x] = __shfl_xor_sync(-1, q[threadIdx.x], 3);"),
        ("ACQBULK", 1, 'asm volatile("griddepcontrol.wait;" ::: "memory"); q[threadIdx.x] = 1;'),
        ("MEMBAR", 1, "__threadfence(); q[threadIdx.x] = 1;"),
        ("BAR", 1, "__syncthreads(); q[threadIdx.x] = 1;"),
        ("STS", 1, "__shared__ float z[128]; z[threadIdx.x] = p[1]; __syncthreads(); p[threadIdx.x] = z[n];"),
        ("LDS", 1, "__shared__ float z[128]; z[threadIdx.x] = p[1]; __syncthreads(); p[threadIdx.x] = z[n];"),
        ("SYNCS", 1, 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s) : "memory");'),
        ("USETMAXREG", 1, 'asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); q[threadIdx.x] = 1;'),
        ("WARPGROUP", 1, 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'),
        ("UTMACMDFLUSH", 1, 'asm volatile("cp.async.bulk.commit_group;" ::: "memory");'),
        ("STSM", 1, asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%2, %2, %2, %2}")),
        ("UTMALDG", 1, asm(f"{TMA}.shared::cluster.global.mbarrier::complete_tx::bytes [%0], {BOX}, [%0]")),
        ("UTMASTG", 1, asm(f"{TMA}.global.shared::cta.bulk_group {BOX}, [%0]")),
        ("UTMAREDG", 1, asm(f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group {BOX}, [%0]")),
    ],
)
def test_the_reader_counts(mnemonic: str, times: int, body: str) -> None:
    assert mnemonic not in counts_of("")
    assert counts_of(body).get(mnemonic) == times


def test_control_fields_lie_where_the_hardware_has_them() -> None:
    high = 5 << 41 | 1 << 45 | 2 << 46 | 6 << 49 | 0b100101 << 52 | 0b0010 << 58
    expected = Control(stall=5, yield_=1, write_barrier=2, read_barrier=6, wait_mask=0b100101, reuse=0b0010)
    assert Instruction(0, 0, high).control == expected


def test_a_load_releases_a_scoreboard_that_its_user_waits_for() -> None:
    source = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] = __fadd_rn(p[1], 2.0f); }'
    (kernel,) = read_kernels(compiled(source).cubin)
    (load,) = [i for i in kernel.instructions if i.mnemonic == "LDG"]
    (add,) = [i for i in kernel.instructions if i.mnemonic == "FADD"]
    assert load.control.write_barrier < 6
    assert add.control.wait_mask >> load.control.write_barrier & 1


@pytest.mark.parametrize(("arch", "found"), [("sm_90a", 90), ("sm_80", 80), ("sm_100", 100)])
def test_a_cubin_tells_which_gpu_it_is_for(arch: str, found: int) -> None:
    source = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] *= 2; }'
    cubin = compile_cubin(source, {}, name="k", arch=arch).cubin
    assert architecture(cubin) == found
    with pytest.raises(ValueError, match="cubin: malformed"):
        architecture(cubin[:7] + b"\0" + cubin[8:])  # an OS ABI that no compiler writes


def test_the_accumulators_of_a_product_are_as_many_as_its_columns_need() -> None:
    for columns in (8, 64, 256):
        assert len(Instruction(0, columns // 8 - 1 << 53, 0).accumulators) == columns // 2
    (kernel,) = read_kernels(compiled(PLANNED).cubin)
    assert {len(i.accumulators) for i in kernel.instructions if i.mnemonic == "QGMMA"} == {4}


# ---- reports ----------------------------------------------------------------------------------------------------


def test_a_report_holds_the_register_counts_that_setmaxnreg_asks_for() -> None:
    kernel = compiled(PLANNED)
    facts = report(kernel.cubin, kernel.log)
    assert facts.setmaxnreg == {40, 232}
    assert facts.counts["QGMMA"] == 2
    assert facts.notes == ()


@pytest.mark.parametrize(
    ("kind", "operands", "multicast"),
    [
        ("", "[%0], [%1, {%2, %2}], [%0]", 0),
        (".L2::cache_hint", "[%0], [%1, {%2, %2}], [%0], %1", 0),
        (".multicast::cluster", "[%0], [%1, {%2, %2}], [%0], %3", 1),
        (".multicast::cluster.L2::cache_hint", "[%0], [%1, {%2, %2}], [%0], %3, %1", 1),
    ],
)
def test_multicast_loads_are_told_from_others(kind: str, operands: str, multicast: int) -> None:
    source = f"""extern "C" __global__ void k(unsigned long long map, unsigned s, int n, unsigned short mask) {{
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{kind} {operands};"
                   ::"r"(s), "l"(map), "r"(n), "h"(mask) : "memory"); }}"""
    kernel = compiled(source)
    facts = report(kernel.cubin, kernel.log)
    assert (facts.counts["UTMALDG"], facts.multicast_loads) == (1, multicast)


def test_a_report_on_one_of_several_kernels_needs_its_name() -> None:
    kernel = compiled(TWO)
    assert report(kernel.cubin, kernel.log, kernel="shared").static_shared_bytes == 128
    for name in (None, "absent"):
        with pytest.raises(ValueError, match=r"expected one of \[.*'shared'"):
            report(kernel.cubin, kernel.log, kernel=name)


# ---- nvdisasm ---------------------------------------------------------------------------------------------------


def test_disassemble_is_none_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert disassemble(compiled(TWO).cubin) is None


@pytest.mark.parametrize("place", ["PATH", "CUDA_HOME", "CUDA_PATH", "triton"])
@pytest.mark.parametrize(("tool", "prints"), [("nvdisasm", "x.cubin"), ("cuobjdump", "-sass x.cubin")])
def test_a_disassembler_is_found_on_path_in_the_toolkit_and_in_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, tool: str, prints: str
) -> None:
    folder = tmp_path / {"PATH": "", "triton": "backends/nvidia/bin"}.get(place, "bin")
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / tool
    script.write_text('#!/bin/sh\necho "$@" | /bin/sed "s/[^ ]*[.]cubin/x.cubin/"\n')
    script.chmod(0o755)
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path) if name == place else "/nonexistent")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py")) if place == "triton" else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert disassemble(compiled(TWO).cubin) == prints + "\n"


def test_disassemble_returns_what_nvdisasm_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\nhead -c 4 "$1" | tail -c 3\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert disassemble(compiled(TWO).cubin) == "ELF"
    tool.write_text("#!/bin/sh\necho not a cubin >&2; exit 1\n")
    with pytest.raises(ValueError, match="not a cubin"):
        disassemble(b"")


# ---- malformed files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_kernels, architecture])
@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF" + b"\0" * 200, b"#!/bin/sh\n" * 20])
def test_what_is_no_cubin_is_a_value_error(data: bytes, read: Callable[[bytes], object]) -> None:
    with pytest.raises(ValueError, match="cubin: "):
        read(data)


def test_every_truncation_is_a_value_error() -> None:
    cubin = compiled(TWO).cubin
    section_table, sections = struct.unpack_from("<Q", cubin, 0x28)[0], cubin[0x3C]
    for length in range(0, section_table + 64 * sections, 7):  # only program headers follow, which no reader uses
        with pytest.raises(ValueError, match="cubin: "):
            read_kernels(cubin[:length])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8), st.booleans())
def test_overwritten_bytes_are_read_or_are_a_value_error(edits: list[tuple[int, int]], in_tables: bool) -> None:
    cubin = bytearray(compiled(TWO).cubin)
    # Most bytes are code, where every value can be read. A wrong byte in the tables at the end may stop a reader.
    start = struct.unpack_from("<Q", cubin, 0x28)[0] if in_tables else 0
    for at, value in edits:
        cubin[start + at % (len(cubin) - start)] = value
    try:
        kernels = read_kernels(bytes(cubin))
    except ValueError:
        return
    for kernel in kernels:
        assert kernel.code_bytes == 16 * len(kernel.instructions)
