"""Shows compiled kernels: their resources, their instructions, and the results of their gates.

This module needs no GPU. It compiles kernels without the cache, so that it measures the time of a first use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deep_gemm.core.gpu import REGISTERS_PER_SM, SHARED_BYTES_LIMIT
from deep_gemm.core.jit.compiler import compiler_version
from deep_gemm.core.jit.cubin import NO_DISASSEMBLER, KernelReport, disassemble, report
from deep_gemm.core.kernel import CodePlan, Kernel
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import BLOCK_K, GemmConfig

from .gates import REGISTERS_STEP, Verdict, verdicts
from .kernels import compiled as compiled_kernel

OPCODES = {
    "QGMMA": "FP8 tensor core products, 64 x n x 32 each",
    "HGMMA": "BF16 tensor core products, 64 x n x 16 each",
    "HMMA": "products of a warp's tensor cores",
    "FFMA": "products and sums in FP32, rounded once: promotion of partial sums",
    "FMUL": "products in FP32: scale of A times scale of B",
    "FADD": "additions in FP32",
    "MUFU": "reciprocals, where something is divided",
    "SHFL": "values handed from lane to lane: scales of B, roles",
    "WARPGROUP": "fences and waits around the products",
    "UTMALDG": "TMA loads",
    "UTMASTG": "TMA stores",
    "UTMAREDG": "TMA stores that add",
    "UBLKCP": "copies of rows between shared memory and addresses",
    "SYNCS": "barriers in shared memory (mbarrier): those of the ring",
    "BAR": "barriers of a block or a warpgroup",
    "LDS": "loads from shared memory: scales of A",
    "STSM": "stores of matrices to shared memory: D in BF16",
    "STS": "stores to shared memory: D in FP32",
    "LDG": "loads from global memory: scales of B and C",
    "STG": "stores to global memory",
    "USETMAXREG": "registers moved between warps",
    "LDL": "local memory read: spills",
    "STL": "local memory written: spills",
}
"""Instructions that show how a kernel works, each with its purpose; after a colon, the purpose in fp8_gemm."""


@dataclass(frozen=True)
class Inspection:
    """One configuration, compiled."""

    kernel: str
    config: Any
    facts: Mapping[str, str]
    """Facts about the configuration, by name."""
    cubin: bytes
    report: KernelReport
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> int:
        """Count the gates that it passes."""
        return sum(verdict.passed for verdict in self.verdicts)


def inspect(kernel: Kernel[Any], config: Any) -> Inspection:
    """Compile a configuration of a kernel and inspect it."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"{config.name}: {reason}")
    compiler_version()  # loads the compiler now, so that the measured time excludes it
    start = time.perf_counter()
    compiled = compiled_kernel(kernel, config)
    milliseconds = (time.perf_counter() - start) * 1e3
    found, plan = report(compiled.cubin, compiled.log), kernel.code_plan(config)
    is_gemm = kernel.name == "fp8_gemm"
    facts = _facts(config, found) if is_gemm else _common_facts(plan, found)
    facts |= {"code": f"{found.code_bytes} bytes", "compiled in": f"{milliseconds:.0f} ms, cold"}
    results = tuple(verdicts(found, plan))
    return Inspection(kernel.name, config, facts, compiled.cubin, found, results)


def show(found: Inspection, console: Console, *, sass: bool = False) -> None:
    """Print the findings about one kernel."""
    facts = found.report
    console.print(f"[bold]{found.kernel} {found.config.name}[/], sm_90a, NVRTC {compiler_version()}\n")
    console.print(_pairs(found.facts))
    opcodes = _table("instructions", ("opcode", "what it does here"), ("count",))
    for opcode, meaning in OPCODES.items():
        if facts.counts[opcode]:
            meaning = meaning if found.kernel == "fp8_gemm" else meaning.partition(":")[0]  # noqa: PLW2901
            multicast = f", {facts.multicast_loads} multicast" * (opcode == "UTMALDG" and facts.multicast_loads > 0)
            opcodes.add_row(opcode, meaning + multicast, str(facts.counts[opcode]))
    opcodes.add_row("all", "padding included", str(facts.counts.total()), style="dim")
    console.print(opcodes)
    gates = _table("gates", ("gate", "", "protects from"))
    for verdict in found.verdicts:
        gates.add_row(
            verdict.gate.name, "[green]passed[/]" if verdict.passed else "[red]failed[/]", verdict.gate.protects_from
        )
    console.print(gates)
    _show_problems(found, console)
    if sass:
        code = disassemble(found.cubin)
        console.print(f"SASS: {NO_DISASSEMBLER}" if code is None else code, markup=False, soft_wrap=True)


def show_configs(configs: Sequence[GemmConfig | DecodeConfig], console: Console) -> None:
    """Print a list of configurations, without compiling them."""
    title = f"{len(configs)} configurations that can be chosen"
    table = _table(title, ("configuration",), ("stages", "shared bytes", "threads", "registers"))
    for config in configs:
        if isinstance(config, DecodeConfig):
            registers = str(config.registers_limit)
        else:
            registers = " / ".join(map(str, config.registers))
        cells = (config.num_stages, config.shared_bytes, config.num_threads, registers)
        table.add_row(config.name, *map(str, cells))
    console.print(table)
    console.print(
        "registers: of a producer's and of a math thread, once setmaxnreg has moved them; of the decode kernel (2/SM) "
        "as many as a thread may have.",
        style="dim",
    )


def show_other_configs(kernels: Sequence[Kernel[Any]], console: Console) -> None:
    """Print the configurations of kernels that have no table of their own, without compiling them."""
    title = f"{sum(len(kernel.configs()) for kernel in kernels)} configurations of the other kernels"
    table = _table(title, ("configuration",), ("shared bytes", "threads", "registers"))
    for kernel in kernels:
        for config in kernel.configs():
            plan = kernel.code_plan(config)
            numbers = (plan.shared_bytes, _threads_of(plan), _registers_limit(plan))
            table.add_row(f"{kernel.name} {config.name}", *map(str, numbers))
    console.print(table)
    console.print("registers: as many as a thread may have, before setmaxnreg moves them.", style="dim")


def _threads_of(plan: CodePlan) -> int:
    return sum(threads for threads, _ in plan.roles)


def _registers_limit(plan: CodePlan) -> int:
    """Return the most registers of a thread if the planned blocks share an SM: a multiple of 8, at most 255."""
    return min(REGISTERS_PER_SM // (_threads_of(plan) * plan.ctas_per_sm) // REGISTERS_STEP * REGISTERS_STEP, 255)


def _show_problems(found: Inspection, console: Console) -> None:
    for verdict in found.verdicts:
        for problem in verdict.problems:
            console.print(f"[red]{found.config.name}, {verdict.gate.name}:[/] {escape(problem)}")


def _facts(config: GemmConfig, found: KernelReport) -> dict[str, str]:
    producer, math = config.registers
    slot_bytes = (config.block_m + config.block_n) * BLOCK_K + config.block_m * 4
    buffers = config.num_math_warpgroups * config.num_store_buffers
    cluster = "none"
    if config.cluster_size > 1:
        cluster = "2 CTAs share A along n" if config.cluster_n > 1 else "2 CTAs share B along m"
    output = "FP32" if config.is_fp32 else "BF16"
    output += ", plus C" * config.with_c + ", added to D in place" * config.adds_to_d
    units = f"{config.units_per_warpgroup} of 64 x {config.unit_n or config.block_n} in turn"
    return {
        "tile": f"{config.block_m} x {config.block_n} x {BLOCK_K}",
        "output": output,
        "cluster": cluster,
        "threads": f"{config.num_threads}: {config.num_math_warpgroups} math warpgroups and the producer's",
        "work": f"each math warpgroup: {units}",
        "registers": f"{found.registers} a thread at launch, "
        f"{found.registers * config.num_threads} of {REGISTERS_PER_SM} in all",
        "  then": f"{math} for a math thread, {producer} for a producer's",
        "shared memory": f"{config.shared_bytes} of {SHARED_BYTES_LIMIT} bytes",
        "  ring": f"{config.num_stages} stages of {slot_bytes} bytes (A, B, scales of A)",
        "  stores": f"{buffers} buffers of {config.store_buffer_bytes} bytes, "
        f"{config.panels_per_store} panels of 64 x {config.panel_columns} each",
    }


def _common_facts(plan: CodePlan, found: KernelReport) -> dict[str, str]:
    return {
        "threads": f"{_threads_of(plan)}, in {plan.ctas_per_sm} blocks an SM",
        "registers": f"{found.registers} a thread, of {_registers_limit(plan)}",
        "shared memory": f"{plan.shared_bytes} bytes",
    }


def _pairs(pairs: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in pairs.items():
        table.add_row(key, value)
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"\n{title}", title_justify="left", pad_edge=False, show_edge=False)
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
