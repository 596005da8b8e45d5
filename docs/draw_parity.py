"""Draws docs/learn/parity.svg, the phases of one mbarrier, and waits for these phases:  python docs/draw_parity.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PICTURE = Path(__file__).parent / "learn" / "parity.svg"
PHASES = 4
LEFT, TOP, PHASE, BAR, STEP = 200, 56, 150, 34, 34
WIDTH = LEFT + PHASES * PHASE + 90
COLOURS = ("#7aa6c2", "#e0a030")
"""The colours of phases, by parity."""
WAITS = (
    ("a new barrier, wait(1)", 0.0, 1),
    ("a new barrier, wait(0)", 0.0, 0),
    ("in phase 1, wait(0)", 1.4, 0),
    ("in phase 1, wait(1)", 1.4, 1),
    ("too late for phase 0, wait(0)", 2.3, 0),
)
"""Waits: a title, the time of its beginning (in phases), and the parity."""


def end_of_wait(begin: float, parity: int) -> float:
    """Give the time at which a wait returns: at once if the current phase has the other parity, else at its end."""
    phase = int(begin)
    return begin if phase % 2 != parity else float(phase + 1)


def svg() -> str:
    """Draw phases from left to right, and a line for each wait."""
    height = TOP + BAR + 30 + len(WAITS) * STEP + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 26, "A phase ends when all arrivals and all announced bytes have come", 15, weight="bold"),
    ]
    for phase in range(PHASES):
        x = LEFT + phase * PHASE
        size = f'x="{x}" y="{TOP - 14}" width="{PHASE}" height="{BAR}"'
        lines.append(f'<rect {size} fill="{COLOURS[phase % 2]}" stroke="#444444"/>')
        lines.append(_text(x + PHASE // 2, TOP + 8, f"phase {phase}, parity {phase % 2}", 12, "middle"))
        bottom = TOP + BAR + 12 + len(WAITS) * STEP
        lines.append(f'<path d="M{x} {TOP + BAR - 14}V{bottom}" stroke="#999999" stroke-dasharray="3 4"/>')
    for number, (title, begin, parity) in enumerate(WAITS):
        lines += _wait(TOP + BAR + 26 + number * STEP, title, begin, parity)
    lines.append(_text(LEFT, height - 14, "a wait for a parity goes on while the phase of that parity lasts", 12))
    return "\n".join([*lines, "</svg>", ""])


def _wait(y: int, title: str, begin: float, parity: int) -> Iterator[str]:
    end = end_of_wait(begin, parity)
    first, last = LEFT + begin * PHASE, LEFT + end * PHASE
    yield _text(LEFT - 12, y + 4, title, 12, "end")
    if last > first:
        yield f'<path d="M{first:g} {y}H{last:g}" stroke="#c8502d" stroke-width="6"/>'
    yield f'<circle cx="{last:g}" cy="{y}" r="6" fill="#3f8f4f" stroke="#222222"/>'
    yield _text(
        last + 12, y + 4, "returns at once" if end == begin else f"returns with the end of phase {int(begin)}", 12
    )


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style} fill="#222222">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg())
