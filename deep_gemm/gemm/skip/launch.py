"""Products whose D has columns between the parts of heads: the kernels of dense products, with another way out."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor

from ...casts.lay_scales import mn_major
from ...core.gpu import Gpu, gpu_of
from ...core.jit import driver
from ...core.jit.tensor_map import ElementType, TensorMap
from ...core.settings import get_batch_invariant, get_compile_mode, get_pdl, num_sms_of, settings
from ...core.sm90 import WGMMA_ROWS
from .. import kernel as fp8_gemm
from .. import kernel_decode as fp8_gemm_decode
from ..config import BLOCK_K, GemmConfig
from ..config_decode import DecodeConfig
from ..dense.launch import box_rows_of_sfa, grid
from ..maps import matrix_map, row_pitch, scales_map
from ..plan import SFA, SFB, A, B, D, Place, Plan, addresses_of, places_of, refuse_if
from .check import SkipProblem, parts
from .choose import select_skipping

Config = GemmConfig | DecodeConfig


def run(p: SkipProblem, config: Config | None = None) -> Plan | None:
    """Compute a product on the GPU that its tensors are on, and give the plan, which serves other calls."""
    if p.m == 0 or p.n == 0:
        return None
    if p.k == 0:
        if get_compile_mode() == 0:
            for part in parts(p.d, p.heads):
                part.zero_()
        return None
    device = p.d.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(p, config)
    gpu = gpu_of(device)
    if config is None:
        config = choice(p, gpu)
    else:
        refuse_if(config.name, why_unfit(config, p.heads.part_multiple))
    if settings().print_configs:
        print(f"deep_gemm: {p.m} x {p.n} x {p.k} runs {config.name}", file=sys.stderr)
    ready = prepared(config, p)
    launcher = fp8_gemm_decode.kernel_of(config).launcher(config, device, get_pdl())
    plan = plan_of(ready, config, num_sms_of(gpu.num_sms), launcher)
    plan.set_copies(p, ready)
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(ready))
    return plan


def choice(p: SkipProblem, gpu: Gpu) -> Config:
    """Choose as for the plain product: for the whole GPU, unless so many CTAs cannot be held to fewer SMs."""
    asked = p.m, p.n, p.k, p.heads.part_multiple, gpu
    split_k, num_sms = not get_batch_invariant(), num_sms_of(gpu.num_sms)
    config = select_skipping(*asked, split_k=split_k)
    if isinstance(config, DecodeConfig) and num_sms < fp8_gemm_decode.grid(config, p.m, p.n) and num_sms < gpu.num_sms:
        config = select_skipping(*asked, split_k=split_k, whole_gpu=False)
    if isinstance(config, GemmConfig) and config.cluster_size > num_sms:
        config = replace(config, cluster_m=1, cluster_n=1)
    return config


def why_unfit(config: Config, part_multiple: int) -> str | None:
    """Say why a configuration would compute something else; None if it computes such a product."""
    if not config.skips_mid:
        return "writes D without columns between parts of heads"
    if isinstance(config, GemmConfig) and part_multiple % config.panel_columns:
        return f"stores panels of {config.panel_columns} columns, of which parts are no multiples"
    return None


def prepared(config: Config, p: SkipProblem) -> SkipProblem:
    """Lay A's scales out as TMA loads them. Itself, where they lie so."""
    if isinstance(config, DecodeConfig):
        return p
    sfa = mn_major(p.sfa)
    return p if sfa is p.sfa else p._replace(sfa=sfa)


def plan_of(p: SkipProblem, config: Config, num_sms: int, launcher: driver.Launcher) -> Plan:
    """Prepare the launch for a problem that is `prepared`."""
    multiplier, shift = p.heads.division
    left, mid, _ = p.heads
    heads = {"left": left, "mid": mid, "columns": p.heads.columns, "multiplier": multiplier, "shift": shift}
    more = {f"heads.{name}": number for name, number in heads.items()}
    if isinstance(config, DecodeConfig):
        return fp8_gemm_decode.plan_of(p, config, launcher, more=more)
    left_d, right_d = parts(p.d, p.heads)
    before_right = -(left + mid) * p.d.element_size()
    maps = {
        "map_a": matrix_map(ElementType.UINT8, p.a, (min(config.box_rows_of_a, p.m), BLOCK_K), 128),
        "map_b": matrix_map(ElementType.UINT8, p.b, (config.block_n // config.cluster_m, BLOCK_K), 128),
        "map_sfa": scales_map(box_rows_of_sfa(config, p.m), p.sfa),
        "map_d": part_map(config, p.d, left_d),
        "map_right_d": part_map(config, p.d, right_d),
    }
    places = places_of(map_a=A, map_b=B, map_sfa=SFA, map_d=D, sfb=SFB, d=D)
    places.append(Place("map_right_d", D, before_right))
    numbers: dict[str, int | bytes] = {
        "c": 0,
        "c_pitch": 0,
        "d_pitch": p.d.stride(0),
        "sfb_stride_n": p.sfb.stride(0),
        "sfb_stride_k": p.sfb.stride(1),
        "words": 0,
        "m": p.m,
        "n": p.n,
        "k": p.k,
        **more,
    }
    return Plan(p, fp8_gemm.SKIP_PARAMS, numbers, maps, places, launcher, grid(config, p.m, p.n, num_sms))


def part_map(config: GemmConfig, d: Tensor, part: Tensor) -> TensorMap:
    """One part of all heads, in boxes of a panel."""
    rows, heads, columns = part.shape
    strides = (part.stride(1) * 2, row_pitch(d) * 2)
    box = (config.panel_columns, 1, WGMMA_ROWS)
    return TensorMap(ElementType.BFLOAT16, (columns, heads, rows), strides, box, config.panel_columns * 2)
