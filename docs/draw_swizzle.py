"""Draws docs/learn/swizzle.svg, the places of a row's 16-byte pieces in shared memory:  python docs/draw_swizzle.py"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

PICTURE = Path(__file__).parent / "learn" / "swizzle.svg"
ROWS = CHUNKS = 8
"""The number of rows after which the pattern repeats, and of 16-byte pieces in a row of 128 bytes."""
CELL, ROW, LEFT, TOP, GAP = 44, 26, 60, 84, 90
WIDTH = LEFT + 2 * CHUNKS * CELL + GAP + 20
MARKED = 2
"""The piece of each row that the picture follows."""


def swizzled(offset: int) -> int:
    """Give the place of a byte: bits 7 to 9 of its offset (the row) flip bits 4 to 6 (the piece)."""
    return offset ^ (offset >> 3 & 0x70)


def svg() -> str:
    """Draw the order in which a matrix lies in global memory, and the order in shared memory."""
    height = TOP + ROWS * ROW + 74
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *_tile(LEFT, "rows as they are written", lambda offset: offset),
            *_tile(LEFT + CHUNKS * CELL + GAP, "rows as TMA swizzles them", swizzled),
            "</svg>",
            "",
        ]
    )


def _tile(x: int, title: str, place: Callable[[int], int]) -> Iterator[str]:
    yield _text(x, 28, title, 15, weight="bold")
    yield _text(x, 50, "banks of 4 bytes:", 11)
    for chunk in range(CHUNKS):
        yield _text(x + chunk * CELL + CELL // 2, TOP - 8, f"{chunk * 4}-{chunk * 4 + 3}", 11, "middle")
    banks = set()
    for row in range(ROWS):
        yield _text(x - 8, TOP + row * ROW + 18, f"row {row}", 11, "end")
        for chunk in range(CHUNKS):
            at = place(row * 128 + chunk * 16)
            left, top = x + at % 128 // 16 * CELL, TOP + at // 128 * ROW
            is_marked = chunk == MARKED
            colour = "#e0a030" if is_marked else "#e6eef4"
            yield f'<rect x="{left}" y="{top}" width="{CELL}" height="{ROW}" fill="{colour}" stroke="#666666"/>'
            yield _text(left + CELL // 2, top + 18, str(chunk), 12, "middle", "bold" if is_marked else "normal")
            if is_marked:
                banks.add(at % 128)
    ways = ROWS // len(banks)
    told = "no two in one bank: read at once" if ways == 1 else f"all in four banks: read in {ways} turns"
    yield _text(x, TOP + ROWS * ROW + 28, f"piece {MARKED} of eight rows: {told}", 13)
    yield _text(x, TOP + ROWS * ROW + 50, "a number is a piece's place in its row, 16 bytes each", 11)


def _text(x: int, y: int, text: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style} fill="#222222">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg())
