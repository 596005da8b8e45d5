"""Counts the size of the source tree: files, lines, parts and the imports between them, and repetitions in gemm.

`python -m lab.house` prints each number beside its ceiling. docs/draw_architecture.py defines the parts (rooms), and
the imports between rooms (arrows). Inside of gemm each folder or file is a room.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GEMM = ROOT / "deep_gemm" / "gemm"
CEILINGS = {
    "files in the wheel": 330,
    "lines of Python in the wheel": 27_500,
    "lines of CUDA in the wheel": 11_000,
    "lines of C in the wheel": 900,
    "lines of data in the wheel": 39,
    "lines of Python in lab/": 18_500,
    "lines of Python in tests/": 47_500,
    "rooms": 18,
    "floors": 10,
    "arrows": 78,
    "arrows in gemm": 74,
    "arrows upward in gemm": 0,
    "functions in the wheel": 1800,
    "types in the wheel": 190,
    "lines of the longest function": 80,
    "problem types in gemm": 1,
    "functions `run` in gemm": 5,
    "switches asked in gemm/config/tall.py": 76,
}
"""A ceiling may only fall or stay: tests/lab/test_house.py compares it with the counts of every earlier commit."""


class Grant(NamedTuple):
    """Growth that an issue allows for a capability. A branch pays for any other growth by removing something."""

    issue: str
    lines: int
    """Lines that the wheel may gain, of all languages and data together. The laboratory may gain the same number, and
    tests twice that number."""
    kernels: int = 0
    """Number of new kernels; the wheel may have two more files for each."""


GRANTS: tuple[Grant, ...] = (
    Grant("the first hour: convert, peft, doctor", 300),
    Grant("scales of a row, a column, a tensor, and biases", 500),
    Grant("mixtures in BF16", 400),
    Grant("served for real: decode of one token, engines", 200),
    Grant("train = rollout, to the bit", 500, kernels=1),
    Grant("experts across GPUs: results leave beside the first products", 500, kernels=1),
)
_GRANTED = (
    (tuple(f"lines of {what} in the wheel" for what in ("Python", "CUDA", "C", "data")), 1, 0),
    (("lines of Python in lab/",), 1, 0),
    (("lines of Python in tests/",), 2, 0),
    (("files in the wheel",), 0, 2),
)
"""Counts that share a grant, and how much each of its lines, and each of its kernels, raises them."""
SWITCHES = (
    *("groups_rows", "is_stacked", "reads_ids", "is_along_k", "has_planes", "may_be_empty", "is_summed"),
    *("converts_b", "has_chunks", "loads_sfb", "with_c"),
    *("activates", "gates_apart", "has_row_addresses", "skips_mid"),
)
"""Attributes of a configuration that distinguish kinds of work, operands and outputs."""


def counts() -> dict[str, int]:
    """Count lines, files, imports and other things in the checkout."""
    package, lab, tests = (_files(folder) for folder in ("deep_gemm", "lab", "tests"))
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs" / "draw_architecture.py")
    assert spec is not None and spec.loader is not None
    drawing: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    arrows, in_gemm = drawing.arrows(), arrows_in_gemm(drawing)
    functions = [*_defined(package, ast.FunctionDef)]
    types = [*_defined(package, ast.ClassDef)]
    of_gemm = [*_defined((path for path in package if GEMM in path.parents), ast.FunctionDef)]
    asked = ast.walk(ast.parse((GEMM / "config" / "tall.py").read_text()))
    numbers = (
        len(package),
        _lines(package, ".py"),
        _lines(package, ".cuh", ".h"),
        _lines(package, ".c"),
        _lines(package, ".json"),
        _lines(lab, ".py"),
        _lines(tests, ".py"),
        len(drawing.rooms()),
        max(drawing.floors(arrows).values()) + 1,
        sum(map(len, arrows.values())),
        len(in_gemm),
        len(upward(in_gemm)),
        len(functions),
        len(types),
        max(each.end_lineno - each.lineno + 1 for _, each in functions),
        sum(GEMM in path.parents and each.name.endswith("Problem") for path, each in types),
        sum(each.name.strip("_") == "run" for _, each in of_gemm),
        sum(isinstance(node, ast.Attribute) and node.attr in SWITCHES for node in asked),
    )
    return dict(zip(CEILINGS, numbers, strict=True))


def excess(counted: Mapping[str, int], grants: Sequence[Grant] = GRANTS) -> dict[str, int]:
    """Return how far counts exceed their ceilings, beyond the growth that grants allow."""
    over = {what: number - CEILINGS[what] for what, number in counted.items() if number > CEILINGS[what]}
    for together, of_line, of_kernel in _GRANTED:
        room = sum(grant.lines * of_line + grant.kernels * of_kernel for grant in grants)
        if sum(over.get(what, 0) for what in together) <= room:
            over = {what: by for what, by in over.items() if what not in together}
    return over


def raised(earlier: Mapping[str, int]) -> dict[str, int]:
    """Return how far ceilings are above those of an earlier commit."""
    return {what: now - earlier[what] for what, now in CEILINGS.items() if now > earlier.get(what, now)}


def arrows_in_gemm(drawing: Any) -> set[tuple[str, str]]:
    """Return the imports between rooms of gemm. `__init__`, which imports most rooms, is not a room."""
    rooms = {path.stem for path in GEMM.iterdir()} - {"__init__", "__pycache__"}
    found = set()
    for path in GEMM.rglob("*.py"):
        here = path.relative_to(GEMM).parts[0].removesuffix(".py")
        for name in drawing.imports(path):
            if name[:2] == ("deep_gemm", "gemm") and len(name) > 2:
                found.add((here, name[2]))
    return {(here, there) for here, there in found if here != there and {here, there} <= rooms}


def upward(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows that point up in an order with few such arrows: the next room has fewest unplaced imports."""
    left, placed = {room for arrow in arrows for room in arrow}, dict[str, int]()
    while left:
        missing = {room: sum(here == room and there in left for here, there in arrows) for room in left}
        users = {room: sum(there == room and here in left for here, there in arrows) for room in left}
        lowest = min(left, key=lambda room: (missing[room] > 0, missing[room] - users[room], room))
        left.remove(lowest)
        placed[lowest] = len(placed)
    return {(here, there) for here, there in arrows if placed[there] > placed[here]}


def _defined(paths: Any, kind: type) -> Iterator[tuple[Path, Any]]:
    for path in paths:
        if path.suffix == ".py":
            yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind))


def _lines(paths: list[Path], *suffixes: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths if path.suffix in suffixes)


def _files(folder: str) -> list[Path]:
    built = ".pyc", ".so"
    return [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in built]


if __name__ == "__main__":
    for what, number in counts().items():
        print(f"{what:34}{number:8,}{CEILINGS[what]:8,}")
