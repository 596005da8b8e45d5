"""Products of heads in the simulator, by either kernel, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm import reference
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.heads import launch as kernels
from deep_gemm.gemm.heads.check import BY_HEADS, HeadsProblem, heads_problem
from deep_gemm.gemm.plan import addresses_of

from . import dense as sim_dense
from . import fp8_gemm_decode as sim_decode
from .dense import Outcome, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel
from .rounding import EXACT_STEPS, TENSOR_CORES, allowed_difference
from .simulate import Buffer, Simulation

Config = GemmConfig | DecodeConfig


def random_problem(
    config: Config, heads: int, m: int, n: int, k: int, seed: int = 0, *, in_place: bool = False, gap: int = 0
) -> HeadsProblem:
    """Make a problem of the form "bhr,hdr->bhd" with random data. D is NaN, unless it is also C.

    Each row of A and B is followed by `gap` other values, a multiple of 16.
    """
    generator = torch.Generator().manual_seed(seed)
    is_per_row = isinstance(config, GemmConfig) and config.sfb == PER_ROW
    adds_to_d = isinstance(config, GemmConfig) and config.adds_to_d
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    a, sfa = per_token_cast_to_fp8(torch.randn(m, heads, k, generator=generator))
    cast_b = per_token_cast_to_fp8 if is_per_row else per_block_cast_to_fp8
    b, sfb = cast_b(torch.randn(heads, n, k, generator=generator))
    d = torch.full((m, heads, n), float("nan"), dtype=dtype)
    c = None
    if adds_to_d or (config.with_c and in_place):
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(m, heads, n, generator=generator).to(dtype)
    recipe = (1, 1, 128) if is_per_row else (1, 128, 128)
    return heads_problem(BY_HEADS, (_wider(a, gap), sfa), (_wider(b, gap), sfb), d, c, (recipe, None, None))


def _wider(x: Tensor, gap: int) -> Tensor:
    """The same values in the rows of a wider tensor, whose others are NaN."""
    if gap == 0:
        return x
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), 0x7F, dtype=torch.uint8).view(x.dtype)
    wide[..., : x.shape[-1]].view(torch.uint8).copy_(x.view(torch.uint8))
    return wide[..., : x.shape[-1]]


def run(
    kernel: HostKernel,
    config: Config,
    problem: HeadsProblem,
    *,
    num_sms: int | None = None,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    is_dependent: bool = False,
) -> Outcome:
    """Compute products on simulated SMs and with the reference. `is_dependent`: the kernel ahead may still run."""
    p = kernels.prepared(config, problem)
    buffers = {name: Buffer(flat_memory(getattr(p, name)), is_dependent=is_dependent) for name in ("a", "b")}
    sfa_alignment = 4 if isinstance(config, DecodeConfig) else 16
    buffers["sfa"] = Buffer(flat_memory(p.sfa), alignment=sfa_alignment, is_dependent=is_dependent)
    sfb_alignment = 16 if p.of_b == PER_ROW else 4
    buffers["sfb"] = Buffer(flat_memory(p.sfb), alignment=sfb_alignment, is_dependent=is_dependent)
    buffers["d"] = Buffer(flat_memory(p.d), is_writable=True, is_dependent=is_dependent)
    if p.c is not None and p.c.data_ptr() != p.d.data_ptr():
        buffers["c"] = Buffer(flat_memory(p.c), is_dependent=is_dependent)
    if isinstance(config, DecodeConfig):
        cluster_size, params = config.cluster_k, fp8_gemm_decode.HEADS_PARAMS
        num_sms = num_sms or 2 * cluster_size
    else:
        cluster_size, params = config.cluster_size, fp8_gemm.HEADS_PARAMS
        num_sms = num_sms or 2
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    placed = placed_in(simulation, p)
    launcher = Launcher(
        simulation,
        kernel,
        params,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=cluster_size,
    )
    plan = kernels.plan_of(placed, kernels.output_of(placed), config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(addresses_of(placed))
    result = simulation.result()
    d = result.buffers["d"]
    assert isinstance(d, Tensor)
    by_head = d.as_strided(p.d.shape, p.d.stride())
    result.buffers["d"] = by_head.contiguous()
    return outcome(result, *right_and_allowed(problem, TENSOR_CORES if truncate else EXACT_STEPS))


def right_and_allowed(p: HeadsProblem, partial_sums: float) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it."""
    right = torch.empty(p.d.shape, dtype=p.d.dtype, device=p.d.device)
    reference.heads(p._replace(d=right))
    allowed = torch.empty(right.shape, dtype=torch.float64, device=right.device)
    for h in range(p.heads):
        c = None if p.c is None else p.c[h]
        of_head = DenseProblem(p.a[h], p.sfa[h], p.b[h], p.sfb[h], right[h], c, p.m, p.n, p.k, p.of_b)
        allowed[h] = allowed_difference(of_head, right[h], partial_sums)
    return right, allowed


def compile_config(config: Config, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    if isinstance(config, DecodeConfig):
        return sim_decode.compile_config(config, edits)
    return sim_dense.compile_config(config, edits)
