"""Draws docs/grouped.png, the layouts of grouped rows:  python docs/draw_grouped.py  (needs matplotlib)"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

GROUPS = ("#4c72b0", "#dd8452", "#55a868")
ZERO, SKIPPED = "#e8e8e8", "white"


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one kind: rows of a group, rows that the product fills with zeros, or rows that it skips."""

    count: int
    kind: int | str
    layout: str = ""
    """The layout's number for these rows."""


IDS = [
    Rows(70, 2, "2"),
    Rows(58, "zero", "-1"),
    Rows(100, 0, "0"),
    Rows(70, 1, "1"),
    Rows(86, "zero", "-1"),
    Rows(128, "left", "-1"),
]
ENDS = [
    Rows(100, 0, ""),
    Rows(28, "zero"),
    Rows(70, 1),
    Rows(58, "zero"),
    Rows(70, 2),
    Rows(58, "zero"),
    Rows(128, "left"),
]
COUNTS = [[Rows(100, 0), Rows(60, "left")], [Rows(70, 1), Rows(90, "left")], [Rows(70, 2), Rows(90, "left")]]


def stack(ax: Axes, x: float, top: float, rows: list[Rows], width: float = 1.0) -> float:
    """Draw rows from the top down, and return the place where they end."""
    for part in rows:
        color = GROUPS[part.kind] if isinstance(part.kind, int) else ZERO if part.kind == "zero" else SKIPPED
        hatch = "///" if part.kind == "left" else None
        ax.add_patch(
            Rectangle((x, top), width, part.count, facecolor=color, edgecolor="#777777", hatch=hatch, linewidth=0.8)
        )
        text = f"group {part.kind}, {part.count} rows" if isinstance(part.kind, int) else f"{part.count} rows"
        words = {"zero": ", zeros", "left": ", not touched"}.get(str(part.kind), "")
        ax.text(
            x + width / 2,
            top + part.count / 2,
            text + words,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if isinstance(part.kind, int) else "black",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1} if part.kind == "left" else None,
        )
        if part.layout:
            ax.text(x - 0.06, top + part.count / 2, part.layout, ha="right", va="center", fontsize=9)
        top += part.count
    return top


def note(ax: Axes, x: float, y: float, text: str) -> None:
    """Write a text beside a row."""
    ax.text(x, y, text, ha="left", va="center", fontsize=8)


def draw() -> Figure:
    """Draw the three layouts side by side."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    ids, ends, counts = figure.subplots(1, 3)
    titles = (
        "ids: a number for each row",
        "ends (use_psum_layout): [100, 198, 326]",
        "masked: counts [100, 70, 70], max_m 160",
    )
    for ax, title in zip((ids, ends, counts), titles, strict=True):
        ax.set_title(title, fontsize=10)
        ax.set_xlim(-0.25, 1.45)
        ax.set_ylim(540, -12)
        ax.axis("off")
    stack(ids, 0, 0, IDS)
    for row in (0, 128, 256, 384, 512):
        ids.plot([1.0, 1.05], [row, row], color="black", linewidth=1)
        note(ids, 1.07, row, f"row {row}")
    stack(ends, 0, 0, ENDS)
    for row, text in (
        (100, "ends[0] = 100"),
        (128, "aligned: 128"),
        (198, "ends[1] = 198"),
        (256, "256"),
        (326, "ends[2] = 326"),
    ):
        ends.plot([1.0, 1.05], [row, row], color="black", linewidth=1)
        note(ends, 1.07, row, text)
    top = 0.0
    for group, rows in enumerate(COUNTS):
        end = stack(counts, 0, top, rows)
        note(counts, 1.05, (top + end) / 2, f"d[{group}]")
        top = end + 20
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_name("grouped.png"), dpi=110)
