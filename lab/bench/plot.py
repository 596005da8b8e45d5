"""Draws a run: speedup by shape above, the roofline below. Only plots need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .cases import COLD_COPY_US, PEAK_TFLOPS
from .compare import Comparison, comparisons
from .contenders import BF16, BLOCKWISE, FAST, OURS
from .report import Report, Row

COLOURS = {OURS: "#c8102e", FAST: "#3b3b3b", BLOCKWISE: "#2a7f9e", BF16: "#a9a9a9", "deepgemm": "#e39b2d"}
NAMES = {
    OURS: "deep_gemm",
    FAST: "cuBLASLt, tensorwise, fast accumulation",
    BLOCKWISE: "cuBLASLt, 1x128 with 128x128",
    BF16: "BF16",
    "deepgemm": "DeepGEMM 2.5.0 (estimate)",
}
GAP = 1.5
"""Space between shapes with different weights, in units of one shape's space."""


@dataclass(frozen=True)
class Place:
    """Position of a shape in the upper panel."""

    x: float
    family: str
    tick: str
    ours: Comparison


def draw(report: Report, path: Path) -> None:
    """Draw a run of `bench dense` or `bench grouped` into a file of any type that matplotlib supports."""
    if report.kind not in ("dense", "grouped"):
        raise ValueError(f"a plot needs a run of bench dense or bench grouped, got {report.kind}")
    compared = [each for each in comparisons(report) if each.row.us is not None]
    if not compared:
        raise ValueError(f"a plot needs cold times of {OURS}, and this run of bench {report.kind} has none")
    # Grouped runs have dense rows only for comparison, and no rival computes a product like dense_1d1d.
    shown = [each for each in compared if (each.row.kind == "dense") == (report.kind == "dense")]
    places = arrange(shown or compared)
    figure = Figure(figsize=(16, 10), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.05))
    draw_speedup(above, places, report)
    draw_roofline(below, places, report)
    gpu = report.header["machine"].get("gpu") or "unknown machine"
    figure.suptitle(f"FP8 products on {gpu}, one call with a cold L2", fontsize=18, fontweight="bold")
    versions = report.header["versions"]
    about = f"{report.header['date'][:10]}, commit {report.header['commit']}, CUDA {versions.get('cuda')}"
    figure.text(0.995, 0.005, about, ha="right", va="bottom", fontsize=8, color="#777777")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def arrange(compared: Sequence[Comparison]) -> list[Place]:
    """Place shapes with the same weights side by side, by growing m; weights with one or two shapes come last."""
    families: dict[str, list[Comparison]] = {}
    for each in compared:
        families.setdefault(_family(each.row), []).append(each)
    lonely = [each for members in families.values() if len(members) < 3 for each in members]
    shown = {family: members for family, members in families.items() if len(members) >= 3}
    places: list[Place] = []
    x = 0.0
    for family, members in [*shown.items(), ("", lonely)]:
        for each in sorted(members, key=lambda each: each.row.shape):
            places.append(Place(x, family, _tick(each.row, whole=not family), each))
            x += 1
        x += GAP if members else 0
    return places


def draw_speedup(axes: Axes, places: Sequence[Place], report: Report) -> None:
    """Draw each contender's speedup over the baseline for each shape; higher is better."""
    with_fast = any(place.ours.to_fast for place in places)
    baseline = NAMES[FAST] if with_fast else NAMES["deepgemm"]
    axes.axhline(1, color=COLOURS[FAST if with_fast else "deepgemm"], linewidth=1.5, label=baseline)
    series = [OURS, "deepgemm", BLOCKWISE] if with_fast else [OURS]
    for name in reversed(series):
        points = [(place, _speedup(name, place, report, with_fast)) for place in places]
        label: str | None = NAMES[name]
        for family in dict.fromkeys(place.family for place in places):
            here = [(place.x, speedup) for place, speedup in points if place.family == family and speedup]
            if not here:
                continue
            xs, ys = zip(*here, strict=True)
            line = "-" if family else "none"
            size = 7 if name == OURS else 4.5
            drawn = axes.plot(xs, ys, linestyle=line, color=COLOURS[name], label=label, zorder=3)
            drawn[0].set(marker="o", markersize=size, linewidth=1.3)
            label = None
    for family in dict.fromkeys(place.family for place in places if place.family):
        span = [place.x for place in places if place.family == family]
        axes.text(sum(span) / len(span), 1.01, family, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
        axes.axvspan(min(span) - 0.7, max(span) + 0.7, color="#f4f4f4", zorder=0)
    axes.set_xticks([place.x for place in places], [place.tick for place in places], rotation=90, fontsize=8)
    axes.set_xlim(places[0].x - 1, places[-1].x + 1)
    axes.set_ylabel(f"speedup over\n{baseline}")
    axes.set_xlabel("m for each pair of n x k" if report.kind == "dense" else "groups x size")
    axes.margins(y=0.15)  # space for the legend
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", ncols=4, fontsize=9, framealpha=0.9)


def draw_roofline(axes: Axes, places: Sequence[Place], report: Report) -> None:
    """Draw each shape at its operations per byte, below the limits of memory and tensor cores."""
    mib, us = COLD_COPY_US[-1]
    tb_per_s = mib * (1 << 20) / us / 1e6
    shapes = {(place.ours.row.kind, place.ours.row.shape) for place in places}
    rows = [row for row in report.rows if row.mode == "cold" and row.tflops and (row.kind, row.shape) in shapes]
    least, most = min(map(_intensity, rows)) / 1.6, max(map(_intensity, rows)) * 1.6
    ridge = PEAK_TFLOPS / tb_per_s
    roof = sorted({least, ridge, max(most, ridge * 1.6)})
    axes.plot(roof, [min(x * tb_per_s, PEAK_TFLOPS) for x in roof], color="#3b3b3b", linewidth=2)
    axes.text(roof[-1], PEAK_TFLOPS * 1.06, f"tensor cores, sustained: {PEAK_TFLOPS} TFLOPS", ha="right", fontsize=10)
    middle = (least * ridge) ** 0.5 if least < ridge else least
    label = f"memory: {tb_per_s:.1f} TB/s "
    axes.text(middle, middle * tb_per_s * 1.15, label, ha="right", va="bottom", fontsize=10)
    for name, marker, fill in ((BF16, "s", "none"), (FAST, "D", "none"), (OURS, "o", COLOURS[OURS])):
        points = [(_intensity(row), row.tflops or 0.0) for row in rows if row.contender == name]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(
                x, y, s=36, marker=marker, facecolors=fill, edgecolors=COLOURS[name], label=NAMES[name], zorder=3
            )
    best = max((row for row in rows if row.contender == OURS), key=lambda row: row.tflops or 0.0)
    text = f"deep_gemm's best: {best.tflops:.0f} TFLOPS at {' x '.join(map(str, best.shape))}"
    axes.text(0.01, 0.95, text, transform=axes.transAxes, va="top", fontsize=12, color=COLOURS[OURS])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte that has to move")
    axes.set_ylabel("TFLOPS")
    axes.grid(which="both", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=9)


def _speedup(name: str, place: Place, report: Report, with_fast: bool) -> float | None:
    ours = place.ours
    ours_to_baseline = ours.to_fast if with_fast else ours.to_deepgemm
    if not ours_to_baseline or not ours.row.us:
        return None
    if name == OURS:
        return 1 / ours_to_baseline
    baseline_us = ours.row.us / ours_to_baseline
    if name == "deepgemm":
        return baseline_us / (ours.row.us / ours.to_deepgemm) if ours.to_deepgemm else None
    same = (ours.row.kind, ours.row.shape, "cold", name)
    other = next((row.us for row in report.rows if (row.kind, row.shape, row.mode, row.contender) == same), None)
    return baseline_us / other if other else None


def _intensity(row: Row) -> float:
    return (row.operations or 1) / (row.bytes or 1)


def _family(row: Row) -> str:
    n, k = (row.shape[1], row.shape[2]) if row.kind == "k_grouped" else row.shape[-2:]
    text = f"{row.shape[1]} x {row.shape[2]}" if row.kind == "k_grouped" else f"{n} x {k}"
    return text if row.kind == "dense" else f"{row.kind.replace('_', ' ')}\n{text}"


def _tick(row: Row, whole: bool) -> str:
    if whole:
        return "x".join(map(str, row.shape))
    if row.kind == "k_grouped":
        return f"{row.shape[0]}x{row.shape[3]}"
    return "x".join(map(str, row.shape[:-2]))
