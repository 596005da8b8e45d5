"""The kernel of gemm/fp8_gemm_decode.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..casts.lay_scales import laid_out, mn_major
from ..core.check.layout import ceil_div
from ..core.check.recipes import Scales
from ..core.check.ue8m0 import Words, sides_in_words
from ..core.code_plan import CodePlan
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType
from ..core.kernel import Kernel
from ..core.params import Field, Kind, Params, head_parts
from ..core.sm90 import WARPGROUP_THREADS, WGMMA_K
from ..core.wgmma_header import wgmma_header
from . import kernel as fp8_gemm
from .config import BLOCK_K, GemmConfig
from .config_decode import DecodeConfig
from .dense import choose as dense
from .dense.check import DenseProblem
from .heads import choose as heads
from .heads.check import HeadsProblem
from .maps import matrix_map, plane_map
from .output import FINE_OPERANDS, FP4_OPERANDS, Groups, Output, other_fields
from .plan import SFA, SFB, A, B, C, D, Plan, Resized, Rows, derived_for_rows, places_of
from .rows import choose as rows
from .skip import choose as skip
from .skip.check import SkipProblem

Problem = DenseProblem | SkipProblem | HeadsProblem
_PRODUCT = (
    Field("map_a", Kind.MAP),
    Field("map_b", Kind.MAP),
    Field("sfa", Kind.POINTER),
    Field("sfb", Kind.POINTER),
    Field("d", Kind.POINTER),
    Field("c", Kind.POINTER),
    Field("d_pitch", Kind.UINT64),
    Field("c_pitch", Kind.UINT64),
    Field("sfa_stride_m", Kind.UINT32),
    Field("sfa_stride_k", Kind.UINT32),
    Field("sfb_stride_n", Kind.UINT32),
    Field("sfb_stride_k", Kind.UINT32),
    Field("m", Kind.UINT32),
    Field("n", Kind.UINT32),
    Field("k", Kind.UINT32),
    Field("slot_bytes", Kind.UINT32),
    Field("weight_is_ready", Kind.UINT32),
    Field("words", Kind.UINT32),
)
"""`DecodeMaps` and `DecodeProduct` of gemm/decode/product.cuh."""
PARAMS = Params("Params", *_PRODUCT)
"""`Params` of gemm/decode/one.cuh."""
HEADS_PARAMS = Params(
    "Params",
    *_PRODUCT,
    Field("heads.sfa_stride", Kind.UINT64),
    Field("heads.sfb_stride", Kind.UINT64),
    Field("heads.d_stride", Kind.UINT64),
    Field("heads.c_stride", Kind.UINT64),
)
"""`Params` of gemm/decode/heads.cuh."""
SKIP_PARAMS = Params("Params", *_PRODUCT, *head_parts(Kind.POINTER.alignment))
"""`Params` of gemm/decode/skip_mid.cuh."""
ROWS_PARAMS = Params(
    "Params",
    *_PRODUCT,
    *fp8_gemm.GROUPS_OF_ROWS,
    Field("sfa_stride", Kind.UINT64),
    Field("d_stride", Kind.UINT64),
)
"""`Params` of gemm/decode/rows.cuh."""


def params_of(config: DecodeConfig) -> Params:
    """The list that a configuration's kernel is launched with."""
    if config.rows_are_grouped:
        return ROWS_PARAMS
    return HEADS_PARAMS if config.groups == Groups.HEADS else SKIP_PARAMS if config.skips_mid else PARAMS


def code_plan(config: DecodeConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of. It writes D by ordinary stores."""
    return CodePlan(
        roles=((32, None), (WARPGROUP_THREADS * config.num_math_warpgroups, None)),
        shared_bytes=config.shared_bytes,
        qgmma=(config.slot_blocks + config.is_fp4) * BLOCK_K // WGMMA_K + config.is_fp4,  # a k-block alone, and a group
        tma_loads=2 * (1 + config.slot_blocks),  # A and B, and B ahead of A
        multicast_loads=0,
        ctas_per_sm=config.ctas_per_sm,
        bulk_copies=int(config.groups == Groups.IDS),  # zeros of padding
    )


def kernel_of(config: GemmConfig | DecodeConfig) -> Kernel[Any]:
    """Give the kernel that a configuration is for: this one, or that for any number of rows."""
    return KERNEL if isinstance(config, DecodeConfig) else fp8_gemm.KERNEL


def why_unfit(config: GemmConfig | DecodeConfig, k: int, output: Output) -> str | None:
    """Say why a configuration would compute something else than this product; None if it computes it."""
    if isinstance(config, GemmConfig):
        return fp8_gemm.why_unfit(config, k, output)
    own = Output(
        is_fp32=config.is_fp32,
        with_c=config.with_c,
        groups=config.groups,
        b=config.b,
        sfa=config.sfa,
        sfb=config.sfb,
    )
    others = other_fields(own, output)
    return f"is for another output: {', '.join(others)}" if others else None


def scales_for(config: Output | DecodeConfig, side: Words, sf: Tensor, of: Scales, k: int) -> Tensor:
    """Give a side's scales as a kernel takes them: words, if it reads these, or FP32, m-major where TMA loads them."""
    if sf.dtype == torch.int32:
        return sf if side in config.reads_words else laid_out(sf, ceil_div(k, of.columns))
    by_tma = isinstance(config, Output) and (side == Words.A or config.loads_sfb)
    return mn_major(sf) if by_tma else sf


def grid(config: DecodeConfig, m: int, n: int) -> int:
    """A cluster for each tile of D."""
    return ceil_div(m, config.block_tokens) * ceil_div(n, config.block_n) * config.cluster_k


def plan_of(
    p: Problem,
    config: DecodeConfig,
    launcher: driver.Launcher,
    *,
    weight_is_ready: bool = False,
    more: Mapping[str, int] | None = None,
    kind: type[Plan] = Plan,
) -> Plan:
    """Prepare the launch for one product, or for several of a shape, as a plan of this kind.

    `weight_is_ready`: as in `Params`; `more`: what its destination adds to these.
    """
    map_of, products = (matrix_map, 1) if p.a.dim() == 2 else (plane_map, p.a.shape[0])
    # A box has no rows that are never there: to fill one with zeros takes TMA longer than to load one.
    maps = {
        "map_a": map_of(ElementType.UINT8, p.a, (min(config.block_tokens, p.m), BLOCK_K), 128),
        "map_b": map_of(ElementType.UINT8, p.b, (min(config.block_n, p.n), BLOCK_K), 128),
    }
    places = places_of(map_a=A, map_b=B, sfa=SFA, sfb=SFB, d=D, c=C)
    numbers = {
        "d_pitch": p.d.stride(-2),
        "c_pitch": 0 if p.c is None else p.c.stride(-2),
        "sfa_stride_m": p.sfa.stride(-2),
        "sfa_stride_k": p.sfa.stride(-1),
        "sfb_stride_n": p.sfb.stride(-2),
        "sfb_stride_k": p.sfb.stride(-1),
        "m": p.m,
        "n": p.n,
        "k": p.k,
        "slot_bytes": slot_bytes(config, p.m, p.n),
        "weight_is_ready": int(weight_is_ready),
        "words": sides_in_words(p.sfa, p.sfb),
        **(more or {}),
    }
    return kind(p, params_of(config), numbers, maps, places, launcher, products * grid(config, p.m, p.n))


def derived(templates: dict[Any, Plan], config: DecodeConfig, m: int, pitch: int, rows: Rows) -> Plan:
    """Derive a plan for other rows of a weight, scales of A m-major with this pitch."""
    n, are_whole = templates[config].n, m >= config.block_tokens
    of_rows, changed = (rows, grid(config, m, n)), partial(resized_for, config, m, n, pitch)
    return derived_for_rows(
        templates, config, m, pitch, of_rows, changed, are_whole=are_whole, pitch_name="sfa_stride_k"
    )


def resized_for(config: DecodeConfig, m: int, n: int, pitch: int, *planes: int) -> tuple[dict[str, int], list[Resized]]:
    """Give numbers of a plan for other rows, and its map of A, whose boxes have so many planes if A has any."""
    numbers = {"sfa_stride_m": 1, "sfa_stride_k": pitch, "m": m, "slot_bytes": slot_bytes(config, m, n)}
    return numbers, [Resized("map_a", 1, m, box=(BLOCK_K, min(config.block_tokens, m), *planes))]


def slot_bytes(config: DecodeConfig, m: int, n: int) -> int:
    """Count the bytes that land in a slot of the ring: a box of A and one of B."""
    return (min(config.block_tokens, m) * config.slot_blocks + min(config.block_n, n)) * BLOCK_K


def reachable() -> list[DecodeConfig]:
    """Every configuration that the choice for any kind of work can give."""
    ways = (
        *dense.reachable_decode(),
        *dense.reachable_decode(FP4_OPERANDS),
        *(config for operands in FINE_OPERANDS for config in dense.reachable_decode(operands)),
        *heads.reachable(),
        *rows.reachable_grouped_decode(),
        *skip.reachable_skipping(),
    )
    return [config for config in dict.fromkeys(ways) if isinstance(config, DecodeConfig)]


KERNEL: Kernel[DecodeConfig] = Kernel(
    "fp8_gemm_decode",
    params_of,
    reachable,
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.block_tokens], of_registers=config.is_fp4)},
    promotes=True,
)
