"""Products into the parts of heads in the simulator: both kernels, with the parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm import reference
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.plan import addresses_of
from deep_gemm.gemm.skip import launch as kernels
from deep_gemm.gemm.skip.check import SkipProblem, parts, skip_problem

from . import dense
from . import fp8_gemm_decode as decode
from .dense import Outcome, buffers_of, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel
from .rounding import EXACT_STEPS, allowed_difference
from .simulate import Buffer, Simulation

Config = GemmConfig | DecodeConfig
UNTOUCHED = 42.0


def compile_config(config: Config, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    if isinstance(config, DecodeConfig):
        return decode.compile_config(config, edits)
    return dense.compile_config(config, edits)


def random_problem(
    m: int, n: int, k: int, head_splits: tuple[int, int, int], seed: int = 0, *, extra_columns: int = 0
) -> SkipProblem:
    """Make a problem with random data. All of D is a canary, in rows that have some columns more."""
    generator = torch.Generator().manual_seed(seed)
    a = per_token_cast_to_fp8(torch.randn(m, k, generator=generator))
    b = per_block_cast_to_fp8(torch.randn(n, k, generator=generator))
    columns = n // (head_splits[0] + head_splits[2]) * sum(head_splits)
    d = torch.full((m, columns + extra_columns), UNTOUCHED, dtype=torch.bfloat16)[:, :columns]
    return skip_problem(a, b, d, head_splits, recipes=(None, None, None))


def run(
    kernel: HostKernel,
    config: Config,
    p: SkipProblem,
    *,
    num_sms: int | None = None,
    seed: int = 0,
    schedule: str | None = None,
    is_dependent: bool = False,
) -> Outcome:
    """Compute a product on simulated SMs and with the reference. All of D must be right, columns between parts too."""
    p = kernels.prepared(config, p)
    is_decode = isinstance(config, DecodeConfig)
    cluster = config.cluster_k if isinstance(config, DecodeConfig) else config.cluster_size
    buffers = buffers_of(plain(p), is_dependent)
    buffers["d"] = Buffer(flat_memory(p.d), is_writable=True, is_dependent=is_dependent)
    if is_decode:
        buffers |= {name: replace(buffers[name], alignment=4) for name in ("sfa", "sfb")}
    num_sms = num_sms or 2 * cluster
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule)
    placed = placed_in(simulation, p)
    params = fp8_gemm_decode.SKIP_PARAMS if is_decode else fp8_gemm.SKIP_PARAMS
    launcher = Launcher(
        simulation,
        kernel,
        params,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=cluster,
    )
    plan = kernels.plan_of(placed, config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(addresses_of(placed))
    result = simulation.result()
    flat = result.buffers["d"]
    assert isinstance(flat, Tensor)
    d = flat.as_strided(p.d.shape, p.d.stride())
    result.buffers["d"] = d
    return outcome(result, *right_and_allowed(p))


def plain(p: SkipProblem) -> DenseProblem:
    """The product as a matrix of its own."""
    d = torch.empty(p.m, p.n, dtype=p.d.dtype)
    return DenseProblem(p.a, p.sfa, p.b, p.sfb, d, None, p.m, p.n, p.k, p.of_b)


def right_and_allowed(p: SkipProblem) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it: not at all between the parts."""
    right, allowed = torch.full_like(p.d, UNTOUCHED), torch.full(p.d.shape, 1e-30, dtype=torch.float64)
    reference.skip_head_mid(p._replace(d=right))
    matrix = plain(p)
    reference.dense(matrix)
    of_heads = allowed_difference(matrix, matrix.d, EXACT_STEPS).view(p.m, p.n // p.heads.columns, p.heads.columns)
    left_part, right_part = parts(allowed, p.heads)
    left_part.copy_(of_heads[..., : p.heads.left])
    right_part.copy_(of_heads[..., p.heads.left :])
    return right, allowed
