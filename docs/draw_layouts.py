"""Draws docs/layouts.svg: elements that share a scale, and scales in memory:  python docs/draw_layouts.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import deep_gemm

PICTURE = Path(__file__).with_name("layouts.svg")
ROWS, BLOCKS = 6, 3
ROW, BLOCK, CELL = 16, 60, 34
COLOURS = ("#7aa6c2", "#c2a77a", "#8fbf8f")
"""Colours of the blocks of k."""
LEFT, TOP, GAP = 30, 56, 70
WIDTH = LEFT + 2 * (BLOCKS * BLOCK + GAP) + BLOCKS * BLOCK + 30
STRIPS = TOP + 2 * BLOCK + 60
"""The height at which the pictures of memory begin."""
GROUPS = (2, 1)
"""The number of blocks of k in each group of a k-grouped operand."""


def svg() -> str:
    """Return the picture. `get_mn_major_tma_aligned_tensor` computes the places of scales."""
    height = STRIPS + 3 * (CELL + 40) - 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_by_row(LEFT, "1x128: A; 1D1D: B too"),
        *_by_block(LEFT + BLOCKS * BLOCK + GAP),
        *_by_row(LEFT + 2 * (BLOCKS * BLOCK + GAP), "1x128, groups along k", cut=GROUPS[0]),
    ]
    plain = torch.arange(ROWS * BLOCKS).view(ROWS, BLOCKS).float()
    laid = deep_gemm.get_mn_major_tma_aligned_tensor(plain)
    strips = (
        ("scales of the first, row-major: as per_token_cast_to_fp8 gives them", _in_memory(plain)),
        ("the same, m-major: as products load them (mn_major=True)", _in_memory(laid)),
        ("values along k, one dimension: all rows of group 0, then all rows of group 1", _values_along_k()),
    )
    for i, (title, cells) in enumerate(strips):
        lines += _strip(STRIPS + i * (CELL + 40), title, cells)
    return "\n".join([*lines, "</svg>", ""])


def _in_memory(sf: torch.Tensor) -> list[tuple[str, int | None]]:
    """List the places of memory from the first scale to the last: each has a scale's name and block, or nothing."""
    at: dict[int, tuple[str, int | None]] = {}
    for row in range(ROWS):
        for block in range(BLOCKS):
            at[row * sf.stride(0) + block * sf.stride(1)] = f"{row},{block}", block
    return [at.get(place, ("", None)) for place in range(max(at) + 1)]


def _values_along_k() -> list[tuple[str, int | None]]:
    """List each row's blocks, group by group."""
    cells: list[tuple[str, int | None]] = []
    first = 0
    for blocks in GROUPS:
        cells += [(f"{row},{first + i}", first + i) for row in range(ROWS) for i in range(blocks)]
        first += blocks
    return cells


def _by_row(x: float, title: str, cut: int = BLOCKS) -> Iterator[str]:
    """Draw rows in which 128 columns share a scale; a group begins at block `cut`."""
    yield _text(x, TOP - 30, title, 13, weight="bold")
    yield from _heads(x)
    for row in range(ROWS):
        for block in range(BLOCKS):
            at = x + block * BLOCK + (6 if block >= cut else 0)
            yield _box(at, TOP + row * ROW, BLOCK, ROW, COLOURS[block], f"{row},{block}")
    yield _text(x, TOP + ROWS * ROW + 18, f"scales [{ROWS}, {BLOCKS}]", 12)


def _by_block(x: float) -> Iterator[str]:
    """Draw blocks of 128x128."""
    yield _text(x, TOP - 30, "128x128: B", 13, weight="bold")
    yield from _heads(x)
    for row in range(2):
        for block in range(BLOCKS):
            yield _box(x + block * BLOCK, TOP + row * BLOCK, BLOCK, BLOCK, COLOURS[block], f"{row},{block}")
    yield _text(x, TOP + 2 * BLOCK + 18, f"scales [2, {BLOCKS}]", 12)


def _heads(x: float) -> Iterator[str]:
    for block in range(BLOCKS):
        yield _text(x + block * BLOCK + BLOCK / 2, TOP - 8, "128", 10, "middle")


def _strip(y: float, title: str, cells: list[tuple[str, int | None]]) -> Iterator[str]:
    """Draw memory, from left to right."""
    yield _text(LEFT, y, title, 13, weight="bold")
    width = (WIDTH - 2 * LEFT) / (BLOCKS * 8)
    for i, (name, block) in enumerate(cells):
        colour = "none" if block is None else COLOURS[block]
        yield _box(LEFT + i * width, y + 10, width, CELL, colour, name)


def _box(x: float, y: float, width: float, height: float, colour: str, text: str) -> str:
    dashes = ' stroke-dasharray="3 3"' if colour == "none" else ""
    frame = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="#444444"{dashes}/>'
    )
    return frame + _text(x + width / 2, y + height / 2 + 4, text, 10, "middle")


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg())
