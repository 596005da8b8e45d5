"""Sums over BF16 products on a GPU: slices of their common depth, each in a plane of a workspace, then their sum."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..core.check.memory import copied, empty
from ..core.gpu import gpu_of
from ..core.settings import num_sms_of, settings
from . import sum_slices
from .choose.bf16 import select_bf16_sum
from .config.bf16 import BLOCK_K, Bf16Config
from .launch import majors_of, start
from .problem import Problem, write_without_depth
from .sum_slices import SlicesConfig

SLICES = "slices of a sum over products"


def run(p: Problem) -> None:
    """Compute on the GPU that the tensors are on."""
    if 0 in p.d.shape:
        return
    if p.a.numel() == 0:
        write_without_depth(p)
        return
    products, m, k = p.a.shape
    n = p.d.shape[1]
    if 0 in (p.a.stride(0), p.b.stride(0)):  # one matrix for all products: a driver may refuse a stride of 0
        p = p._replace(a=apart(p.a), b=apart(p.b))
    config, slices = select_bf16_sum(m, n, products * (k // BLOCK_K), majors_of(p))
    if settings().print_configs:
        print(f"deep_gemm: {products} x {m} x {n} x {k}, added up, runs {slices} of {config.name}", file=sys.stderr)
    workspace = empty(SLICES, (slices, m, n), torch.float32, p.d.device)
    launch(p, workspace, config, num_sms_of(gpu_of(p.d.get_device()).num_sms))


def apart(x: Tensor) -> Tensor:
    """Copy an operand whose products are all in one place."""
    return x if x.stride(0) else copied("products that share one matrix", x)


def launch(p: Problem, workspace: Tensor, config: Bf16Config, num_sms: int) -> None:
    """Launch the products, for a workspace `[slices, m, n]` which is D to them, and behind them the sum of slices.

    D is `[m, n]`, k a multiple of 64. C is D, in FP32, or None.
    """
    slices = workspace.shape[0]
    start(p._replace(d=workspace, c=None), config, num_sms, slices, slices=slices)
    of_slices = SlicesConfig(p.d.dtype == torch.float32, p.c is not None)
    values, ctas = sum_slices.values_of(workspace, p.d), sum_slices.grid(p.m, p.n)
    sum_slices.KERNEL.run(of_slices, values, ctas, p.d.get_device(), is_dependent=True)
