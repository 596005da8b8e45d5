"""The command `python -m lab tune --fit`: fit the cost model's constants to measured times, and judge its choices.

A choice is judged by its regret: how much longer the chosen tile takes than the fastest timed tile. The fit searches
constants with small regrets in the products for fitting, and with right times too. A regret changes in jumps, so it
is smoothed: each tile counts as chosen in part, and counts more the closer its cost is to the lowest.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from deep_gemm.cli import make_console
from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW
from deep_gemm.core.gpu import GPUS, Gpu
from deep_gemm.gemm.choose.cost import NEVER, estimate
from deep_gemm.gemm.choose.fp8 import chosen_tile, menu_by
from deep_gemm.gemm.choose.tiles import DEPTHS_TILES, OUTPUTS_BY_NAME, SHARING_A, Tile, tiles_for
from deep_gemm.gemm.choose.timings import FORMAT, Timings, measured, timings_of
from deep_gemm.gemm.kinds.output import Output, Sizes
from deep_gemm.gemm.kinds.works import DENSE, WORKS

from .command import UsageError
from .report import write_whole
from .table import new_table

NAMES = tuple(field.name for field in fields(Timings))
OF_A_GPU = ("dram_tb_per_s", "evict_us")
"""Constants whose values differ between GPUs."""
SHARPNESS = 100.0
"""A tile that costs 1% more than the lowest counts as chosen 1/e times as much as the lowest."""
WEIGHT_OF_ERRORS = 0.15
"""Weight of an error in a near-best tile's time, relative to a regret of the same size."""
NEAR = 0.3
"""A tile's error counts if its time is up to this fraction above the best; it counts less the slower the tile is."""
FIRST_STEP, LAST_STEP = 0.2, 0.005
"""Relative changes of a constant: the first step, and the smallest step."""
LEAST_GAIN = 1e-6
"""A smaller gain is ignored."""


@dataclass(frozen=True)
class Product:
    """A timed product."""

    output: Output
    m: int
    n: int
    k: int
    num_groups: int
    sizes: tuple[int, ...]
    is_fitted: bool
    purpose: str
    us: Mapping[str, float]
    """Times in us, by the names of tiles."""

    @property
    def best_us(self) -> float:
        """Return the time of the fastest tile."""
        return min(self.us.values())

    @property
    def name(self) -> str:
        """Return a short name for people."""
        groups = f"{self.num_groups} groups, " if self.num_groups else ""
        return f"{groups}{self.m}x{self.n}x{self.k} {self.output.name}"

    @property
    def kind(self) -> str:
        """Return the name of the product's kind for tables."""
        return self.output.work.name or "dense"

    def tiles(self) -> dict[str, Tile]:
        """Return the timed tiles that still exist, by name."""
        known = (*DEPTHS_TILES, SHARING_A) if self.output.work.is_along_k else tiles_for(self.output)
        by_name = {tile.name: tile for tile in known}
        return {name: by_name[name] for name in self.us if name in by_name}

    def cost_us(self, tile: Tile, gpu: Gpu, timings: Timings) -> float:
        """Estimate the time by the model."""
        return estimate(tile, self.shape, self.output, gpu, timings).cost_us

    def chosen(self, gpu: Gpu, timings: Timings) -> Tile:
        """Return the tile that a call would choose by these timings."""
        if self.output.work is DENSE:
            return menu_by(timings, self.n, self.k, self.output, gpu).tile_for(self.m)
        return chosen_tile(self.shape, self.output, gpu, timings)

    @property
    def shape(self) -> Sizes:
        """Return the sizes that the host knows."""
        work, groups = self.output.work, max(self.num_groups, 1)
        rows = self.m / groups if work.is_stacked else self.m
        return Sizes(rows, self.n, sum(self.sizes) // groups if work.is_along_k else self.k, groups)


@dataclass(frozen=True)
class Collected:
    """A file of times: products on one GPU, each with every tile that may suit it."""

    gpu: Gpu
    products: tuple[Product, ...]

    @classmethod
    def load(cls, path: Path) -> Collected:
        """Read a file of times of tiles; for any other file, raise a ValueError that names the fault."""
        try:
            content = json.loads(path.read_text())
            machine = content["header"]["machine"]
            known = next(gpu for gpu in GPUS if gpu.name in machine["gpu"])
            products = [_product(row) for row in content["rows"] if row["us"]]
            return cls(replace(known, num_sms=machine["num_sms"]), tuple(products))
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise ValueError(f"{path}: expected a file of times of tiles, got {error!r}") from error


def _product(row: Mapping[str, Any]) -> Product:
    output = OUTPUTS_BY_NAME.get(row["output"]) or next(each for each in _GROUPED if each.name == row["output"])
    us = {name: spread[0] for name, spread in row["us"].items()}
    sizes = tuple(row["sizes"])
    return Product(output, row["m"], row["n"], row["k"], row["groups"], sizes, row["fitted"], row["purpose"], us)


_GROUPED = [
    Output(is_fp32=is_fp32, with_c=with_c, adds_to_d=adds_to_d, sfb=sfb, work=work)
    for work in WORKS
    for sfb in (PER_BLOCK, PER_ROW)
    for is_fp32, with_c, adds_to_d in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
    )
]


# Judging


@dataclass(frozen=True)
class Regret:
    """Regret: how much longer chosen tiles take than the fastest tiles."""

    of: str
    count: int
    mean: float
    p95: float
    worst: float
    worst_product: Product

    @classmethod
    def over(cls, of: str, lost: Sequence[tuple[float, Product]]) -> Regret:
        """Summarize regrets."""
        ordered = sorted(lost, key=lambda each: each[0])
        values = [value for value, _ in ordered]
        worst, product = ordered[-1]
        p95 = values[min(math.ceil(0.95 * len(values)), len(values)) - 1]
        return cls(of, len(values), statistics.mean(values), p95, worst, product)


def regrets(products: Iterable[Product], gpu: Gpu, timings: Timings) -> list[Regret]:
    """Summarize regrets by kind, separately for products that the fit saw and for the others."""
    lost: dict[str, list[tuple[float, Product]]] = {}
    for product in products:
        value = regret(product, gpu, timings)
        half = "fitted" if product.is_fitted else "held back"
        for of in (f"{product.kind}, {half}", f"all, {half}"):
            lost.setdefault(of, []).append((value, product))
    return [Regret.over(of, lost[of]) for of in sorted(lost)]


def regret(product: Product, gpu: Gpu, timings: Timings) -> float:
    """Return the chosen tile's extra time over the fastest tile, as a fraction; an untimed tile counts as slowest."""
    us = product.us.get(product.chosen(gpu, timings).name, max(product.us.values()))
    return us / product.best_us - 1


# Fitting


class _Search:
    """The constants during a fit, and the loss of each product with them."""

    def __init__(self, collected: Sequence[Collected], timings: Mapping[str, Timings]) -> None:
        self.timings = dict(timings)
        self.cases = [_Case.of(product, one.gpu) for one in collected for product in one.products if product.is_fitted]
        self.losses = [case.loss(self.timings[case.gpu.name]) for case in self.cases]

    @property
    def loss(self) -> float:
        """Return the mean loss, which the fit minimizes."""
        return statistics.fmean(self.losses)

    def take_if_better(self, timings: Mapping[str, Timings]) -> bool:
        """Keep these constants if they are better than the present ones; tell whether they are."""
        losses = [
            case.loss(timings[case.gpu.name]) if timings[case.gpu.name] is not self.timings[case.gpu.name] else before
            for case, before in zip(self.cases, self.losses, strict=True)
        ]
        if statistics.fmean(losses) >= self.loss - LEAST_GAIN:
            return False
        self.timings, self.losses = dict(timings), losses
        return True


@dataclass(frozen=True)
class _Case:
    """A product, its tiles, and how much longer each tile takes than the best tile."""

    product: Product
    gpu: Gpu
    tiles: tuple[Tile, ...]
    us: tuple[float, ...]
    slower: tuple[float, ...]

    @classmethod
    def of(cls, product: Product, gpu: Gpu) -> _Case:
        """Look up the tiles that still exist."""
        tiles = product.tiles()
        us = tuple(product.us[name] for name in tiles)
        return cls(product, gpu, tuple(tiles.values()), us, tuple(own / product.best_us - 1 for own in us))

    def loss(self, timings: Timings) -> float:
        """Return the smoothed regret, plus the errors of the near-best tiles' times."""
        costs = [self.product.cost_us(tile, self.gpu, timings) for tile in self.tiles]
        lowest = min(costs)
        shares = regret = weights = errors = 0.0
        for cost, us, slower in zip(costs, self.us, self.slower, strict=True):
            if cost == NEVER:
                continue
            share = math.exp((1 - cost / lowest) * SHARPNESS)
            shares += share
            regret += share * slower
            weight = max(1 - slower / NEAR, 0.0)
            weights += weight
            errors += weight * math.log(cost / us) ** 2
        return regret / shares + WEIGHT_OF_ERRORS * math.sqrt(errors / weights)


START = Timings(
    launch_us=2.5,
    sm_tflops=14,
    block_ns=80,
    tile_us=0.4,
    store_us=1.5,
    load_gb_per_s=90,
    fp4_ns=165.0,
    fp4_token_ns=1.3,
    fp4_alone_ns=130.0,
    convert_ns=190.0,
    part_ps=8.0,
    part_ns=30.0,
    split_us=2.0,
    decode_split_ns=0.5,
    split_c_ns=0.3,
    add_us=14,
    across_lines_ps=14,
    across_sectors_ps=25,
    by_row=1.3,
    find_us=2.5,
    find_group_us=0.27,
    find_row_ns=9.0,
    part_power=0.6,
    dram_tb_per_s=4,
    evict_us=6,
)
"""The fit starts here on any GPU, so that its result depends only on the files."""


def fit(
    collected: Sequence[Collected], start: Timings = START, announce: Callable[[str], None] = lambda _: None
) -> dict[str, Timings]:
    """Fit constants to the products for fitting, of all GPUs together.

    Each step changes one constant; the step shrinks once it no longer helps. After each round all constants repeat
    their change of that round, for as long as this helps (Hooke and Jeeves).
    """
    search = _Search(collected, {one.gpu.name: replace(start) for one in collected})
    steps: dict[tuple[str, str | None], float] = {(name, None): FIRST_STEP for name in NAMES if name not in OF_A_GPU}
    steps.update({(name, gpu): FIRST_STEP for name in OF_A_GPU for gpu in search.timings})
    while max(steps.values()) >= LAST_STEP:
        announce(f"fitting: {search.loss:.4f}")
        before = search.timings
        for (name, gpu), step in steps.items():
            if step < LAST_STEP:
                continue
            changed = (_changed(search.timings, name, gpu, factor) for factor in (1 + step, 1 / (1 + step)))
            steps[name, gpu] = step * 1.5 if any(map(search.take_if_better, changed)) else step / 2
        while search.take_if_better(_further(before, search.timings)):
            announce(f"fitting: {search.loss:.4f}")
    return {gpu: rounded(timings) for gpu, timings in search.timings.items()}


def _changed(timings: Mapping[str, Timings], name: str, gpu: str | None, factor: float) -> dict[str, Timings]:
    """Change a constant for one GPU, or for all."""
    return {
        of: replace(each, **{name: getattr(each, name) * factor}) if gpu in (None, of) else each
        for of, each in timings.items()
    }


def _further(before: Mapping[str, Timings], after: Mapping[str, Timings]) -> dict[str, Timings]:
    """Extrapolate: repeat the change from `before` to `after`."""
    return {
        of: Timings(*(getattr(each, name) ** 2 / getattr(before[of], name) for name in NAMES))
        for of, each in after.items()
    }


def rounded(timings: Timings) -> Timings:
    """Round times for the file to their significant digits."""
    return Timings(*(float(f"{getattr(timings, name):.3g}") for name in NAMES))


def text_of(timings: Mapping[str, Timings], made_by: str) -> str:
    """Return the text of gemm/choose/timings.json, with one constant on each line."""
    own = {name: {key: getattr(each, key) for key in OF_A_GPU} for name, each in sorted(timings.items())}
    of_all = {key: value for key, value in asdict(next(iter(timings.values()))).items() if key not in OF_A_GPU}
    return json.dumps({"format": FORMAT, "made_by": made_by, "all": of_all, "gpus": own}, indent=1) + "\n"


# The command


def run(files: Sequence[Path], out: Path) -> None:
    """Fit the constants of these files' GPUs, and print how good the choices are."""
    if not files:
        raise UsageError("tune: expected --fit and files of times of tiles, got none")
    try:
        collected = [Collected.load(path) for path in files]
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = make_console()
    before = {one.gpu.name: timings_of(one.gpu) for one in collected}
    with console.status("fitting") as status:
        after = fit(collected, announce=status.update)
    for one in collected:
        title = f"{one.gpu.name}: how much longer the chosen tile takes than the best"
        console.print(_table(title, *(regrets(one.products, one.gpu, each[one.gpu.name]) for each in (before, after))))
    made_by = f"python -m lab tune --fit {' '.join(path.name for path in files)}"
    write_whole(out, text_of({**_of_other_gpus(after), **after}, made_by))
    console.print(f"\nwritten to {out}", markup=False)


def _of_other_gpus(fitted: Mapping[str, Timings]) -> dict[str, Timings]:
    """Return the timings of GPUs without a file: they keep their own constants, and share the rest."""
    shared = next(iter(fitted.values()))
    return {
        name: replace(shared, **{key: getattr(before, key) for key in OF_A_GPU})
        for name, before in measured().items()
        if name not in fitted
    }


def _table(title: str, before: Sequence[Regret], after: Sequence[Regret]) -> Table:
    """Tabulate the regrets of choices, by the constants before and after a fit."""
    table = new_table(title)
    table.add_column("products")
    for heading in ("count", "mean before", "after", "p95 before", "after", "worst before", "after"):
        table.add_column(heading, justify="right")
    table.add_column("worst after")
    for old, new in zip(before, after, strict=True):
        pairs = ((old.mean, new.mean), (old.p95, new.p95), (old.worst, new.worst))
        cells = [f"{value:.{1 + (place == 0)}%}" for place, pair in enumerate(pairs) for value in pair]
        table.add_row(new.of, str(new.count), *cells, new.worst_product.name)
    return table
