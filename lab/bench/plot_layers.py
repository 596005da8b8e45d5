"""Draws the times of a layer's parts, with casts in eager torch and in this package. Only plots need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deep_gemm.core.check.layout import ceil_div

from .contenders import OURS
from .fp4 import PRODUCT
from .layers import ACTIVATION, CAST, EAGER, FIRST, GATHER, ROUTING, SECOND
from .report import Report, Row

COLOURS = {
    ROUTING: "#8c6bb1",
    CAST: "#e39b2d",
    PRODUCT: "#c8102e",
    FIRST: "#c8102e",
    ACTIVATION: "#2a7f9e",
    SECOND: "#8e0b20",
    GATHER: "#55a868",
}
BEFORE_AND_AFTER = ((EAGER, "before"), (OURS, "after"))
WIDTH = 0.38


@dataclass(frozen=True)
class Pair:
    """A layer of one shape, with torch's casts and with ours; one of the two rows may be missing."""

    rows: tuple[Row | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of both rows."""
        return next(row.shape for row in self.rows if row is not None)


def draw(report: Report, path: Path) -> None:
    """Draw a run of `bench linear` or `bench experts` into a file of any type that matplotlib supports."""
    panels = panels_of(report)
    if not panels:
        raise ValueError(f"a plot needs times of parts, and this run of bench {report.kind} has none")
    columns = min(len(panels), 4 if len(panels) > 6 else 3)
    lines = ceil_div(len(panels), columns)
    figure = Figure(figsize=(4.2 * columns + 1, 3.6 * lines + 1.2), layout="constrained")
    for ax, (title, pairs) in zip(figure.subplots(lines, columns, squeeze=False).flat, panels.items(), strict=False):
        draw_panel(ax, title, pairs)
    for ax in figure.axes[len(panels) :]:
        ax.remove()
    gpu = report.header["machine"].get("gpu") or "unknown machine"
    figure.suptitle(
        f"Where the time of {'a linear layer' if report.kind == 'linear' else 'a mixture of experts'} goes, {gpu}\n"
        "left: casts in eager torch, right: deep_gemm, both with deep_gemm's products; us of one call, cold L2",
        fontsize=12,
    )
    rows = [row for pairs in panels.values() for pair in pairs for row in pair.rows if row is not None]
    parts = {part for row in rows for part in row.parts or {}}
    handles = [figure.axes[0].bar(0, 0, color=COLOURS[part], label=part) for part in COLOURS if part in parts]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
    about = f"{report.header['date'][:10]}, commit {report.header['commit']}"
    figure.text(0.995, 0.003, about, ha="right", va="bottom", fontsize=7, color="#777777")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def panels_of(report: Report) -> dict[str, list[Pair]]:
    """Return a panel for each weight: the layers whose parts' times are known, by growing number of tokens."""
    known = {(row.shape, row.contender): row for row in report.rows if row.parts and row.us and not row.failed}
    panels: dict[str, list[Pair]] = {}
    for shape in sorted({shape for shape, _ in known}, key=lambda shape: (weight_of(shape), tokens_of(shape))):
        rows = tuple(known.get((shape, contender)) for contender, _ in BEFORE_AND_AFTER)
        if any(rows):
            panels.setdefault(title_of(shape), []).append(Pair(rows))
    return panels


def tokens_of(shape: Sequence[int]) -> int:
    """Return the rows of a linear layer, or the tokens of a mixture of experts."""
    return shape[0] if len(shape) == 3 else shape[2]


def weight_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the weights that all layers of a panel share."""
    return tuple(shape[1:]) if len(shape) == 3 else (*shape[3:], shape[0])


def title_of(shape: Sequence[int]) -> str:
    """Name a panel.

    >>> title_of((64, 2112, 7168)), title_of((32, 8, 64, 7168, 2048))
    ('n x k = 2112 x 7168', '32 experts, top 8, 7168 x 2048')
    """
    if len(shape) == 3:
        return f"n x k = {shape[1]} x {shape[2]}"
    return f"{shape[0]} experts, top {shape[1]}, {shape[3]} x {shape[4]}"


def draw_panel(ax: Axes, title: str, pairs: Sequence[Pair]) -> None:
    """Draw two stacks for each layer, scaled by the slower one's time, with their times above."""
    for place, pair in enumerate(pairs):
        slowest = max(sum((row.parts or {}).values()) for row in pair.rows if row is not None)
        for side, row in enumerate(pair.rows):
            if row is None or not row.parts:
                continue
            x, bottom = place + (side - 0.5) * (WIDTH + 0.04), 0.0
            for part, us in row.parts.items():
                ax.bar(x, us / slowest, WIDTH, bottom=bottom, color=COLOURS[part])
                bottom += us / slowest
            ax.text(x, bottom + 0.01, _figure(row.us), ha="center", va="bottom", fontsize=6.5)
    ax.set_title(title, fontsize=10)
    ax.set_xticks(range(len(pairs)), [str(tokens_of(pair.shape)) for pair in pairs], fontsize=8)
    ax.set_xlabel("rows" if len(pairs[0].shape) == 3 else "tokens", fontsize=9)
    ax.set_yticks([0, 0.5, 1], ["0", "", "1"])
    ax.set_ylim(0, 1.12)
    ax.set_ylabel("share of the slower", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)


def _figure(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"
