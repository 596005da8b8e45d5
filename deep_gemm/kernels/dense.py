"""Dense products on a GPU: which kernel computes one, and the plan that launches it."""

from __future__ import annotations

import sys
from functools import cache

import torch

from ..choose.config import GemmConfig, Output, tile_config
from ..choose.config_decode import DecodeConfig
from ..choose.dense import select
from ..gpus import Gpu, gpu_of
from ..jit import driver
from ..problem import DenseProblem
from ..problem.layout import ADDRESS_ALIGNMENT
from ..settings import generation, get_batch_invariant, get_compile_mode, num_sms_of, settings
from . import fp8_gemm, fp8_gemm_decode
from .plan import Plan, addresses_of, keep, refuse_if

_plans: dict[tuple[object, ...], Plan] = {}
_elders: dict[tuple[object, ...], fp8_gemm.Plan] = {}
"""Of plans that differ in m alone the first with as many rows as a tile, from which the others are made."""


def run(p: DenseProblem, config: GemmConfig | DecodeConfig | None = None) -> Plan | None:
    """Compute a dense product on the GPU that its tensors are on.

    The plan serves later products of the same kind; it is not given where scales had to be copied first. `config` None
    leaves the choice to the heuristics.
    """
    if p.m == 0 or p.n == 0:
        return None
    if p.k == 0:
        if get_compile_mode() == 0:
            p.d.zero_() if p.c is None else p.d.copy_(p.c)
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(p, config)
    output = output_of(p)
    # `generation` stands for the number of SMs and the other settings that a plan depends on.
    family = (p.n, p.k, output, device, generation(), _layout(p))
    key = (p.m, p.sfa.stride(), config, family)
    found = _plans.get(key)
    if found is None:
        found, ready = _plan(p, output, config, family)
        keep(_plans, key, found)
    else:
        ready = found.prepared(p)
    if get_compile_mode() == 1:
        return None
    found.launch(*addresses_of(ready))
    return found if ready is p else None


def output_of(p: DenseProblem) -> Output:
    """What decides the kernel's code besides the tile: the type of D, how C takes part, how B is scaled."""
    is_fp32, sfb_is_per_row = p.d.dtype == torch.float32, p.sfb_rows == 1
    adds_to_d = p.c is not None and is_fp32 and p.c.data_ptr() == p.d.data_ptr()
    return _output(is_fp32, p.c is not None and not adds_to_d, adds_to_d, sfb_is_per_row)


_output = cache(Output)


def _plan(
    p: DenseProblem, output: Output, config: GemmConfig | DecodeConfig | None, family: tuple[object, ...]
) -> tuple[Plan, DenseProblem]:
    """Prepare the launch of a kernel, and the problem for it. A configuration that was given must suit the problem."""
    gpu = gpu_of(p.d.get_device())
    num_sms = num_sms_of(gpu.num_sms)
    is_given = config is not None
    config = config or _choice(p, output, gpu, num_sms)
    if settings().print_configs:
        print(f"deep_gemm: {p.m} x {p.n} x {p.k} runs {config.name}", file=sys.stderr)
    if isinstance(config, DecodeConfig):
        if is_given:
            refuse_if(config.name, fp8_gemm_decode.why_unfit(config, output))
        return fp8_gemm_decode.Plan(p, config), p
    if is_given:
        refuse_if(config.name, fp8_gemm.why_unfit(config, p.k, output))
    ready = fp8_gemm.prepared(config, p)
    # With fewer rows than a tile has, boxes are lower: such a plan is neither made from another's, nor another from it.
    if p.m < config.block_m or not driver.sizes_are_numbers():
        return fp8_gemm.Plan(ready, output, config, num_sms), ready
    elder = _elders.get((config, family))
    plan = None if elder is None else elder.for_m(ready)
    if plan is None:
        plan = fp8_gemm.Plan(ready, output, config, num_sms)
        keep(_elders, (config, family), plan)
    return plan, ready


def _choice(p: DenseProblem, output: Output, gpu: Gpu, num_sms: int) -> GemmConfig | DecodeConfig:
    """Choose for the whole GPU; on fewer SMs the same kernel runs, so that nothing is compiled, unless it needs more.

    `fp8_gemm` is persistent: its grid is as small as it is told. The decode kernel's is what its tiles need, and where
    that is more CTAs than SMs, nothing would hold them to these SMs.
    """
    split_k = not get_batch_invariant()
    config = select(p.m, p.n, p.k, output, gpu, split_k=split_k)
    if num_sms >= gpu.num_sms:
        return config
    if isinstance(config, DecodeConfig):
        if fp8_gemm_decode.grid(config, p) <= num_sms:
            return config
        config = select(p.m, p.n, p.k, output, gpu, split_k=split_k, whole_gpu=False)
    if isinstance(config, GemmConfig) and config.cluster_size > num_sms:
        return tile_config(config.block_m, config.block_n, output, k=p.k)
    return config


def _layout(p: DenseProblem) -> tuple[object, ...]:
    """Strides but those of A's scales, and which scales TMA could load where they are: others are copied."""
    c_stride = None if p.c is None else p.c.stride(0)
    for_tma = p.sfa.data_ptr() % ADDRESS_ALIGNMENT == 0, p.sfb.data_ptr() % ADDRESS_ALIGNMENT == 0
    return p.a.stride(0), p.b.stride(0), p.sfb.stride(), p.d.stride(0), c_stride, for_tma
