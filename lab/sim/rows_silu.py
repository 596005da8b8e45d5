"""The `fp8_gemm` kernel for grouped rows that are activated in the simulator: source and parameters are a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import Quantized, empty_scales
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.kernel import ROWS_SILU_PARAMS
from deep_gemm.gemm.rows import silu_launch as kernels
from deep_gemm.gemm.rows.silu_check import SILU_COLUMNS, SiluRowsProblem, silu_rows_problem

from .launcher import Launcher, flat_memory
from .library import HostKernel
from .simulate import Buffer, Result, Simulation

POISON = 0xA5
CANARY = 42.0
"""Values and scales before: a row that must not be written still has them afterwards."""
OUTPUTS = ("d", "scales")
TENSORS = ("a", "sfa", "b", "sfb", "ids", "row_weights", *OUTPUTS)


def random_problem(
    ids: Sequence[int],
    n: int,
    k: int,
    seed: int = 0,
    *,
    groups: int | None = None,
    limit: float | None = None,
    has_weights: bool = True,
    size: float = 1.0,
    gates_apart: bool = False,
) -> SiluRowsProblem:
    """Make a problem with random data. Rows without a group are NaN: values, scales and weights.

    Gates and ups are `size` apart from zero, about.
    """
    generator = torch.Generator().manual_seed(seed)
    m, numbers = len(ids), torch.tensor(ids, dtype=torch.int32)
    groups = groups or int(numbers.max()) + 1
    a, sfa = per_token_cast_to_fp8(torch.randn(m, k, generator=generator) * size)
    b = per_block_cast_to_fp8(torch.randn(groups, n, k, generator=generator) / k**0.5)
    # The scales of gate and of up must differ by more than chance.
    b[1].mul_(torch.rand(b[1].shape, generator=generator) + 0.5)
    row_weights = torch.rand(m, generator=generator) * 2 - 0.5 if has_weights else None
    d = torch.full((m, n // 2), POISON, dtype=torch.uint8).view(torch.float8_e4m3fn)
    columns = SCALE_BLOCK if gates_apart else SILU_COLUMNS
    scales = empty_scales((m,), n // 2, d, mn_major=True, gran_k=columns).fill_(CANARY)
    unused = numbers < 0
    a.view(torch.uint8)[unused] = 0x7F
    for x in (sfa, row_weights):
        if x is not None:
            x[unused] = float("nan")
    return silu_rows_problem((a, sfa), b, (d, scales), numbers, row_weights, limit, gates_apart)


def run(
    kernel: HostKernel,
    config: GemmConfig,
    p: SiluRowsProblem,
    *,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
) -> tuple[Quantized, Result]:
    """Compute a product on simulated SMs: values and scales, as they are afterwards."""
    p = kernels.prepared(p)
    alignments = {"sfb": 4, "row_weights": 4}
    given = {name: getattr(p, name) for name in TENSORS if getattr(p, name) is not None}
    buffers = {
        name: Buffer(flat_memory(x), is_writable=name in OUTPUTS, alignment=alignments.get(name, 16))
        for name, x in given.items()
    }
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    tensors: Any = {name: simulation.tensor(name, x) for name, x in given.items()}
    placed = p._replace(**tensors)
    launcher = Launcher(
        simulation, kernel, ROWS_SILU_PARAMS, threads=config.num_threads, shared_bytes=config.shared_bytes
    )
    plan = kernels.plan_of(placed, config, num_sms, launcher)  # type: ignore[arg-type]
    plan.launch(kernels.addresses(placed))
    result = simulation.result()
    return (as_before(p.d, result.buffers["d"]), as_before(p.scales, result.buffers["scales"])), result


def as_before(like: Tensor, written: object) -> Tensor:
    """See what a kernel wrote as the tensor that it was made from."""
    assert isinstance(written, Tensor)
    return written.view(like.dtype).as_strided(like.shape, like.stride())
