"""The `fp8_gemm_decode` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem, dense_problem
from deep_gemm.gemm.plan import addresses_of

from .dense import Outcome, buffers_of, outcome, right_and_allowed
from .launcher import Launcher, placed_in
from .library import HostKernel, compile_for_host
from .rounding import EXACT_STEPS, TENSOR_CORES
from .simulate import Simulation


def compile_config(config: DecodeConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(fp8_gemm_decode.KERNEL, config, edits)


def random_problem(
    config: DecodeConfig, m: int, n: int, k: int, seed: int = 0, *, in_place: bool = False
) -> DenseProblem:
    """Make a problem with random data for a configuration. D is NaN, unless it is also C (`in_place`)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    a = per_token_cast_to_fp8(torch.randn(m, k, generator=generator))
    b = per_block_cast_to_fp8(torch.randn(n, k, generator=generator))
    d = torch.full((m, n), float("nan"), dtype=dtype)
    c = None
    if config.with_c:
        c = d if in_place else torch.empty_like(d)
        c.normal_(generator=generator)
    return dense_problem(a, b, d, c)


def run(
    kernel: HostKernel,
    config: DecodeConfig,
    p: DenseProblem,
    *,
    num_sms: int | None = None,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    is_dependent: bool = False,
    weight_is_ready: bool = False,
) -> Outcome:
    """Compute a product on simulated SMs and with the reference.

    `is_dependent`: the kernel ahead may still run. `weight_is_ready`: B is not what it writes, and the kernel may know.
    """
    buffers = buffers_of(p, is_dependent, weight_is_ready)
    buffers |= {name: replace(buffers[name], alignment=4) for name in ("sfa", "sfb")}
    simulation = Simulation(
        buffers, num_sms=num_sms or 2 * config.cluster_k, seed=seed, schedule=schedule, truncate=truncate
    )
    placed = placed_in(simulation, p)
    launcher = Launcher(
        simulation,
        kernel,
        fp8_gemm_decode.PARAMS,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster_k,
    )
    plan = fp8_gemm_decode.plan_of(placed, config, launcher, weight_is_ready=weight_is_ready)  # type: ignore[arg-type]
    plan.launch(addresses_of(placed))
    result = simulation.result()
    tile = config.block_tokens, config.block_n
    return outcome(result, *right_and_allowed(p, TENSOR_CORES if truncate else EXACT_STEPS), tile)
