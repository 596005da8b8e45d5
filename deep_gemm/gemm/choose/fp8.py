"""Choose the configuration of a product: the tile of the lowest cost in the model of cost.py.

A dense weight uses few kernels, for any m, so that few are compiled and kept. They are picked at the first call with a
weight of this shape, together with the rows that each kernel serves; later calls only look up their m. Other products
use the best tile for their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...core.check.recipes import E2M1, E4M3
from ...core.gpu import Gpu
from ...core.settings import get_batch_invariant, num_sms_of
from ..config.decode import DecodeConfig
from ..config.tall import BLOCK_K, GemmConfig
from ..kinds.epilogues import BLOCK_SUMS, combinations
from ..kinds.output import (
    BF16,
    FP32,
    FP32_C,
    FP32_D,
    OPERANDS_OF,
    OUTPUTS,
    OUTPUTS_OF,
    OUTPUTS_OF_ROWS,
    SUMMED_OPERANDS,
    Output,
    Sizes,
    other_fields,
)
from ..kinds.works import COUNTS, DENSE, DEPTHS, ENDS, HEADS, IDS
from .cost import BAND_WEIGHTS, BANDS, SPREAD, OnWeight, alike, band_of, dense_memory_us, estimate, on_weight, together
from .tiles import (
    BLOCKS_OF_RUNS,
    DEPTHS_TILES,
    DEPTHS_TO_C,
    FEW,
    HIGH_TILE,
    LARGEST,
    MOST_FEW,
    SHARING_A,
    Tile,
    pairs_up,
    skipping,
    tiles_for,
    wants_pairs,
)
from .timings import Timings, timings_of

Config = GemmConfig | DecodeConfig
MAX_MENU = 12
LEAD = 0.97
"""Grouped rows use the decode kernel if it costs at most this part of `fp8_gemm`: at closer costs both kernels took the
same time on an H100."""
PANELS = (64, 32, 16)
"""Columns of a panel. Parts of heads must be whole panels; the widest panel that fits is stored fastest."""


def choose(sizes: Sizes, output: Output, gpu: Gpu, part_multiple: int = 0) -> Config:
    """Choose by the settings in force: for the whole GPU, unless that configuration needs more SMs than are allowed.

    `fp8_gemm` is persistent: its grid can be as small as the caller wants. The decode kernel has a CTA for each tile;
    with more CTAs than allowed SMs, it would use other SMs too. `part_multiple`: for heads with columns between their
    parts; each part has a multiple of this number of columns.
    """
    split_k, num_sms = not get_batch_invariant(), num_sms_of(gpu.num_sms)
    if output.work.groups_rows:  # with FP4 the two kernels may add up in different orders
        return select(sizes, output, gpu, whole_gpu=(split_k or output.b != E2M1) and num_sms >= gpu.num_sms)
    config = select(sizes, output, gpu, part_multiple, split_k=split_k)
    if num_sms >= gpu.num_sms:
        return config
    if isinstance(config, DecodeConfig) and config.ctas(int(sizes.m), sizes.n, groups=sizes.groups) > num_sms:
        config = select(sizes, output, gpu, part_multiple, split_k=split_k, whole_gpu=False)
    if config.cluster_size > num_sms:
        config = select(sizes, output, replace(gpu, num_sms=num_sms), part_multiple, split_k=split_k, whole_gpu=False)
    return config


def select(
    sizes: Sizes, output: Output, gpu: Gpu, part_multiple: int = 0, *, split_k: bool = True, whole_gpu: bool = True
) -> Config:
    """Choose the configuration of the lowest cost.

    Without `split_k`, CTAs do not divide k: one thread promotes each element of D in order of k, and the element's bits
    depend only on its row of A and its row of B. Without `whole_gpu`, only configurations whose grid can be limited to
    some SMs are considered.

    A dense product uses the menu of its weight. A product stored in parts of heads uses the plain product's
    configuration, except an `fp8_gemm` that splits k: that would help only products of few columns.
    """
    if output.work is not DENSE:
        return select_grouped(alike(sizes, output), output, gpu, split_k, whole_gpu)
    plain, k = BF16 if part_multiple else output, sizes.k
    menu = menu_of(sizes.n, k, plain, gpu, split_k, whole_gpu)
    number = menu.numbers[band_of(int(sizes.m))]
    config = menu.configs[number]
    if config is None:
        config = menu.configs[number] = menu.offers[number].tile.config(plain, k)
    if not part_multiple:
        return config
    if isinstance(config, GemmConfig) and config.cluster_k > 1:
        config = select(sizes, plain, gpu, split_k=False, whole_gpu=whole_gpu)
    return skipping(config, next(columns for columns in PANELS if part_multiple % columns == 0))


@lru_cache(maxsize=4096)
def select_grouped(sizes: Sizes, output: Output, gpu: Gpu, split_k: bool = True, whole_gpu: bool = True) -> Config:
    """Choose the configuration for groups or heads.

    If the scales of an FP4 weight do not fold, the decode kernel adds in another order than `fp8_gemm`.
    """
    tile = chosen_tile(sizes, output, gpu, split_k=split_k, whole_gpu=whole_gpu)
    return tile.config(output, sizes.k)


def chosen_tile(
    sizes: Sizes,
    output: Output,
    gpu: Gpu,
    timings: Timings | None = None,
    *,
    split_k: bool = True,
    whole_gpu: bool = True,
) -> Tile:
    """Choose the tile that `select` would; `timings` replace the GPU's if they are given."""
    m, n, k, _ = sizes
    if output.work is DENSE:
        return menu_of(n, k, output, gpu, split_k, whole_gpu).tile_for(int(m))
    times = timings or timings_of(gpu)

    def cost(tile: Tile) -> float:
        own = estimate(tile, sizes, output, gpu, times).cost_us
        return own / LEAD if tile in FEW and output.work.groups_rows else own

    best = min(offered(sizes, output, gpu, split_k=split_k, whole_gpu=whole_gpu), key=cost)
    return SHARING_A if output.work.is_along_k and best == LARGEST and pairs_up(n) else best


def offered(sizes: Sizes, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True) -> Sequence[Tile]:
    """List the tiles to choose from."""
    work = output.work
    if work.is_along_k:  # pairs that share A take up to 1% more cycles, but less power: the cost does not choose them
        return DEPTHS_TO_C if wants_pairs(output) and not pairs_up(sizes.n) else DEPTHS_TILES
    if work.groups_rows:
        takes_few = whole_gpu and (output.b == E2M1 or sizes.m <= MOST_FEW)
        return [tile for tile in tiles_for_rows(output, sizes.m) if takes_few or not tile.is_decode]
    return [
        tile
        for tile in tiles_for(output)
        if (split_k or tile.cluster_k == 1) and (whole_gpu or not tile.is_decode) and tile.cluster_size <= gpu.num_sms
    ]


def tiles_for_rows(output: Output, rows: float) -> list[Tile]:
    """List the tiles for groups of `rows` rows on average."""
    highest = HIGH_TILE if output.work.has_planes and output.b == E4M3 and output.parts == 1 else 256
    return [tile for tile in tiles_for(output) if tile.block_m <= highest or rows * SPREAD[-1] <= tile.block_m]


class Menu(NamedTuple):
    """The few tiles that serve one weight, and the tile that serves each band of m."""

    offers: tuple[OnWeight, ...]
    numbers: tuple[int, ...]
    """For each band of m, the index of its tile in `offers`."""
    configs: list[Config | None]
    """Configurations of the tiles, each made at its first use."""

    def tile_for(self, m: int) -> Tile:
        """Return the tile for m rows."""
        return self.offers[self.numbers[band_of(m)]].tile


@lru_cache(maxsize=4096)
def menu_of(n: int, k: int, output: Output, gpu: Gpu, split_k: bool = True, whole_gpu: bool = True) -> Menu:
    """Return the menu of a weight.

    If a kernel must keep to some of the SMs, other tiles of the menu serve the rows of the decode kernel.
    """
    if whole_gpu:
        return menu_by(timings_of(gpu), n, k, output, gpu, split_k)
    all_offers = menu_of(n, k, output, gpu, split_k).offers
    offers = tuple(offer for offer in all_offers if not offer.tile.is_decode)
    columns = zip(*(offer.multiply_us(BANDS) for offer in offers), strict=True)
    return Menu(offers, tuple(column.index(min(column)) for column in columns), [None] * len(offers))


def menu_by(timings: Timings, n: int, k: int, output: Output, gpu: Gpu, split_k: bool = True) -> Menu:
    """Pick the tiles for a weight, by the given timings.

    The menu begins with the best tile of each band. While it is too long, the tile whose loss costs least is dropped. A
    band's loss counts relative to the least cost that the band could have.
    """
    tiles = [tile for tile in tiles_for(output) if split_k or tile.cluster_k == 1]
    if (output.b == E2M1 or output.folds_parts) and not split_k:  # the two kernels add up in different orders
        tiles = [tile for tile in tiles if not tile.is_decode]
    offers = [on_weight(tile, n, k, output, gpu, timings) for tile in tiles]
    columns = list(zip(*[offer.multiply_us(BANDS) for offer in offers], strict=True))
    best = [column.index(min(column)) for column in columns]
    kept = sorted(set(best))
    if len(kept) > MAX_MENU:
        _drop_the_least_missed(kept, best, columns, dense_memory_us(BANDS, n, k, output, timings))
    return Menu(tuple(offers[i] for i in kept), tuple(kept.index(i) for i in best), [None] * len(kept))


def _drop_the_least_missed(
    kept: list[int], best: list[int], columns: Sequence[Sequence[float]], memory: Sequence[float]
) -> None:
    """Drop tiles until MAX_MENU remain, and give the bands of a dropped tile their best remaining tile."""
    costs = [together(column[first], us) for column, first, us in zip(columns, best, memory, strict=True)]
    least, second, losses = costs.copy(), best.copy(), [0.0] * len(best)

    def look(band: int) -> None:
        """Find the tile that would serve a band if its best tile were dropped, and the time lost by that."""
        column, place = columns[band], kept.index(best[band])
        others = [column[i] for i in kept]
        del others[place]
        us = min(others)
        next_best = others.index(us)
        second[band] = kept[next_best + (next_best >= place)]
        losses[band] = BAND_WEIGHTS[band] * (together(us, memory[band]) - costs[band]) / least[band]

    for band in range(len(best)):
        look(band)
    while len(kept) > MAX_MENU:
        missed = dict.fromkeys(kept, 0.0)
        for first, loss in zip(best, losses, strict=True):
            missed[first] += loss
        gone = min(kept, key=missed.__getitem__)
        kept.remove(gone)
        for band in range(len(best)):
            if gone == best[band]:
                best[band] = second[band]
                costs[band] = together(columns[band][best[band]], memory[band])
                look(band)
            elif gone == second[band]:
                look(band)


def outputs() -> list[Output]:
    """List every output that `select` may be called with, in the order of the kernels' families."""
    dense = [output for operands in OPERANDS_OF[DENSE] for output in OUTPUTS_OF[operands]]
    rows = [
        replace(output, work=work)
        for work in (IDS, ENDS, COUNTS)
        for operands in OPERANDS_OF[work]
        for output in (OUTPUTS_OF[operands][OUTPUTS.index(each)] for each in OUTPUTS_OF_ROWS)
    ]
    with_epilogues = [
        Output(work=work, epilogue=epilogue, b=b, sfa=sfa, sfb=sfb) for epilogue, work, (b, sfa, sfb) in combinations()
    ]
    depths = [
        replace(OUTPUTS_OF[operands][OUTPUTS.index(each)], work=DEPTHS)
        for operands in OPERANDS_OF[DEPTHS]
        for each in (FP32, FP32_C, FP32_D, BF16)
    ]
    heads = [replace(output, work=HEADS) for operands in OPERANDS_OF[HEADS] for output in OUTPUTS_OF[operands][:5]]
    block_sums = [replace(OUTPUTS_OF[each][2], epilogue=BLOCK_SUMS) for each in SUMMED_OPERANDS]
    return [*dense, *rows, *with_epilogues, *block_sums, *depths, *heads]


def reachable() -> list[Config]:
    """List every configuration that `select` can return. Tests compile all of them and find no spills."""
    found = [
        tile.config(output, BLOCK_K * (BLOCKS_OF_RUNS + blocks_left))
        for output in outputs()
        for blocks_left in range(BLOCKS_OF_RUNS)
        for tile in tiles_for(output)
    ]
    plain = [config for config in dict.fromkeys(found) if not other_fields(config, BF16)]
    into_heads = [
        skipping(config, columns)
        for config in plain
        if isinstance(config, DecodeConfig) or config.cluster_k == 1
        for columns in PANELS
    ]
    return list(dict.fromkeys([*found, *into_heads]))
