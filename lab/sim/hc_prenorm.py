"""Both kernels of hyper-connections in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.kernel import launch
from deep_gemm.hyper.check import BLOCK_K, HcProblem
from deep_gemm.hyper.choose import Chosen, kernel_of
from deep_gemm.hyper.kernel import PRODUCT_K
from deep_gemm.hyper.reference import hc_prenorm as reference
from deep_gemm.hyper.reference import to_tf32

from .launcher import Launcher, flat_memory
from .library import HostKernel, compile_for_host
from .rounding import FP32_UNIT
from .simulate import Buffer, Simulation

LEFT_OVER = 2.0**-133
"""The most that is lost of a value of B below 2^-123."""


def compile_config(config: Chosen, edits: Mapping[str, str] | None = None) -> HostKernel:
    """Compile the kernel for the host; `edits` replaces sources by name, for mutations."""
    return compile_for_host(kernel_of(config).KERNEL, config, edits)


def run(
    kernel: HostKernel,
    config: Chosen,
    a: Tensor,
    b: Tensor,
    splits: int = 1,
    *,
    num_sms: int | None = None,
    seed: int = 0,
    schedule: str | None = None,
    truncate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute D `[splits, m, n]` and sqr_sum `[splits, m]` on simulated SMs. What is left unwritten is NaN."""
    m, n = len(a), len(b)
    d, sqr_sum = torch.full((splits, m, n), torch.nan), torch.full((splits, m), torch.nan)
    buffers = {
        "a": Buffer(flat_memory(a), is_dependent=True),
        "b": Buffer(flat_memory(b), is_dependent=True),
        "d": Buffer(d, is_writable=True, is_dependent=True, alignment=4),
        "sqr_sum": Buffer(sqr_sum, is_writable=True, is_dependent=True, alignment=4),
    }
    num_sms = num_sms or 2 * config.cluster
    simulation = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
    module = kernel_of(config)
    launcher: Any = Launcher(
        simulation,
        kernel,
        module.PARAMS,
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        cluster_size=config.cluster,
    )
    placed = (simulation.tensor(name, x) for name, x in (("a", a), ("b", b), ("d", d), ("sqr_sum", sqr_sum)))
    params = module.bind(config, launcher, HcProblem(*placed))
    launch(launcher, params, module.grid(config, m, n, splits, num_sms), -1)
    found = simulation.result().buffers
    return torch.as_tensor(found["d"]), torch.as_tensor(found["sqr_sum"])


def random_operands(m: int, n: int, k: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Make normally distributed operands. Half of B's values lie in the middle between two of TF32."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=g).bfloat16(), torch.randn(n, k, generator=g)
    in_the_middle = ((b.view(torch.int32) & ~0x1FFF) | 0x1000).view(torch.float32)
    b = torch.where(torch.rand(n, k, generator=g) < 0.5, in_the_middle, b)
    return a.to(device), b.to(device)


def mistakes(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, of_step: float = 1.0) -> str | None:
    """Say what is wrong with results `[splits, m, n]` and `[splits, m]`; None if nothing is.

    A product of 16 along k, one of high and one of low parts, may be off by `of_step` units of the magnitudes' sum.
    """
    right = HcProblem(a, b, torch.empty_like(d), torch.empty_like(sqr_sum))
    reference(right)
    wide, vectors = (x.double().nan_to_num(0, 0, 0).abs() for x in (a, to_tf32(b)))
    steps = ceil_div(a.shape[1] // BLOCK_K, len(d)) * (BLOCK_K // PRODUCT_K)
    allowed_d = (wide @ vectors.t()) * ((steps * of_step + 20) * FP32_UNIT) + wide.sum(1, keepdim=True) * LEFT_OVER
    allowed_sums = wide.square().sum(1) * ((steps + 20) * FP32_UNIT)
    return _difference("d", d, right.d, allowed_d) or _difference("sqr_sum", sqr_sum, right.sqr_sum, allowed_sums)


def _difference(name: str, got: Tensor, expected: Tensor, allowed: Tensor) -> str | None:
    is_near = (got.double() - expected.double()).abs() <= allowed
    is_right = torch.where(expected.isfinite(), is_near, (got == expected) | (got.isnan() & expected.isnan()))
    if is_right.all():
        return None
    at = tuple((~is_right).nonzero()[0].tolist())
    return (
        f"{int((~is_right).sum())} of {got.numel()} elements of {name} are wrong, the first at {at}: "
        f"{got[at].item():.9g} instead of {expected[at].item():.9g}"
    )
