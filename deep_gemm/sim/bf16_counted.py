"""Groups along k of BF16 of depths that the GPU alone knows, in the simulator, as a GPU gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..choose.config_bf16 import Bf16Config
from ..kernels import bf16_counted as kernels
from ..kernels.bf16_counted import CountedProblem
from ..kernels.fp8_gemm import params_of
from ..kernels.plan import addresses_of
from .bf16_depths import right_and_allowed_of_groups
from .dense import Outcome, outcome
from .launcher import Launcher, flat_memory, placed_in
from .library import HostKernel
from .simulate import Buffer, Simulation


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
    dtype = torch.float32 if config.output_is_fp32 else torch.bfloat16
    d = torch.full((len(ks), m, n), float("nan"), dtype=dtype)
    c = None
    if config.adds_to_d:
        c = d.normal_(generator=generator)
    elif config.with_c:
        c = torch.randn(d.shape, generator=generator).to(dtype)
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
    right, allowed = right_and_allowed_of_groups(p, ks or ())
    buffers = {name: Buffer(flat_memory(getattr(p, name))) for name in ("a", "b")}
    buffers["d"] = Buffer(p.d, is_writable=True)
    if p.sfa is not None:
        buffers["sfa"] = Buffer(p.sfa)
    if p.c is not None and p.c.data_ptr() != p.d.data_ptr():
        buffers["c"] = Buffer(flat_memory(p.c))
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    placed = placed_in(simulation, p)
    launcher = Launcher(
        simulation,
        kernel,
        params_of(config),
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster_size,
    )
    for plan in kernels.plans_of(placed, config, num_sms, launcher):  # type: ignore[arg-type]
        plan.launch(addresses_of(placed))
    return outcome(simulation.result(), right, allowed, (config.block_m, config.block_n))
