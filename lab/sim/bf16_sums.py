"""Sums over BF16 products in the simulator: both kernels, with the source, maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.kernel import launch
from deep_gemm.gemm.bf16 import sum_slices
from deep_gemm.gemm.bf16 import sums as kernels
from deep_gemm.gemm.bf16.choose import SUM_OUTPUT
from deep_gemm.gemm.bf16.config import BLOCK_K, Bf16Config
from deep_gemm.gemm.bf16.sum_slices import SlicesConfig
from deep_gemm.gemm.bf16.sums import Operands
from deep_gemm.gemm.kernel import SUM_PARAMS
from deep_gemm.gemm.plan import Plan

from .dense import Outcome, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel, compile_kernel
from .rounding import FP32_UNIT, within_units
from .simulate import Buffer, Simulation


def compile_slices(config: SlicesConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel that adds up slices; `edits` replaces sources by name, for mutations."""
    headers = {**sum_slices.KERNEL.headers(config), **(edits or {})}
    return compile_kernel(sum_slices.KERNEL.source, headers, name=sum_slices.KERNEL.kernel_name)


def random_problem(
    config: Bf16Config, products: int, m: int, n: int, k: int, output: SlicesConfig, seed: int = 0, *, gap: int = 0
) -> Operands:
    """Make a problem with random data. Behind each row are `gap` NaNs, a multiple of 8. D is NaN, unless it is C."""
    assert config.groups == SUM_OUTPUT.groups
    generator = torch.Generator().manual_seed(seed)

    def operand(rows: int, is_mn: bool) -> torch.Tensor:
        shape = (products, k, rows) if is_mn else (products, rows, k)
        wide = torch.full((*shape[:-1], -(-shape[-1] // 8) * 8 + gap), float("nan"), dtype=torch.bfloat16)
        x = wide[..., : shape[-1]].copy_(torch.randn(shape, generator=generator))
        return x.mT if is_mn else x

    a, b = operand(m, config.majors.a_is_mn), operand(n, config.majors.b_is_mn)
    d = torch.full((m, n), float("nan"), dtype=torch.float32 if output.output_is_fp32 else torch.bfloat16)
    return Operands(a, b, d, d.normal_(generator=generator) if output.adds_to_d else None)


def run(
    kernel: HostKernel,
    adder: HostKernel,
    config: Bf16Config,
    slices: int,
    p: Operands,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
) -> Outcome:
    """Compute on simulated SMs and in FP64. What the first kernel leaves unwritten of the workspace is NaN."""
    a, b = p.a.double(), p.b.double()
    exact, magnitudes = (a @ b.mT).sum(0), (a.abs() @ b.abs().mT).sum(0)
    if p.c is not None:
        exact, magnitudes = exact + p.c.double(), magnitudes + p.c.double().abs()
    roundings = ceil_div(len(a) * a.shape[-1] // BLOCK_K, slices) * BLOCK_K // 16 + slices + 2
    right = exact.to(p.d.dtype)
    workspace = torch.full((slices, *p.d.shape), float("nan"))
    buffers = {name: Buffer(flat_memory(getattr(p, name)), is_dependent=True) for name in ("a", "b")}
    buffers["workspace"] = Buffer(workspace, is_writable=True, is_dependent=True)
    buffers["d"] = Buffer(p.d, is_writable=True, is_dependent=True)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    placed = placed_in(simulation, p)
    threads, shared_bytes, cluster = config.num_threads, config.shared_bytes, config.cluster_size
    first = Launcher(
        simulation,
        kernel,
        SUM_PARAMS,
        threads=threads,
        shared_bytes=shared_bytes,
        cluster_size=cluster,
        inputs=frozenset({"d"}),
    )
    between = simulation.tensor("workspace", workspace)
    plan = kernels.plan_of(placed, between, config, num_sms, first)  # type: ignore[arg-type]
    Plan.launch(plan, (placed.a.data_ptr(), 0, placed.b.data_ptr(), 0, between.data_ptr(), 0))
    output = plan.slices_config
    second = Launcher(
        simulation,
        adder,
        sum_slices.PARAMS,
        threads=output.num_threads,
        shared_bytes=output.shared_bytes,
        inputs=frozenset({"workspace"}),
    )
    params = sum_slices.bind(between, placed.d.data_ptr(), plan.pitch)
    launch(second, params, sum_slices.grid(*p.d.shape), -1)  # type: ignore[arg-type]
    return outcome(simulation.result(), right, within_units(right, magnitudes * (roundings * FP32_UNIT)), (64, 64))
