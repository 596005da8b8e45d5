"""Sums of BF16 products on a GPU: slices of their common depth, each written to a plane of a workspace, then added.

The kernel of gemm/sum_slices.cuh, which adds the slices, is launched after the kernel that writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.check.memory import copied, empty
from ..core.gpu import gpu_of
from ..core.kernel import Config, Kernel
from ..core.settings import num_sms_of, settings
from .choose.bf16 import select_bf16_sum
from .config.bf16 import BLOCK_K, Bf16Config
from .launch import majors_of, start
from .problem import Problem, write_without_depth

COLUMNS = 128
"""Columns of D that a CTA adds up."""


@dataclass(frozen=True)
class SlicesConfig(Config):
    """One configuration of `sum_slices`."""

    output_is_fp32: bool
    adds_to_d: bool = False
    num_threads: int = 256
    ctas_per_sm: int = 4
    taken = "output_bytes", "adds_to_d", "num_threads", "shared_bytes"

    @property
    def output_bytes(self) -> int:
        """Bytes of an element of D."""
        return 4 if self.output_is_fp32 else 2

    @property
    def name(self) -> str:
        """Short name for people."""
        return f"{'fp32' if self.output_is_fp32 else 'bf16'}{'+d' if self.adds_to_d else ''}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: four sums of each thread."""
        return self.num_threads * 16

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.output_is_fp32 or not self.adds_to_d, "an FP32 D if it adds to D"


def grid(m: int, n: int) -> int:
    """Count the CTAs: each row has one for every `COLUMNS` columns."""
    return m * ceil_div(n, COLUMNS)


def values_of(slices: Tensor, d: Tensor) -> dict[str, Any]:
    """Return the kernel's parameters by member."""
    count, m, n = slices.shape
    return {"slices": slices, "d": d, "d_pitch": d.stride(0), "count": count, "m": m, "n": n}


KERNEL: Kernel[SlicesConfig] = Kernel(
    "sum_slices", "SlicesParams", lambda: [SlicesConfig(False), SlicesConfig(True), SlicesConfig(True, adds_to_d=True)]
)


def run(p: Problem) -> None:
    """Compute on the GPU of the tensors."""
    if 0 in p.d.shape:
        return
    if p.a.numel() == 0:
        write_without_depth(p)
        return
    products, m, k = p.a.shape
    n = p.d.shape[1]
    if 0 in (p.a.stride(0), p.b.stride(0)):  # all products share one matrix: a driver may refuse a stride of 0
        p = p._replace(a=apart(p.a), b=apart(p.b))
    config, slices = select_bf16_sum(m, n, products * (k // BLOCK_K), majors_of(p))
    if settings().print_configs:
        print(f"deep_gemm: {products} x {m} x {n} x {k}, added up, runs {slices} of {config.name}", file=sys.stderr)
    workspace = empty("slices of a sum over products", (slices, m, n), torch.float32, p.d.device)
    launch(p, workspace, config, num_sms_of(gpu_of(p.d.get_device()).num_sms))


def apart(x: Tensor) -> Tensor:
    """Copy an operand if all its products share one matrix, so that each product has its own."""
    return x if x.stride(0) else copied("products that share one matrix", x)


def launch(p: Problem, workspace: Tensor, config: Bf16Config, num_sms: int) -> None:
    """Launch the products, which write slices to the workspace `[slices, m, n]`, and then the sum of the slices.

    D is `[m, n]`, k a multiple of 64. C is D, in FP32, or None.
    """
    slices = workspace.shape[0]
    start(p._replace(d=workspace, c=None), config, num_sms, slices, slices=slices)
    of_slices = SlicesConfig(p.d.dtype == torch.float32, p.c is not None)
    values, ctas = values_of(workspace, p.d), grid(p.m, p.n)
    KERNEL.run(of_slices, values, ctas, p.d.get_device(), is_dependent=True)
