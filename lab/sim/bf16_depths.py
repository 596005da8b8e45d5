"""Groups along k of BF16 in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from deep_gemm.core.jit import driver
from deep_gemm.gemm.bf16 import depths as kernels
from deep_gemm.gemm.bf16.config import Bf16Config
from deep_gemm.gemm.bf16.counted import CountedProblem
from deep_gemm.gemm.bf16.depths import DepthsProblem
from deep_gemm.gemm.kernel import params_of
from deep_gemm.gemm.plan import Plan, addresses_of

from .bf16 import Problem, right_and_allowed
from .dense import Outcome, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel
from .simulate import Buffer, Simulation

P = TypeVar("P", DepthsProblem, CountedProblem)


def random_problem(config: Bf16Config, ks: Sequence[int], m: int, n: int, seed: int = 0) -> DepthsProblem:
    """Make a problem with random data. D is NaN, unless it is also C."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(sum(ks), rows, generator=generator).to(torch.bfloat16) for rows in (m, n))
    d, c = random_d_and_c(config, (len(ks), m, n), generator)
    return DepthsProblem(a, b, d, c, tuple(ks))


def random_d_and_c(
    config: Bf16Config, shape: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """D full of NaN, and C if there is one; D is random if it is C."""
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    d = torch.full(tuple(shape), float("nan"), dtype=dtype)
    c = None
    if config.adds_to_d:
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(d.shape, generator=generator).to(dtype)
    return d, c


def run(
    kernel: HostKernel,
    config: Bf16Config,
    p: DepthsProblem,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
) -> Outcome:
    """Compute on simulated SMs and in FP64."""
    return run_plans(
        kernel, config, p, p.ks, kernels.plans_of, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate
    )


def run_plans(
    kernel: HostKernel,
    config: Bf16Config,
    p: P,
    ks: Sequence[int],
    plans_of: Callable[[P, Bf16Config, int, driver.Launcher], list[Plan]],
    *,
    num_sms: int,
    seed: int,
    schedule: str | None,
    truncate: bool,
) -> Outcome:
    """Compute by the plans of a problem, and in FP64 for groups of these depths."""
    right, allowed = right_and_allowed_of_groups(p, ks)
    buffers = {name: Buffer(flat_memory(getattr(p, name))) for name in ("a", "b")}
    buffers["d"] = Buffer(p.d, is_writable=True)
    if p.sfa is not None:
        buffers["sfa"] = Buffer(p.sfa)
    if p.c is not None and p.c.data_ptr() != p.d.data_ptr():
        buffers["c"] = Buffer(flat_memory(p.c))
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
    for plan in plans_of(placed, config, num_sms, launcher):  # type: ignore[arg-type]
        plan.launch(addresses_of(placed))
    return outcome(simulation.result(), right, allowed, (config.block_m, config.block_n))


def right_and_allowed_of_groups(p: DepthsProblem | CountedProblem, ks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The right D of all groups, and how far each element may be from it."""
    parts, first = [], 0
    for group, k in enumerate(ks):
        a, b = p.a[first : first + k].mT, p.b[first : first + k].mT
        parts.append(right_and_allowed(Problem(a, b, p.d[group], None if p.c is None else p.c[group]), 1))
        first += k
    right, allowed = (torch.stack(each) for each in zip(*parts, strict=True))
    return right, allowed
