"""The `fp8_gemm_decode` kernel in the simulator: the same source, tensor maps and parameters as on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..config_decode import DecodeConfig
from ..kernels import fp8_gemm_decode
from ..problem import DenseProblem, dense_problem
from ..quantize import per_block_cast_to_fp8, per_token_cast_to_fp8
from .arguments import U64, Map, Pointer, Struct
from .fp8_gemm import Outcome, as_it_lies, outcome, right_and_allowed
from .library import HostKernel, compile_kernel
from .rounding import EXACT_STEPS, TENSOR_CORES
from .simulate import Buffer, simulate


def compile_config(config: DecodeConfig, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    headers = {**fp8_gemm_decode.headers(config), **(edits or {})}
    return compile_kernel(fp8_gemm_decode.SOURCE, headers, name=fp8_gemm_decode.NAME)


def random_problem(
    config: DecodeConfig, m: int, n: int, k: int, seed: int = 0, *, in_place: bool = False
) -> DenseProblem:
    """Make a problem with random data for a configuration; D is NaN unless it is C as well (`in_place`)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config.output_is_fp32 else torch.bfloat16
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
) -> Outcome:
    """Compute a product on simulated SMs, and with the reference. `is_dependent`: the kernel ahead may be at work."""
    map_a, map_b = fp8_gemm_decode.tensor_maps(config, p).values()
    in_place = p.c is not None and p.c.data_ptr() == p.d.data_ptr()
    # Params of cuda/fp8_gemm_decode.cuh
    params = Struct(
        Map("a", map_a),
        Map("b", map_b),
        Pointer("sfa"),
        Pointer("sfb"),
        Pointer("d"),
        Pointer(None if p.c is None else "d" if in_place else "c"),
        *map(U64, fp8_gemm_decode.pitches(p)),
        *fp8_gemm_decode.numbers(config, p),
    )
    buffers = {
        "a": Buffer(as_it_lies(p.a), is_dependent=is_dependent),
        "b": Buffer(as_it_lies(p.b), is_dependent=is_dependent),
        "sfa": Buffer(as_it_lies(p.sfa), alignment=4, is_dependent=is_dependent),
        "sfb": Buffer(as_it_lies(p.sfb), alignment=4, is_dependent=is_dependent),
        "d": Buffer(p.d, is_writable=True, is_dependent=is_dependent),
    }
    if p.c is not None and not in_place:
        buffers["c"] = Buffer(as_it_lies(p.c), is_dependent=is_dependent)
    result = simulate(
        kernel,
        [params],
        buffers,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        grid=fp8_gemm_decode.grid(config, p),
        cluster_size=config.cluster_k,
        num_sms=num_sms or 2 * config.cluster_k,
        seed=seed,
        schedule=schedule,
        truncate=truncate,
    )
    tile = config.block_tokens, config.block_n
    return outcome(result, *right_and_allowed(p, TENSOR_CORES if truncate else EXACT_STEPS), tile)
