"""Dense products on a GPU: which kernel computes one, and the plan that launches it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.check.layout import align, ceil_div
from ...core.check.ue8m0 import Words, sides_in_words
from ...core.gpu import Gpu, gpu_of
from ...core.jit import driver
from ...core.jit.tensor_map import ElementType
from ...core.settings import get_batch_invariant, get_compile_mode, get_pdl, num_sms_of, settings
from .. import kernel_decode as fp8_gemm_decode
from ..config import BLOCK_K, GemmConfig
from ..config_decode import DecodeConfig
from ..config_of_tile import tile_config
from ..kernel import DENSE_PARAMS
from ..maps import matrix_map, output_map, scales_map
from ..output import Output, output_into, values_of
from ..plan import (
    SCALE_BYTES,
    SFA,
    SFB,
    A,
    B,
    C,
    D,
    Place,
    Plan,
    Resized,
    addresses_of,
    derived_for_rows,
    other_rows,
    places_of,
    refuse_if,
)
from .check import DenseProblem
from .choose import band_of, select, tuned_tiles

Config = GemmConfig | DecodeConfig


def run(p: DenseProblem, config: Config | None = None, *, is_behind_cast: bool = False) -> Plan | None:
    """Compute a dense product on the GPU that its tensors are on, and give the plan, which serves other calls.

    `config` None leaves the choice to the heuristics. `is_behind_cast`: the kernel ahead on this stream writes A and
    its scales alone, and lets this one start only when all that ran before it is over.
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
            return run(p, config, is_behind_cast=is_behind_cast)
    output = output_of(p)
    if config is None:
        config = choice(p.m, p.n, p.k, output, gpu_of(device))
    else:
        refuse_if(config.name, fp8_gemm_decode.why_unfit(config, p.k, output))
    _print_if_asked(p.m, p.n, p.k, config)
    ready = prepared(config, p)
    num_sms = num_sms_of(gpu_of(device).num_sms)
    launcher = fp8_gemm_decode.kernel_of(config).launcher(config, device, is_behind_cast or get_pdl())
    is_ready = is_behind_cast and ready.sfb is p.sfb  # else the kernel ahead writes more than A and its scales
    plan = plan_of(ready, output, config, num_sms, launcher, weight_is_ready=is_ready)
    plan.set_copies(p, ready)
    if get_compile_mode() == 1:
        return None
    plan.launch(addresses_of(ready))
    return plan


def derive(templates: dict[Config, Plan], operands: Sequence[Tensor]) -> Plan | None:
    """Make a plan for other rows of a weight, of operands that nobody has checked; None if they want the checks."""
    like = next(iter(templates.values()))
    of_rows, c = other_rows(like, operands), operands[C]
    if of_rows is None or (c is not None and c.shape[0] != of_rows[0]):
        return None
    m, pitch, rows = of_rows
    gpu, band = gpu_of(like.device), band_of(m)
    config = like.by_band.get(band)
    if config is None:
        config = choice(m, like.n, like.k, like.output, gpu)
        if num_sms_of(gpu.num_sms) >= gpu.num_sms and not tuned_tiles():  # else m itself may decide
            like.by_band[band] = config
    template = templates.get(config)
    if template is None or template.copies_sfa:
        return None
    _print_if_asked(m, like.n, like.k, config)
    if isinstance(config, DecodeConfig):
        return fp8_gemm_decode.derived(templates, config, m, pitch, rows)
    ctas = grid(config, m, like.n, num_sms_of(gpu.num_sms))

    def changed() -> tuple[dict[str, int], Sequence[Resized]]:
        return {"m": m}, (
            Resized("map_a", 1, m, box=(BLOCK_K, min(config.box_rows_of_a, m))),
            Resized("map_sfa", 0, m, pitch * SCALE_BYTES, (box_rows_of_sfa(config, m), config.scale_parts)),
            Resized("map_d", 2 if config.has_wide_panels else 1, m),
        )

    return derived_for_rows(templates, config, m, pitch, (rows, ctas), changed, are_whole=m >= config.block_m)


def output_of(p: DenseProblem) -> Output:
    """Give all that decides the kernel's code besides the tile: the type of D, how C takes part, how B is scaled."""
    return output_into(p.d, p.c, (values_of(p.b), p.of_a, p.of_b))


def choice(m: int, n: int, k: int, output: Output, gpu: Gpu) -> Config:
    """Choose for the whole GPU; on fewer SMs the same kernel runs, so that nothing is compiled, unless it needs more.

    `fp8_gemm` is persistent: its grid is as small as it is told. The decode kernel's is what its tiles need, and where
    that is more CTAs than SMs, nothing would hold them to these SMs.
    """
    split_k, num_sms = not get_batch_invariant(), num_sms_of(gpu.num_sms)
    config = select(m, n, k, output, gpu, split_k=split_k)
    if num_sms >= gpu.num_sms:
        return config
    if isinstance(config, DecodeConfig):
        if fp8_gemm_decode.grid(config, m, n) <= num_sms:
            return config
        config = select(m, n, k, output, gpu, split_k=split_k, whole_gpu=False)
    if isinstance(config, GemmConfig) and config.cluster_size > num_sms:
        return tile_config(config.block_m, config.block_n, output, k=k)
    return config


def prepared(config: Config, p: DenseProblem) -> DenseProblem:
    """Lay scales out as the kernel reads them. The problem itself, where they lie so."""
    sfa = fp8_gemm_decode.scales_for(config, Words.A, p.sfa, p.of_a, p.k)
    sfb = fp8_gemm_decode.scales_for(config, Words.B, p.sfb, p.of_b, p.k)
    return p if sfa is p.sfa and sfb is p.sfb else p._replace(sfa=sfa, sfb=sfb)


def run_behind_cast(p: DenseProblem) -> Plan | None:
    """Compute a dense product whose A and scales the kernel ahead on this stream writes."""
    return run(p, is_behind_cast=True)


def plan_of(
    p: DenseProblem,
    output: Output,
    config: Config,
    num_sms: int,
    launcher: driver.Launcher,
    *,
    weight_is_ready: bool = False,
) -> Plan:
    """Prepare the launch for a problem that is `prepared`. `weight_is_ready`: as in `Params` of fp8_gemm_decode.cuh."""
    if isinstance(config, DecodeConfig):
        plan = fp8_gemm_decode.plan_of(p, config, launcher, weight_is_ready=weight_is_ready)
    else:
        plan = _plan_of(p, config, num_sms, launcher)
    plan.config, plan.output, plan.n, plan.k = config, output, p.n, p.k
    if p.c is not None and not isinstance(config, DecodeConfig):
        plan.c_is_d = output.c_is_d
    return plan


def _plan_of(p: DenseProblem, config: GemmConfig, num_sms: int, launcher: driver.Launcher) -> Plan:
    line_of_b = config.loaded_line_bytes_of_b
    maps = {
        # Boxes of A have no rows that are never there, those of its scales at most what fills 16 bytes.
        "map_a": matrix_map(ElementType.UINT8, p.a, (min(config.box_rows_of_a, p.m), BLOCK_K), 128),
        "map_b": matrix_map(ElementType.UINT8, p.b, (config.box_rows_of_b // config.cluster_m, line_of_b), line_of_b),
        "map_sfa": scales_map(box_rows_of_sfa(config, p.m), p.sfa, config.scale_parts),
        "map_d": output_map(config, p.d),
    }
    places = places_of(map_a=A, map_b=B, map_sfa=SFA, map_d=D, sfb=SFB, c=C, d=D)
    numbers: dict[str, int | bytes] = {
        "map_sfb": b"",
        "c_pitch": 0 if p.c is None else p.c.stride(0),
        "d_pitch": p.d.stride(0),
        "sfb_stride_n": p.sfb.stride(0),
        "sfb_stride_k": p.sfb.stride(1),
        "m": p.m,
        "n": p.n,
        "k": p.k,
        "words": sides_in_words(p.sfa, p.sfb),
    }
    if config.loads_sfb:
        del numbers["map_sfb"]
        maps["map_sfb"] = scales_map(config.block_n, p.sfb, config.scale_parts_of_b)
        places.append(Place("map_sfb", SFB))
    return Plan(p, DENSE_PARAMS, numbers, maps, places, launcher, grid(config, p.m, p.n, num_sms))


def box_rows_of_sfa(config: GemmConfig, m: int) -> int:
    """Rows of A whose scales one TMA load brings: a tile's, but no more than there are in whole 16 bytes.

    All of a tile's if they have lines of several parts, which lie that far apart in a slot.
    """
    return config.block_m if config.scale_parts > 1 else min(config.block_m, align(m, 4))


def grid(config: GemmConfig, m: int, n: int, num_sms: int, products: int = 1) -> int:
    """One CTA for each SM, but no more clusters than tiles to share out."""
    tiles_m, tiles_n = ceil_div(m, config.block_m), ceil_div(n, config.block_n)
    cluster_tiles = products * ceil_div(tiles_m, config.cluster_m) * ceil_div(tiles_n, config.cluster_n)
    return min(max(num_sms // config.cluster_size, 1), cluster_tiles) * config.cluster_size


def _print_if_asked(m: int, n: int, k: int, config: Config) -> None:
    if settings().print_configs:
        print(f"deep_gemm: {m} x {n} x {k} runs {config.name}", file=sys.stderr)
