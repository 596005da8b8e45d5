"""Draws the speedup over DeepGEMM, product by product, on both GPUs: python docs/draw_peers.py docs/peers.png

The times are from lab/bench/peers.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lab.bench.contenders import FAST, OURS
from lab.bench.peers import DEEPGEMM, sessions
from lab.bench.plot import COLOURS
from lab.bench.report import geometric_mean

Product = tuple[str, tuple[int, ...]]

KINDS: tuple[tuple[str, Callable[[Product], bool]], ...] = (
    ("dense\nm = 1 and 16", lambda p: p[0] == "dense" and p[1][0] <= 16),
    ("dense\nm = 64 and 128", lambda p: p[0] == "dense" and 16 < p[1][0] <= 128),
    ("dense\nm = 256 to 1024", lambda p: p[0] == "dense" and 128 < p[1][0] <= 1024),
    ("dense\nm = 4096 and 8192", lambda p: p[0] == "dense" and p[1][0] > 1024),
    ("weight\ngradients", lambda p: p[0] == "dense_1d1d"),
    ("experts,\nequal", lambda p: p[0] == "contiguous"),
    ("experts,\nuneven", lambda p: p[0] == "contiguous_uneven"),
    ("experts,\nmasked", lambda p: p[0] == "masked"),
    ("gradients\nof experts", lambda p: p[0] == "k_grouped"),
)
GAP = 2.5
"""The gap between kinds; the unit is the width of one product."""
LEAST, MOST = 0.8, 2.4


def draw(path: Path) -> None:
    """Draw the products of each kind side by side, slowest first, and the kind's geometric mean."""
    (h200, on_h200), (h100, on_h100) = ((name, speeds(name)) for name in sessions())
    figure = Figure(figsize=(13, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, color=COLOURS["deepgemm"], linewidth=2, label="DeepGEMM")
    left = 0.0
    for name, belongs in KINDS:
        products = sorted((product for product in on_h200[OURS] if belongs(product)), key=on_h200[OURS].__getitem__)
        places = [left + i for i in range(len(products))]
        first = left == 0
        _points(axes, places, [on_h200[FAST].get(product) for product in products], "cuBLASLt fast, H200", first, "x")
        _points(axes, places, [on_h100[OURS][product] for product in products], "deep_gemm, H100", first, "o", "none")
        _points(axes, places, [on_h200[OURS][product] for product in products], "deep_gemm, H200", first, "o")
        mean = geometric_mean(on_h200[OURS][product] for product in products) or 1
        span = places[0] - 0.8, places[-1] + 0.8
        axes.axvspan(*span, color="#f4f4f4", zorder=-1)
        axes.plot(span, (mean, mean), color=COLOURS[OURS], linewidth=1, alpha=0.6)
        middle = (span[0] + span[1]) / 2
        axes.text(middle, 1.01, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)
        axes.text(middle, 0.02, f"{mean:.2f}", transform=axes.get_xaxis_transform(), ha="center", fontsize=9)
        left = places[-1] + GAP
    axes.set_xlim(-1.5, left - GAP + 1.5)
    axes.set_ylim(LEAST, MOST)
    axes.set_yscale("log")
    axes.set_xticks([])
    axes.set_yticks([0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.2], minor=False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.1f}x"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("speed beside DeepGEMM's")
    header = sessions()[h200].header
    axes.set_xlabel(
        "a mark is one product, slowest first; line and figure: geometric mean on the H200\n"
        f"{h200} and {h100}, {header['date']}, commit {header['commit']}, cold L2, all contenders in one process",
        fontsize=9,
    )
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e2e2e2")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="upper center", ncols=4, fontsize=9, framealpha=0.95, bbox_to_anchor=(0.58, 0.99))
    figure.savefig(path, dpi=120)


def speeds(gpu: str) -> dict[str, dict[Product, float]]:
    """Compute the speedup of each contender over DeepGEMM, for each product."""
    rows = sessions()[gpu].rows
    deepgemm = {(row.kind, row.shape): row.us for row in rows if row.contender == DEEPGEMM}
    found: dict[str, dict[Product, float]] = {}
    for row in rows:
        other = deepgemm[row.kind, row.shape]
        if row.us and other:
            found.setdefault(row.contender, {})[row.kind, row.shape] = other / row.us
    return found


def _points(
    axes: Axes, places: list[float], speeds: list[float | None], name: str, first: bool, marker: str, fill: str = ""
) -> None:
    colour = COLOURS[FAST] if name.startswith("cuBLASLt") else COLOURS[OURS]
    points = [(x, y) for x, y in zip(places, speeds, strict=True) if y]
    if points:
        colours = {"color": colour} if marker == "x" else {"facecolors": fill or colour, "edgecolors": colour}
        axes.scatter(
            *zip(*points, strict=True), s=22, marker=marker, linewidths=1.1, label=name if first else None, **colours
        )


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
