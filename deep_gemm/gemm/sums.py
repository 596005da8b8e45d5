"""Sums over BF16 products on a GPU: slices of their common depth, each in a plane of a workspace, then their sum."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..core.check.layout import byte_span
from ..core.check.memory import copied, empty
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.settings import get_compile_mode, get_pdl, num_sms_of, settings
from . import sum_slices
from .choose.bf16 import select_bf16_sum
from .config.bf16 import BLOCK_K, Bf16Config
from .kernel import BF16_GEMM
from .launch import majors_of
from .launch import plan_of as plan_of_product
from .plan import Addresses, D, Plan, addresses_of
from .problem import Problem, write_without_depth
from .sum_slices import SlicesConfig

SLICES = "slices of a sum over products"


class SumPlan(Plan):
    """A plan of both launches, which makes the workspace between them anew each time."""

    slices: tuple[int, int, int]
    """Shape of the workspace."""
    pitch: int
    """The pitch of D."""
    slices_config: SlicesConfig

    def launch(self, at: Addresses, tail: bytes = b"", tail_at: int = 0) -> None:
        """Launch the products, and behind them the sum of their slices."""
        workspace = empty(SLICES, self.slices, torch.float32, self.place)
        super().launch((*at[:D], workspace.data_ptr(), 0), tail, tail_at)
        params = sum_slices.bind(workspace, at[D], self.pitch)
        ctas = sum_slices.grid(*self.slices[1:])
        sum_slices.KERNEL.run(self.slices_config, params, ctas, self.device, is_dependent=True)


def run(p: Problem) -> SumPlan | None:
    """Compute on the GPU that the tensors are on, and give the plan, which serves other calls."""
    if 0 in p.d.shape:
        return None
    if p.a.numel() == 0:
        write_without_depth(p)
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(p)
    products, m, k = p.a.shape
    n = p.d.shape[1]
    # One matrix for all products: a driver may refuse a stride of 0. A plan would take the caller's address again.
    is_copied = 0 in (p.a.stride(0), p.b.stride(0))
    if is_copied:
        p = p._replace(a=apart(p.a), b=apart(p.b))
    config, slices = select_bf16_sum(m, n, products * (k // BLOCK_K), majors_of(p))
    if settings().print_configs:
        print(f"deep_gemm: {products} x {m} x {n} x {k}, added up, runs {slices} of {config.name}", file=sys.stderr)
    launcher = BF16_GEMM.launcher(config, device, get_pdl())
    workspace = empty(SLICES, (slices, m, n), torch.float32, p.d.device)
    plan = plan_of(p, workspace, config, num_sms_of(gpu_of(device).num_sms), launcher)
    del workspace  # each launch makes its own
    sum_slices.KERNEL.launcher(plan.slices_config, device, True)
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(p))
    return None if is_copied else plan


def apart(x: Tensor) -> Tensor:
    """Copy an operand whose products are all in one place."""
    return x if x.stride(0) else copied("products that share one matrix", x)


def plan_of(p: Problem, workspace: Tensor, config: Bf16Config, num_sms: int, launcher: driver.Launcher) -> SumPlan:
    """Prepare both launches, for a workspace `[slices, m, n]` like this one, which is D to the first.

    D is `[m, n]`, k a multiple of 64. C is D, in FP32, or None.
    """
    slices = workspace.shape[0]
    first, numbers = p._replace(d=workspace, c=None), {"sum.slices": slices}
    plan = plan_of_product(first, config, num_sms, launcher, numbers=numbers, count=slices, kind=SumPlan)
    assert isinstance(plan, SumPlan)
    plan.rows = plan.rows._replace(shape=tuple(p.d.shape), span_d=byte_span(p.d))
    plan.dtype = p.d.dtype
    plan.slices, plan.pitch = (slices, p.m, p.n), p.d.stride(0)
    plan.slices_config = SlicesConfig(p.d.dtype == torch.float32, p.c is not None)
    plan.c_is_d = True if p.c is not None else None
    return plan
