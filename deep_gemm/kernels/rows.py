"""Products of grouped rows on a GPU: how high their tiles are, and the plan that launches them."""

from __future__ import annotations

import sys

import torch

from ..choose.config import GemmConfig
from ..choose.rows import select_grouped
from ..gpus import gpu_of
from ..problem import ContiguousProblem, MaskedProblem
from ..reference import padding_rows
from ..settings import generation, get_compile_mode, get_num_sms, settings
from .fp8_gemm import why_unfit
from .fp8_gemm_grouped import GroupedProblem, Plan, grouped_problem, output_of, prepared
from .plan import keep, refuse_if

_plans: dict[tuple[object, ...], Plan] = {}


def run(problem: ContiguousProblem | MaskedProblem, config: GemmConfig | None = None) -> Plan | None:
    """Compute a product of grouped rows on the GPU that its tensors are on. The host does not wait for the layout.

    The plan serves later products of the same kind; it is not given where scales had to be copied first. `config` None
    leaves the choice to the heuristics.
    """
    p = grouped_problem(problem)
    if 0 in (p.planes, p.m, p.n, p.num_groups):
        return None
    device = p.d.device.index
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(problem, config)
    if p.k == 0:
        if get_compile_mode() == 0:
            _write_zeros(problem)
        return None
    ready = prepared(p)
    expected = problem.expected_m if isinstance(problem, MaskedProblem) else p.m / p.num_groups
    # `generation` stands for the number of SMs and the other settings that a plan depends on.
    strides = tuple(x.stride() for x in (p.a, ready.sfa, p.b, ready.sfb, p.d))
    kind = (p.groups, p.d.dtype, p.alignment, p.zero_padding, p.sfb_rows)
    key = (p.d.shape, p.b.shape, expected, kind, device, generation(), strides, config)
    found = _plans.get(key)
    if found is None:
        found = _plan(ready, expected, config)
        keep(_plans, key, found)
    if get_compile_mode() == 1:
        return None
    found.launch(*(x.data_ptr() for x in (p.a, ready.sfa, p.b, ready.sfb, p.d, ready.c)))
    return found if ready is p else None


def _plan(p: GroupedProblem, expected_m: float, config: GemmConfig | None) -> Plan:
    if config is not None:
        refuse_if(config.name, why_unfit(config, p.k, output_of(p)))
    else:
        config = select_grouped(p.num_groups, expected_m, p.n, p.k, output_of(p), gpu_of(p.d.device.index))
    if settings().print_configs:
        print(f"deep_gemm: {p.num_groups} groups of {p.n} x {p.k} run {config.name}", file=sys.stderr)
    return Plan(p, config, get_num_sms())


def _write_zeros(p: ContiguousProblem | MaskedProblem) -> None:
    """What a product of depth 0 is, in the rows that are written."""
    if isinstance(p, MaskedProblem):
        is_written = torch.arange(p.max_m, device=p.d.device) < p.masked_m[:, None]
    elif p.layout_is_ends:
        ends = p.grouped_layout.clamp(0, p.m)
        aligned = (ends + (p.alignment - 1)) // p.alignment * p.alignment
        starts = torch.cat([torch.zeros_like(aligned[:1]), aligned[:-1]])
        rows = torch.arange(p.m, device=p.d.device)[:, None]
        last = aligned if p.zero_padding else ends
        is_written = ((rows >= starts) & (rows < last) & (ends > starts)).any(dim=1)
    else:
        is_written = p.grouped_layout >= 0
        if p.zero_padding:
            is_written |= padding_rows(p.grouped_layout, p.alignment)
    p.d.masked_fill_(is_written[..., None], 0)
