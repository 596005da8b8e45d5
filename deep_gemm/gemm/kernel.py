"""The kernels of products: their parameters, and the instructions that their machine code must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.check.layout import ceil_div
from ..core.check.recipes import WHOLE
from ..core.gpu import WARPGROUP_THREADS, WGMMA_K
from ..core.kernel import CodePlan, Config, Kernel
from ..core.meeting import MAX_RANKS
from ..core.params import Params
from ..core.wgmma_header import wgmma_bf16_header, wgmma_header
from .choose.bf16 import reachable_bf16, reachable_bf16_depths, reachable_bf16_rows, reachable_bf16_sum
from .choose.fp8 import reachable
from .config.bf16 import BLOCK_K as BLOCK_K_OF_BF16
from .config.bf16 import Bf16Config
from .config.decode import DecodeConfig
from .config.tall import BLOCK_K, GemmConfig
from .kinds.epilogues import Epilogue
from .kinds.output import Output, other_fields
from .kinds.works import MOST_INLINE_COUNTS, MOST_K_PARTS, Work

MAX_INLINE_KS = 896
"""The most depths that the host can pass to `k_group_maps` as parameters."""
PRODUCTS_OF_BLOCK = 4
"""BF16 WGMMAs for one unit and one k-block, 16 deep each."""
_SOURCE = "#include ROWS_PARAMS\n#include WORK\n#include DECODE_WORK\n"
"""Includes of the files that may define the struct of parameters; a configuration's choices name these files."""
_LENGTHS = {"kMaxRanks": MAX_RANKS, "kMostKParts": MOST_K_PARTS, "kMostInlineCounts": MOST_INLINE_COUNTS}
_PARAMS: dict[tuple[str, Work, Epilogue], Params] = {}
"""Parameter lists read so far, by everything that decides them: members of unions, the work and the epilogue."""


def params_of(config: GemmConfig | DecodeConfig) -> Params:
    """Return the parameters of a configuration's kernel: the work or the epilogue names the file with the struct."""
    last_map, epilogue = "", config.epilogue
    if isinstance(config, GemmConfig):
        last_map = epilogue.second_map if config.has_second_map else "map_sfb"
        last_map += " whole_sfa" if config.sfa == WHOLE else " map_sfa"
    key = last_map, config.work, epilogue
    found = _PARAMS.get(key)
    if found is None:
        names: dict[str, str | int] = {**config.choices(), **_LENGTHS}
        found = _PARAMS[key] = Params.of_source(_SOURCE, "Params", names, last_map)
    return found


def code_plan(config: GemmConfig) -> CodePlan:
    """Derive the parts that the kernel's machine code must have.

    The code has the k loops (of runs, and of the tail) once, and once more for the units of a short or narrow tile.
    `#pragma unroll 1` keeps NVRTC from unrolling them, and neither NVRTC nor ptxas peels off iterations.
    """
    producer_registers, math_registers = config.registers
    k_blocks_in_code = config.run_k_blocks + config.has_tail + config.folds_parts + config.mixes_parts
    units = config.units_per_warpgroup + (0 if config.branches_on_parts else config.units_of_part)
    columns = config.unit_n or config.block_n
    stores = 0 if config.epilogue.has_row_addresses else units * columns // config.panel_columns
    boxes = 2  # of A and B
    if config.work.groups_rows or config.converts_b:
        boxes = config.block_m // config.box_rows_of_a + config.block_n // config.box_rows_of_b
    return CodePlan(
        roles=(
            (WARPGROUP_THREADS, producer_registers),
            *([(WARPGROUP_THREADS * config.convert_groups, config.convert_registers)] if config.converts_b else []),
            (WARPGROUP_THREADS * config.num_math_warpgroups, math_registers),
        ),
        shared_bytes=config.shared_bytes,
        qgmma=units * BLOCK_K // WGMMA_K * k_blocks_in_code,
        tma_loads=boxes + (config.scale_rows > 0) + (config.scale_rows > config.box_scale_rows) + config.loads_sfb,
        multicast_loads=(1 + config.work.is_along_k) * (config.cluster_m * config.cluster_n > 1),  # and A's scales
        tma_stores=stores * (1 + config.has_second_map) if config.stores_by_tma and not config.adds_to_d else 0,
        tma_reduces=stores if config.adds_to_d else 0,
        bulk_copies=int(config.work.reads_ids),  # to write zeros as padding
    )


def code_plan_of_bf16(config: Bf16Config) -> CodePlan:
    """Derive the instructions of the machine code: one loop over k-blocks, and another for parts of tiles."""
    producer_registers, math_registers = config.registers
    units = config.units_per_warpgroup + config.units_of_part
    columns = (config.unit_n or config.block_n) // (1 + config.epilogue.activates)
    stores = 0 if config.epilogue.has_row_addresses else units * columns // config.panel_columns
    boxes_of_a = config.block_m // config.box_rows_of_a if config.work.groups_rows else 1
    boxes_of_b = config.block_n // config.box_rows_of_b
    if config.majors.a_is_mn:
        boxes_of_a = config.box_rows_of_a // 64
    if config.majors.b_is_mn:
        boxes_of_b = config.block_n // config.cluster_m // 64
    shares_a, shares_b = config.cluster_n > 1, config.cluster_m > 1
    return CodePlan(
        roles=(
            (WARPGROUP_THREADS, producer_registers),
            (WARPGROUP_THREADS * config.num_math_warpgroups, math_registers),
        ),
        shared_bytes=config.shared_bytes,
        hgmma=units * PRODUCTS_OF_BLOCK,
        tma_loads=boxes_of_a + boxes_of_b,
        multicast_loads=boxes_of_a * shares_a + boxes_of_b * shares_b,
        tma_stores=0 if config.adds_to_d or not config.stores_by_tma else stores * (1 + config.has_second_map),
        tma_reduces=stores if config.adds_to_d else 0,
        bulk_copies=int(config.work.reads_ids),  # to write zeros as padding
    )


def code_plan_of_decode(config: DecodeConfig) -> CodePlan:
    """Derive the instructions of the machine code. Ordinary stores write D."""
    return CodePlan(
        roles=((32, None), (WARPGROUP_THREADS * config.num_math_warpgroups, None)),
        shared_bytes=config.shared_bytes,
        qgmma=(config.slot_blocks + config.is_fp4) * BLOCK_K // WGMMA_K + config.is_fp4,  # a k-block alone, and a group
        tma_loads=2 * (1 + config.slot_blocks),  # A and B, and B ahead of A
        ctas_per_sm=config.ctas_per_sm,
        bulk_copies=int(config.work.reads_ids),  # to write zeros as padding
    )


def why_unfit(config: GemmConfig | DecodeConfig, k: int, output: Output) -> str | None:
    """Say why a configuration would compute something else than the problem; None if it computes the problem."""
    others = other_fields(config, output)
    if others:
        return f"is for another output: {', '.join(others)}"
    if isinstance(config, DecodeConfig):
        return None
    if config.adds_to_d and not output.adds_to_d:
        return "adds to D, which is not C"
    k_blocks = ceil_div(k, BLOCK_K)
    if k_blocks % config.run_k_blocks and not config.has_tail:
        return f"has no code for the tail of {k_blocks} blocks of k in runs of {config.run_k_blocks}"
    if isinstance(config, Bf16Config) and config.slices > ceil_div(k, BLOCK_K_OF_BF16):
        return f"cuts k into {config.slices} slices, more than there are blocks of {BLOCK_K_OF_BF16}"
    return None


FP8_GEMM: Kernel[GemmConfig] = Kernel(
    "fp8_gemm",
    params_of,
    lambda: [config for config in reachable() if isinstance(config, GemmConfig)],
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.unit_n or config.block_n], b=config.multiplied_b)},
    promotes=True,
)
BF16_GEMM: Kernel[Bf16Config] = Kernel(
    "bf16_gemm",
    params_of,
    lambda: [
        config
        for way in (reachable_bf16, reachable_bf16_rows, reachable_bf16_depths, reachable_bf16_sum)
        for config in dict.fromkeys(way())
    ],
    code=code_plan_of_bf16,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_bf16_header([config.unit_n or config.block_n], *config.majors)},
)
FP8_GEMM_DECODE: Kernel[DecodeConfig] = Kernel(
    "fp8_gemm_decode",
    params_of,
    lambda: [config for config in reachable() if isinstance(config, DecodeConfig)],
    code=code_plan_of_decode,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.block_tokens], of_registers=config.is_fp4)},
    promotes=True,
)


@dataclass(frozen=True)
class MapsConfig(Config):
    """The only configuration of `k_group_maps`, whose source needs no constants: it includes no `config.cuh`."""

    name: str = "maps"
    num_threads: int = 32
    """Threads of a CTA, one for each group."""


MAPS = MapsConfig()
K_GROUP_MAPS = Kernel("k_group_maps", "MapParams", lambda: [MAPS], lengths={"kMaxInlineKs": MAX_INLINE_KS})
"""Makes the tensor maps of groups along k on the GPU."""


def kernel_of(config: GemmConfig | DecodeConfig) -> Kernel[Any]:
    """Return the kernel that a configuration belongs to."""
    if isinstance(config, DecodeConfig):
        return FP8_GEMM_DECODE
    return BF16_GEMM if isinstance(config, Bf16Config) else FP8_GEMM
