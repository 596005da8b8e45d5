"""The kernel of gemm/fp8_gemm.cuh: what it is launched with, and what its machine code consists of."""

from __future__ import annotations

from ..core import meeting
from ..core.check.layout import ceil_div
from ..core.code_plan import CodePlan
from ..core.kernel import Kernel
from ..core.params import Field, Kind, Params, head_parts
from ..core.sm90 import WARPGROUP_THREADS, WGMMA_K
from ..core.wgmma_header import wgmma_header
from .config import BLOCK_K, GemmConfig
from .dense import choose as dense
from .depths import choose as depths
from .heads import choose as heads
from .output import Groups, Output, other_fields
from .rows import choose as rows
from .skip import choose as skip


def _params(last_map: str, *work: Field) -> Params:
    """`Product` of gemm/params.cuh, and what the `Params` of one kind of work, in work, add to it."""
    return Params(
        "Params",
        Field("map_a", Kind.MAP),
        Field("map_b", Kind.MAP),
        Field("map_sfa", Kind.MAP),
        Field("map_d", Kind.MAP),
        Field(last_map, Kind.MAP),
        Field("sfb", Kind.POINTER),
        Field("c", Kind.POINTER),
        Field("d", Kind.POINTER),
        Field("c_pitch", Kind.UINT64),
        Field("d_pitch", Kind.UINT64),
        Field("sfb_stride_n", Kind.UINT32),
        Field("sfb_stride_k", Kind.UINT32),
        Field("m", Kind.UINT32),
        Field("n", Kind.UINT32),
        Field("k", Kind.UINT32),
        Field("words", Kind.UINT32),
        *work,
    )


GROUPS_OF_ROWS = (
    Field("groups.layout", Kind.POINTER),
    Field("groups.sfb_stride", Kind.UINT64),
    Field("groups.count", Kind.UINT32),
    Field("groups.rows", Kind.UINT32),
    Field("groups.alignment", Kind.UINT32),
    Field("groups.zeroes_padding", Kind.UINT32),
)
DENSE_PARAMS = _params("map_sfb")
SKIP_PARAMS = _params("map_right_d", *head_parts(Kind.MAP.alignment))
ROWS_PARAMS = _params("map_whole_d", *GROUPS_OF_ROWS)
ROWS_SFB_PARAMS = _params("map_sfb", *GROUPS_OF_ROWS)
_ACTIVATION = (
    Field("activation.row_weights", Kind.POINTER),
    Field("activation.scales", Kind.POINTER),
    Field("activation.scales_pitch", Kind.UINT32),
    Field("activation.limit", Kind.FLOAT32),
)
ROWS_SILU_PARAMS = _params("map_whole_d", *GROUPS_OF_ROWS, *_ACTIVATION)
ROWS_FETCHED_PARAMS = _params(
    "map_whole_d",
    *GROUPS_OF_ROWS,
    *_ACTIVATION,
    Field("fetching.token_of", Kind.POINTER),
    Field("fetching.row_of", Kind.POINTER),
    Field("fetching.arrivals", Kind.POINTER),
    Field("fetching.values", Kind.POINTER),
    Field("fetching.sfa", Kind.POINTER),
    Field("fetching.weights", Kind.POINTER),
    Field("fetching.addresses", Kind.POINTER),
    Field("fetching.results", Kind.UINT64),
    Field("fetching.topk", Kind.UINT32),
    Field("fetching.row_bytes", Kind.UINT32),
    Field("fetching.weights_at", Kind.UINT32),
    Field("fetching.pitch", Kind.UINT32),
    Field("fetching.max_tokens", Kind.UINT32),
    *(field._replace(name=f"fetching.{field.name}") for field in meeting.FIELDS),
)
DEPTHS_PARAMS = _params(
    "map_sfb",
    Field("groups.by_depth", Kind.POINTER),
    Field("groups.c_stride", Kind.UINT64),
    Field("groups.count", Kind.UINT32),
)
MOST_K_PARTS = 128
"""Groups along k that one launch of BF16 takes: `kMostKParts` of gemm/work/k_parts.cuh."""
K_PARTS_PARAMS = _params(
    "map_sfb",
    Field("parts.c_stride", Kind.UINT64),
    Field("parts.count", Kind.UINT32),
    Field("parts.first_k_block", Kind.UINT32, MOST_K_PARTS),
    Field("parts.num_k_blocks", Kind.UINT32, MOST_K_PARTS),
    Field("parts.group", Kind.UINT32, MOST_K_PARTS),
)
MOST_INLINE_COUNTS = 768
"""Depths from the host that a launch takes among its parameters: `kMostInlineCounts` of gemm/work/k_counted.cuh."""
K_COUNTED_PARAMS = _params(
    "map_sfb",
    Field("depths.counts", Kind.POINTER),
    Field("depths.c_stride", Kind.UINT64),
    Field("depths.groups", Kind.UINT32),
    Field("depths.rows", Kind.UINT32),
    Field("depths.first", Kind.UINT32),
    Field("depths.count", Kind.UINT32),
    Field("depths.inline_counts", Kind.UINT32, MOST_INLINE_COUNTS),
)
HEADS_PARAMS = _params(
    "map_sfb",
    Field("heads.sfb_stride", Kind.UINT64),
    Field("heads.c_stride", Kind.UINT64),
    Field("heads.count", Kind.UINT32),
)

SUM_PARAMS = _params(
    "map_sfb", Field("sum.products", Kind.UINT32, of_base=Kind.MAP.alignment), Field("sum.slices", Kind.UINT32)
)


def params_of(config: GemmConfig) -> Params:
    """The list that a configuration's kernel is launched with."""
    if config.groups == Groups.DEPTHS:
        return DEPTHS_PARAMS if config.has_scales else K_PARTS_PARAMS
    if config.groups == Groups.HEADS:
        return HEADS_PARAMS
    if config.groups == Groups.SUM:
        return SUM_PARAMS
    if config.groups == Groups.COUNTED_DEPTHS:
        return K_COUNTED_PARAMS
    if config.activates:
        return ROWS_FETCHED_PARAMS if config.fetches else ROWS_SILU_PARAMS
    if config.rows_are_grouped:
        return ROWS_SFB_PARAMS if config.loads_sfb else ROWS_PARAMS
    return SKIP_PARAMS if config.skips_mid else DENSE_PARAMS


def code_plan(config: GemmConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of.

    The k loops, of runs and of the tail, are there once, or once more for the units of a tile that is short or narrow:
    `#pragma unroll 1` keeps NVRTC from unrolling them, and neither NVRTC nor ptxas peels them.
    """
    producer_registers, math_registers = config.registers
    k_blocks_in_code = config.run_k_blocks + config.has_tail + config.folds_parts
    units = config.units_per_warpgroup + (0 if config.branches_on_parts else config.units_of_part)
    stores = 0 if config.to_addresses else units * (config.unit_n or config.block_n) // config.panel_columns
    boxes = 2  # of A and B
    if config.rows_are_grouped or config.converts_b:
        boxes = config.block_m // config.box_rows_of_a + config.block_n // config.box_rows_of_b
    # Beside the one that cuts off: a whole D; or of heads' left parts, the right ones.
    has_second_map = (config.rows_are_grouped and not config.loads_sfb) or config.skips_mid
    return CodePlan(
        roles=(
            (WARPGROUP_THREADS, producer_registers),
            *([(WARPGROUP_THREADS * config.convert_groups, config.convert_registers)] if config.converts_b else []),
            (WARPGROUP_THREADS * config.num_math_warpgroups, math_registers),
        ),
        shared_bytes=config.shared_bytes,
        qgmma=units * BLOCK_K // WGMMA_K * k_blocks_in_code,
        tma_loads=boxes + config.scale_rows // config.box_scale_rows + config.loads_sfb,  # and scales
        multicast_loads=0
        if config.cluster_m * config.cluster_n == 1
        else 2
        if config.groups == Groups.DEPTHS
        else 1,  # and A's scales
        tma_stores=stores * (1 + has_second_map) if config.stores_by_tma and not config.adds_to_d else 0,
        tma_reduces=stores if config.adds_to_d else 0,
        bulk_copies=2 * config.fetches + (config.groups == Groups.IDS),  # a row there and back; zeros of padding
    )


def why_unfit(config: GemmConfig, k: int, output: Output) -> str | None:
    """Say why a configuration would compute something else than this problem; None if it computes it."""
    others = other_fields(config, output)
    if others:
        return f"is for another output: {', '.join(others)}"
    if config.adds_to_d and not output.adds_to_d:
        return "adds to D, which is not C"
    k_blocks = ceil_div(k, BLOCK_K)
    if k_blocks % config.run_k_blocks and not config.has_tail:
        return f"has no code for the tail of {k_blocks} blocks of k in runs of {config.run_k_blocks}"
    return None


def reachable() -> list[GemmConfig]:
    """Every configuration that the choice for any kind of work can give."""
    ways = (
        *dense.reachable(),
        *rows.reachable_grouped(),
        *rows.reachable_silu(),
        *depths.reachable_k_grouped(),
        *heads.reachable(),
        *skip.reachable_skipping(),
    )
    return [config for config in dict.fromkeys(ways) if isinstance(config, GemmConfig)]


KERNEL: Kernel[GemmConfig] = Kernel(
    "fp8_gemm",
    params_of,
    reachable,
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.unit_n or config.block_n])},
    promotes=True,
)
