"""The rooms and the imports between them agree with docs/architecture.md and its picture."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from test_docs import DOCS, ROOT, script

drawing = script("draw_architecture")
imports_of_rooms = cache(drawing.arrows)


def allowed() -> dict[str, set[str] | None]:
    """Return the rooms that each room may import, by docs/architecture.md; None: all rooms on lower floors."""
    table = re.findall(r"^\| (`.+?) \| .+? \| (.+?) \|$", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    found: dict[str, set[str] | None] = {}
    for rooms, imports in table:
        for room in re.findall(r"`(\w+)/?`", rooms):
            found[room] = None if imports == "any floor below" else set(re.findall(r"`(\w+)`", imports))
    return found


def test_no_import_runs_upward() -> None:
    floors = drawing.floors(imports_of_rooms())
    assert floors.keys() == drawing.rooms()
    assert all(floors[there] < floors[room] for room, imported in imports_of_rooms().items() for there in imported)


def test_rooms_that_import_each_other_are_found_out() -> None:
    with pytest.raises(ValueError, match="import each other: a, b"):
        drawing.floors({"a": {"b", "c"}, "b": {"a"}, "c": set()})


def test_each_room_imports_what_its_row_allows() -> None:
    rows = allowed()
    assert rows.keys() == imports_of_rooms().keys()
    beyond = {room: imports_of_rooms()[room] - allow for room, allow in rows.items() if allow is not None}
    assert {room: rooms for room, rooms in beyond.items() if rooms} == {}


@pytest.mark.parametrize("folder", ["deep_gemm", "lab"])
def test_docstrings_begin_with_a_verb_or_the_things_name(folder: str) -> None:
    begin = re.compile(r'^ *"""(Of|Those|Theirs?|What|Whose|Who|Where|As|Not) .*$', re.MULTILINE)
    found = {path.name: begin.findall(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    assert {name: words for name, words in found.items() if words} == {}


def test_few_modules_lie_flat() -> None:
    assert len(drawing.flat_modules()) <= 16


def test_only_jit_imports_cuda_bindings() -> None:
    importing = {
        path.parent.relative_to(ROOT / "deep_gemm").as_posix()
        for path in (ROOT / "deep_gemm").rglob("*.py")
        for name in drawing.imports(path)
        if name[0] in ("cuda", "cupy", "pycuda")
    }
    assert importing == {"core/jit"}


def test_the_package_does_not_import_the_laboratory() -> None:
    importing = [
        path for path in (ROOT / "deep_gemm").rglob("*.py") if any(name[0] == "lab" for name in drawing.imports(path))
    ]
    assert importing == []


def test_the_picture_is_that_of_todays_imports() -> None:
    assert drawing.PICTURE.read_text() == drawing.svg(), "run: python docs/draw_architecture.py"


def test_the_picture_carries_its_arrows_and_draws_those_that_nothing_implies() -> None:
    found = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert drawing.direct(found) == {("top", "middle"), ("middle", "bottom")}
    assert drawing.listed(imports_of_rooms()) in drawing.PICTURE.read_text()


def test_imports_are_seen_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "deep_gemm"
    (package / "a").mkdir(parents=True)
    for name in ("__init__", "b", "c", "d"):
        (package / f"{name}.py").write_text("")
    (package / "a" / "inside.py").write_text(
        "from ..b import x\nfrom .. import c, __version__\n"
        "def f():\n    import importlib\n    from ..d import y\n    importlib.import_module('cuda.bindings.driver')\n"
    )
    monkeypatch.setattr(drawing, "PACKAGE", package)
    assert drawing.arrows()["a"] == {"b", "c", "d", "__init__"}
    assert ("cuda", "bindings", "driver") in set(drawing.imports(package / "a" / "inside.py"))
