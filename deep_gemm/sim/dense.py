"""The `fp8_gemm` kernel in the simulator: the same source, the same tensor maps and parameters as on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..choose.config import GemmConfig
from ..jit.driver import TENSOR_MAP_BYTES
from ..kernels import fp8_gemm
from ..problem import DenseProblem, dense_problem
from ..problem.layout import get_mn_major_tma_aligned_tensor
from ..quantize import per_block_cast_to_fp8, per_token_cast_to_fp8
from .arguments import U64, Map, Pointer, Struct
from .library import HostKernel, compile_kernel
from .rounding import EXACT_STEPS, TENSOR_CORES, allowed_difference, describe_mistakes, excess
from .simulate import Buffer, Result, simulate


@dataclass(frozen=True)
class Outcome:
    """D from the simulator and from the reference, and how far apart rounding may take their elements."""

    d: Tensor
    right: Tensor
    allowed: Tensor
    mistakes: str | None
    """What is wrong with D, in words; None if nothing is."""
    result: Result

    @property
    def worst(self) -> float:
        """Largest difference of one element, relative to what is allowed: right up to 1, infinite where NaN is."""
        return float(excess(self.d, self.right, self.allowed).amax())


def compile_config(config: GemmConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"{config.name}: {reason}")
    return compile_kernel(fp8_gemm.SOURCE, {**fp8_gemm.headers(config), **(edits or {})}, name=fp8_gemm.NAME)


def random_problem(
    config: GemmConfig, m: int, n: int, k: int, seed: int = 0, *, in_place: bool = False
) -> DenseProblem:
    """Make a problem with random data; D is NaN unless it is C as well, with `in_place` or `adds_to_d`."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config.output_is_fp32 else torch.bfloat16
    a = per_token_cast_to_fp8(torch.randn(m, k, generator=generator))
    cast_b = per_token_cast_to_fp8 if config.sfb_is_per_row else per_block_cast_to_fp8
    b = cast_b(torch.randn(n, k, generator=generator))
    d = torch.full((m, n), float("nan"), dtype=dtype)
    c = None
    if config.adds_to_d or (config.with_c and in_place):
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(m, n, generator=generator).to(dtype)
    recipe = (1, 1, 128) if config.sfb_is_per_row else None
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
    """Compute a product on simulated SMs, and with the reference. `is_dependent`: the kernel ahead may be at work."""
    p = p._replace(sfa=get_mn_major_tma_aligned_tensor(p.sfa))
    if config.sfb_is_per_row:
        p = p._replace(sfb=get_mn_major_tma_aligned_tensor(p.sfb))
    maps = fp8_gemm.tensor_maps(config, p)
    with_c = p.c is not None and not config.adds_to_d
    c_is_d = with_c and p.c is p.d
    # Params of cuda/fp8_gemm.cuh
    params = Struct(
        *(Map(name, tensor_map) for name, tensor_map in maps.items()),
        *([] if config.sfb_is_per_row else [U64(0)] * (TENSOR_MAP_BYTES // 8)),
        Pointer("sfb"),
        Pointer(("d" if c_is_d else "c") if with_c else None),
        Pointer("d"),
        U64(p.c.stride(0) if p.c is not None else 0),
        U64(p.d.stride(0)),
        p.sfb.stride(0),
        p.sfb.stride(1),
        p.m,
        p.n,
        p.k,
        Struct(*[U64(0)] * (fp8_gemm.GROUPS_BYTES // 8)),
    )
    buffers = {
        "a": Buffer(as_it_lies(p.a), is_dependent=is_dependent),
        "b": Buffer(as_it_lies(p.b), is_dependent=is_dependent),
        "sfa": Buffer(as_it_lies(p.sfa), is_dependent=is_dependent),
        "sfb": Buffer(as_it_lies(p.sfb), alignment=16 if config.sfb_is_per_row else 4, is_dependent=is_dependent),
        "d": Buffer(p.d, is_writable=True, is_dependent=is_dependent),
    }
    if with_c and not c_is_d and p.c is not None:
        buffers["c"] = Buffer(as_it_lies(p.c), is_dependent=is_dependent)
    grid = min(num_sms // config.cluster_size * config.cluster_size, fp8_gemm.grid(config, p, num_sms))
    result = simulate(
        kernel,
        [params],
        buffers,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        grid=grid,
        cluster_size=config.cluster_size,
        num_sms=num_sms,
        seed=seed,
        schedule=schedule,
        truncate=truncate,
    )
    tile = config.block_m, config.block_n
    return outcome(result, *right_and_allowed(p, TENSOR_CORES if truncate else EXACT_STEPS), tile)


def right_and_allowed(p: DenseProblem, partial_sums: float) -> tuple[Tensor, Tensor]:
    """What D must hold afterwards, and how far each element may be from it."""
    right = torch.empty_like(p.d)
    reference.dense(p._replace(d=right))
    return right, allowed_difference(p, right, partial_sums)


def outcome(result: Result, right: Tensor, allowed: Tensor, tile: tuple[int, int] | None = None) -> Outcome:
    """Judge what a simulation left in D."""
    d = result.buffers["d"]
    assert isinstance(d, Tensor)
    flat_d, flat_right, flat_allowed = (x.flatten(0, -2) for x in (d, right, allowed))
    return Outcome(d, right, allowed, describe_mistakes(flat_d, flat_right, flat_allowed, tile), result)


def as_it_lies(x: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, padding between rows and all."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,))
