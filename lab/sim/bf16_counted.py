"""Groups along k of BF16 of depths that the GPU alone knows, in the simulator, as a GPU gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deep_gemm.gemm.bf16 import counted as kernels
from deep_gemm.gemm.bf16.config import Bf16Config
from deep_gemm.gemm.bf16.counted import CountedProblem

from .bf16_depths import random_d_and_c, run_plans
from .dense import Outcome
from .library import HostKernel


def random_problem(
    config: Bf16Config,
    ks: Sequence[int],
    m: int,
    n: int,
    seed: int = 0,
    *,
    on_gpu_alone: bool = True,
    more_rows: int = 0,
    gap: int = 0,
) -> CountedProblem:
    """Make a problem with random data. D is NaN, unless it is also C.

    Rows that no group has are NaN, and so is what follows each row: `gap` values, a multiple of 8.
    """
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.full((sum(ks) + more_rows, rows + gap), float("nan"), dtype=torch.bfloat16) for rows in (m, n))
    for x, rows in ((a, m), (b, n)):
        x[: sum(ks), :rows] = torch.randn(sum(ks), rows, generator=generator)
    d, c = random_d_and_c(config, (len(ks), m, n), generator)
    counts = torch.tensor(ks, dtype=torch.int32) if on_gpu_alone else None
    return CountedProblem(a[:, :m], b[:, :n], d, c, counts, None if on_gpu_alone else tuple(ks))


def run(
    kernel: HostKernel,
    config: Bf16Config,
    p: CountedProblem,
    *,
    ks: Sequence[int] | None = None,
    num_sms: int = 2,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
) -> Outcome:
    """Compute on simulated SMs and in FP64. `ks`: the depths that are right, if not the problem's."""
    if ks is None:
        ks = p.ks if p.sfa is None else p.sfa.tolist()
    return run_plans(
        kernel,
        config,
        p,
        ks or (),
        kernels.plans_of,
        num_sms=num_sms,
        seed=seed,
        schedule=schedule,
        truncate=truncate,
    )
