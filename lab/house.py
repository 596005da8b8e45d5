"""Count the house's files, lines, rooms, floors and arrows. `python -m lab.house` prints it beside its ceilings.

Rooms and the imports between them are those of docs/draw_architecture.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = {
    "files in the wheel": 365,
    "lines of Python in the wheel": 31_470,
    "lines of Python in lab/": 21_140,
    "lines of Python in tests/": 51_280,
    "rooms": 18,
    "floors": 10,
    "arrows": 80,
}
"""A commit that exceeds one says why. They go to 220, 21,000, 12,000, 37,000; 18, 10, 85."""


def counts() -> dict[str, int]:
    """Count what lies in the checkout."""
    package, lab, tests = (_files(folder) for folder in ("deep_gemm", "lab", "tests"))
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs" / "draw_architecture.py")
    assert spec is not None and spec.loader is not None
    drawing: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    arrows = drawing.arrows()
    numbers = (
        len(package),
        *(
            sum(len(path.read_text().splitlines()) for path in each if path.suffix == ".py")
            for each in (package, lab, tests)
        ),
        len(drawing.rooms()),
        max(drawing.floors(arrows).values()) + 1,
        sum(map(len, arrows.values())),
    )
    return dict(zip(CEILINGS, numbers, strict=True))


def _files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


if __name__ == "__main__":
    for what, number in counts().items():
        print(f"{what:30}{number:8,}{CEILINGS[what]:8,}")
