"""The `fp8_gemm` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import reference
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.dense import launch as kernels
from deep_gemm.gemm.dense.check import DenseProblem, dense_problem
from deep_gemm.gemm.plan import addresses_of

from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel, compile_for_host
from .rounding import EXACT_STEPS, TENSOR_CORES, allowed_difference, describe_mistakes, excess
from .simulate import Buffer, Result, Simulation


@dataclass(frozen=True)
class Outcome:
    """D from the simulator and from the reference, and how far rounding may take their elements apart."""

    d: Tensor
    right: Tensor
    allowed: Tensor
    mistakes: str | None
    """Mistakes in D, in words; None if nothing is."""
    result: Result

    @property
    def worst(self) -> float:
        """Largest difference of an element, relative to the allowed one: up to 1 is right; NaN counts as infinite."""
        return float(excess(self.d, self.right, self.allowed).amax())


def compile_config(config: GemmConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"{config.name}: {reason}")
    return compile_for_host(fp8_gemm.KERNEL, config, edits)


def random_problem(
    config: GemmConfig, m: int, n: int, k: int, seed: int = 0, *, in_place: bool = False
) -> DenseProblem:
    """Make a problem with random data. D is NaN, unless it is also C (`in_place` or `adds_to_d`)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    a = per_token_cast_to_fp8(torch.randn(m, k, generator=generator))
    cast_b = per_token_cast_to_fp8 if config.sfb == PER_ROW else per_block_cast_to_fp8
    b = cast_b(torch.randn(n, k, generator=generator))
    d = torch.full((m, n), float("nan"), dtype=dtype)
    c = None
    if config.adds_to_d or (config.with_c and in_place):
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(m, n, generator=generator).to(dtype)
    recipe = (1, 1, 128) if config.sfb == PER_ROW else None
    return dense_problem(a, b, d, c, recipes=(recipe, None, None))


def run(
    kernel: HostKernel,
    config: GemmConfig,
    p: DenseProblem,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    is_dependent: bool = False,
) -> Outcome:
    """Compute a product on simulated SMs and with the reference. `is_dependent`: the kernel ahead may still run."""
    p = kernels.prepared(config, p)
    simulation = Simulation(
        buffers_of(p, is_dependent), num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate
    )
    placed = placed_in(simulation, p)
    launcher = Launcher(
        simulation,
        kernel,
        fp8_gemm.DENSE_PARAMS,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster_size,
    )
    plan = kernels.plan_of(placed, kernels.output_of(placed), config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(addresses_of(placed))
    result = simulation.result()
    tile = config.block_m, config.block_n
    return outcome(result, *right_and_allowed(p, TENSOR_CORES if truncate else EXACT_STEPS), tile)


def right_and_allowed(p: DenseProblem, partial_sums: float) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it."""
    right = torch.empty_like(p.d)
    reference.dense(p._replace(d=right))
    return right, allowed_difference(p, right, partial_sums)


def outcome(result: Result, right: Tensor, allowed: Tensor, tile: tuple[int, int] | None = None) -> Outcome:
    """Compare the D of a simulation with the right one."""
    d = result.buffers["d"]
    assert isinstance(d, Tensor)
    flat_d, flat_right, flat_allowed = (x.flatten(0, -2) for x in (d, right, allowed))
    return Outcome(d, right, allowed, describe_mistakes(flat_d, flat_right, flat_allowed, tile), result)


def buffers_of(p: DenseProblem, is_dependent: bool = False, weight_is_ready: bool = False) -> dict[str, Buffer]:
    """A problem's operands as the simulator's buffers, each with the least alignment that is allowed.

    `is_dependent`: the kernel ahead may still write them, all but B if `weight_is_ready`.
    """
    alignments = {"sfb": 16 if p.of_b == PER_ROW else 4}
    found = {
        name: Buffer(
            flat_memory(x),
            alignment=alignments.get(name, 16),
            is_dependent=is_dependent and not (weight_is_ready and name == "b"),
        )
        for name, x in (("a", p.a), ("b", p.b), ("sfa", p.sfa), ("sfb", p.sfb))
    }
    found["d"] = Buffer(p.d, is_writable=True, is_dependent=is_dependent)
    if p.c is not None and p.c.data_ptr() != p.d.data_ptr():
        found["c"] = Buffer(flat_memory(p.c), is_dependent=is_dependent)
    return found
