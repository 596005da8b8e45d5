"""Which configuration runs a product: candidates -> legal? -> cost -> best. Deterministic, explainable.

A table of measured choices (tuned.py) is asked first.

The cost is a time in microseconds on a named GPU, the larger of two, and a little more where they are alike:

    computing   launch + waves * (k_blocks of a CTA * block_us + tile_us + what adding up a split k takes); or,
                where rows lie across lines of the L2, launch + what it takes to load all tiles' rows, if that is more
    memory      launch + bytes / bandwidth, and that `fp8_gemm` begins later; for the decode kernel also what rings that
                hold less of B, reading B again, and crowded SMs take

`block_us` is what a tile takes for one k-block with all SMs at work, and `tile_us` what it takes besides: filling the
ring, and the part of its stores that the next tile does not hide. They were fitted to the times of some hundred
products on an H200, cold, each with up to 40 configurations. In an audit of 136 (`python -m deep_gemm tune --audit`)
what is chosen took 0.7% longer than the best on average, 8.8% at most. Other GPUs are scaled from these.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from .config import BLOCK_K, GemmConfig, Output
from .config_decode import DecodeConfig
from .layout import ceil_div
from .tiles import BLOCKS_OF_RUNS, OUTPUTS, OUTPUTS_1D1D, TILES, Tile, tiles_by_name, tiles_for
from .tuned import Entry, Product, read_table, tables_in_force


@dataclass(frozen=True)
class Gpu:
    """What the cost of a product depends on."""

    name: str
    num_sms: int
    dram_tb_per_s: float
    """What products reach, cold, at the sizes of real weights."""
    fp8_tflops: float
    """What the tensor cores reach in a burst, operands resident."""
    launch_us: float = 2.9
    """An empty product: launch, barriers, first bytes from DRAM."""


H200 = Gpu("H200", 132, 3.0, 1875)
H100 = Gpu("H100", 132, 2.1, 1875)
H20 = Gpu("H20", 78, 2.5, 290)
GPUS = (H200, H100, H20)
HOPPER = 9


def gpu_named(name: str) -> Gpu | None:
    """Facts of a GPU by its name here; None if there are none."""
    return next((gpu for gpu in GPUS if gpu.name == name), None)


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


CLUSTERS_THAT_FIT = {
    1: (132, 264), 2: (66, 132), 3: (39, 79), 4: (30, 62), 5: (22, 47), 6: (17, 39), 7: (15, 32), 8: (15, 30),
}  # fmt: skip
"""By their size: how many run at a time on 132 SMs, with one and with two CTAs on an SM (an H200's driver says so)."""
SPLIT_US = {False: (2.4, 0.2), True: (0.4, 0.05)}
"""Adding up a split k: what it takes always and for each CTA, with `fp8_gemm` and with the decode kernel."""
WHOLE_RING_KB, SHALLOW_BY_KB, SHALLOW = 192, 64, 0.03
"""How much of B the decode kernel's rings on an SM hold where they hold most; with so much less it takes that part
longer to read B, and more by the square of what is missing."""
LATE_US = 0.35
"""How much later than with the decode kernel memory is busy with `fp8_gemm`."""
DECODE_REREAD = 0.2
"""What each row of the decode kernel's tiles after the first adds to the time of reading B, as a part of it."""
DECODE_CROWDED_US = 0.3
"""What its memory time grows by where some SMs have two of its CTAs and others one."""
DECODE_WAVE_US = 1.0
"""And where its CTAs do not all run at once."""
STRADDLING_ROW_US = 2.1e-5
"""What the L2 takes for 128 bytes of a row across two of its lines, as they lie where k is no multiple of 128."""
SHARPNESS = 8
"""Of the larger of two times: the exponent of the norm that is taken for it."""
LAST_RESORT = 100.0
"""How much a size of batch loses, as a multiple of its best cost, while no chosen tile can run it."""
NARROW = 1536
MOST_TOKENS = {False: 32, True: 128}
"""Up to how many the decode kernel multiplies: more by a narrow weight, whose k it splits."""
MAX_MENU = 12
LOSS_TO_AVOID = 0.05
"""What is lost beyond this part of the best cost counts three times when the few tiles of a weight are picked."""
MENU_SWEEP = (
    1, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 320, 384, 448,
    512, 576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280, 1408, 1536,
    1664, 1792, 1920, 2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840, 4096, 5120, 6144, 8192,
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One configuration for a product: its cost, and where it goes."""

    tile: Tile
    config: GemmConfig | DecodeConfig
    waves: int
    compute_us: float
    memory_us: float
    cost_us: float
    why_not: str | None = None
    """Why it cannot run this product; None if it can."""


class Fit(NamedTuple):
    """A tile put to one weight: all of its cost that does not depend on m, so that a new m is looked at quickly."""

    tile: Tile
    rows: int
    """Rows of D that a cluster computes."""
    clusters_n: int
    clusters_at_once: int
    clusters_uncrowded: int
    """How many run with a CTA on each SM."""
    wave_us: float
    launch_us: float
    row_us: float
    """What memory takes for one row of A and of D."""
    weight_us: float
    """What memory takes for B."""
    straddling_us: float
    """What the L2 takes for a cluster's rows of A and B where they lie across its lines, else 0."""
    least_m: int
    most_m: int

    @classmethod
    def of(cls, tile: Tile, n: int, k: int, output: Output, gpu: Gpu) -> Fit:
        """Put a tile to a weight."""
        k_blocks = ceil_div(ceil_div(k, BLOCK_K), tile.cluster_k)
        split_us = 0.0
        if tile.cluster_k > 1:
            once, each = SPLIT_US[tile.is_decode]
            split_us = once + each * tile.cluster_k
            if not tile.is_decode:  # shares are whole runs
                k_blocks = ceil_div(k_blocks, BLOCKS_OF_RUNS) * BLOCKS_OF_RUNS
        # An FP32 output is twice the bytes to store, a C as many to read.
        output_factor = (2 if output.is_fp32 else 1) + (1 if output.with_c else 0)
        macs = tile.block_m * tile.block_n * BLOCK_K * tile.ctas_per_sm
        tensor_us = 2 * macs / (gpu.fp8_tflops / gpu.num_sms) / 1e6
        block_us = max(tile.block_ns / 1e3, tensor_us)
        weight_us = n * k / (gpu.dram_tb_per_s * 1e6)
        config = tile.config(output, k)
        if isinstance(config, DecodeConfig):
            ring_kb = config.num_stages * config.block_n * BLOCK_K * config.ctas_per_sm / 1024
            weight_us *= 1 + SHALLOW * ((WHOLE_RING_KB - ring_kb) / SHALLOW_BY_KB) ** 2
        rows_loaded = (tile.block_m * tile.cluster_m + tile.block_n * tile.cluster_n) * ceil_div(k, BLOCK_K)
        row_bytes = k + n * (4 if output.is_fp32 else 2) * (2 if output.with_c or output.adds_to_d else 1)
        bytes_per_us = gpu.dram_tb_per_s * 1e6
        ctas = tile.cluster_m * tile.cluster_n * tile.cluster_k
        # Nothing to share, nothing to split, nowhere to run: never.
        never = (
            (tile.cluster_n > 1 and n <= tile.block_n)
            or (tile.cluster_k > 1 and k <= BLOCK_K * tile.cluster_k)
            or ctas > gpu.num_sms
        )
        fit = [max(clusters * gpu.num_sms // H200.num_sms, 1) for clusters in CLUSTERS_THAT_FIT[ctas]]
        most_m = MOST_TOKENS[n <= NARROW] if tile.is_decode else sys.maxsize
        return cls(
            tile,
            rows=tile.block_m * tile.cluster_m,
            clusters_n=ceil_div(n, tile.block_n * tile.cluster_n),
            clusters_at_once=fit[tile.ctas_per_sm - 1],
            clusters_uncrowded=fit[0],
            wave_us=k_blocks * block_us + tile.tile_us * output_factor + split_us,
            launch_us=gpu.launch_us,
            row_us=row_bytes / bytes_per_us,
            weight_us=weight_us,
            straddling_us=rows_loaded * STRADDLING_ROW_US if k % BLOCK_K else 0.0,
            least_m=tile.block_m + 1 if tile.cluster_m > 1 else 1,
            most_m=0 if never else most_m,
        )

    def clusters(self, m: int) -> int:
        """How many compute all of D."""
        return ceil_div(m, self.rows) * self.clusters_n

    def waves(self, m: int) -> int:
        """How often all SMs take a tile."""
        return ceil_div(self.clusters(m), self.clusters_at_once)

    def compute_us(self, m: int) -> float:
        """What computing takes."""
        return self.launch_us + max(self.waves(m) * self.wave_us, self.clusters(m) * self.straddling_us)

    def memory_us(self, m: int) -> float:
        """What memory takes."""
        us = self.launch_us + self.weight_us + m * self.row_us
        if not self.tile.is_decode:
            return us + LATE_US
        us += DECODE_REREAD * (ceil_div(m, self.rows) - 1) * self.weight_us + DECODE_WAVE_US * (self.waves(m) - 1)
        return us + (DECODE_CROWDED_US if self.clusters(m) > self.clusters_uncrowded else 0.0)

    def cost_us(self, m: int) -> float:
        """The larger of the two, about; infinite for what cannot or shall not run."""
        if not self.least_m <= m <= self.most_m:
            return float("inf")
        compute, memory = self.compute_us(m), self.memory_us(m)
        return float((compute**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS))

    def why_not(self, m: int) -> str | None:
        """Say why it cannot or shall not run; None if it can."""
        if self.least_m <= m <= self.most_m:
            return None
        if m < self.least_m:
            return "one row of tiles, nothing to share B with"
        if self.most_m:
            return "many tokens" if m > MOST_TOKENS[True] else "many tokens and a wide weight"
        if self.tile.cluster_n > 1:
            return "one column of tiles, nothing to share A with"
        return "fewer blocks of k, or SMs, than CTAs that would split k"


def candidates(m: int, n: int, k: int, output: Output, gpu: Gpu) -> list[Candidate]:
    """Every configuration with its cost for this product, best first; those that cannot run it last."""
    fits = [Fit.of(tile, n, k, output, gpu) for tile in tiles_for(output)]
    found = [
        Candidate(
            fit.tile,
            fit.tile.config(output, k),
            fit.waves(m),
            fit.compute_us(m),
            fit.memory_us(m),
            fit.cost_us(m),
            fit.why_not(m),
        )
        for fit in fits
    ]
    return sorted(found, key=lambda candidate: candidate.cost_us)


def select(
    m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> GemmConfig | DecodeConfig:
    """The configuration that a table has for this product, else that of the lowest cost.

    Without `split_k` none in which several CTAs add up their parts of k: then each element of D is promoted in order of
    k by one thread, and its bits depend on its row of A and its row of B alone. Without `whole_gpu` none whose grid
    cannot be held to some of the SMs.
    """
    return chosen_tile(m, n, k, output, gpu, split_k=split_k, whole_gpu=whole_gpu).config(output, k)


def chosen_tile(
    m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> Tile:
    """The tile of `select`."""
    tile = tuned_tile(m, n, k, output, gpu)
    if tile is None or (tile.cluster_k > 1 and not split_k) or (tile.is_decode and not whole_gpu):
        return cheapest_tile(m, n, k, output, gpu, split_k=split_k, whole_gpu=whole_gpu)
    return tile


def cheapest_tile(
    m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> Tile:
    """The tile with the lowest cost, of the few that serve this weight."""
    fits = menu(n, k, output, gpu, split_k=split_k)
    if not whole_gpu:
        fits = tuple(fit for fit in fits if not fit.tile.is_decode)
    return min(fits, key=lambda fit: fit.cost_us(m)).tile


def tuned_tile(m: int, n: int, k: int, output: Output, gpu: Gpu) -> Tile | None:
    """The tile that a table in force has for this very product on this GPU."""
    tiles = tuned_tiles()
    return tiles.get((m, n, k, output, gpu.name, gpu.num_sms)) if tiles else None


@cache
def tuned_tiles() -> dict[Product, Tile]:
    """All that the tables in force have.

    An entry whose tile is chosen no more, or not for this product, is told of and left out: it was right with the
    version that wrote it, and a table that grew old must not stop a program.
    """
    found = {}
    for path in tables_in_force():
        for entry in read_table(path):
            tile, reason = _tile_of(entry)
            if tile is None:
                print(f"deep_gemm: {path}: {entry.name}: left out, {reason}", file=sys.stderr)
            else:
                found[entry.product] = tile
    return found


def _tile_of(entry: Entry) -> tuple[Tile | None, str | None]:
    """An entry's tile; or None, and why it has none."""
    gpu, tile = gpu_named(entry.gpu), tiles_by_name(entry.output).get(entry.tile)
    if gpu is None:
        return None, f"gpu: expected one of {', '.join(gpu.name for gpu in GPUS)}, got {entry.gpu!r}"
    if tile is None:
        return None, f"tile: expected one of {', '.join(tiles_by_name(entry.output))}, got {entry.tile!r}"
    reason = Fit.of(tile, entry.n, entry.k, entry.output, replace(gpu, num_sms=entry.num_sms)).why_not(entry.m)
    if reason is not None:
        return None, f"tile: expected one that can run it, got {entry.tile}: {reason}"
    return tile, None


@cache
def menu(n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True) -> tuple[Fit, ...]:
    """The few tiles that serve one weight for every m, so that few kernels are compiled and kept.

    It takes the tile that saves most over a sweep of m, one at a time, and then looks at each choice once more. What is
    saved counts relative to the best cost at that m, so that every size of batch has the same say; powers of two, which
    programs choose where they have a choice, have two. Over 67 weights and 74 sizes of batch the best of twelve is 0.2%
    from the best of all by this cost, at the 99th percentile 5%.
    """
    fits = [Fit.of(tile, n, k, output, gpu) for tile in tiles_for(output) if split_k or tile.cluster_k == 1]
    costs = [[fit.cost_us(m) for fit in fits] for m in MENU_SWEEP]
    losses = [[_loss(cost / min(row) - 1) for cost in row] for row in costs]
    weights = [2 if m.bit_count() == 1 else 1 for m in MENU_SWEEP]

    def best_addition(chosen: list[int]) -> int:
        so_far = [min([LAST_RESORT, *(row[index] for index in chosen)]) for row in losses]
        return min(
            range(len(fits)),
            key=lambda index: sum(
                weight * min(low, row[index]) for weight, low, row in zip(weights, so_far, losses, strict=True)
            ),
        )

    chosen: list[int] = []
    while len(chosen) < MAX_MENU:
        chosen.append(best_addition(chosen))
    for place in range(MAX_MENU):  # the first were taken before it was known what the others would serve
        chosen[place] = best_addition(chosen[:place] + chosen[place + 1 :])
    return tuple(fits[index] for index in sorted(set(chosen)))


def _loss(part: float) -> float:
    return part + 2 * max(part - LOSS_TO_AVOID, 0.0)


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
    facts = _gpu_asked_for(gpu)
    found = candidates(m, n, k, output, facts)
    on_menu = [fit.tile for fit in menu(n, k, output, facts)]
    tuned = tuned_tile(m, n, k, output, facts)
    choice = tuned or cheapest_tile(m, n, k, output, facts)
    chosen = next(candidate for candidate in found if candidate.tile == choice)
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
        if candidate is chosen:
            verdict = "chosen" if tuned is None else "chosen, tuned"
        elif candidate.why_not or candidate.tile not in on_menu:
            verdict = candidate.why_not or "not on the menu of this weight"
        else:
            verdict = f"{lost:.0%} slower" if lost >= 0 else "cheaper by cost"
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


def _gpu_asked_for(name: str | None) -> Gpu:
    if name is None:
        return gpu_of(torch.cuda.current_device()) if torch.cuda.is_available() else H200
    gpu = gpu_named(name)
    if gpu is None:
        raise ValueError(f"gpu: expected {', '.join(gpu.name for gpu in GPUS)} or None, got {name!r}")
    return gpu


def reachable() -> list[GemmConfig]:
    """Every configuration of `fp8_gemm` that `select` can give: all compile without spills, which the tests see to."""
    found = [
        tile.config(output, BLOCK_K * (BLOCKS_OF_RUNS + blocks_left))
        for blocks_left in range(BLOCKS_OF_RUNS)
        for output in (*OUTPUTS, *OUTPUTS_1D1D)
        for tile in tiles_for(output)
    ]
    return list(dict.fromkeys(config for config in found if isinstance(config, GemmConfig)))


def reachable_decode() -> list[DecodeConfig]:
    """Every configuration of the decode kernel that `select` can give."""
    found = [tile.config(output, BLOCK_K) for output in OUTPUTS for tile in TILES]
    return list(dict.fromkeys(config for config in found if isinstance(config, DecodeConfig)))
