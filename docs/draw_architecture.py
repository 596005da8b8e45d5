"""Draws architecture.svg from the imports of the package: python docs/draw_architecture.py

A room is a folder or a flat module of the package. An arrow is an import between rooms. A room stands one floor above
the highest room that it imports, so every arrow runs downward; rooms that import each other have no floor, and the
script names them. The picture omits an arrow if a path over other rooms implies it, and has one arrow for the entry
points, which import all rooms. The file also lists all arrows, and a test compares it with today's imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from math import inf
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "deep_gemm"
PICTURE = Path(__file__).with_name("architecture.svg")
FRONT = "__init__"
PATHS = ("distributed", "errors", "jit_kernels", "utils")
"""Public import paths that only name things that other rooms hold, and are not rooms."""

Arrows = dict[str, set[str]]
"""For each room the rooms that it imports."""

PARTS = {
    "the base of all kernels": ("#f3cfcf", ("core",)),
    "families of kernels": ("#cfe3f3", ("casts", "gemm", "linear", "moe", "indexer", "hyper", "across")),
    "layers that learn": ("#f6e3bf", ("nn", "convert")),
    "used by programs": ("#e6e6e6", (FRONT, "__main__", "cli", "ops", "kernels", "compat", "integrations", "testing")),
}
EVERYWHERE = (FRONT, "__main__", "cli", "ops", "kernels")
"""Entry points, which import rooms of all floors: the picture draws them side by side above all floors."""
HOLDS = {
    FRONT: "public names",
    "__main__": "python -m deep_gemm",
    "cli": "demo, doctor, compile, cache",
    "ops": "operators of torch",
    "kernels": "all kernels",
    "across": "experts across GPUs",
    "nn": "modules with gradients",
    "convert": "existing models",
    "integrations": "engines, transformers",
    "moe": "mixtures of experts",
    "linear": "cast and product",
    "hyper": "hyper-connections",
    "gemm": "products: FP8, FP4, BF16",
    "casts": "FP8, FP4, scales",
    "indexer": "MQA logits",
    "testing": "time and compare",
    "compat": "older call forms",
    "core": "checks, compiler, launch, PTX",
}
WIDTH, LEFT, TOP = 1000, 20, 56
BOX_HEIGHT, FLOOR_HEIGHT = 46, 82
GAP, PASSAGE = 26, 2
"""The gap between boxes, and the width of a place where an arrow passes a floor."""

Point = tuple[float, float]


def rooms() -> set[str]:
    """List the folders and flat modules of the package."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    return (folders | set(flat_modules())) - set(PATHS)


def flat_modules() -> list[str]:
    """List the modules that are in no folder."""
    return sorted(path.stem for path in PACKAGE.glob("*.py"))


def room_of(path: Path) -> str:
    """Name the room of a source file."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield all imports of a source file, at any place of the file, as parts of absolute names."""
    package = (PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                yield tuple(str(node.args[0].value).split("."))


def arrows() -> Arrows:
    """Find the imports between rooms. Names that `__init__` itself defines, such as the version, are its own."""
    known = rooms()
    found: Arrows = {room: set() for room in known}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in imports(path):
            if name[0] == PACKAGE.name:
                there = name[1] if len(name) > 1 and name[1] in (*known, *PATHS) else FRONT
                found.get(room_of(path), set()).add(there)
    return {room: there - {room, *PATHS} for room, there in sorted(found.items())}


def floors(found: Arrows) -> dict[str, int]:
    """Compute the floor of each room; the lowest floor is 0."""
    placed: dict[str, int] = {}
    while len(placed) < len(found):
        ready = [room for room in found if room not in placed and found[room] <= placed.keys()]
        if not ready:
            raise ValueError(f"rooms that import each other: {', '.join(sorted(found.keys() - placed.keys()))}")
        placed.update({room: 1 + max((placed[there] for there in found[room]), default=-1) for room in ready})
    return placed


def direct(found: Arrows) -> set[tuple[str, str]]:
    """Find the arrows that no path over other rooms implies."""
    below: dict[str, set[str]] = {}
    for room in sorted(found, key=floors(found).__getitem__):
        below[room] = found[room].union(*(below[there] for there in found[room]))
    return {
        (room, there)
        for room in found
        for there in found[room]
        if not any(there in below[between] for between in found[room])
    }


def listed(found: Arrows) -> str:
    """List the arrows, with one line for each room."""
    return "\n".join(f"{room} -> {' '.join(sorted(there)) or '(none)'}" for room, there in sorted(found.items()))


def svg() -> str:
    """Return the picture."""
    every = arrows()
    found = {room: there for room, there in every.items() if room not in EVERYWHERE}
    floor = floors(found)
    highest = max(floor.values())
    height = TOP + (highest + 2) * FLOOR_HEIGHT + 8
    ways = {(a, b): _way(a, b, floor) for a, b in direct(found)}
    place = _places(floor, ways, highest)
    ways_in = sorted((room for room in EVERYWHERE if room in every), key=lambda room: (-floors(every)[room], room))
    place |= _row(ways_in)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f"<desc>\n{listed(every)}\n</desc>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#444444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(len(every), max(floors(every).values()) + 1, sum(map(len, every.values()))),
        f'<rect x="0" y="{TOP}" width="{WIDTH}" height="{FLOOR_HEIGHT}" fill="#f4f4f4"/>',
        _arrow([(WIDTH / 2, TOP + FLOOR_HEIGHT - BOX_HEIGHT / 2 - 8), (WIDTH / 2, TOP + 2.2 * FLOOR_HEIGHT)]),
        f'<text x="{WIDTH / 2 + 12:.0f}" y="{TOP + FLOOR_HEIGHT + 22}" font-size="13">these import all below</text>',
    ]
    lines += [_arrow([place[node] for node in ways[arrow]]) for arrow in sorted(ways)]
    lines += [_box(room, *place[room]) for room in sorted(every)]
    return "\n".join([*lines, "</svg>", ""])


def _row(names: list[str]) -> dict[str, Point]:
    """Draw boxes side by side at the top, over the whole width of the picture."""
    gap = (WIDTH - 2 * LEFT - sum(map(_width, names))) / (len(names) - 1)
    left, found = float(LEFT), {}
    for name in names:
        found[name] = (left + _width(name) / 2, TOP + FLOOR_HEIGHT / 2)
        left += _width(name) + gap
    return found


def _way(room: str, there: str, floor: dict[str, int]) -> list[str]:
    """List an arrow's nodes: its two rooms, and a place to pass on each floor between them."""
    return [room, *(f"{room} {there} {level}" for level in range(floor[room] - 1, floor[there], -1)), there]


def _places(floor: dict[str, int], ways: dict[tuple[str, str], list[str]], highest: int) -> dict[str, Point]:
    """Compute the middle of each node. On each floor nodes are ordered by the places of their neighbours."""
    levels: list[list[str]] = [sorted(room for room in floor if floor[room] == level) for level in range(highest + 1)]
    ties: dict[str, set[str]] = {}
    for way in (ways[arrow] for arrow in sorted(ways)):
        for node in way[1:-1]:
            levels[int(node.rpartition(" ")[2])].append(node)
        for above, below in pairwise(way):
            ties.setdefault(above, set()).add(below)
            ties.setdefault(below, set()).add(above)
    x = {node: at for level in levels for node, at in _spread(level).items()}
    for turn in range(60):
        for level in levels if turn % 2 else reversed(levels):
            wish = {node: _middle([x[other] for other in sorted(ties.get(node, ()))], x[node]) for node in level}
            x.update(_spread(sorted(level, key=lambda node: (wish[node], node)), wish))
    leftmost = min(x[node] - _width(node) / 2 for node in x)
    extent = max(x[node] + _width(node) / 2 for node in x) - leftmost
    stretch = (WIDTH - LEFT - GAP) / extent
    return {
        node: (LEFT + (x[node] - leftmost) * stretch, TOP + (highest + 1.5 - i) * FLOOR_HEIGHT)
        for i, level in enumerate(levels)
        for node in level
    }


def _spread(level: list[str], wish: dict[str, float] | None = None) -> dict[str, float]:
    """Place nodes from left to right, each as close to its wanted place as the other nodes allow."""
    half = [(_width(node) + GAP) / 2 for node in level]
    wish = wish or {node: 100.0 * i for i, node in enumerate(level)}
    pushed_right, pushed_left = dict(wish), dict(wish)
    edge = -inf
    for node, width in zip(level, half, strict=True):
        pushed_right[node] = max(wish[node], edge + width)
        edge = pushed_right[node] + width
    edge = inf
    for node, width in reversed([*zip(level, half, strict=True)]):
        pushed_left[node] = min(wish[node], edge - width)
        edge = pushed_left[node] - width
    return {node: (pushed_right[node] + pushed_left[node]) / 2 for node in level}


def _middle(others: list[float], alone: float) -> float:
    return sum(others) / len(others) if others else alone


def _label(room: str) -> str:
    if room == FRONT:
        return "deep_gemm"
    return f"{room}/" if (PACKAGE / room).is_dir() else room


def _colour(room: str) -> str:
    return next((colour for colour, members in PARTS.values() if room in members), "white")


def _width(node: str) -> float:
    return PASSAGE if " " in node else 24 + max(10 * len(_label(node)), 7.5 * len(HOLDS.get(node, "")))


def _box(room: str, x: float, y: float) -> str:
    width = _width(room)
    shape = f'x="{x - width / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="5"'
    return (
        f'<rect {shape} fill="{_colour(room)}" stroke="#444444"/>'
        f'<text x="{x:.0f}" y="{y - 3:.0f}" font-size="15" font-weight="bold" text-anchor="middle">'
        f"{_label(room)}</text>"
        f'<text x="{x:.0f}" y="{y + 15:.0f}" font-size="13" text-anchor="middle">{HOLDS.get(room, "")}</text>'
    )


def _arrow(points: list[Point]) -> str:
    """Draw a curve from the bottom of a box to the top of another box; it is vertical where it passes a floor."""
    (x, y), half = points[0], BOX_HEIGHT / 2
    y += half
    path = f"M{x:.0f},{y:.0f}"
    for i, (to_x, middle_y) in enumerate(points[1:], start=1):
        is_last = i == len(points) - 1
        to_y = middle_y - half - 1
        bend = (to_y - y) / 2
        path += f" C{x:.0f},{y + bend:.0f} {to_x:.0f},{to_y - bend:.0f} {to_x:.0f},{to_y:.0f}"
        x, y = to_x, to_y
        if not is_last:
            y = middle_y + half
            path += f" L{x:.0f},{y:.0f}"
    return f'<path d="{path}" fill="none" stroke="#444444" stroke-width="1.4" marker-end="url(#head)"/>'


def _legend(num_rooms: int, num_floors: int, num_arrows: int) -> Iterator[str]:
    yield (
        f'<text x="{LEFT}" y="20" font-size="14">An arrow: imports. {num_rooms} rooms, {num_floors} floors, '
        f"{num_arrows} arrows; not drawn are those that others lead along.</text>"
    )
    x = LEFT
    for name, (colour, _) in PARTS.items():
        yield f'<rect x="{x}" y="30" width="14" height="14" fill="{colour}" stroke="#444444"/>'
        yield f'<text x="{x + 20}" y="42" font-size="13">{name}</text>'
        x += 44 + 8 * len(name)


if __name__ == "__main__":
    PICTURE.write_text(svg())
