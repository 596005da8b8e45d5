"""BF16 products in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.bf16 import launch as kernels
from deep_gemm.gemm.bf16.config import Bf16Config
from deep_gemm.gemm.bf16.kernel import KERNEL as BF16_GEMM
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.output import Groups
from deep_gemm.gemm.plan import addresses_of

from .dense import Outcome, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel, compile_for_host
from .rounding import FP32_UNIT, within_units
from .simulate import Buffer, Simulation


class Problem(NamedTuple):
    """Operands as `kernels.bf16` takes them."""

    a: Tensor
    b: Tensor
    d: Tensor
    c: Tensor | None
    sfa: None = None
    sfb: None = None


def compile_config(config: Bf16Config, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"{config.name}: {reason}")
    return compile_for_host(BF16_GEMM, config, edits)


def random_problem(
    config: Bf16Config,
    m: int,
    n: int,
    k: int,
    seed: int = 0,
    *,
    planes: int = 2,
    in_place: bool = False,
    gap: int = 0,
    exact: bool = False,
) -> Problem:
    """Make a problem with random data, for a configuration of heads `planes` of them. D is NaN, unless it is also C.

    Each row is followed by `gap` NaNs, a multiple of 8. `exact`: small integers, of which no sum is rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    lead = (planes,) if config.groups == Groups.HEADS else ()

    def operand(rows: int, is_mn: bool) -> Tensor:
        shape = (*lead, k, rows) if is_mn else (*lead, rows, k)
        wide = torch.full((*shape[:-1], -(-shape[-1] // 8) * 8 + gap), float("nan"), dtype=torch.bfloat16)
        values = torch.randint(-2, 3, shape, generator=generator) if exact else torch.randn(shape, generator=generator)
        x = wide[..., : shape[-1]].copy_(values)
        return x.mT if is_mn else x

    a, b = operand(m, config.majors.a_is_mn), operand(n, config.majors.b_is_mn)
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    d = torch.full((*lead, m, n), float("nan"), dtype=dtype)
    c = None
    if config.adds_to_d or (config.with_c and in_place):
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(d.shape, generator=generator).to(dtype)
    return Problem(a, b, d, c)


def run(
    kernel: HostKernel,
    config: Bf16Config,
    p: Problem,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    is_dependent: bool = False,
) -> Outcome:
    """Compute on simulated SMs and in FP64. `is_dependent`: the kernel ahead may still run."""
    right, allowed = right_and_allowed(p, config.slices)
    buffers = {name: Buffer(flat_memory(getattr(p, name)), is_dependent=is_dependent) for name in ("a", "b")}
    buffers["d"] = Buffer(p.d, is_writable=True, is_dependent=is_dependent)
    if p.c is not None and p.c.data_ptr() != p.d.data_ptr():
        buffers["c"] = Buffer(flat_memory(p.c), is_dependent=is_dependent)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    placed = placed_in(simulation, p)
    launcher = Launcher(
        simulation,
        kernel,
        params_of(config),
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster_size,
    )
    plan = kernels.plan_of(placed, config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(addresses_of(placed))
    return outcome(simulation.result(), right, allowed, (config.block_m, config.block_n))


def right_and_allowed(p: Problem, slices: int) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it: a rounding for each 16 of k, each slice, and C."""
    a, b = p.a.double(), p.b.double()
    exact, magnitudes = a @ b.mT, a.abs() @ b.mT.abs()
    if p.c is not None:
        exact, magnitudes = exact + p.c.double(), magnitudes + p.c.double().abs()
    roundings = ceil_div(p.a.shape[-1], 16) + slices + 2
    right = exact.to(p.d.dtype)
    return right, within_units(right, magnitudes * (roundings * FP32_UNIT))
