"""Products of heads on a GPU: which kernel computes them, and the plan that launches it."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...casts import lay_scales
from ...casts.lay_scales import mn_major
from ...core.check.layout import empty_mn_major
from ...core.check.memory import empty
from ...core.check.recipes import PER_ROW
from ...core.gpu import Gpu, gpu_of
from ...core.jit import driver
from ...core.jit.tensor_map import ElementType, TensorMap
from ...core.settings import get_batch_invariant, get_compile_mode, get_pdl, num_sms_of, settings
from .. import kernel_decode as fp8_gemm_decode
from ..config import BLOCK_K, GemmConfig
from ..config_decode import DecodeConfig
from ..dense.launch import box_rows_of_sfa, grid
from ..kernel import HEADS_PARAMS
from ..maps import output_map, plane_map
from ..output import Groups, Output, output_into, values_of
from ..plan import SCALE_BYTES, SFA, SFB, A, Addresses, B, C, D, Place, Plan, addresses_of, places_of, refuse_if
from .check import HeadsProblem
from .choose import select_heads

Config = GemmConfig | DecodeConfig
_ADDRESSES = struct.Struct("<QQ")


class ScalesLaid(NamedTuple):
    """A launch of lay_scales ahead of the product: the same for each call but for two addresses."""

    params: bytes
    grid: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, sf: Tensor) -> ScalesLaid:
        """Prepare the launch for scales that lie as these do."""
        out = empty_mn_major(sf)
        params, ctas = lay_scales.params_of(sf, out), lay_scales.grid(lay_scales.CONFIG, out)
        return cls(params, ctas, tuple(out.shape), out.stride())

    def lay(self, address: int, place: torch.device, device: int) -> Tensor:
        """Lay scales out that begin at an address."""
        out = empty("scales laid out for TMA", self.shape, torch.float32, place, self.strides)
        params = _ADDRESSES.pack(address, out.data_ptr()) + self.params[_ADDRESSES.size :]  # PARAMS begins with these
        lay_scales.KERNEL.run(lay_scales.CONFIG, params, self.grid, device)
        return out


class HeadsPlan(Plan):
    """A plan whose calls have scales as callers do; those that TMA cannot load there are laid out first."""

    laid_sfa: ScalesLaid | None = None
    laid_sfb: ScalesLaid | None = None

    def new_output(self) -> Tensor:
        """Make a D, contiguous for callers, who have rows first."""
        heads, m, n = self.rows.shape
        return torch.empty((m, heads, n), dtype=self.dtype, device=self.place).transpose(0, 1)

    def launch(self, at: Addresses, tail: bytes = b"", tail_at: int = 0) -> None:
        """Launch, behind the kernels that lay scales out."""
        if self.laid_sfa is None and self.laid_sfb is None:
            return super().launch(at, tail, tail_at)
        addresses, kept = list(at), []
        for operand, laid in ((SFA, self.laid_sfa), (SFB, self.laid_sfb)):
            if laid is not None:
                kept.append(laid.lay(at[operand], self.place, self.device))
                addresses[operand] = kept[-1].data_ptr()
        return super().launch(tuple(addresses), tail, tail_at)


def run(p: HeadsProblem, config: Config | None = None) -> Plan | None:
    """Compute products of heads on the GPU that the tensors are on, and give the plan, which serves other calls.

    `config` None leaves the choice to the heuristics.
    """
    if 0 in (p.heads, p.m, p.n):
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
    if config is None:
        config = choice(p.heads, p.m, p.n, p.k, output, gpu_of(device))
    else:
        refuse_if(config.name, fp8_gemm_decode.why_unfit(config, p.k, output))
    if settings().print_configs:
        print(f"deep_gemm: {p.heads} heads of {p.m} x {p.n} x {p.k} run {config.name}", file=sys.stderr)
    launcher = fp8_gemm_decode.kernel_of(config).launcher(config, device, get_pdl())
    ready = prepared(config, p)
    plan = plan_of(ready, output, config, num_sms_of(gpu_of(device).num_sms), launcher)
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(ready))
    _take_scales_of_callers(plan, p, ready)
    return plan


def _take_scales_of_callers(plan: HeadsPlan, p: HeadsProblem, ready: HeadsProblem) -> None:
    """Let further launches of the plan begin with scales as callers have them, where `ready` has them elsewhere."""
    rows = plan.rows
    if ready.sfa is not p.sfa:
        plan.laid_sfa, plan.alignment_of_sfa = ScalesLaid.of(p.sfa), SCALE_BYTES
        plan.rows = rows = rows._replace(span_sfa=_span(p.sfa))
    if ready.sfb is not p.sfb:
        plan.laid_sfb, plan.alignment_of_sfb = ScalesLaid.of(p.sfb), SCALE_BYTES
        plan.rows = rows._replace(span_sfb=_span(p.sfb))


def _span(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def output_of(p: HeadsProblem) -> Output:
    """Give all that decides the kernel's code besides the tile."""
    return output_into(p.d, p.c, (values_of(p.b), PER_ROW, p.of_b), Groups.HEADS)


def choice(heads: int, m: int, n: int, k: int, output: Output, gpu: Gpu) -> Config:
    """Choose as `kernels.dense.choice` does: what must keep to some of the SMs is not given to the decode kernel."""
    split_k, num_sms = not get_batch_invariant(), num_sms_of(gpu.num_sms)
    config = select_heads(heads, m, n, k, output, gpu, split_k=split_k)
    if num_sms >= gpu.num_sms:
        return config
    if isinstance(config, DecodeConfig):
        if fp8_gemm_decode.grid(config, m, n) * heads <= num_sms:
            return config
        config = select_heads(heads, m, n, k, output, gpu, split_k=split_k, whole_gpu=False)
    if isinstance(config, GemmConfig) and config.cluster_size > num_sms:
        return select_heads(heads, m, n, k, output, replace(gpu, num_sms=num_sms), split_k=split_k, whole_gpu=False)
    return config


def prepared(config: Config, p: HeadsProblem) -> HeadsProblem:
    """Lay scales that TMA loads out for it. The problem itself, where they lie so."""
    if isinstance(config, DecodeConfig):
        return p
    sfa = mn_major(p.sfa)
    sfb = mn_major(p.sfb) if config.loads_sfb else p.sfb
    return p if sfa is p.sfa and sfb is p.sfb else p._replace(sfa=sfa, sfb=sfb)


def plan_of(p: HeadsProblem, output: Output, config: Config, num_sms: int, launcher: driver.Launcher) -> HeadsPlan:
    """Prepare the launch for a problem that is `prepared`."""
    if isinstance(config, DecodeConfig):
        strides = {
            "heads.sfa_stride": p.sfa.stride(0),
            "heads.sfb_stride": p.sfb.stride(0),
            "heads.d_stride": p.d.stride(0),
            "heads.c_stride": 0 if p.c is None else p.c.stride(0),
        }
        plan = fp8_gemm_decode.plan_of(p, config, launcher, more=strides, kind=HeadsPlan)
        assert isinstance(plan, HeadsPlan)
    else:
        plan = _plan_of(p, config, num_sms, launcher)
        if p.c is not None:
            plan.c_is_d = output.c_is_d
    plan.config, plan.output, plan.n, plan.k = config, output, p.n, p.k
    return plan


def _plan_of(p: HeadsProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> HeadsPlan:
    maps: dict[str, TensorMap] = {
        "map_a": plane_map(ElementType.UINT8, p.a, (min(config.box_rows_of_a, p.m), BLOCK_K), 128),
        "map_b": plane_map(ElementType.UINT8, p.b, (config.block_n // config.cluster_m, BLOCK_K), 128),
        "map_sfa": plane_map(ElementType.FLOAT32, p.sfa.mT, (1, box_rows_of_sfa(config, p.m)), 0),
        "map_d": output_map(config, p.d),
    }
    places = places_of(map_a=A, map_b=B, map_sfa=SFA, map_d=D, sfb=SFB, c=C, d=D)
    numbers: dict[str, int | bytes] = {
        "map_sfb": b"",
        "c_pitch": 0 if p.c is None else p.c.stride(1),
        "d_pitch": p.d.stride(1),
        "sfb_stride_n": p.sfb.stride(1),
        "sfb_stride_k": p.sfb.stride(2),
        "words": 0,
        "m": p.m,
        "n": p.n,
        "k": p.k,
        "heads.sfb_stride": p.sfb.stride(0),
        "heads.c_stride": 0 if p.c is None else p.c.stride(0),
        "heads.count": p.heads,
    }
    if config.loads_sfb:
        del numbers["map_sfb"]
        maps["map_sfb"] = plane_map(ElementType.FLOAT32, p.sfb.mT, (1, config.block_n), 0)
        places.append(Place("map_sfb", SFB))
    return HeadsPlan(p, HEADS_PARAMS, numbers, maps, places, launcher, grid(config, p.m, p.n, num_sms, p.heads))
