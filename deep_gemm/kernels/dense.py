"""Dense products on a GPU: which kernel computes one, and the plan that launches it."""

from __future__ import annotations

import sys

import torch

from ..config import GemmConfig, Output
from ..config_decode import DecodeConfig
from ..heuristics import gpu_of, select
from ..problem import DenseProblem
from ..settings import (
    generation,
    get_batch_invariant,
    get_compile_mode,
    get_num_sms,
    settings,
)
from . import fp8_gemm, fp8_gemm_decode
from .plan import Plan, make_room

_plans: dict[tuple[object, ...], Plan] = {}


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
    device = p.d.device.index
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(p, config)
    output = output_of(p)
    # `generation` stands for the number of SMs and the other settings that a plan depends on.
    key = (p.m, p.n, p.k, output, device, generation(), _strides(p), config)
    found = _plans.get(key)
    if found is None:
        make_room(_plans)
        found = _plans[key] = _plan(p, output, config)
    if get_compile_mode() == 1:
        return None
    ready = found.prepared(p)
    found.launch(
        *(0 if x is None else x.data_ptr() for x in (ready.a, ready.sfa, ready.b, ready.sfb, ready.d, ready.c))
    )
    return found if ready is p else None


def output_of(p: DenseProblem) -> Output:
    """What decides the kernel's code besides the tile: the type of D, how C takes part, how B is scaled."""
    is_fp32, sfb_is_per_row = p.d.dtype == torch.float32, p.sfb_rows == 1
    if p.c is None:
        return Output(is_fp32, sfb_is_per_row=sfb_is_per_row)
    adds_to_d = is_fp32 and p.c.data_ptr() == p.d.data_ptr()
    return Output(is_fp32, with_c=not adds_to_d, adds_to_d=adds_to_d, sfb_is_per_row=sfb_is_per_row)


def _plan(p: DenseProblem, output: Output, config: GemmConfig | DecodeConfig | None) -> Plan:
    device = p.d.device.index
    if config is None:
        gpu, num_sms = gpu_of(device), get_num_sms()
        # Chosen for the whole GPU: with fewer SMs the same kernel runs on a smaller grid, and nothing is compiled. Only
        # the decode kernel's grid is what its tiles need, so it is left out then.
        config = select(p.m, p.n, p.k, output, gpu, split_k=not get_batch_invariant(), whole_gpu=num_sms >= gpu.num_sms)
    if settings().print_configs:
        print(f"deep_gemm: {p.m} x {p.n} x {p.k} runs {config.name}", file=sys.stderr)
    if isinstance(config, DecodeConfig):
        return fp8_gemm_decode.Plan(p, config)
    return fp8_gemm.Plan(p, output, config, get_num_sms())


def _strides(p: DenseProblem) -> tuple[object, ...]:
    c_stride = None if p.c is None else p.c.stride(0)
    return p.a.stride(0), p.sfa.stride(), p.b.stride(0), p.sfb.stride(), p.d.stride(0), c_stride
