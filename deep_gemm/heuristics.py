"""Which configuration runs a product: candidates -> legal? -> cost -> best. Pure, deterministic, explainable.

The cost is a time in microseconds on a named GPU:

    launch + waves * (k_blocks * block_us + tile_us), but not less than the time that memory takes

`block_us` is what a tile takes for one k-block with all SMs at work, and `tile_us` what it takes besides: filling the
ring, and the part of its stores that the next tile does not hide. Both were measured for every tile on an H200 (one
wave of tiles, cold L2, random data, at k = 512 and 7168) and are listed in TILES; other GPUs are scaled from these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from .config import BLOCK_K, GemmConfig, Output, tile_config
from .layout import ceil_div


@dataclass(frozen=True)
class Gpu:
    """What the cost of a product depends on."""

    name: str
    num_sms: int
    dram_tb_per_s: float
    """Bulk copies into shared memory, cold, at the sizes of real weights."""
    fp8_tflops: float
    """What the tensor cores reach in a burst, operands resident."""
    launch_us: float = 2.2
    """An empty product: launch, barriers, first bytes from DRAM."""


H200 = Gpu("H200", 132, 4.0, 1875)
H100 = Gpu("H100", 132, 2.9, 1875)
H20 = Gpu("H20", 78, 3.6, 290)
GPUS = (H200, H100, H20)
HOPPER = 9


@cache
def gpu_of(device: int) -> Gpu:
    """Facts of a CUDA device; an unknown Hopper GPU is taken for an H100 with its own number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major != HOPPER:
        raise NotImplementedError(
            f"deep_gemm's kernels need a Hopper GPU (compute capability 9.0); cuda:{device} is {properties.name}, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    known = next((gpu for gpu in GPUS if gpu.name in properties.name), H100)
    return replace(known, num_sms=properties.multi_processor_count)


@dataclass(frozen=True)
class Tile:
    """A tile that the kernel computes, and its times on an H200."""

    block_m: int
    block_n: int
    block_ns: float
    tile_us: float
    cluster_m: int = 1
    cluster_n: int = 1


TILES = (
    Tile(64, 16, 164, 0.44),
    Tile(64, 32, 175, 0.46),
    Tile(64, 48, 203, 0.54),
    Tile(64, 64, 207, 0.59),
    Tile(64, 96, 259, 0.70),
    Tile(64, 112, 278, 0.95),
    Tile(64, 128, 301, 0.88),
    Tile(64, 192, 395, 1.31),
    Tile(64, 256, 514, 1.79),
    Tile(128, 16, 211, 0.64),
    Tile(128, 32, 231, 0.65),
    Tile(128, 48, 276, 0.95),
    Tile(128, 64, 280, 0.94),
    Tile(128, 96, 385, 1.44),
    Tile(128, 112, 406, 1.94),
    Tile(128, 128, 423, 1.58),
    Tile(128, 160, 471, 2.22),
    Tile(128, 192, 540, 2.84),
    Tile(128, 256, 737, 2.92),
    Tile(192, 64, 376, 1.58),
    Tile(192, 128, 568, 2.44),
    Tile(256, 64, 458, 1.85),
    Tile(256, 96, 633, 2.24),
    Tile(256, 112, 714, 3.42),
    Tile(256, 128, 721, 2.98),
    Tile(128, 128, 385, 2.08, cluster_n=2),
    Tile(256, 128, 733, 3.06, cluster_n=2),
    Tile(256, 128, 728, 3.11, cluster_m=2),
)


MAX_MENU = 8
MENU_SWEEP = tuple(sorted({m for power in range(5, 15) for m in (1 << power, 3 << power - 1)} | {1, 8, 16, 24}))


@dataclass(frozen=True)
class Candidate:
    """One configuration for a product: its cost, and where it goes."""

    tile: Tile
    config: GemmConfig
    waves: int
    compute_us: float
    memory_us: float
    why_not: str | None = None
    """Why it cannot run this product; None if it can."""

    @property
    def cost_us(self) -> float:
        """The larger of the two times; infinite for what cannot run."""
        return max(self.compute_us, self.memory_us) if self.why_not is None else float("inf")


def candidates(m: int, n: int, k: int, output: Output, gpu: Gpu) -> list[Candidate]:
    """Every configuration with its cost for this product, best first; those that cannot run it last."""
    found = [_candidate(tile, m, n, k, output, gpu) for tile in TILES]
    return sorted(found, key=lambda candidate: candidate.cost_us)


@cache
def select(m: int, n: int, k: int, output: Output, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest cost, of the few that serve this weight."""
    tile = min(menu(n, k, output, gpu), key=lambda tile: _cost(tile, m, n, k, output, gpu))
    return _config(tile, output)


@cache
def menu(n: int, k: int, output: Output, gpu: Gpu) -> tuple[Tile, ...]:
    """The few tiles that serve one weight for every m, so that few kernels are compiled and kept.

    Starting with what runs everything, it takes the tile that saves most over a sweep of m, one at a time. What is
    saved counts relative to the best cost at that m, so that every size of batch has the same say.
    """
    costs = [[_cost(tile, m, n, k, output, gpu) for tile in TILES] for m in MENU_SWEEP]
    best = [min(row) for row in costs]
    chosen = [next(index for index, tile in enumerate(TILES) if tile.cluster_m * tile.cluster_n == 1)]
    while len(chosen) < MAX_MENU:

        def total(index: int) -> float:
            return sum(min(row[i] for i in (*chosen, index)) / least for row, least in zip(costs, best, strict=True))

        chosen.append(min(range(len(TILES)), key=total))
    return tuple(TILES[index] for index in sorted(set(chosen)))


def explain(
    m: int,
    n: int,
    k: int,
    d_dtype: torch.dtype = torch.bfloat16,
    *,
    with_c: bool = False,
    accumulate: bool = False,
    gpu: str | None = None,
) -> list[Candidate]:
    """Print and return every candidate for a dense product with its cost, best first, and why it lost.

    `with_c`: C is another tensor, added; `accumulate`: C is D itself. `gpu` is "H200", "H100" or "H20"; None means the
    current GPU, or an H200 where there is none.

    >>> explain(4096, 7168, 2048)[0].config.name  # doctest: +SKIP
    '256x128 bf16'
    """
    if d_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"d_dtype: expected torch.bfloat16 or torch.float32, got {d_dtype}")
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size < 1:
            raise ValueError(f"{name}: expected a positive size, got {size}")
    is_fp32 = d_dtype == torch.float32
    output = Output(is_fp32, with_c=with_c or (accumulate and not is_fp32), adds_to_d=accumulate and is_fp32)
    facts = _gpu_named(gpu)
    found = candidates(m, n, k, output, facts)
    on_menu = menu(n, k, output, facts)
    chosen = next(candidate for candidate in found if candidate.tile in on_menu)
    from rich import box  # here, because importing deep_gemm must stay cheap
    from rich.console import Console
    from rich.table import Table

    title = f"{m} x {n} x {k} on {facts.name}, {facts.num_sms} SMs"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("configuration")
    for heading in ("waves", "compute us", "memory us", "cost us"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for candidate in found:
        lost = candidate.cost_us / chosen.cost_us - 1
        verdict = (
            "chosen"
            if candidate is chosen
            else candidate.why_not
            or ("not on the menu of this weight" if candidate.tile not in on_menu else f"{lost:.0%} slower")
        )
        table.add_row(
            candidate.config.name,
            str(candidate.waves),
            f"{candidate.compute_us:.1f}",
            f"{candidate.memory_us:.1f}",
            "-" if candidate.why_not else f"{candidate.cost_us:.1f}",
            verdict,
        )
    Console(highlight=False).print(table)
    return found


def _gpu_named(name: str | None) -> Gpu:
    if name is None:
        return gpu_of(torch.cuda.current_device()) if torch.cuda.is_available() else H200
    known = next((gpu for gpu in GPUS if gpu.name == name), None)
    if known is None:
        raise ValueError(f"gpu: expected {', '.join(gpu.name for gpu in GPUS)} or None, got {name!r}")
    return known


def reachable() -> list[GemmConfig]:
    """Every configuration that `select` can give: all of them compile without spills, which the tests see to."""
    outputs = [Output(), Output(with_c=True)]
    outputs += [Output(is_fp32=True), Output(is_fp32=True, with_c=True), Output(is_fp32=True, adds_to_d=True)]
    return [_config(tile, output) for output in outputs for tile in TILES]


@cache
def _config(tile: Tile, output: Output) -> GemmConfig:
    return tile_config(tile.block_m, tile.block_n, output, tile.cluster_m, tile.cluster_n)


def _candidate(tile: Tile, m: int, n: int, k: int, output: Output, gpu: Gpu) -> Candidate:
    waves, compute_us, memory_us = _times(tile, m, n, k, output, gpu)
    return Candidate(tile, _config(tile, output), waves, compute_us, memory_us, _why_not(tile, m, n))


def _times(tile: Tile, m: int, n: int, k: int, output: Output, gpu: Gpu) -> tuple[int, float, float]:
    """Waves, and the microseconds that computing and memory take."""
    clusters_m = ceil_div(ceil_div(m, tile.block_m), tile.cluster_m)
    clusters_n = ceil_div(ceil_div(n, tile.block_n), tile.cluster_n)
    waves = ceil_div(clusters_m * clusters_n, gpu.num_sms // (tile.cluster_m * tile.cluster_n))
    # An FP32 output is twice the bytes to store, a C as many to read.
    output_factor = (2 if output.is_fp32 else 1) + (1 if output.with_c else 0)
    tensor_us = 2 * tile.block_m * tile.block_n * BLOCK_K / (gpu.fp8_tflops / gpu.num_sms) / 1e6
    block_us = max(tile.block_ns / 1e3, tensor_us)
    compute_us = gpu.launch_us + waves * (ceil_div(k, BLOCK_K) * block_us + tile.tile_us * output_factor)
    output_bytes = m * n * (4 if output.is_fp32 else 2) * (2 if output.with_c or output.adds_to_d else 1)
    memory_us = gpu.launch_us + (m * k + n * k + output_bytes) / (gpu.dram_tb_per_s * 1e6)
    return waves, compute_us, memory_us


def _cost(tile: Tile, m: int, n: int, k: int, output: Output, gpu: Gpu) -> float:
    """What `Candidate.cost_us` says, without the candidate: a new m is looked at within microseconds."""
    if _why_not(tile, m, n) is not None:
        return float("inf")
    _, compute_us, memory_us = _times(tile, m, n, k, output, gpu)
    return max(compute_us, memory_us)


def _why_not(tile: Tile, m: int, n: int) -> str | None:
    if tile.cluster_m > 1 and m <= tile.block_m:
        return "one row of tiles, nothing to share B with"
    if tile.cluster_n > 1 and n <= tile.block_n:
        return "one column of tiles, nothing to share A with"
    return None
