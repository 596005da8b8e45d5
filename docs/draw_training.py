"""Draws docs/training.svg, the operands of a linear layer's three products:  python docs/draw_training.py"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).with_name("training.svg")
SIZE = {"tokens": 132, "in": 96, "out": 72}
"""Lengths of the sides in the picture; the 128 elements of a scale are `STEP` long."""
STEP = 24
COLOURS = {"x": "#7aa6c2", "w": "#c2a77a", "dy": "#8fbf8f", "": "#d9d9d9"}
LEFT, ROW, TOP = 96, 186, 56
PLACES = (LEFT, LEFT + 232, LEFT + 470)
WIDTH, HEIGHT = 820, TOP + 3 * ROW + 6


class Matrix(NamedTuple):
    """A matrix of the picture."""

    name: str
    of: str
    rows: str
    columns: str
    cast: tuple[int, int] | None
    """The numbers of rows and columns under a scale, in units of `STEP`; 0 means one row or column."""
    note: str


BY_ROW, BY_BLOCK = (0, 1), (1, 1)
PRODUCTS = (
    (
        "forward",
        Matrix("x", "x", "tokens", "in", BY_ROW, "FP8, 1x128"),
        Matrix("w", "w", "out", "in", BY_BLOCK, "FP8, 128x128"),
        Matrix("y", "", "tokens", "out", None, "type of x, bias added"),
    ),
    (
        "gradient of x",
        Matrix("dy", "dy", "tokens", "out", BY_ROW, "FP8, 1x128"),
        Matrix("w, transposed", "w", "in", "out", BY_BLOCK, "FP8, 128x128"),
        Matrix("dx", "", "tokens", "in", None, "type of x"),
    ),
    (
        "gradient of w",
        Matrix("dy, transposed", "dy", "out", "tokens", BY_ROW, "FP8, 1x128 along tokens"),
        Matrix("x, transposed", "x", "in", "tokens", BY_ROW, "FP8, 1x128 along tokens: saved"),
        Matrix("dw", "", "out", "in", None, "type of w, or added to main_grad"),
    ),
)


def svg() -> str:
    """Draw a row for each product: both operands, contiguous along the dimension that is summed up."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *(
            _text(x, 24, label, 14, "#3b3b3b")
            for x, label in zip(PLACES, ("A", "B", "D = A times B transposed"), strict=True)
        ),
    ]
    for index, (title, *matrices) in enumerate(PRODUCTS):
        top = TOP + index * ROW
        lines.append(_text(8, top + 12, title, 12, "#3b3b3b"))
        for left, matrix in zip(PLACES, matrices, strict=True):
            lines += _matrix(matrix, left, top)
    return "\n".join([*lines, "</svg>", ""])


def _matrix(m: Matrix, left: int, top: int) -> list[str]:
    height, width = SIZE[m.rows], SIZE[m.columns]
    lines = [
        _text(left, top - 6, f"{m.name}  [{m.rows}, {m.columns}]", 12, "#222222"),
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="{COLOURS[m.of]}"/>',
    ]
    if m.cast is not None:
        down, across = m.cast
        lines += [_line(left, y, left + width, y) for y in range(top, top + height + 1, STEP if down else 4)]
        lines += [_line(x, top, x, top + height) for x in range(left, left + width + 1, STEP * across)]
    lines.append(_text(left, top + height + 14, m.note, 11, "#666666"))
    return lines


def _line(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ffffff" stroke-width="1"/>'


def _text(x: int, y: int, text: str, size: int, colour: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg())
    print(f"wrote {PICTURE}")
