"""The `fp8_gemm` kernel for groups along k in the simulator, and `k_group_maps`, which makes its tensor maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import k_grouped_cast_to_fp8
from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div
from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm import reference
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.depths import launch as kernels
from deep_gemm.gemm.depths import maps_kernel as k_group_maps
from deep_gemm.gemm.depths.check import KGroupedProblem, k_grouped_problem
from deep_gemm.gemm.kernel import DEPTHS_PARAMS
from deep_gemm.gemm.plan import addresses_of

from .dense import Outcome, compile_config, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel, compile_kernel
from .rounding import EXACT_STEPS, TENSOR_CORES, allowed_difference
from .simulate import Buffer, Simulation


def compile_maps(edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel that makes the maps; `edits` replaces sources by name."""
    headers = {**k_group_maps.KERNEL.headers(k_group_maps.CONFIG), **(edits or {})}
    return compile_kernel(k_group_maps.KERNEL.source, headers, name=k_group_maps.KERNEL.kernel_name)


@cache
def compiled(config: GemmConfig) -> tuple[HostKernel, HostKernel]:
    """Both kernels, without edits."""
    return compile_maps(), compile_config(config)


def random_problem(
    config: GemmConfig, ks: Sequence[int], m: int, n: int, seed: int = 0, *, on_gpu_alone: bool = False
) -> KGroupedProblem:
    """Make a problem with random data. D is NaN, unless it is also C. `on_gpu_alone`: depths in a tensor only."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (k_grouped_cast_to_fp8(torch.randn(rows, sum(ks), generator=generator), ks) for rows in (m, n))
    dtype = torch.float32 if config.is_fp32 else torch.bfloat16
    d = torch.full((len(ks), m, n), float("nan"), dtype=dtype)
    c = None
    if config.adds_to_d:
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(d.shape, generator=generator)
    p = k_grouped_problem(a, b, d, list(ks), None, c)
    return p._replace(ks=None, ks_tensor=torch.tensor(ks, dtype=torch.int32)) if on_gpu_alone else p


def run(
    compiled: tuple[HostKernel, HostKernel],
    config: GemmConfig,
    problem: KGroupedProblem,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
    is_dependent: bool = True,
    ks: Tensor | None = None,
) -> Outcome:
    """Compute a product on simulated SMs and with the reference. `ks` replaces the problem's depths for the kernels."""
    p = kernels.prepared(problem)
    buffers = {
        "a": Buffer(p.a, is_dependent=is_dependent),
        "b": Buffer(p.b, is_dependent=is_dependent),
        "sfa": Buffer(flat_memory(p.sfa), is_dependent=is_dependent),
        "sfb": Buffer(flat_memory(p.sfb), is_dependent=is_dependent),
        "d": Buffer(p.d, is_writable=True, is_dependent=is_dependent),
        "k_groups": Buffer(
            torch.full((k_group_maps.room_bytes(p.num_groups),), 0xFF, dtype=torch.uint8),
            is_writable=True,
            alignment=64,
            is_dependent=is_dependent,
        ),
    }
    if config.with_c and p.c is not None:
        buffers["c"] = Buffer(flat_memory(p.c), is_dependent=is_dependent)
    depths = kernels.depths_of(p.ks, p.ks_tensor, p.d.device)
    if isinstance(depths, Tensor):
        buffers["ks"] = Buffer(depths if ks is None else ks, alignment=4, is_dependent=is_dependent)
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    placed = placed_in(simulation, p)
    plan = kernels.plan_of(
        placed,
        config,
        num_sms,
        Launcher(  # type: ignore[arg-type]
            simulation,
            compiled[1],
            DEPTHS_PARAMS,
            threads=config.num_threads,
            shared_bytes=config.shared_bytes,
            cluster_size=config.cluster_size,
        ),
        Launcher(  # type: ignore[arg-type]
            simulation,
            compiled[0],
            k_group_maps.PARAMS,
            threads=k_group_maps.CONFIG.num_threads,
            shared_bytes=0,
            inputs=frozenset({"d"}),
        ),
    )
    at_ks = simulation.address("ks") if isinstance(depths, Tensor) else 0
    at = (*addresses_of(placed), at_ks, simulation.address("k_groups"))
    plan.make_maps.launch(at, b"" if isinstance(depths, Tensor) else depths, kernels.INLINE_KS_AT)
    plan.launch(at)
    result = simulation.result()
    return outcome(result, *right_and_allowed(problem, TENSOR_CORES if truncate else EXACT_STEPS))


def right_and_allowed(p: KGroupedProblem, partial_sums: float) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it."""
    right = torch.empty_like(p.d)
    reference.k_grouped(p._replace(d=right))
    ks = p.ks if p.ks is not None else tuple(p.ks_tensor.tolist())  # type: ignore[union-attr]
    allowed, first_k, first_block = torch.empty_like(right, dtype=torch.float64), 0, 0
    for group, k in enumerate(ks):
        blocks = slice(first_block, first_block + ceil_div(k, SCALE_BLOCK))
        a = p.a[p.m * first_k : p.m * (first_k + k)].view(p.m, k)
        b = p.b[p.n * first_k : p.n * (first_k + k)].view(p.n, k)
        part = DenseProblem(a, p.sfa[:, blocks], b, p.sfb[:, blocks], right[group], None, p.m, p.n, k, PER_ROW)
        allowed[group] = allowed_difference(part, right[group], partial_sums)
        first_k, first_block = first_k + k, blocks.stop
    return right, allowed
