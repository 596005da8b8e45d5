"""The `fp8_gemm` kernel in the simulator where groups are along k, and `k_group_maps`, which makes its tensor maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from .. import reference
from ..choose.config import GemmConfig
from ..jit.driver import TENSOR_MAP_BYTES
from ..kernels import fp8_gemm_k_grouped as kernel_side
from ..problem import DenseProblem, KGroupedProblem, k_grouped_problem
from ..problem.layout import SCALE_BLOCK, ceil_div
from ..quantize import k_grouped_cast_to_fp8
from .arguments import U64, Map, Pointer, Struct
from .dense import Outcome, as_it_lies, compile_config, outcome
from .library import HostKernel, compile_kernel
from .rounding import EXACT_STEPS, TENSOR_CORES, allowed_difference
from .simulate import Buffer, KernelLaunch, simulate_in_turn


def compile_maps(edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel that makes the maps; `edits` replaces sources by name."""
    headers = {**kernel_side.maps_headers(), **(edits or {})}
    return compile_kernel(kernel_side.MAPS_SOURCE, headers, name=kernel_side.MAPS_NAME)


@cache
def compiled(config: GemmConfig) -> tuple[HostKernel, HostKernel]:
    """Both kernels, as they are."""
    return compile_maps(), compile_config(config)


def random_problem(
    config: GemmConfig, ks: Sequence[int], m: int, n: int, seed: int = 0, *, on_gpu_alone: bool = False
) -> KGroupedProblem:
    """Make a problem with random data; D is NaN unless it is C as well. `on_gpu_alone`: depths in a tensor only."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (k_grouped_cast_to_fp8(torch.randn(rows, sum(ks), generator=generator), ks) for rows in (m, n))
    d = torch.full((len(ks), m, n), float("nan"))
    c = None
    if config.adds_to_d:
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(d.shape, generator=generator)
    p = k_grouped_problem(a, b, d, list(ks), None, c)
    return p._replace(ks=None, ks_tensor=torch.tensor(ks, dtype=torch.int32)) if on_gpu_alone else p


def run(
    kernels: tuple[HostKernel, HostKernel],
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
    """Compute a product on simulated SMs, and with the reference. `ks`: what the kernels read, if not the problem's."""
    p = kernel_side.prepared(problem)
    buffers = {
        "a": Buffer(p.a, is_dependent=is_dependent),
        "b": Buffer(p.b, is_dependent=is_dependent),
        "sfa": Buffer(as_it_lies(p.sfa), is_dependent=is_dependent),
        "sfb": Buffer(as_it_lies(p.sfb), is_dependent=is_dependent),
        "d": Buffer(p.d, is_writable=True, is_dependent=is_dependent),
        "k_groups": Buffer(
            torch.full((kernel_side.k_groups_bytes(p),), 0xFF, dtype=torch.uint8),
            is_writable=True,
            alignment=64,
            is_dependent=is_dependent,
        ),
    }
    if config.with_c and p.c is not None:
        buffers["c"] = Buffer(as_it_lies(p.c), is_dependent=is_dependent)
    on_gpu, inline = kernel_side.depths(p)
    if on_gpu is not None:
        buffers["ks"] = Buffer(on_gpu if ks is None else ks, alignment=4, is_dependent=is_dependent)
    maps = KernelLaunch(
        kernels[0],
        [_map_params(config, p, inline)],
        kernel_side.MAPS_THREADS,
        0,
        ceil_div(p.num_groups, kernel_side.MAPS_THREADS),
        inputs=frozenset({"d"}),
    )
    product = KernelLaunch(
        kernels[1],
        [_params(config, p)],
        config.num_threads,
        config.shared_bytes,
        kernel_side.grid(config, p, num_sms),
        config.cluster_size,
    )
    result = simulate_in_turn(
        [maps, product], buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate
    )
    return outcome(result, *right_and_allowed(problem, TENSOR_CORES if truncate else EXACT_STEPS))


def _map_params(config: GemmConfig, p: KGroupedProblem, inline: bytes) -> Struct:
    """Build `MapParams` of cuda/k_group_maps.cuh."""
    like_a, like_b = kernel_side.templates(config, p)
    *_, m, n, count, sum_k, num_k_blocks = kernel_side.MAP_SCALARS.unpack(kernel_side.map_scalars(p, 0, 0))
    ks = memoryview(inline.ljust(4 * kernel_side.MAX_INLINE_KS, b"\0")).cast("i")
    return Struct(
        Map("a", like_a),
        Map("b", like_b),
        Pointer("a"),
        Pointer("b"),
        Pointer("k_groups"),
        Pointer(None if inline else "ks"),
        m,
        n,
        count,
        sum_k,
        num_k_blocks,
        *ks,
    )


def _params(config: GemmConfig, p: KGroupedProblem) -> Struct:
    """Build `Params` of cuda/fp8_gemm.cuh."""
    maps = kernel_side.tensor_maps(config, p)
    return Struct(
        *[U64(0)] * (2 * TENSOR_MAP_BYTES // 8),
        *(Map(name, tensor_map) for name, tensor_map in maps.items()),
        Pointer(None),
        Pointer("c" if config.with_c else "d" if config.adds_to_d else None),
        Pointer("d"),
        *map(U64, kernel_side.pitches(p)),
        *(0, 0, p.m, p.n, 0),
        Struct(Pointer("k_groups"), U64(kernel_side.c_stride(p)), p.num_groups, 0, 0, 0),
    )


def right_and_allowed(p: KGroupedProblem, partial_sums: float) -> tuple[Tensor, Tensor]:
    """What D must hold afterwards, and how far each element may be from it."""
    right = torch.empty_like(p.d)
    reference.k_grouped(p._replace(d=right))
    ks = p.ks if p.ks is not None else tuple(p.ks_tensor.tolist())  # type: ignore[union-attr]
    allowed, first_k, first_block = torch.empty_like(right, dtype=torch.float64), 0, 0
    for group, k in enumerate(ks):
        blocks = slice(first_block, first_block + ceil_div(k, SCALE_BLOCK))
        a = p.a[p.m * first_k : p.m * (first_k + k)].view(p.m, k)
        b = p.b[p.n * first_k : p.n * (first_k + k)].view(p.n, k)
        part = DenseProblem(a, p.sfa[:, blocks], b, p.sfb[:, blocks], right[group], None, p.m, p.n, k, 1)
        allowed[group] = allowed_difference(part, right[group], partial_sums)
        first_k, first_block = first_k + k, blocks.stop
    return right, allowed
