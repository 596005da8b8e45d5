"""Products of groups along k on a GPU: which tile they take, and the plan that launches them."""

from __future__ import annotations

import sys

import torch

from ..choose.config import GemmConfig
from ..choose.depths import select_k_grouped
from ..gpus import gpu_of
from ..problem import KGroupedProblem
from ..settings import generation, get_compile_mode, get_num_sms, settings
from .fp8_gemm import why_unfit
from .fp8_gemm_k_grouped import Plan, output_of, prepared
from .plan import keep, refuse_if

_plans: dict[tuple[object, ...], Plan] = {}


def run(p: KGroupedProblem, config: GemmConfig | None = None) -> None:
    """Compute a product of groups along k on the GPU that its tensors are on. The host reads no depth from there.

    `config` None leaves the choice to the heuristics.
    """
    if 0 in (p.num_groups, p.m, p.n):
        return
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(p, config)
        return
    if p.a.numel() == 0:  # no group has any depth
        if get_compile_mode() == 0:
            p.d.zero_() if p.c is None else p.d.copy_(p.c)
        return
    output, ready = output_of(p), prepared(p)
    if config is None:
        k = p.a.numel() // p.m // p.num_groups
        config = select_k_grouped(p.num_groups, p.m, p.n, k, output, gpu_of(device))
    else:
        refuse_if(config.name, why_unfit(config, 0, output))
    # `generation` stands for the number of SMs and the other settings that a plan depends on.
    strides = tuple(None if x is None else x.stride() for x in (ready.sfa, ready.sfb, p.d, p.c))
    key = (p.num_groups, p.m, p.n, strides, device, generation(), config)
    found = _plans.get(key)
    if found is None:
        if settings().print_configs:
            print(f"deep_gemm: {p.num_groups} groups of {p.m} x {p.n} run {config.name}", file=sys.stderr)
        found = Plan(ready, config, get_num_sms())
        keep(_plans, key, found)
    if get_compile_mode() == 0:
        found.launch(ready)
