"""Draws times by batch size from a result file of `bench dense`: python docs/draw_sweep.py result.json picture.png"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from lab.bench.contenders import FAST, OURS
from lab.bench.plot import COLOURS, NAMES
from lab.bench.report import Report


def draw(report: Report, path: Path) -> None:
    """Draw one panel for each weight: time against m."""
    rows = [row for row in report.rows if row.kind == "dense" and row.mode == "cold" and row.us]
    weights = list(dict.fromkeys(row.shape[1:] for row in rows))
    figure = Figure(figsize=(5 * len(weights), 4.2), layout="constrained")
    for axes, weight in zip(figure.subplots(1, len(weights), squeeze=False)[0], weights, strict=True):
        for contender in (FAST, OURS):
            points = sorted(
                (row.shape[0], row.us) for row in rows if row.shape[1:] == weight and row.contender == contender
            )
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=3.5, color=COLOURS[contender], label=NAMES[contender]
            )
        axes.set(title=f"n x k = {weight[0]} x {weight[1]}", xscale="log", xlabel="m", ylabel="us, cold")
        axes.set_ylim(bottom=0)
        axes.grid(which="both", color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    header = report.header
    about = f"{header['machine'].get('gpu')}, {header['date'][:10]}, commit {header['commit']}"
    figure.suptitle(about, x=0.995, ha="right", fontsize=7, color="#777777")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Report.load(Path(sys.argv[1])), Path(sys.argv[2]))
